# SPDX-License-Identifier: Apache-2.0
"""The operators flashgrad::forward and flashgrad::backward, and their rules.

    kernel      every device; calls the C library, or has it say why it does not serve the device
    Meta        shapes and dtypes only: torch.compile, FakeTensor
    Autograd    one autograd.Function each; the one of backward refuses to be differentiated
    Autocast    casts q, k, v (and dout) to autocast's dtype
    vmap        a mapped axis becomes a part of the batch

``torch.library.custom_op`` would write these rules itself, but costs 96 us a forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Union

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import has_torch_function_variadic

from .._call import Call, capsule_pointer, pack_options
from .._library import BACKWARD, FORWARD, UNBOUNDED
from ._plans import HEADS_FIRST, Plan, current_stream, find

_OPTIONS = (
    "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, "
    "Tensor? seqused_kv, Tensor? q_offset, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "SymInt? window_left, SymInt? window_right, bool top_left, float? scale, float softcap, "
    "bool deterministic"
)
_NUM_OPTIONS = _OPTIONS.count(",") + 1
_NUM_LENGTHS = 6  # those of the options that are tensors: sinks, and what follows

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
_to_dlpack = torch._C._to_dlpack
_NAN = float("nan")


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; a q of a rank that has none gets shapes that the library refuses."""
    shape = q.shape
    lse_shape = (*shape[:-3], shape[-2], shape[-3]) if len(shape) >= 3 else shape
    return (
        q.new_empty((*shape[:-1], *v.shape[-1:])),
        q.new_empty(lse_shape, dtype=_lse_dtype(q)),
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with a last stride of 1, copied if need be."""
    return x if x.ndim == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _gradient_rows(x: torch.Tensor) -> torch.Tensor:
    """Likewise, but a stride of 0 may stay: the gradient of a sum is read as it is."""
    return x if x.ndim == 0 or x.stride(-1) == 0 else _rows(x)


def _run(which: int, q: torch.Tensor, tensors: list[Any], options: tuple[Any, ...]) -> None:
    """Runs a call on q's device and its current stream.

    ``tensors`` are those before sinks in flashgrad.h, in its order; ``options`` hold the others.
    """
    for x in options[:_NUM_LENGTHS]:
        tensors.append(x if x is None or x.is_contiguous() else _rows(x))
    call = Call()
    call.keep = capsules = [None if x is None else _to_dlpack(x) for x in tensors]
    call.pointers = [0 if c is None else capsule_pointer(c, b"dltensor") for c in capsules]
    num_bytes = call.prepare(which, _pack(*options[_NUM_LENGTHS:]))
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=q.device)
    call.launch(which, workspace.data_ptr(), num_bytes, current_stream(q) if q.is_cuda else 0)


def _pack(
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
        _NAN if scale is None else scale, softcap, deterministic, 0, max_seqlen_q, max_seqlen_kv,
        None,
    )  # fmt: skip


def _forward_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    out, lse = _empty_results(q, v)
    tensors = [x if x.is_contiguous() else _rows(x) for x in (q, k, v)]
    _run(FORWARD, q, [*tensors, out, lse, None, None, None, None, None, None], options)
    return out, lse


def _differentiate(
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
    _run(BACKWARD, saved[0], [*tensors, *gradients], options)


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_in_order(x: torch.Tensor) -> torch.Tensor:
    """Like x, whose dimensions follow each other in memory as those of x do."""
    result = torch.empty_like(x)
    return result if result.stride(-1) == 1 else _empty(x)


def _backward_kernel(*arguments: Any) -> Any:
    dout, dlse, *saved = arguments[:7]
    options, needs = arguments[7 : 7 + _NUM_OPTIONS], arguments[7 + _NUM_OPTIONS :]
    q, k, v = saved[:3]
    gradients = [_empty(x) if need else None for x, need in zip((q, k, v, options[0]), needs)]
    _differentiate(dout, dlse, saved, gradients, options)
    dtypes = (q.dtype, q.dtype, q.dtype, _lse_dtype(q))
    return tuple(
        q.new_empty((0,), dtype=dtype) if gradient is None else gradient
        for gradient, dtype in zip(gradients, dtypes)
    )


def _forward_meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    return _empty_results(q, v)


def _backward_meta(dout: Any, dlse: Any, *arguments: Any) -> Any:
    q, k, v = arguments[:3]
    sinks, needs = arguments[5], arguments[5 + _NUM_OPTIONS :]
    dtypes = (q.dtype, q.dtype, q.dtype, _lse_dtype(q))
    return tuple(
        x.new_empty(x.shape) if need else q.new_empty((0,), dtype=dtype)
        for x, need, dtype in zip((q, k, v, sinks), needs, dtypes)
    )


def _keys(*names: str) -> int:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


# The dispatch keys of a thread in no mode, and of plain tensors on the devices of the backends.
_PLAIN_THREAD, _PLAIN_TENSORS = None, frozenset()
if hasattr(torch._C.DispatchKeySet, "raw_repr"):  # an older PyTorch always takes the dispatcher
    _PLAIN_THREAD = _keys("BackendSelect", "ADInplaceOrView")
    _PLAIN_TENSORS = frozenset(
        _keys(device, "ADInplaceOrView", f"Autograd{device}", f"Autocast{device}")
        for device in ("CPU", "CUDA")
    )


def _is_ordinary(optional: Any, *tensors: Any) -> bool:
    """Whether autograd and autocast are all that the dispatcher would do before the kernel.

    Then it is left out, which halves the overhead of a small call. No mode, transform or tracer is
    active, and the arguments are tensors, neither of subclasses nor lazily negated.
    """
    if (
        _PLAIN_THREAD is None
        or torch.compiler.is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() != _PLAIN_THREAD
        or has_torch_function_variadic(optional, *tensors)
    ):
        return False
    try:
        for x in tensors if optional is None else (optional, *tensors):
            if torch._C._dispatch_keys(x).raw_repr() not in _PLAIN_TENSORS:
                return False
    except TypeError:  # one is no tensor
        return False
    return True


def check_tensor(name: str, x: Any) -> None:
    """Refuses what has neither the shape nor the memory of a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"flashgrad: {name}: a {type(x).__name__}, want a Tensor")
    if x.is_nested:
        raise NotImplementedError(
            f"flashgrad: {name}: a nested tensor, want a dense one: give the values and offsets of "
            "its sequences to flash_attn_varlen_func"
        )


