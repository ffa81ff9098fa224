# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of nested tensors: their values are packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from .._library import ArgumentError
from ._attention import attention

# (batch, heads, seqlen, head_dim), of which the sequences' lengths differ.
_RAGGED = 2


def is_served(x: Any) -> bool:
    """Whether x is a jagged tensor (batch, heads, seqlen, head_dim) of any lengths."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_nested
        and x.layout == torch.jagged
        and x.ndim == 4
        and x._ragged_idx == _RAGGED
    )


def nested_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Each sequence of query with the one of key and value, without padding or copies of them."""
    same = key.shape[_RAGGED] == value.shape[_RAGGED]  # made from the same offsets
    if not same and not torch.equal(key.offsets(), value.offsets()):
        raise ArgumentError("flashgrad: value: a nested tensor of other lengths than key's")
    if query.shape[1] != key.shape[1] and key.shape[1] != 1 and not enable_gqa:
        raise ArgumentError(
            f"flashgrad: key: {key.shape[1]} heads, want {query.shape[1]} (query's), or "
            "enable_gqa=True"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = attention(
        *(x.values() for x in (q, k, v)),
        cu_seqlens_q=q.offsets().int(),
        cu_seqlens_kv=k.offsets().int(),
        # Tensors that a larger one was narrowed to have rows in between that do not count.
        seqused_q=None if q.lengths() is None else q.lengths().int(),
        seqused_kv=None if k.lengths() is None else k.lengths().int(),
        max_seqlen_q=getattr(q, "_maybe_max_seqlen", None) or 0,
        max_seqlen_kv=getattr(k, "_maybe_max_seqlen", None) or 0,
        window_right=0 if is_causal else None,
        top_left=is_causal,
        scale=scale,
    )
    return torch.nested.nested_tensor_from_jagged(out, q.offsets(), q.lengths()).transpose(1, 2)
