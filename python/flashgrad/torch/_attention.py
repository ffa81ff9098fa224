# SPDX-License-Identifier: Apache-2.0
"""Attention as all functions here call it, differentiable, in one of three ways.

    plan        a call of plain tensors in no mode that is like an earlier one: _plans.py
    kernel      such a call that plans do not serve: without the dispatcher
    operator    everything else: torch.compile, torch.func, subclasses, modes

The numbers are those of the operator in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .._functions import LENGTHS
from ._layout import HEADS_FIRST, Layout, empty_like, parts
from ._operators import (
    SingleLevelFunction,
    backward_op,
    below_autograd,
    differentiate,
    empty_results,
    forward_kernel,
    forward_op,
    library,
    pack,
    record,
    records,
    refuse_forward_mode,
)
from ._plans import Places, Plan, find, is_ordinary, make

# Of the options that are tensors, the first are the sinks.
_NUM_AFTER_SINKS = len(LENGTHS) - 1


def check_tensor(name: str, x: Any) -> None:
    """Refuses what has neither the shape nor the memory of a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"flashgrad: {name}: a {type(x).__name__}, want a Tensor")
    if x.is_nested:
        raise NotImplementedError(
            f"flashgrad: {name}: a nested tensor, want a dense one (or, in "
            "scaled_dot_product_attention, three jagged ones, batch, heads, seqlen, head_dim): give "
            "the values and offsets of its sequences to flash_attn_varlen_func"
        )
    if x.layout != torch.strided:
        raise NotImplementedError(f"flashgrad: {name}: {x.layout}, want a dense tensor")


def _is_cast(*tensors: torch.Tensor) -> bool:
    """Whether autocast has nothing to change in the tensors."""
    device_type = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return True
    dtype = torch.get_autocast_dtype(device_type)
    return all(x.dtype == dtype for x in tensors)


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


def _gradients(
    dout: Any,
    dlse: Any,
    saved: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    needs: tuple[bool, ...],
    need_dsinks: bool,
    layout: Layout,
    options: tuple[Any, ...],
    direct: bool,
) -> list[torch.Tensor | None]:
    """dsinks, then the gradients of the tensors, as ``layout`` says.

    ``saved`` are the tensors as they came, out and lse. ``direct``: the kernel is called without
    the dispatcher if the cotangents allow it.
    """
    tensors, results = saved[:-2], saved[-2:]
    packed = isinstance(layout, int)
    if packed:
        saved = [*parts(tensors, layout), *results]
    dout, saved = _rows_first(layout, dout, saved)
    create_graph = torch.is_grad_enabled()
    if create_graph or not (direct and is_ordinary(dlse, dlse if dout is None else dout)):
        arguments = (dout, dlse, *saved, sinks, *options)
        # A packed tensor is the last one; all of its parts are needed or none.
        needs_parts = (*needs, *needs[-1:] * (3 - len(needs)), need_dsinks)
        if create_graph:  # the operator's own rule will refuse
            *gradients, dsinks = backward_op(*arguments, *needs_parts)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                *gradients, dsinks = backward_op(*arguments, *needs_parts)
        if packed:
            n = len(needs) - 1
            gradients[n:] = [torch.stack(gradients[n:], layout)] if needs[-1] else [None]
        heads_first = isinstance(layout, str)
        return [
            dsinks if need_dsinks else None,
            *(
                (x.transpose(1, 2) if heads_first else x) if need else None
                for x, need in zip(gradients, needs)
            ),
        ]
    gradients = [empty_like(x, layout) if need else None for x, need in zip(tensors, needs)]
    dsinks = empty_like(sinks, None) if need_dsinks else None
    separate = parts(gradients, layout)
    if isinstance(layout, str):
        separate = [x if x is None else x.transpose(1, 2) for x in separate]
    differentiate(dout, dlse, saved, [*separate, dsinks], (sinks, *options))
    return [dsinks, *gradients]