def _is_cast(*tensors: torch.Tensor) -> bool:
    """Whether autocast has nothing to change in the tensors."""
    device_type = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return True
    dtype = torch.get_autocast_dtype(device_type)
    return all(x.dtype == dtype for x in tensors)


# How the tensors of a call come: q, k, v as the operators take them; packed along a dimension,
# (q, kv) or (qkv,); or one of those of _plans.
Layout = Union[None, int, str]


def _parts(tensors: Sequence[Any], layout: Layout) -> Sequence[Any]:
    """q, k and v of what comes, as it comes heads first; a packed None: three None."""
    if not isinstance(layout, int):
        return tensors
    dim = layout
    *separate, packed = tensors
    if packed is None:
        return [*separate, *[None] * (3 - len(separate))]
    return [*separate, *packed.unbind(dim)]


def _rows_first(layout: Layout, dout: Any, saved: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """dout and the saved q, k, v, out and lse as the operators take them."""
    if layout is None or isinstance(layout, int):
        return dout, saved
    q, k, v, out, lse = saved
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if layout == HEADS_FIRST:
        out = out.transpose(1, 2)
        dout = dout if dout is None else dout.transpose(1, 2)
    return dout, (q, k, v, out, lse)


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "flashgrad: forward-mode differentiation (jvp, jacfwd, hessian) is not supported: use "
        "backward, torch.func.grad, vjp or jacrev"
    )


