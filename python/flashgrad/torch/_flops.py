# SPDX-License-Identifier: Apache-2.0
"""The operators' FLOPs for ``torch.utils.flop_counter``, which counts 0 for what it does not know.

They are counted as those of PyTorch's own attention: of all rows with all keys of their sequence,
whatever the mask, and of all gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import _operators as _operators


def _pairs(q: torch.Tensor, k: torch.Tensor, options: tuple[Any, ...]) -> int:
    """The pairs of a row and a key of its sequence, in all query heads.

    ``options`` are the operator's. Where offsets have no data, all sequences count as the longest.
    """
    _, cu_seqlens_q, cu_seqlens_kv, _, _, _, max_seqlen_q, max_seqlen_kv, *_ = options
    heads = q.shape[-2]
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        return q.shape[0] * heads * q.shape[1] * k.shape[1]
    if isinstance(cu_seqlens_q, FakeTensor) or cu_seqlens_q.is_meta:
        batch = cu_seqlens_q.shape[0] - 1
        return heads * batch * (max_seqlen_q or q.shape[0]) * (max_seqlen_kv or k.shape[0])
    lengths = [x.diff().long() for x in (cu_seqlens_q, cu_seqlens_kv)]
    return heads * int((lengths[0] * lengths[1]).sum())


@register_flop_formula(torch.ops.flashgrad.forward, get_raw=True)
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any, **results: Any
) -> int:
    return 2 * _pairs(q, k, options) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.flashgrad.backward, get_raw=True)
def _backward(
    dout: Any,
    dlse: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Any,
    lse: Any,
    *options: Any,
    **results: Any,
) -> int:
    return 2 * _pairs(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])


# PyTorch 2.4 registers overloads, and then looks for the packet of them.
flop_registry.setdefault(torch.ops.flashgrad.forward, _forward)
flop_registry.setdefault(torch.ops.flashgrad.backward, _backward)
