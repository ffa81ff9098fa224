# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention for JAX.

Three layers, from the outside: ``jax.custom_vjp`` (gradients), ``jax.custom_batching.custom_vmap``
(a mapped axis becomes a part of the batch), the FFI call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._call import pack_options
from .._functions import Alignment, band, is_top_left
from .._library import BACKWARD, FORWARD
from ._ffi import call, vary_over, varying_axes

Tensors = dict[str, Any]  # arrays by their names in fg_tensors; what is not given is not there


def _lse_dtype(q: Any) -> Any:
    return jnp.float64 if q.dtype == jnp.float64 else jnp.float32


def _forward(options: bytes, tensors: Tensors) -> Tensors:
    q, v = tensors["q"], tensors["v"]
    # q of a rank without heads is refused by the library, whatever the results are.
    rows_last = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if q.ndim >= 3 else q.shape
    results = {
        "out": jax.ShapeDtypeStruct((*q.shape[:-1], *v.shape[-1:]), q.dtype),
        "lse": jax.ShapeDtypeStruct(rows_last, _lse_dtype(q)),
    }
    return dict(zip(results, call(FORWARD, tensors, results, options)))


def _backward(options: bytes, tensors: Tensors) -> Tensors:
    results = {
        f"d{name}": jax.ShapeDtypeStruct(tensors[name].shape, tensors[name].dtype)
        for name in ("q", "k", "v", "sinks")
        if name in tensors
    }
    return dict(zip(results, call(BACKWARD, tensors, results, options)))


@functools.cache
def _mappable(
    run: Callable[[bytes, Tensors], Tensors], options: bytes
) -> Callable[[Tensors], Tensors]:
    """``run`` under vmap: one call with a larger batch where that means the same.

    Packed sequences have no batch to extend, sinks of their own and the sum of their gradients
    over the batch must not mix what was mapped over: there each is a call of its own.
    """
    function = jax.custom_batching.custom_vmap(functools.partial(run, options))

    @function.def_vmap
    def rule(axis_size: int, in_batched: Any, tensors: Tensors) -> tuple[Tensors, Any]:
        (batched,) = in_batched
        mapped = {name: x for name, x in tensors.items() if batched[name]}
        apart = "cu_seqlens_q" in tensors or "sinks" in mapped
        if apart or ("sinks" in tensors and run is _backward):
            results = jax.lax.map(lambda one: function({**tensors, **one}), mapped)
        else:
            folded = {
                name: x if name == "sinks" else _fold(axis_size, x, batched[name])
                for name, x in tensors.items()
            }
            batch = tensors["q"].shape[1 if batched["q"] else 0]
            results = {
                name: x.reshape(axis_size, batch, *x.shape[1:])
                for name, x in function(folded).items()
            }
        return results, {name: True for name in results}

    return function


def _fold(axis_size: int, x: Any, batched: bool) -> Any:
    """The mapped axis as a part of the batch."""
    if not batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: bytes, tensors: Tensors) -> tuple[Any, Any]:
    results = _mappable(_forward, options)(tensors)
    return results["out"], results["lse"]


def _attention_fwd(options: bytes, tensors: Tensors) -> tuple[Any, Any]:
    # By the differentiable function: whoever differentiates this again gets to _gradients_bwd.
    out, lse = _attention(options, tensors)
    return (out, lse), {**tensors, "out": out, "lse": lse}


def _attention_bwd(options: bytes, residuals: Tensors, cotangents: tuple[Any, Any]) -> Any:
    dout, dlse = cotangents
    gradients = _gradients(options, {**residuals, "dout": dout, "dlse": dlse})
    inputs = (name for name in residuals if name not in ("out", "lse"))
    return ({name: gradients.get(f"d{name}") for name in inputs},)


