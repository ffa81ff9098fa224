# SPDX-License-Identifier: Apache-2.0
"""JAX's dot_product_attention over flashgrad, with the masks that it can serve."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from ._attention import as_array, attention, refuse_traced


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """``softmax(scale * query key^T + mask) value``, with the signature of ``jax.nn``'s.

    Parameters
    ----------
    query : array (batch, T, heads, dim) or (T, heads, dim)
        float32, bfloat16, float16, or float64 on the CPU (by the reference backend).
    key : array (batch, S, heads_kv, dim) or (S, heads_kv, dim)
        heads is a multiple of heads_kv.
    value : array (batch, S, heads_kv, dim_v) or (S, heads_kv, dim_v)
        dim_v may differ from dim, which jax.nn refuses.
    bias : None
        Must be None.
    mask : boolean array broadcastable to (batch, heads, T, S), optional
        True where a row sees a key. Its content must be known while the program is made (not an
        argument of a jitted function), the same for every sequence and head, and a diagonal band:
        row i sees key j iff ``left <= j - i <= right``.
    scale : float, optional
        None: 1 / sqrt(dim).
    is_causal : bool
        Row i sees key j iff ``j <= i``, whatever T and S.
    query_seq_lengths, key_value_seq_lengths : int32 array (batch), optional
        How many rows and keys of each sequence count.
    local_window_size : int or (left, right), optional
        Row i sees key j iff ``i - left <= j <= i + right``; one number: both sides.
    implementation : str, optional
        None: flashgrad. "xla" and "cudnn" are handed to ``jax.nn.dot_product_attention``, with all
        other arguments.
    return_residual : bool
        Returns (out, lse), lse of shape (batch, T, heads) or (T, heads) in query's dtype and
        without a gradient, as jax.nn does. ``attention`` has a differentiable one in float32.

    Returns
    -------
    array, query's shape with value's last size
        0 in rows that see nothing, where jax.nn may return the mean of the values.

    Raises
    ------
    ValueError
        Shapes, dtypes or options contradict each other.
    NotImplementedError
        A bias, any other mask, and what ``attention`` refuses.

    Examples
    --------
    >>> import jax
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (1, 16, 2, 8)
    """
    if implementation is not None:
        more = {"return_residual": True} if return_residual else {}  # jax.nn has it since 0.7
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size, implementation=implementation, **more,
        )  # fmt: skip
    if bias is not None:
        raise NotImplementedError("flashgrad: bias: given, want None: biases are not supported")
    refuse_traced(
        is_causal=is_causal, local_window_size=local_window_size, return_residual=return_residual
    )
    query, key, value = (
        as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    shape = query.shape
    if query.ndim == key.ndim == value.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"flashgrad: {name}: {x.ndim} dimensions, want 4, or 3 in all three")
    bands: list[tuple[int | None, int | None]] = []
    if is_causal:
        bands.append((None, 0))
    if local_window_size is not None:
        bands.append(_window(local_window_size))
    if mask is not None:
        batch, rows, heads = query.shape[:3]
        bands.append(_read_mask(mask, (batch, heads, rows, key.shape[1])))
    out, lse = attention(
        query,
        key,
        value,
        window=(_narrowest(left for left, _ in bands), _narrowest(right for _, right in bands)),
        alignment="top-left",
        scale=scale,
        seqused_q=query_seq_lengths,
        seqused_kv=key_value_seq_lengths,
    )
    out = out.reshape(*shape[:-1], out.shape[-1])
    if not return_residual:
        return out
    lse = jax.lax.stop_gradient(lse.transpose(0, 2, 1)).astype(out.dtype)
    return out, lse.reshape(shape[:-1])


def _window(size: Any) -> tuple[int, int]:
    """local_window_size as (left, right); a number is both sides."""
    try:
        size = operator.index(size)
        return size, size
    except TypeError:
        pass
    try:
        left, right = size
    except (TypeError, ValueError):
        raise ValueError(
            f"flashgrad: local_window_size: {size!r}, want a whole number or (left, right)"
        ) from None
    return left, right


def _narrowest(sides: Any) -> int | None:
    return min((side for side in sides if side is not None), default=None)


def _read_mask(mask: Any, shape: tuple[int, int, int, int]) -> tuple[int | None, int | None]:
    """The window (left, right) of a boolean mask that is a band, top-left aligned."""
    refused = "flashgrad: mask: {}, want None or a boolean mask that is a diagonal band"
    if isinstance(mask, jax.core.Tracer):
        raise NotImplementedError(
            refused.format("an argument of a transformed function, whose content is not known")
        )
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise NotImplementedError(refused.format(f"of dtype {mask.dtype}"))
    try:
        full = np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(
            f"flashgrad: mask: shape {mask.shape}, want broadcastable to {shape}"
        ) from None
    if full.size == 0:
        return None, None
    rows = full[0, 0]
    seen = rows.any(-1)
    if not seen.any():
        left, right = 0, -1  # an empty band
    else:
        i = np.flatnonzero(seen)
        left = int((i - rows[i].argmax(-1)).max())
        right = int((rows.shape[1] - 1 - rows[i, ::-1].argmax(-1) - i).max())
    distance = np.arange(rows.shape[1]) - np.arange(rows.shape[0])[:, None]
    if not (full == ((distance >= -left) & (distance <= right))).all():
        raise NotImplementedError(refused.format("of another form"))
    return (
        None if left >= rows.shape[0] - 1 else left,
        None if right >= rows.shape[1] - 1 else right,
    )