class _Forward(_SingleLevelFunction):
    """out and lse, both differentiable.

    ``tensors`` are as ``layout`` says, and so are their gradients: those of packed tensors are
    written where they belong, instead of being stacked. ``direct``: the kernel is called without
    the dispatcher, by way of ``plan`` if there is one (heads first there is), with ``parts`` of the
    tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        direct: bool,
        plan: Plan | None,
        parts: Sequence[Any],
        layout: Layout,
        options: tuple[Any, ...],
        sinks: Any,
        *tensors: Any,
    ) -> Any:
        if plan is not None:
            out, lse = plan.forward(*parts)
        elif direct:
            out, lse = _forward_kernel(*parts, sinks, *options)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = _forward_op(*parts, sinks, *options)
        ctx.save_for_backward(*tensors, out, lse, sinks)
        ctx.call = direct, plan, layout, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        need_dsinks, needs = needs[5], needs[6:]
        direct, plan, layout, options = ctx.call
        *saved, sinks = ctx.saved_tensors
        tensors = saved[:-2]
        packed = isinstance(layout, int)
        if packed:
            saved = [*_parts(tensors, layout), *saved[-2:]]
        create_graph = torch.is_grad_enabled()
        if create_graph or not (direct and _is_ordinary(dlse, dlse if dout is None else dout)):
            dout, saved = _rows_first(layout, dout, saved)
            arguments = (dout, dlse, *saved, sinks, *options)
            # A packed tensor is the last one; all of its parts are needed or none.
            needs_parts = (*needs, *needs[-1:] * (3 - len(needs)), need_dsinks)
            if create_graph:  # the operator's own rule will refuse
                *results, dsinks = _backward_op(*arguments, *needs_parts)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    *results, dsinks = _backward_op(*arguments, *needs_parts)
            if packed:
                n = len(needs) - 1
                results[n:] = [torch.stack(results[n:], layout)] if needs[-1] else [None]
            results = [
                (x if layout is None or packed else x.transpose(1, 2)) if need else None
                for x, need in zip(results, needs)
            ]
            return (None, None, None, None, None, dsinks if need_dsinks else None, *results)
        like = _empty if layout is None or packed else _empty_in_order
        results = [like(x) if need else None for x, need in zip(tensors, needs)]
        gradients = _parts(results, layout)
        if plan is not None and plan.backward(dout, dlse, saved, gradients, (layout, needs)):
            return (None, None, None, None, None, None, *results)
        dsinks = _empty(sinks) if need_dsinks else None
        dout, saved = _rows_first(layout, dout, saved)
        if layout is not None and not packed:
            gradients = [x if x is None else x.transpose(1, 2) for x in gradients]
        _differentiate(dout, dlse, saved, [*gradients, dsinks], (sinks, *options))
        return (None, None, None, None, None, dsinks, *results)

    jvp = staticmethod(_refuse_forward_mode)


class _Backward(_SingleLevelFunction):
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

    jvp = staticmethod(_refuse_forward_mode)


def _records(tensors: Iterable[Any]) -> bool:
    """Whether autograd records an operation on these arguments, or may have tangents of them."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def _record(function: Any, *arguments: Any) -> Any:
    """``function.apply`` for the dispatcher, which may call it for one level of torch.func's."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def _forward_autograd(q: Any, k: Any, v: Any, sinks: Any, *options: Any) -> Any:
    if _records((q, k, v, sinks)):
        return _record(_Forward, False, None, (q, k, v), None, options, sinks, q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, sinks, *options)


def _backward_autograd(*arguments: Any) -> Any:
    if _records(arguments):
        return _record(_Backward, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*arguments)


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
        apart = cu_seqlens_q is not None or in_dims[at_sinks] is not None
        if apart or (sinks is not None and op is _backward_op):
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
            return _forward_op(q, k, v, *options)

    return rule


_library.impl("forward", _forward_kernel, "CompositeExplicitAutograd")
_library.impl("backward", _backward_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("flashgrad::forward", _forward_meta, lib=_library)
torch.library.register_fake("flashgrad::backward", _backward_meta, lib=_library)
_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("backward", _backward_autograd, "Autograd")
if hasattr(torch.library, "register_vmap"):  # before PyTorch 2.5, vmap calls one by one
    for _op, _num_tensors in ((_forward_op, 3 + _NUM_LENGTHS), (_backward_op, 7 + _NUM_LENGTHS)):
        torch.library.register_vmap(_op._name, _batching(_op, _num_tensors), lib=_library)
_library.impl("forward", _autocast("cpu"), "AutocastCPU")
_library.impl("forward", _autocast("cuda"), "AutocastCUDA")


def attention(
    *tensors: torch.Tensor,
    layout: Layout = None,
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
    """The operator flashgrad::forward with defaults: out and lse as ``flashgrad.forward``.

    ``tensors`` are as ``layout`` says, and so is out. The maxima may be tensors, as Transformers
    passes them.
    """
    if isinstance(max_seqlen_q, torch.Tensor):
        max_seqlen_q = int(max_seqlen_q)
    if isinstance(max_seqlen_kv, torch.Tensor):
        max_seqlen_kv = int(max_seqlen_kv)
    options = (
        cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset, max_seqlen_q, max_seqlen_kv,
        window_left, window_right, top_left, scale, softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return _attend(tensors, layout, sinks, options)


def _attend(
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    sinks: torch.Tensor | None,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    ordinary = _is_ordinary(sinks, *tensors) and _is_cast(*tensors)
    heads_first = isinstance(layout, str)
    plan = None
    if ordinary:
        # Detached, so that autograd does not record the slices of a packed tensor.
        packed = isinstance(layout, int)
        q, k, v = parts = _parts([x.detach() for x in tensors] if packed else tensors, layout)
        cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset = options[: _NUM_LENGTHS - 1]
        if sinks is cu_seqlens_q is cu_seqlens_kv is seqused_q is seqused_kv is q_offset is None:
            plan = find(q, k, v, layout if heads_first else None, options, _make_plan)
    if heads_first and plan is None:
        out, lse = _attend([x.transpose(1, 2) for x in tensors], None, sinks, options)
        return out.transpose(1, 2) if layout == HEADS_FIRST else out, lse
    if ordinary:
        if _records((*tensors, sinks)):
            return _Forward.apply(True, plan, parts, layout, options, sinks, *tensors)
        if plan is not None:
            return plan.forward(q, k, v)
        return _forward_kernel(q, k, v, sinks, *options)
    for name, x in zip(("q", "k", "v"), tensors):
        check_tensor(name, x)
    return _forward_op(*_parts(tensors, layout), sinks, *options)


def _make_plan(
    q: torch.Tensor, v: torch.Tensor, layout: str | None, options: tuple[Any, ...]
) -> Plan:
    if layout is not None:
        q, v = q.transpose(1, 2), v.transpose(1, 2)
    return Plan(_empty_results(q, v), layout, _pack(*options[_NUM_LENGTHS - 1 :]))
