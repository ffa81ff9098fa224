# SPDX-License-Identifier: Apache-2.0
"""Calls on compact CPU tensors, prepared once for their shapes and options.

In a small call the library takes less time than what leads to it. A plan keeps what depends on
shapes and options alone, the C structs and the answer of fg_workspace_size, so that a call like an
earlier one only sets its tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._call import DATA_WORD, SLOT, Call
from .._library import BACKWARD, FORWARD, WORKSPACE_TOO_SMALL, library

# A program has few shapes; one whose shapes keep changing must not keep them all.
_MAX_PLANS = 64
# A workspace up to this size stays with its plan, a larger one comes from PyTorch's allocator.
_KEPT_WORKSPACE_BYTES = 1 << 17

_FORWARD_NAMES = ("q", "k", "v", "out", "lse")
_BACKWARD_NAMES = ("dout", "dlse", "dq", "dk", "dv")


class _PreparedCall:
    """One of the calls of a plan, for one thread at a time."""

    __slots__ = ("call", "data_words", "num_bytes", "options", "which", "words", "workspace")

    def __init__(
        self, which: int, names: Sequence[str], tensors: Sequence[torch.Tensor], options: bytes
    ) -> None:
        self.which, self.options = which, options
        self.call = Call()
        for name, x in zip(names, tensors):
            code = 4 if x.dtype == torch.bfloat16 else 2  # kDLBfloat, kDLFloat
            self.call.add_shape(SLOT[name], x.shape, code, 8 * x.itemsize)
        self.words = self.call.words()
        self.data_words = [DATA_WORD[SLOT[name]] for name in names]
        self.prepare()

    def prepare(self) -> None:
        self.num_bytes = self.call.prepare(self.which, self.options)
        self.workspace = None
        if self.num_bytes <= _KEPT_WORKSPACE_BYTES:
            self.workspace = torch.empty(self.num_bytes, dtype=torch.uint8)

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        words = self.words
        for index, x in zip(self.data_words, tensors):
            words[index] = x.data_ptr()
        status = self.launch()
        if status == WORKSPACE_TOO_SMALL:  # the backend was changed since
            self.prepare()
            status = self.launch()
        if status:
            raise library().error(status)

    def launch(self) -> int:
        workspace = self.workspace
        if workspace is None:
            workspace = torch.empty(self.num_bytes, dtype=torch.uint8)
        return self.call.try_launch(self.which, workspace.data_ptr(), self.num_bytes, 0)


_plans: dict[Any, Plan] = {}


def find(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: tuple[Any, ...],
    make: Callable[[torch.Tensor, torch.Tensor, tuple[Any, ...]], Plan],
) -> Plan | None:
    """The plan of a call without sinks and lengths, or None if its tensors want the general way.

    ``options`` are what else determines the call; ``make(q, v, options)`` makes a plan.
    """
    if not (
        q.is_cpu and k.is_cpu and v.is_cpu
        and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    ):  # fmt: skip
        return None
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, options, torch.get_num_threads()
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if q.ndim != 4 or v.ndim != 4:
            return None  # the library says why not
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make(q, v, options)
    return plan


class Plan:
    """Forward and backward of fixed-length tensors without sinks and lengths."""

    __slots__ = ("_idle", "_options", "_results")

    def __init__(self, results: Any, options: bytes) -> None:
        # Shape and dtype of out and lse.
        self._results = [(x.shape, x.dtype) for x in results]
        self._options = options
        # By the tensors that they take: the prepared calls that no thread is using.
        self._idle: dict[tuple[bool, ...], list[_PreparedCall]] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        (out_shape, out_dtype), (lse_shape, lse_dtype) = self._results
        out = torch.empty(out_shape, dtype=out_dtype)
        lse = torch.empty(lse_shape, dtype=lse_dtype)
        self._run(FORWARD, (), (q, k, v, out, lse))
        return out, lse

    def backward(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        saved: tuple[torch.Tensor, ...],
        needs: tuple[bool, ...],
    ) -> list[torch.Tensor | None]:
        """dq, dk and dv of the saved q, k, v, out, lse; None where it is not needed."""
        gradients = [torch.empty_like(x) if need else None for x, need in zip(saved, needs)]
        tensors = list(saved)
        tensors += [x for x in (dout, dlse) if x is not None]
        tensors += [x for x in gradients if x is not None]
        self._run(BACKWARD, (dout is not None, dlse is not None, *needs), tensors)
        return gradients

    def _run(self, which: int, given: tuple[bool, ...], tensors: Sequence[torch.Tensor]) -> None:
        """``given``: which of _BACKWARD_NAMES follow q, k, v, out and lse in ``tensors``."""
        idle = self._idle.get(given)
        if idle is None:
            idle = self._idle[given] = []
        try:
            call = idle.pop()
        except IndexError:
            names = [*_FORWARD_NAMES, *(n for n, x in zip(_BACKWARD_NAMES, given) if x)]
            call = _PreparedCall(which, names, tensors, self._options)
        call.run(tensors)
        idle.append(call)
