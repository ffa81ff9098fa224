# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention over flashgrad, with the masks that it can serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._ops import attention

_REFUSED = (
    "flashgrad: attn_mask: {}, want None, a bias of torch.nn.attention.bias, or (in eager mode) a "
    "boolean mask that is a diagonal band, a left or right key padding, or both"
)


class _Band(NamedTuple):
    """What a mask says: row i sees key j iff left <= j - i <= right and start <= j < stop."""

    left: int
    right: int
    start: list[int]
    stop: list[int]


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
        they may be missing.
    key : Tensor (..., heads_kv, S, E)
    value : Tensor (..., heads_kv, S, E_v)
    attn_mask : optional
        ``torch.nn.attention.bias.causal_upper_left`` or ``causal_lower_right``. In eager mode also
        a boolean Tensor broadcastable to (..., heads, L, S), True where a row sees a key, whose
        content is a diagonal band, a contiguous range of keys for each sequence, or both; reading
        it synchronises with the device once.
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
        Shapes, dtypes or options contradict each other.
    NotImplementedError
        Dropout, any other mask, and what ``flash_attn_func`` refuses.

    Examples
    --------
    >>> import torch
    >>> q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    """
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"flashgrad: dropout_p: {dropout_p}, want 0: dropout of attention probabilities is not "
            "supported"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("flashgrad: attn_mask: given with is_causal, want one of them")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            raise ValueError(f"flashgrad: {name}: {x.ndim} dimensions, want 2 or more")
    q, k, v, leading = _to_batch_heads(query, key, value)
    if q.shape[1] != k.shape[1] and k.shape[1] != 1 and not enable_gqa:
        raise ValueError(
            f"flashgrad: key: {k.shape[1]} heads, want {q.shape[1]} (query's), or enable_gqa=True"
        )
    options: dict[str, Any] = {"scale": scale}
    if is_causal:
        options.update(window_right=0, top_left=True)
        out = _attend(q, k, v, options)
    elif attn_mask is None:
        out = _attend(q, k, v, options)
    elif (top_left := _causal_bias(attn_mask, q, k)) is not None:
        options.update(window_right=0, top_left=top_left)
        out = _attend(q, k, v, options)
    else:
        out = _attend_masked(q, k, v, options, _read_mask(attn_mask, leading, q, k))
    return out.reshape(*leading, *out.shape[-2:])


def _to_batch_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The tensors as (batch, heads, seqlen, dim), and the result's leading dimensions."""
    tensors = (query, key, value)
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in tensors]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    ndim = max(x.ndim for x in tensors)
    leading = (*batch, heads[0]) if ndim > 2 else ()
    if key.ndim == query.ndim == value.ndim == 4 and key.shape[0] == value.shape[0] == batch[0]:
        if query.shape[0] == batch[0]:
            return query, key, value, leading
    q, k, v = (
        x.expand(*batch, h, *x.shape[-2:]).reshape(-1, h, *x.shape[-2:])
        for x, h in zip(tensors, heads)
    )
    return q, k, v, leading


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    out, _ = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return out.transpose(1, 2)