_attention.defvjp(_attention_fwd, _attention_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(options: bytes, tensors: Tensors) -> Tensors:
    return _mappable(_backward, options)(tensors)


def _gradients_fwd(options: bytes, tensors: Tensors) -> tuple[Tensors, Tensors]:
    tensors = {name: x.value for name, x in tensors.items()}
    return _gradients(options, tensors), tensors


def _gradients_bwd(options: bytes, tensors: Tensors, cotangents: Tensors) -> Any:
    """Refuses, unless nobody wants it: of ``value_and_grad`` only the value may be differentiated."""
    if all(isinstance(x, SymbolicZero) for x in cotangents.values()):
        return (dict.fromkeys(tensors),)
    raise NotImplementedError(
        "flashgrad: double backward is not supported: the gradients of attention can't be "
        "differentiated again"
    )


_gradients.defvjp(_gradients_fwd, _gradients_bwd, symbolic_zeros=True)


def as_array(name: str, x: Any) -> jax.Array:
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"flashgrad: {name}: a {type(x).__name__}, want an array") from error
    # Without jax_enable_x64 JAX cuts NumPy's integers to 32 bits without a word.
    if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.integer):
        if not np.array_equal(x.astype(array.dtype), x):
            raise ValueError(
                f"flashgrad: {name}: entries that are no {array.dtype}, JAX's integers here"
            )
    return array


# Compiled, so that the platform is that of the arrays and a call outside of jit is made only once.
_compiled = jax.jit(_attention, static_argnums=0)


def refuse_traced(**options: Any) -> None:
    """Refuses options whose values are not known while the program is made."""
    for name, x in options.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            hint = " (q may be multiplied by another)" if name == "scale" else ""
            raise NotImplementedError(
                f"flashgrad: {name}: an argument of a transformed function, want a value that is "
                f"known while the program is made{hint}"
            )


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    alignment: Alignment = "bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    q_offset: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention and the logarithm of its normaliser; both differentiable.

    Works under ``jit``, ``grad``, ``vmap`` and ``shard_map``. Under ``jit`` with sharded arrays
    XLA gathers them before the call, since it does not know how to split it: use ``shard_map``.

    Parameters
    ----------
    q, k, v, causal, window, alignment, scale, softcap, sinks, cu_seqlens_q, ...
        As in ``flashgrad.forward``, but that options are Python values, not traced ones, and
        q_offset has any integer dtype. sinks are differentiable.
    deterministic : bool
        Gradients of the same bits run after run on a GPU; on the CPU they always are.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)
        q's dtype; 0 in rows that see nothing.
    lse : array, (batch, heads_q, seqlen_q) or (heads_q, total_q)
        float32 (float64 with float64); -inf in rows that see nothing.

    Raises
    ------
    ValueError
        A shape, dtype or option contradicts the rules.
    NotImplementedError
        No backend serves the call, an option is a traced value, or the gradients are
        differentiated again.
    jax.errors.JaxRuntimeError
        When the program runs: offsets contradict the rules, or the device reported an error.

    Examples
    --------
    >>> import jax
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    >>> jax.grad(lambda q: attention(q, k, v, causal=True)[0].sum())(q).shape
    (1, 16, 2, 8)
    """
    refuse_traced(
        causal=causal, window=window, alignment=alignment, scale=scale, softcap=softcap,
        max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, deterministic=deterministic,
    )  # fmt: skip
    left, right = band(causal, window)
    options = pack_options(
        left, right, is_top_left(alignment), scale, softcap, bool(deterministic), 0, max_seqlen_q,
        max_seqlen_kv, None,
    )  # fmt: skip
    tensors = {
        "q": q, "k": k, "v": v, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv, "seqused_q": seqused_q, "seqused_kv": seqused_kv,
        "q_offset": q_offset,
    }  # fmt: skip
    tensors = {
        name: as_array(name, x)
        for name, x in tensors.items()
        if x is not None or name in ("q", "k", "v")
    }
    if q_offset is not None and not jnp.issubdtype(tensors["q_offset"].dtype, np.integer):
        raise ValueError(f"flashgrad: q_offset: dtype {tensors['q_offset'].dtype}, want integers")
    axes = varying_axes(tensors.values())
    return _compiled(options, {name: vary_over(axes, x) for name, x in tensors.items()})
