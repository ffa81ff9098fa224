# SPDX-License-Identifier: Apache-2.0
"""Masks that flashgrad can serve: recognised by content, and attention under them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._library import ArgumentError
from ._attention import attention
from ._layout import HEADS_FIRST

REFUSED = (
    "flashgrad: attention mask: {}, want none, a causal bias of torch.nn.attention.bias, or (in "
    "eager mode) a mask, boolean or of 0 and -inf, that is a diagonal band, a left or right key "
    "padding, or both"
)


class KeyBand(NamedTuple):
    """Row i of sequence b sees key j iff left <= j - i <= right and start[b] <= j < stop[b].

    Attributes
    ----------
    left, right : int or None
        None: unbounded.
    start, stop : int32 Tensor (batch), or None
        None: the first key, the last key.
    """

    left: int | None
    right: int | None
    start: torch.Tensor | None = None
    stop: torch.Tensor | None = None


def recognise(
    first: torch.Tensor, last: torch.Tensor, count: torch.Tensor, keys: int, same: torch.Tensor
) -> KeyBand | None:
    """The mask whose rows see these keys, or None if it is no KeyBand; synchronises once.

    The tightest band and ranges around what is seen contain the mask; they are the mask iff they
    hold no more keys than it does, row by row.

    Parameters
    ----------
    first, last, count : int64 Tensor (batch, seqlen_q)
        The first and the last key that a row sees, and how many it sees; the former two count only
        where it sees some.
    keys : int
        seqlen_kv, 1 or more.
    same : bool Tensor ()
        What else must hold for the mask to be one.
    """
    batch, rows = count.shape
    i = torch.arange(rows, device=count.device)
    some = count > 0
    left = torch.where(some, first - i, keys).amin()
    right = torch.where(some, last - i, -rows).amax()
    start = torch.where(some, first, keys).amin(-1)
    stop = torch.where(some, last + 1, 0).amax(-1)
    begin = torch.maximum(i + left, start[:, None])
    end = torch.minimum(i + right + 1, stop[:, None])
    same = same & ((end - begin).clamp(min=0) == count).all()
    # A sequence of which nothing is seen: any empty range.
    start = torch.minimum(start, stop)
    some_start, some_stop = (start > 0).any(), (stop < keys).any()
    scalars = torch.stack([x.long() for x in (same, left, right, some_start, some_stop)])
    is_band, left_, right_, has_start, has_stop = scalars.tolist()
    if not is_band:
        return None
    return KeyBand(
        None if left_ <= 1 - rows else left_,
        None if right_ >= keys - 1 else right_,
        start.int() if has_start else None,
        stop.int() if has_stop else None,
    )


def seen_keys(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row of a (..., seqlen_kv) mask the first key it sees, the last, and how many."""
    bits = mask.to(torch.uint8)
    return bits.argmax(-1), mask.shape[-1] - 1 - bits.flip(-1).argmax(-1), mask.sum(-1)


def read_mask(
    mask: torch.Tensor, shape: tuple[int, ...], batch: int, device: torch.device
) -> KeyBand:
    """Recognises a mask that broadcasts to (..., heads, seqlen_q, seqlen_kv).

    Parameters
    ----------
    mask : Tensor
        Boolean, or a bias of 0 and -inf. The lowest finite number of its dtype counts as -inf, but
        in a row that sees nothing, where it means the mean of the values.
    shape : tuple of int
        What it is broadcast to: all leading dimensions, seqlen_q, seqlen_kv.
    batch : int
        The product of the dimensions before the heads.
    device : torch.device
        The query's.

    Raises
    ------
    ValueError
        It does not broadcast, or lies on another device.
    NotImplementedError
        It is no band or padding, its gradient is wanted, or it can't be read: under torch.compile,
        CUDA graph capture and vmap its content is not known.
    """
    what = "a boolean mask" if mask.dtype == torch.bool else f"a bias of dtype {mask.dtype}"
    if mask.device != device:
        raise ArgumentError(f"flashgrad: attention mask: on {mask.device}, want {device} (query's)")
    wanted = mask.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        raise NotImplementedError(REFUSED.format("a tensor under torch.compile"))
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(REFUSED.format("a tensor under CUDA graph capture"))
    while torch._C._functorch.is_gradtrackingtensor(mask):  # torch.func.grad has wrapped it
        mask = torch._C._functorch.get_unwrapped(mask)
        wanted |= mask.requires_grad and torch.is_grad_enabled()
    if wanted:
        raise NotImplementedError(REFUSED.format(f"{what} that requires grad"))
    if torch._C._functorch.is_functorch_wrapped_tensor(mask):
        raise NotImplementedError(REFUSED.format("a tensor that torch.func transforms"))
    same = torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.is_floating_point():
        lowest = mask == torch.finfo(mask.dtype).min
        hidden = lowest | (mask == -math.inf)
        mask = mask == 0
        same = (mask | hidden).all() & (mask.any(-1) | ~lowest.any(-1)).all()
    elif mask.dtype != torch.bool:
        raise NotImplementedError(REFUSED.format(what))
    try:
        mask = mask.expand(shape)
    except RuntimeError:
        raise ArgumentError(
            f"flashgrad: attention mask: shape {tuple(mask.shape)}, want broadcastable to {shape}"
        ) from None
    if mask.numel() == 0 or mask.is_meta:  # then only the results' shapes matter
        return KeyBand(None, None)
    rows, keys = shape[-2:]
    heads = shape[-3] if len(shape) > 2 else 1
    if mask.ndim != 4:
        mask = mask.reshape(batch, heads, rows, keys)
    if heads > 1 and mask.stride(1) != 0:
        same = same & (mask == mask[:, :1]).all()
    band = recognise(*seen_keys(mask[:, 0]), keys, same)
    if band is None:
        raise NotImplementedError(REFUSED.format(f"{what} of another form"))
    return band


def band_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: KeyBand, layout: str, **options: Any
) -> torch.Tensor:
    """Attention under a KeyBand.

    With keys missing on the left, the tensors are taken as packed ones in which sequence b begins
    at its first key and ``seqused_kv`` ends it; row i then stands at key ``i - start[b]``. Nothing
    is copied where k and v are (batch, seqlen, heads, dim) in memory.

    Parameters
    ----------
    q : Tensor (batch, heads_q, seqlen_q, head_dim)
    k, v : Tensor (batch, heads_kv, seqlen_kv, head_dim or head_dim_v)
    band : KeyBand
    layout : HEADS_FIRST or HEADS_FIRST_TO_ROWS
    **options
        ``scale``, ``softcap``, ``sinks`` of ``attention``.

    Returns
    -------
    Tensor, as ``layout`` says
    """
    options["window_left"] = None if band.left is None else -band.left
    options["window_right"] = band.right
    if band.start is None:
        out, _ = attention(
            q, k, v, layout=layout, seqused_kv=band.stop, top_left=True, **options
        )
        return out
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    start = band.start
    stop = torch.full_like(start, keys) if band.stop is None else band.stop
    cu_seqlens_kv = sequences * keys
    cu_seqlens_kv[:-1] += start
    out, _ = attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q=sequences * rows,
        cu_seqlens_kv=cu_seqlens_kv,
        seqused_kv=stop - start,
        q_offset=-start.long(),
        max_seqlen_q=rows,
        **options,
    )
    out = out.unflatten(0, (batch, rows))
    return out.transpose(1, 2) if layout == HEADS_FIRST else out