def _causal_bias(mask: Any, q: torch.Tensor, k: torch.Tensor) -> bool | None:
    """Whether a causal bias is the top-left one; None if the mask is something else."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return None
    want = (q.shape[2], k.shape[2])
    if (mask.seq_len_q, mask.seq_len_kv) != want:
        raise ValueError(
            f"flashgrad: attn_mask: a causal bias for {(mask.seq_len_q, mask.seq_len_kv)}, want "
            f"{want} (query's and key's lengths)"
        )
    return mask.variant == CausalVariant.UPPER_LEFT


def _read_mask(
    mask: torch.Tensor, leading: tuple[int, ...], q: torch.Tensor, k: torch.Tensor
) -> _Band:
    """Recognises a boolean mask by its content, with one synchronisation."""
    if mask.dtype != torch.bool:
        raise NotImplementedError(_REFUSED.format(f"a bias of dtype {mask.dtype}"))
    if torch.compiler.is_compiling():
        raise NotImplementedError(_REFUSED.format("a tensor under torch.compile"))
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(_REFUSED.format("a tensor under CUDA graph capture"))
    batch, heads, rows = q.shape[:3]
    keys = k.shape[2]
    want = (*leading, rows, keys)
    try:
        mask = mask.expand(want)
    except RuntimeError:
        raise ValueError(
            f"flashgrad: attn_mask: shape {tuple(mask.shape)}, want broadcastable to {want}"
        ) from None
    if 0 in (batch, heads, rows, keys):
        return _Band(-rows, keys, [0] * batch, [keys] * batch)
    # Dimensions that are only broadcast need no look.
    mask = mask.reshape(batch, heads, rows, keys) if mask.ndim != 4 else mask
    head = mask[:, 0]
    one_for_heads = mask.stride(1) == 0 or heads == 1
    i = torch.arange(rows, device=mask.device)
    j = torch.arange(keys, device=mask.device)
    seen = head.to(torch.uint8)
    first = seen.argmax(-1)
    last = keys - 1 - seen.flip(-1).argmax(-1)
    some = head.any(-1)
    # The tightest band and ranges around what is seen; the mask is one iff they give it back.
    left = torch.where(some, first - i, keys).amin()
    right = torch.where(some, last - i, -rows).amax()
    start = torch.where(some, first, keys).amin(-1)
    stop = torch.where(some, last + 1, 0).amax(-1)
    offset = j - i[:, None]
    band = (offset >= left) & (offset <= right)
    ranges = (j >= start[:, None]) & (j < stop[:, None])
    same = (head == (band & ranges[:, None])).all()
    if not one_for_heads:
        same = same & (mask == mask[:, :1]).all()
    ok, left_, right_, *ends = torch.cat(
        [torch.stack([same.long(), left, right]), start, stop]
    ).tolist()
    if not ok:
        raise NotImplementedError(_REFUSED.format("a boolean mask of another form"))
    start_, stop_ = ends[:batch], ends[batch:]
    empty = [a >= b for a, b in zip(start_, stop_)]
    return _Band(
        left_,
        right_,
        [0 if e else a for a, e in zip(start_, empty)],
        [0 if e else b for b, e in zip(stop_, empty)],
    )


def _attend_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], band: _Band
) -> torch.Tensor:
    rows, keys = q.shape[2], k.shape[2]
    left = None if band.left <= 1 - rows else -band.left
    right = None if band.right >= keys - 1 else band.right
    options = {**options, "window_left": left, "window_right": right, "top_left": True}
    if all(a == 0 for a in band.start):
        if any(b != keys for b in band.stop):
            options["seqused_kv"] = torch.tensor(band.stop, dtype=torch.int32, device=q.device)
        return _attend(q, k, v, options)
    return padded_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        torch.tensor(band.start, dtype=torch.int32, device=q.device),
        torch.tensor(band.stop, dtype=torch.int32, device=q.device),
        **options,
    ).transpose(1, 2)


def padded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    stop: torch.Tensor,
    shift: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Attention in which sequence b has only the keys from ``start[b]`` up to ``stop[b]``.

    Nothing is copied where k and v are (batch, seqlen, heads, dim) in memory: they are taken as
    packed tensors, in which sequence b begins at its first key and ``seqused_kv`` ends it. The
    query's row i stands at key ``i + shift`` of the padded sequence, so at ``i + shift - start[b]``
    of the packed one.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
    k, v : Tensor (batch, seqlen_kv, heads_kv, head_dim or head_dim_v)
    start, stop : int32 Tensor (batch)
    shift : int
    **options
        Those of ``attention`` but the lengths and the alignment.

    Returns
    -------
    Tensor (batch, seqlen_q, heads_q, head_dim_v)
    """
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    first_rows = torch.arange(0, (batch + 1) * rows, max(rows, 1), dtype=torch.int32, device=q.device)
    first_keys = torch.arange(0, (batch + 1) * keys, max(keys, 1), dtype=torch.int32, device=q.device)
    cu_seqlens_kv = first_keys.clone()
    cu_seqlens_kv[:-1] += start
    options.pop("top_left", None)
    out, _ = attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q=first_rows,
        cu_seqlens_kv=cu_seqlens_kv,
        seqused_kv=stop - start,
        q_offset=shift - start.to(torch.int64),
        max_seqlen_q=rows,
        **options,
    )
    return out.unflatten(0, (batch, rows))