class _Planned(SingleLevelFunction):
    """out and lse by a plan, both differentiable.

    The tensors are as the plan's layout says, and so are their gradients: those of packed tensors
    are written where they belong, instead of being stacked.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: Any) -> Any:
        out, lse = plan.forward(inputs)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        plan, saved, needs = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if dlse is None:
            if dout is None:
                return (None,) * (1 + len(needs))
            if not torch.is_grad_enabled():
                gradients = plan.backward(dout, saved, needs)
                if gradients is not None:
                    return (None, *gradients)
        n = plan.num_tensors
        sinks, *lengths = plan.others(saved)
        # Sinks are the first of the others; those that follow have no gradients.
        need_dsinks = any(needs[n:])
        dsinks, *gradients = _gradients(
            dout, dlse, (*saved[:n], *saved[-2:]), sinks, needs[:n], need_dsinks, plan.layout,
            (*lengths, *plan.numbers), True,
        )  # fmt: skip
        return None, *gradients, *(dsinks if x is sinks else None for x in saved[n:-2])

    jvp = staticmethod(refuse_forward_mode)


class _Forward(SingleLevelFunction):
    """Likewise by the operator, or ``direct``, the kernel with the ``parts`` of the tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        direct: bool,
        parts: Sequence[Any],
        layout: Layout,
        options: tuple[Any, ...],
        sinks: Any,
        *tensors: Any,
    ) -> Any:
        if direct:
            out, lse = forward_kernel(*parts, sinks, *options)
        else:
            with below_autograd():
                out, lse = forward_op(*parts, sinks, *options)
        # The lengths too, so that autograd notices if they are others by then.
        ctx.save_for_backward(*tensors, out, lse, sinks, *options[:_NUM_AFTER_SINKS])
        ctx.call = layout, options[_NUM_AFTER_SINKS:], direct
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        saved = ctx.saved_tensors
        *tensors, sinks = saved[:-_NUM_AFTER_SINKS]
        layout, numbers, direct = ctx.call
        options = (*saved[-_NUM_AFTER_SINKS:], *numbers)
        gradients = _gradients(
            dout, dlse, tensors, sinks, needs[5:], needs[4], layout, options, direct
        )
        return (None, None, None, None, *gradients)

    jvp = staticmethod(refuse_forward_mode)


def _forward_autograd(q: Any, k: Any, v: Any, sinks: Any, *options: Any) -> Any:
    if records((q, k, v, sinks)):
        return record(_Forward, False, (q, k, v), None, options, sinks, q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(q, k, v, sinks, *options)


library.impl("forward", _forward_autograd, "Autograd")


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

    ``tensors`` are as ``layout`` says, and so is out.
    """
    return attend(
        tensors,
        layout,
        (sinks, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset),
        (
            max_seqlen_q, max_seqlen_kv, window_left, window_right, top_left, scale, softcap,
            deterministic or torch.are_deterministic_algorithms_enabled(),
        ),
    )  # fmt: skip


def _with_others(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]
) -> tuple[Sequence[torch.Tensor], Places]:
    """All tensors of a call, each once, and which of the others are where: see Plan."""
    inputs, places = list(tensors), []
    for other, x in enumerate(others):
        if x is not None:
            for place, y in enumerate(inputs[len(tensors) :]):
                if x is y:
                    break
            else:
                place = len(inputs) - len(tensors)
                inputs.append(x)
            places.append((other, place))
    return inputs, tuple(places)


def attend(
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    others: tuple[Any, ...],
    numbers: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention`` with its options in two tuples: those that are tensors, and the others.

    The maxima may be tensors, as Transformers passes them.
    """
    sinks, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset = others
    inputs, places = tensors, ()
    if not (sinks is cu_seqlens_q is cu_seqlens_kv is seqused_q is seqused_kv is q_offset is None):
        inputs, places = _with_others(tensors, others)
    compiling = torch.compiler.is_compiling()
    plan = None if compiling else find(inputs, layout, places, numbers)
    ordinary = not compiling and plan is None and is_ordinary(None, *inputs) and _is_cast(*tensors)
    if ordinary:
        plan = make(inputs, layout, places, numbers, empty_results, pack)
    if plan is not None:
        if forward_ad._current_level >= 0 or (plan.records and torch.is_grad_enabled()):
            return _Planned.apply(plan, *inputs)
        return plan.forward(inputs)
    if isinstance(layout, str):
        tensors = [x.transpose(1, 2) for x in tensors]
        out, lse = attend(tensors, None, others, numbers)
        return out.transpose(1, 2) if layout == HEADS_FIRST else out, lse
    for name, x in (("scale", numbers[5]), ("softcap", numbers[6])):
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"flashgrad: {name}: a tensor that requires grad, want a number: it would get no "
                "gradient (q may be multiplied by such a scale instead)"
            )
    numbers = (*(int(x) if isinstance(x, torch.Tensor) else x for x in numbers[:2]), *numbers[2:])
    options = (*others, *numbers)
    if ordinary:
        # Detached, so that autograd does not record the slices of a packed tensor.
        packed = isinstance(layout, int)
        separate = parts([x.detach() for x in tensors] if packed else tensors, layout)
        if records((*tensors, sinks)):
            return _Forward.apply(True, separate, layout, options[1:], sinks, *tensors)
        return forward_kernel(*separate, *options)
    for name, x in zip(("q", "k", "v"), tensors):
        check_tensor(name, x)
    for name, x in zip(LENGTHS, others):
        if x is not None:
            check_tensor(name, x)
    return forward_op(*parts(tensors, layout), *options)
