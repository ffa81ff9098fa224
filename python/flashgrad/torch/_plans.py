# SPDX-License-Identifier: Apache-2.0
"""Calls on compact CPU tensors, prepared once for their shapes and options.

In a small call the library takes less time than what leads to it. A plan keeps what depends on
shapes and options alone, the C structs and the answer of fg_workspace_size, so that a call like an
earlier one only sets its tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._call import DATA_WORD, Call
from .._library import WORKSPACE_TOO_SMALL, library

# A program has few shapes; one whose shapes keep changing must not keep them all.
_MAX_PLANS = 256
# A workspace up to this size stays with its plan, a larger one comes from PyTorch's allocator.
_KEPT_WORKSPACE_BYTES = 1 << 14


class _Plan:
    __slots__ = ("call", "num_bytes", "words", "workspace")

    def __init__(self, which: int, tensors: Sequence[Any], options: bytes) -> None:
        self.call = Call()
        for slot, x in enumerate(tensors):
            if x is not None:
                code = 4 if x.dtype == torch.bfloat16 else 2  # kDLBfloat, kDLFloat
                self.call.add_shape(slot, x.shape, code, 8 * x.itemsize)
        self.num_bytes = self.call.prepare(which, options)
        self.words = self.call.words()
        self.workspace = None
        if self.num_bytes <= _KEPT_WORKSPACE_BYTES:
            self.workspace = torch.empty(self.num_bytes, dtype=torch.uint8)


# Each key's plans that no thread is using.
_idle: dict[Any, list[_Plan]] = {}


def run(which: int, key: Any, tensors: Sequence[Any], options: bytes) -> bool:
    """Runs a call on compact CPU tensors.

    Parameters
    ----------
    which : int
        FORWARD or BACKWARD.
    key
        What determines the tensors' shapes and dtypes, and which of them are None.
    tensors : sequence
        The first of fg_tensors, in its order.
    options : bytes
        From ``pack_options``.

    Returns
    -------
    bool
        False if nothing was done because the plan's workspace is out of date: the backend or the
        number of threads has changed.
    """
    key = (key, which, options, torch.get_num_threads())
    idle = _idle.get(key)
    if idle is None:
        if len(_idle) >= _MAX_PLANS:
            _idle.clear()
        idle = _idle[key] = []
    try:
        plan = idle.pop()
    except IndexError:
        plan = _Plan(which, tensors, options)
    words = plan.words
    for index, x in zip(DATA_WORD, tensors):
        if x is not None:
            words[index] = x.data_ptr()
    workspace = plan.workspace
    if workspace is None:
        workspace = torch.empty(plan.num_bytes, dtype=torch.uint8)
    status = plan.call.try_launch(which, workspace.data_ptr(), plan.num_bytes, 0)
    if status:
        if status == WORKSPACE_TOO_SMALL:
            return False
        raise library().error(status)
    idle.append(plan)
    return True
