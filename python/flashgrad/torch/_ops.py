# SPDX-License-Identifier: Apache-2.0
"""The operators flashgrad::forward and flashgrad::backward, and their rules.

    kernel      every device; calls the C library, or has it say why it does not serve the device
    Meta        shapes and dtypes only: torch.compile, FakeTensor
    Autograd    one autograd.Function each; the one of backward refuses to be differentiated
    Autocast    casts q, k, v (and dout) to autocast's dtype

``torch.library.custom_op`` would write these rules itself, but costs 96 us a forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._call import SLOT, Call
from .._library import BACKWARD, FORWARD, UNBOUNDED

_OPTIONS = (
    "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, "
    "Tensor? seqused_kv, Tensor? q_offset, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "SymInt? window_left, SymInt? window_right, bool top_left, float? scale, float softcap, "
    "bool deterministic"
)
_NUM_OPTIONS = _OPTIONS.count(",") + 1
_LENGTH_SLOTS = tuple(
    SLOT[name]
    for name in (
        "sinks", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "q_offset",
    )  # fmt: skip
)

_library = torch.library.Library("flashgrad", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# A gradient that is not needed is an empty tensor.
_library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_forward_op = torch.ops.flashgrad.forward.default
_backward_op = torch.ops.flashgrad.backward.default


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_results(
    q: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; a q or v of a rank that has none gets a shape that the library refuses."""
    shape = q.shape
    lse_shape = (*shape[:-3], shape[-2], shape[-3]) if len(shape) >= 3 else shape
    return (
        q.new_empty((*shape[:-1], *v.shape[-1:])),
        q.new_empty(lse_shape, dtype=_lse_dtype(q)),
    )


def _empty_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor, ...]:
    gradients = [
        x.new_empty(x.shape if need else (0,)) for x, need in zip((q, k, v), needs)
    ]
    if needs[3] and sinks is not None:
        gradients.append(sinks.new_empty(sinks.shape))
    else:
        gradients.append(q.new_empty((0,), dtype=_lse_dtype(q)))
    return tuple(gradients)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with a last stride of 1, copied if need be."""
    return x if x.ndim == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _gradient_rows(x: torch.Tensor) -> torch.Tensor:
    """Likewise, but a stride of 0 may stay: the gradient of a sum is read as it is."""
    return x if x.ndim == 0 or x.stride(-1) == 0 else _rows(x)


def _run(
    which: int,
    q: torch.Tensor,
    tensors: list[tuple[int, torch.Tensor]],
    outputs: list[tuple[int, torch.Tensor]],
    options: tuple[Any, ...],
) -> None:
    """One call of the C library on q's device and its current stream."""
    to_dlpack = torch._C._to_dlpack
    call = Call()
    for slot, tensor in tensors:
        call.add_capsule(slot, to_dlpack(tensor))
    for slot, tensor in outputs:
        call.add_capsule(slot, to_dlpack(tensor), True)
    for slot, tensor in zip(_LENGTH_SLOTS, options):
        if tensor is not None:
            call.add_capsule(slot, to_dlpack(_rows(tensor)))
    max_q, max_kv, left, right, top_left, scale, softcap, deterministic = options[6:]

    def workspace(num_bytes: int) -> tuple[Any, int]:
        memory = q.new_empty((num_bytes,), dtype=torch.uint8)
        return memory, memory.data_ptr()

    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    call.run(
        which,
        UNBOUNDED if left is None else left,
        UNBOUNDED if right is None else right,
        int(top_left),
        math.nan if scale is None else scale,
        softcap,
        deterministic,
        0,
        max_q,
        max_kv,
        None,
        workspace,
        stream,
    )


def _forward_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    out, lse = _empty_results(q, v)
    tensors = [(slot, _rows(x)) for slot, x in enumerate((q, k, v))]
    _run(FORWARD, q, tensors, [(3, out), (4, lse)], options)
    return out, lse


def _backward_kernel(dout: Any, dlse: Any, *arguments: Any) -> Any:
    q, k, v, out, lse = arguments[:5]
    options, needs = arguments[5 : 5 + _NUM_OPTIONS], arguments[5 + _NUM_OPTIONS :]
    gradients = _empty_gradients(q, k, v, options[0], needs)
    tensors = [(slot, _rows(x)) for slot, x in enumerate((q, k, v, out, lse))]
    if dout is not None:
        tensors.append((5, _gradient_rows(dout)))
    if dlse is not None:
        tensors.append((6, _gradient_rows(dlse)))
    outputs = [(7 + i, gradient) for i, gradient in enumerate(gradients) if needs[i]]
    _run(BACKWARD, q, tensors, outputs, options)
    return gradients


def _forward_meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    return _empty_results(q, v)


def _backward_meta(dout: Any, dlse: Any, *arguments: Any) -> Any:
    q, k, v = arguments[:3]
    return _empty_gradients(q, k, v, arguments[5], arguments[5 + _NUM_OPTIONS :])


class _Forward(torch.autograd.Function):
    """out and lse, both differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, *options: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _forward_op(q, k, v, sinks, *options)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *options[:5])
        ctx.options = options[5:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        none = (None,) * (_NUM_OPTIONS - 1)
        if dout is None and dlse is None:
            return (None, None, None, None, *none)
        needs = ctx.needs_input_grad[:4]
        arguments = (dout, dlse, *ctx.saved_tensors, *ctx.options, *needs)
        if torch.is_grad_enabled():  # create_graph: the operator's own rule will refuse
            gradients = _backward_op(*arguments)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                gradients = _backward_op(*arguments)
        return (*(g if need else None for g, need in zip(gradients, needs)), *none)


class _Backward(torch.autograd.Function):
    """The gradients, which can't be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _backward_op(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "flashgrad: double backward is not supported: the gradients of attention can't be "
            "differentiated again"
        )


def _differentiable(function: Any, operator: Any) -> Any:
    """The Autograd rule: the function where a graph is recorded, else just what lies below."""

    def rule(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in arguments
        ):
            return function.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return rule


def _autocast(device_type: str) -> Any:
    """The Autocast rule of a device type, as that of PyTorch's own attention."""
    keys = torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCPU if device_type == "cpu" else torch._C.DispatchKey.AutocastCUDA
    )

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (
                x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)
                for x in (q, k, v)
            )
            return _forward_op(q, k, v, *options)

    return rule


_library.impl("forward", _forward_kernel, "CompositeExplicitAutograd")
_library.impl("backward", _backward_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("flashgrad::forward", _forward_meta, lib=_library)
torch.library.register_fake("flashgrad::backward", _backward_meta, lib=_library)
_library.impl("forward", _differentiable(_Forward, _forward_op), "Autograd")
_library.impl("backward", _differentiable(_Backward, _backward_op), "Autograd")
_library.impl("forward", _autocast("cpu"), "AutocastCPU")
_library.impl("forward", _autocast("cuda"), "AutocastCUDA")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    window_left: int | None = None,
    window_right: int | None = None,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator flashgrad::forward with defaults: out and lse as ``flashgrad.forward``."""
    return _forward_op(
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset,
        max_seqlen_q, max_seqlen_kv, window_left, window_right, top_left, scale, softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
