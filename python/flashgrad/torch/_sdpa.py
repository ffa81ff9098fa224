# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention over flashgrad, with the masks that it can serve."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .._library import ArgumentError
from ._masks import band_attention, read_mask
from ._attention import attention, check_tensor
from ._layout import HEADS_FIRST
from ._nested import is_served, nested_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``softmax(scale * query key^T + mask) value`` with PyTorch's signature, differentiable.

    Parameters
    ----------
    query : Tensor (..., heads, L, E)
        float32, bfloat16, float16, or float64 (reference backend). Leading dimensions broadcast;
        they may be missing. query, key and value may be jagged nested tensors
        (batch, heads, L, E) of sequences of different L and S, without a mask.
    key : Tensor (..., heads_kv, S, E)
    value : Tensor (..., heads_kv, S, E_v)
    attn_mask : optional
        ``torch.nn.attention.bias.causal_upper_left`` or ``causal_lower_right``. In eager mode also
        a Tensor broadcastable to (..., heads, L, S), boolean and True where a row sees a key, or
        0 there and -inf elsewhere (as ``torch.nn.MultiheadAttention`` makes it), whose content is
        a diagonal band, a contiguous range of keys for each sequence, or both; reading it
        synchronises with the device once.
    dropout_p : float
        Must be 0.
    is_causal : bool
        Row i sees key j iff ``j <= i`` (top-left, whatever L and S).
    scale : float, optional
        None: 1 / sqrt(E).
    enable_gqa : bool
        heads may be a multiple of heads_kv.

    Returns
    -------
    Tensor (..., heads, L, E_v)
        query's dtype; 0 in rows that see nothing.

    Raises
    ------
    ValueError
        Shapes, dtypes or options contradict each other. It is a RuntimeError too, as PyTorch's.
    NotImplementedError
        Dropout, any other mask, other nested tensors, and what ``flash_attn_func`` refuses.

    Examples
    --------
    >>> import torch
    >>> q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    """
    if has_torch_function_variadic(query, key, value):
        return handle_torch_function(
            scaled_dot_product_attention, (query, key, value), query, key, value,
            attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"flashgrad: dropout_p: {dropout_p}, want 0: dropout of attention probabilities is not "
            "supported"
        )
    if is_causal and attn_mask is not None:
        raise ArgumentError("flashgrad: attn_mask: given with is_causal, want one of them")
    if is_served(query) and is_served(key) and is_served(value):
        if attn_mask is not None:
            raise NotImplementedError("flashgrad: attn_mask: given with nested tensors, want None")
        return nested_attention(query, key, value, is_causal, scale, enable_gqa)
    for x in (query, key, value):
        if not isinstance(x, torch.Tensor) or x.is_nested or x.ndim < 2:
            _refuse(query=query, key=key, value=value)
    q, k, v, leading = _to_batch_heads(query, key, value)
    if q.shape[1] != k.shape[1] and k.shape[1] != 1 and not enable_gqa:
        raise ArgumentError(
            f"flashgrad: key: {k.shape[1]} heads, want {q.shape[1]} (query's), or enable_gqa=True"
        )
    if attn_mask is None:
        right, top_left = (0, True) if is_causal else (None, False)
        out, _ = attention(
            q, k, v, layout=HEADS_FIRST, scale=scale, window_right=right, top_left=top_left
        )
    elif (top_left := _causal_bias(attn_mask, q, k)) is not None:
        out, _ = attention(
            q, k, v, layout=HEADS_FIRST, scale=scale, window_right=0, top_left=top_left
        )
    else:
        check_tensor("attn_mask", attn_mask)
        shape = (*leading, q.shape[2], k.shape[2])
        band = read_mask(attn_mask, shape, q.shape[0], q.device)
        out = band_attention(q, k, v, band, HEADS_FIRST, scale=scale)
    return out if q is query else out.reshape(*leading, *out.shape[-2:])


def _refuse(**tensors: Any) -> None:
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.ndim < 2:
            raise ArgumentError(f"flashgrad: {name}: {x.ndim} dimensions, want 2 or more")


def _to_batch_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The tensors as (batch, heads, seqlen, dim), and the result's leading dimensions."""
    tensors = (query, key, value)
    if query.ndim == key.ndim == value.ndim == 4:
        batch, heads, _, _ = query.shape
        batch_kv, heads_kv, _, _ = key.shape
        batch_v, heads_v, _, _ = value.shape
        if batch == batch_kv == batch_v and heads_kv == heads_v and (heads > 1 or heads_kv == 1):
            return query, key, value, (batch, heads)
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in tensors]
    # A single head of keys or values stands for those of the other, one of queries for all.
    heads_kv = max(heads[1:])
    heads = [h if h > 1 else heads_kv for h in heads]
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ArgumentError(
            f"flashgrad: query, key, value: shapes {shapes}, whose dimensions before the heads do "
            "not broadcast"
        ) from None
    ndim = max(x.ndim for x in tensors)
    leading = (*batch, heads[0]) if ndim > 2 else ()
    q, k, v = (
        x.expand(*batch, h, *x.shape[-2:]).reshape(batch.numel(), h, *x.shape[-2:])
        for x, h in zip(tensors, heads)
    )
    return q, k, v, leading


def _causal_bias(mask: Any, q: torch.Tensor, k: torch.Tensor) -> bool | None:
    """Whether a causal bias is the top-left one; None if the mask is something else."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return None
    want = (q.shape[2], k.shape[2])
    if (mask.seq_len_q, mask.seq_len_kv) != want:
        raise ArgumentError(
            f"flashgrad: attn_mask: a causal bias for {(mask.seq_len_q, mask.seq_len_kv)}, want "
            f"{want} (query's and key's lengths)"
        )
    return mask.variant == CausalVariant.UPPER_LEFT
