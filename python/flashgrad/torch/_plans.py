# SPDX-License-Identifier: Apache-2.0
"""Calls prepared once for their tensors' shapes, strides and options.

In a small call the library takes less time than what leads to it. A plan keeps what depends on
neither data nor address, the C structs and the answer of fg_workspace_size, so that a call like an
earlier one only sets its tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._call import CPU, CUDA, DATA_WORD, SLOT, Call
from .._library import BACKWARD, FORWARD, WORKSPACE_TOO_SMALL, library

# A program has few shapes; one whose shapes keep changing must not keep them all.
_MAX_PLANS = 64
# On the CPU a workspace up to this size stays with its plan. A larger one comes from PyTorch's
# allocator, and so does any on a GPU, where the call's stream owns it.
_KEPT_WORKSPACE_BYTES = 1 << 17

# DLPack's type code and bits.
_DTYPES = {
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float64: (2, 64),
}

# How q, k and v come: (batch, heads, seqlen, head_dim), and so are their gradients; out and dout
# likewise, or (batch, seqlen, heads, head_dim) as everywhere else.
HEADS_FIRST = "heads first"
HEADS_FIRST_TO_ROWS = "heads first, out not"
_HEADS_FIRST_NAMES = {
    HEADS_FIRST: ("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
    HEADS_FIRST_TO_ROWS: ("q", "k", "v", "dq", "dk", "dv"),
    None: (),
}

_FORWARD_NAMES = ("q", "k", "v", "out", "lse")
_BACKWARD_NAMES = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")


class _PreparedCall:
    """One of the calls of a plan, for one thread at a time."""

    __slots__ = (
        "call", "data_words", "device", "num_bytes", "options", "which", "words", "workspace"
    )  # fmt: skip

    def __init__(
        self,
        which: int,
        names: Sequence[str],
        tensors: Sequence[Any],
        heads_first: Sequence[str],
        options: bytes,
    ) -> None:
        self.which, self.options = which, options
        self.device = device = tensors[0].device
        dlpack_device = (CUDA, device.index) if device.type == "cuda" else (CPU, 0)
        self.call = Call()
        for name, x in zip(names, tensors):
            if x is not None:
                rows = x.transpose(1, 2) if name in heads_first else x
                self.call.add_shape(
                    SLOT[name], rows.shape, *_DTYPES[x.dtype], rows.stride(), dlpack_device
                )
        self.words = self.call.words()
        self.data_words = [DATA_WORD[SLOT[name]] for name in names]
        self.prepare()

    def prepare(self) -> None:
        self.num_bytes = self.call.prepare(self.which, self.options)
        self.workspace = None
        if self.device.type == "cpu" and self.num_bytes <= _KEPT_WORKSPACE_BYTES:
            self.workspace = self.new_workspace()

    def new_workspace(self) -> torch.Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)

    def run(self, tensors: Sequence[Any], stream: int) -> None:
        words = self.words
        for index, x in zip(self.data_words, tensors):
            if x is not None:
                words[index] = x.data_ptr()
        status = self.launch(stream)
        if status == WORKSPACE_TOO_SMALL:  # the backend was changed since
            self.prepare()
            status = self.launch(stream)
        if status:
            raise library().error(status)

    def launch(self, stream: int) -> int:
        workspace = self.workspace
        if workspace is None:
            workspace = self.new_workspace()
        return self.call.try_launch(self.which, workspace.data_ptr(), self.num_bytes, stream)


def current_stream(x: torch.Tensor) -> int:
    """The cudaStream_t that is current on the device of a CUDA tensor.

    As ``torch.cuda.current_stream``, which takes 2 us for an object around it.
    """
    return torch._C._cuda_getCurrentRawStream(x.get_device())


_plans: dict[Any, Plan] = {}


def find(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str | None,
    options: tuple[Any, ...],
    make: Callable[[torch.Tensor, torch.Tensor, str | None, tuple[Any, ...]], Plan],
) -> Plan | None:
    """The plan of a call without sinks and lengths, or None if its tensors want the general way.

    ``layout``: None, or as the tensors come. ``options`` are what else determines the call;
    ``make(q, v, layout, options)`` makes a plan.
    """
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), layout, options, torch.get_num_threads(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        # The library refuses other ranks and dtypes and mixed devices; other strides are copied.
        if not (
            q.ndim == k.ndim == v.ndim == 4
            and q.device == k.device == v.device
            and all(x.stride(-1) == 1 and x.dtype in _DTYPES for x in (q, k, v))
        ):
            return None
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make(q, v, layout, options)
    return plan


class Plan:
    """Forward and backward of fixed-length tensors without sinks and lengths."""

    __slots__ = ("_heads_first", "_idle", "_lse", "_on_gpu", "_options", "_out", "_out_strides")

    def __init__(
        self, results: Sequence[torch.Tensor], layout: str | None, options: bytes
    ) -> None:
        # Like out and lse, of one element: torch.empty_like is quicker than torch.empty.
        self._out, self._lse = (x.new_empty(1).expand(x.shape) for x in results)
        # Heads first, out has the memory of rows first, as a model's next layer reads it.
        self._out_strides = None
        if layout == HEADS_FIRST:
            self._out = self._out.transpose(1, 2)
            self._out_strides = results[0].transpose(1, 2).stride()
        self._heads_first = _HEADS_FIRST_NAMES[layout]
        self._on_gpu = results[0].is_cuda
        self._options = options
        # By pass and the strides of its tensors: the prepared calls that no thread is using.
        self._idle: dict[Any, list[_PreparedCall]] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        if self._out_strides is None:
            out = torch.empty_like(self._out, memory_format=torch.contiguous_format)
        else:
            out = q.new_empty_strided(self._out.shape, self._out_strides)
        lse = torch.empty_like(self._lse, memory_format=torch.contiguous_format)
        self._run(FORWARD, None, (q, k, v, out, lse))
        return out, lse

    def backward(
        self,
        dout: Any,
        dlse: Any,
        saved: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        form: Any,
    ) -> bool:
        """Writes dq, dk and dv, where they are not None, of the saved q, k, v, out and lse.

        The gradients' strides depend on ``form`` and the saved tensors' alone. False: a tensor has to
        be copied first, and nothing was written.
        """
        key: list[Any] = [form]
        for x in saved:  # hooks on saved tensors may have given them other strides
            strides = x.stride()
            if strides[-1] != 1:
                return False
            key.append(strides)
        for x in (dout, dlse):
            if x is None:
                key.append(None)
            else:
                strides = x.stride()
                if strides[-1] > 1:
                    return False
                key.append(strides)
        self._run(BACKWARD, tuple(key), (*saved, dout, dlse, *gradients))
        return True

    def _run(self, which: int, key: Any, tensors: Sequence[Any]) -> None:
        idle = self._idle.get(key)
        if idle is None:
            idle = self._idle[key] = []
        try:
            call = idle.pop()
        except IndexError:
            names = _FORWARD_NAMES if which == FORWARD else _BACKWARD_NAMES
            call = _PreparedCall(which, names, tensors, self._heads_first, self._options)
        call.run(tensors, current_stream(tensors[0]) if self._on_gpu else 0)
        idle.append(call)
