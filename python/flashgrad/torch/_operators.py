# SPDX-License-Identifier: Apache-2.0
"""The operators flashgrad::forward and flashgrad::backward, and their rules.

    kernel      every device; calls the C library, or has it say why it does not serve the device
    Meta        shapes and dtypes only: torch.compile, FakeTensor
    Autograd    one autograd.Function each; that of forward is _attention.py's, the one of backward
                refuses to be differentiated
    Autocast    casts q, k, v (and dout) to autocast's dtype
    vmap        a mapped axis becomes a part of the batch

``torch.library.custom_op`` would write these rules itself, but costs 96 us a forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .._call import Call, capsule_pointer, outside_of_dynamo, pack_options
from .._functions import LENGTHS
from .._library import BACKWARD, FORWARD, UNBOUNDED, ArgumentError
from ._layout import empty_like
from ._plans import current_stream

_OPTIONS = (
    "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, "
    "Tensor? seqused_kv, Tensor? q_offset, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "SymInt? window_left, SymInt? window_right, bool top_left, float? scale, float softcap, "
    "bool deterministic"
)
_NUM_OPTIONS = _OPTIONS.count(",") + 1
_NUM_LENGTHS = len(LENGTHS)  # those of the options that are tensors

library = torch.library.Library("flashgrad", "DEF")
library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# A gradient that is not needed is an empty tensor.
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
forward_op = torch.ops.flashgrad.forward.default
backward_op = torch.ops.flashgrad.backward.default
_to_dlpack = torch._C._to_dlpack


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def empty_results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; a q of a rank that has none gets shapes that the library refuses."""
    shape = q.shape
    lse_shape = (*shape[:-3], shape[-2], shape[-3]) if len(shape) >= 3 else shape
    return (
        q.new_empty((*shape[:-1], *v.shape[-1:])),
        q.new_empty(lse_shape, dtype=lse_dtype(q)),
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with a last stride of 1, copied if need be."""
    return x if x.ndim == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _gradient_rows(x: torch.Tensor) -> torch.Tensor:
    """Likewise, but a stride of 0 may stay: the gradient of a sum is read as it is."""
    return x if x.ndim == 0 or x.stride(-1) == 0 else _rows(x)


@outside_of_dynamo
def run(which: int, q: torch.Tensor, tensors: list[Any], options: tuple[Any, ...]) -> None:
    """Runs a call on q's device and its current stream.

    ``tensors`` are those before sinks in flashgrad.h, in its order; ``options`` hold the others.
    """
    for x in options[:_NUM_LENGTHS]:
        tensors.append(x if x is None or x.is_contiguous() else _rows(x))
    call = Call()
    call.keep = capsules = [None if x is None else _to_dlpack(x) for x in tensors]
    call.pointers = [0 if c is None else capsule_pointer(c, b"dltensor") for c in capsules]
    num_bytes = call.prepare(which, pack(*options[_NUM_LENGTHS:]))
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=q.device)
    call.launch(
        which, workspace.data_ptr(), num_bytes, current_stream(q.get_device()) if q.is_cuda else 0
    )


def pack(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    left: int | None,
    right: int | None,
    top_left: bool,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> bytes:
    """fg_options of the options that are no tensors."""
    return pack_options(
        UNBOUNDED if left is None else left, UNBOUNDED if right is None else right, top_left,
        scale, softcap, deterministic, 0, max_seqlen_q, max_seqlen_kv, None,
    )  # fmt: skip


def forward_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    out, lse = empty_results(q, v)
    tensors = [x if x.is_contiguous() else _rows(x) for x in (q, k, v)]
    run(FORWARD, q, [*tensors, out, lse, None, None, None, None, None, None], options)
    return out, lse


def differentiate(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    options: tuple[Any, ...],
) -> None:
    """Writes dq, dk, dv and dsinks, where they are not None; ``saved``: q, k, v, out and lse."""
    tensors = [x if x.is_contiguous() else _rows(x) for x in saved]
    for x in (dout, dlse):
        tensors.append(x if x is None or x.is_contiguous() else _gradient_rows(x))
    run(BACKWARD, saved[0], [*tensors, *gradients], options)


def _backward_kernel(*arguments: Any) -> Any:
    dout, dlse, *saved = arguments[:7]
    options, needs = arguments[7 : 7 + _NUM_OPTIONS], arguments[7 + _NUM_OPTIONS :]
    q, k, v = saved[:3]
    gradients = [
        empty_like(x, None) if need else None for x, need in zip((q, k, v, options[0]), needs)
    ]
    differentiate(dout, dlse, saved, gradients, options)
    dtypes = (q.dtype, q.dtype, q.dtype, lse_dtype(q))
    return tuple(
        q.new_empty((0,), dtype=dtype) if gradient is None else gradient
        for gradient, dtype in zip(gradients, dtypes)
    )


def _forward_meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    # The library compares the others; a tensor without memory among them brings all of them here.
    for name, x in zip(("k", "v", *LENGTHS), (k, v, *options)):
        if x is not None and x.device != q.device:
            raise ArgumentError(f"flashgrad: {name}: on {x.device}, want {q.device} (q's)")
    return empty_results(q, v)


def _backward_meta(dout: Any, dlse: Any, *arguments: Any) -> Any:
    q, k, v = arguments[:3]
    sinks, needs = arguments[5], arguments[5 + _NUM_OPTIONS :]
    dtypes = (q.dtype, q.dtype, q.dtype, lse_dtype(q))
    return tuple(
        x.new_empty(x.shape) if need else q.new_empty((0,), dtype=dtype)
        for x, need, dtype in zip((q, k, v, sinks), needs, dtypes)
    )


def refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "flashgrad: forward-mode differentiation (jvp, jacfwd, hessian) is not supported: use "
        "backward, torch.func.grad, vjp or jacrev"
    )


class SingleLevelFunction(_SingleLevelFunction):
    """An autograd.Function below torch.func, which compiled autograd knows by its class too."""

    _compiled_autograd_key = getattr(torch.autograd.Function, "_compiled_autograd_key", None)


class _Backward(SingleLevelFunction):
    """The gradients, which can't be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with below_autograd():
            return backward_op(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "flashgrad: double backward is not supported: the gradients of attention can't be "
            "differentiated again"
        )

    jvp = staticmethod(refuse_forward_mode)


def records(tensors: Iterable[Any]) -> bool:
    """Whether autograd records an operation on these arguments, or may have tangents of them."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Where an autograd.Function calls its operator.

    Autograd has switched recording off by then. Of several transforms of torch.func it has recorded
    for one only: those around it record in the operator.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            yield
            return
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            yield


def record(function: Any, *arguments: Any) -> Any:
    """``function.apply`` for the dispatcher, which may call it for one level of torch.func's."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def _backward_autograd(*arguments: Any) -> Any:
    if records(arguments):
        return record(_Backward, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op(*arguments)


def _batching(op: Any, num_tensors: int) -> Any:
    """The vmap rule of an operator that takes so many tensors before its other options.

    One call with a larger batch where that means the same. Packed sequences have no batch to
    extend, sinks of their own and the sum of their gradients over the batch must not mix what was
    mapped over: there each is a call of its own.
    """
    at_sinks = num_tensors - _NUM_LENGTHS

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        tensors, others = arguments[:num_tensors], arguments[num_tensors:]
        sinks, cu_seqlens_q = tensors[at_sinks : at_sinks + 2]
        count = info.batch_size
        if count == 0:
            return _of_none(op, in_dims, tensors, others)
        apart = cu_seqlens_q is not None or in_dims[at_sinks] is not None
        if apart or (sinks is not None and op is backward_op):
            each = [
                op(*(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims)), *others)
                for i in range(count)
            ]
            results = tuple(torch.stack(x) for x in zip(*each))
        else:
            folded = [
                x if x is None or x is sinks else _fold(x, d, count)
                for x, d in zip(tensors, in_dims)
            ]
            results = tuple(
                x.reshape(count, x.shape[0] // count, *x.shape[1:]) for x in op(*folded, *others)
            )
        return results, (0,) * len(results)

    return rule


def _of_none(op: Any, in_dims: Any, tensors: Any, others: Any) -> Any:
    """Results without elements, for a mapped axis without any: shaped as those of one call."""

    def one(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        shape = [n for axis, n in enumerate(x.shape) if axis != dim]
        return torch.empty(shape, dtype=x.dtype, device="meta")

    shapes = op(*(x if x is None else one(x, d) for x, d in zip(tensors, in_dims)), *others)
    device = next(x.device for x in tensors if x is not None)
    results = tuple(torch.empty((0, *x.shape), dtype=x.dtype, device=device) for x in shapes)
    return results, (0,) * len(results)


def _fold(x: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    """The mapped axis as a part of the batch."""
    x = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _autocast(device_type: str) -> Any:
    """The Autocast rule of a device type: as PyTorch's own attention, all but float64 is cast."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (
                x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)
                for x in (q, k, v)
            )
            return forward_op(q, k, v, *options)

    return rule


library.impl("forward", forward_kernel, "CompositeExplicitAutograd")
library.impl("backward", _backward_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("flashgrad::forward", _forward_meta, lib=library)
torch.library.register_fake("flashgrad::backward", _backward_meta, lib=library)
library.impl("backward", _backward_autograd, "Autograd")
if hasattr(torch.library, "register_vmap"):  # before PyTorch 2.5, vmap calls one by one
    for _op, _num_tensors in ((forward_op, 3 + _NUM_LENGTHS), (backward_op, 7 + _NUM_LENGTHS)):
        torch.library.register_vmap(_op._name, _batching(_op, _num_tensors), lib=library)
library.impl("forward", _autocast("cpu"), "AutocastCPU")
library.impl("forward", _autocast("cuda"), "AutocastCUDA")
