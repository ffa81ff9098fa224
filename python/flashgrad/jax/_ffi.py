# SPDX-License-Identifier: Apache-2.0
"""One call of the C library as a part of an XLA program, through the handlers of src/xla."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._call import SLOT, Call, dlpack_dtype
from .._library import library, library_path


def register() -> None:
    """Registers the handlers with XLA."""
    library()  # the handlers' library asks for it by name
    path = os.path.join(os.path.dirname(library_path()), "libflashgrad_xla.so")
    if not os.path.exists(path):
        raise ImportError(
            f"flashgrad.jax: no library at {path}: flashgrad was built without jaxlib's headers "
            "(-DFLASHGRAD_JAX=ON)"
        )
    handlers = ctypes.CDLL(path)
    for platform in ("cpu", "cuda"):
        jax.ffi.register_ffi_target(
            f"flashgrad_{platform}",
            jax.ffi.pycapsule(getattr(handlers, f"flashgrad_xla_{platform}")),
            platform={"cpu": "cpu", "cuda": "CUDA"}[platform],
        )


def call(
    which: int,
    arguments: Mapping[str, Any],
    results: Mapping[str, jax.ShapeDtypeStruct],
    options: bytes,
) -> Sequence[Any]:
    """Runs FORWARD or BACKWARD on arrays by their names in fg_tensors; returns the results.

    ``options`` is what ``pack_options`` gives.

    What the library refuses of shapes, dtypes and options is raised at once, while XLA's program
    is made; what depends on the values (offsets) only when it runs, by XLA's own error.
    """
    probe = Call()
    for name, x in (*arguments.items(), *results.items()):
        if not all(isinstance(n, int) for n in x.shape):
            raise NotImplementedError(
                f"flashgrad: {name}: shape {x.shape}, want numbers: the library must know them while "
                "the program is made"
            )
        dtype = np.dtype(np.int64 if name == "q_offset" else x.dtype)
        probe.add_shape(SLOT[name], x.shape, *dlpack_dtype(dtype))
    workspace = jax.ShapeDtypeStruct((probe.prepare(which, options),), jnp.uint8)
    attributes = {
        "argument_slots": np.array([SLOT[name] for name in arguments], np.int64),
        "result_slots": np.array([SLOT[name] for name in results], np.int64),
        "which": np.int32(which),
        "options": np.frombuffer(options, np.uint8),
    }
    operands = [_words(x) if name == "q_offset" else x for name, x in arguments.items()]
    shapes = tuple(results.values())

    def on_cpu(*operands: Any) -> Sequence[Any]:
        results = jax.ffi.ffi_call("flashgrad_cpu", (*shapes, workspace))(*operands, **attributes)
        return tuple(results[:-1])

    def on_cuda(*operands: Any) -> Sequence[Any]:
        return tuple(jax.ffi.ffi_call("flashgrad_cuda", shapes)(*operands, **attributes))

    axes = varying_axes(operands)
    return tuple(
        vary_over(axes, x)
        for x in jax.lax.platform_dependent(*operands, cpu=on_cpu, cuda=on_cuda)
    )


def varying_axes(arrays: Iterable[Any]) -> frozenset[str]:
    """The mesh axes of an enclosing ``shard_map`` along which one of the arrays differs."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        of_x = jax.typeof(x)
        # JAX 0.10 moved them from one attribute to the other.
        axes |= of_x.mat.varying if hasattr(of_x, "mat") else of_x.vma
    return axes


def vary_over(axes: frozenset[str], x: Any) -> Any:
    """x as an array that may differ along these axes; its gradient is then summed over them."""
    missing = tuple(axes - varying_axes([x]))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # pcast's name before JAX 0.9


def _words(x: Any) -> Any:
    """Integers as the two 32-bit words of an int64, which JAX has only with jax_enable_x64."""
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    if x.dtype == jnp.uint32:
        low = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jnp.stack([low, jnp.zeros_like(low)], -1)
    x = x.astype(jnp.int32)
    return jnp.stack([x, x >> 31], -1)
