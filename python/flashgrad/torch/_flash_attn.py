# SPDX-License-Identifier: Apache-2.0
"""The functions of flash-attn 2 with its argument names and defaults, and what flashgrad adds.

What FlashAttention-3 adds is taken by name.
"""

from __future__ import annotations

from typing import Any

import torch

from .._functions import Alignment, is_top_left
from .._library import ArgumentError
from ._attention import attend, check_tensor
from ._layout import Layout

Output = Any  # a tensor, or the tuple that return_lse or return_attn_probs asks for


def _refuse(dropout_p: float, alibi_slopes: Any) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"flashgrad: dropout_p: {dropout_p}, want 0: dropout of attention probabilities is not "
            "supported (in model.eval() pass 0.0)"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(
            "flashgrad: alibi_slopes: given, want None: biases are not supported"
        )


# Arguments that FlashAttention-3 added: what is supported of those that change the result, and
# those that only tune its kernels.
_FLASH_ATTN_3 = {
    "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0,
}  # fmt: skip
_FLASH_ATTN_3_TUNING = ("num_splits", "pack_gqa", "sm_margin")


def _check_flash_attn_3(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _FLASH_ATTN_3_TUNING:
            continue
        if name not in _FLASH_ATTN_3:
            raise TypeError(f"flashgrad: {name}: an unexpected argument")
        want = _FLASH_ATTN_3[name]
        if value is not want and value != want:
            raise NotImplementedError(f"flashgrad: {name}: given, want {want}: it is not supported")


def _attend(
    tensors: tuple[torch.Tensor, ...],
    layout: Layout,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: None,
    deterministic: bool,
    return_attn_probs: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    alignment: Alignment = "bottom-right",
) -> Output:
    """The options of flash-attn and flashgrad on tensors as ``layout`` says."""
    if dropout_p != 0.0 or alibi_slopes is not None:
        _refuse(dropout_p, alibi_slopes)
    # As flash-attn's users expect, a negative side is open, and causal closes the right one.
    try:
        left, right = window_size.tolist() if isinstance(window_size, torch.Tensor) else window_size
        if left is not None and left < 0:
            left = None
        if causal:
            right = 0
        elif right is not None and right < 0:
            right = None
    except (TypeError, ValueError):
        raise ArgumentError(
            f"flashgrad: window_size: {window_size!r}, want (left, right)"
        ) from None
    top_left = is_top_left(alignment)
    out, lse = attend(
        tensors,
        layout,
        (sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_offset),
        (
            max_seqlen_q, max_seqlen_k, left, right, top_left, softmax_scale,
            softcap, deterministic or torch.are_deterministic_algorithms_enabled(),
        ),
    )  # fmt: skip
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def _check_packed(packed: torch.Tensor, name: str, parts: int, dim: int) -> None:
    check_tensor(name, packed)
    if packed.ndim != dim + 3 or packed.shape[dim] != parts:
        rows = "batch, seqlen" if dim == 2 else "total"
        raise ArgumentError(
            f"flashgrad: {name}: shape {tuple(packed.shape)}, want "
            f"({rows}, {parts}, heads, head_dim)"
        )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    alignment: Alignment = "bottom-right",
    **flash_attn_3: Any,
) -> Output:
    """``softmax(softmax_scale * q k^T) v``, differentiable.

    With ``softcap > 0`` the logits are ``softcap * tanh(s / softcap)``; ``flashgrad.forward`` has
    the formula in full.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
        float32, bfloat16, float16, or float64 (by the reference backend, for gradcheck). Any
        strides; a last stride other than 1 costs a copy.
    k : Tensor (batch, seqlen_k, heads_k, head_dim)
        q's dtype. heads_q is a multiple of heads_k.
    v : Tensor (batch, seqlen_k, heads_k, head_dim_v)
        q's dtype.
    dropout_p : float
        Must be 0.
    softmax_scale : float, optional
        None: 1 / sqrt(head_dim).
    causal : bool
        Row i sees key j iff ``j <= i + seqlen_k - seqlen_q``.
    window_size : (left, right)
        Row i sees key j iff ``i + shift - left <= j <= i + shift + right``, where shift is
        ``seqlen_k - seqlen_q``. Negative or None: unbounded.
    softcap : float
        0: none.
    alibi_slopes : None
        Must be None.
    deterministic : bool
        Gradients of the same bits run after run on a GPU; on the CPU they always are.
        ``torch.use_deterministic_algorithms(True)`` sets it too.
    return_attn_probs : bool
        Returns (out, lse, None), as flash-attn without dropout.
    return_lse : bool
        Returns (out, lse).
    sinks : Tensor (heads_q), optional
        A logit per head that joins the softmax without a value; float32 (float64 with float64 q).
        Differentiable.
    seqused_q, seqused_k : int32 Tensor (batch), optional
        How many rows and keys of each sequence count.
    q_offset : int64 Tensor (batch), optional
        Where the first query of each sequence stands among its keys; replaces shift.
    alignment : "bottom-right" or "top-left"
        "top-left" sets shift to 0.
    **flash_attn_3
        Arguments of FlashAttention-3: num_splits, pack_gqa and sm_margin change nothing; qv,
        q_descale, k_descale, v_descale must be None, attention_chunk 0.

    Returns
    -------
    out : Tensor (batch, seqlen_q, heads_q, head_dim_v)
        q's dtype; 0 in rows that see nothing.
    lse : Tensor (batch, heads_q, seqlen_q)
        The logarithm of each row's sum of exponentials; float32 (float64 with float64 q).
        Differentiable. -inf in rows that see nothing.

    Raises
    ------
    ValueError
        A tensor or an option contradicts the rules. It is a RuntimeError too, as flash-attn's.
    NotImplementedError
        What is not supported: dropout, ALiBi, a device or dtype that no backend serves. Double
        backward and forward-mode differentiation raise it too.
    RuntimeError
        The device reported an error.
    TypeError
        A tensor is none, or an argument is unknown.

    Examples
    --------
    >>> import torch
    >>> q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3))
    >>> flash_attn_func(q, k, v, causal=True).sum().backward()
    """
    if flash_attn_3:
        _check_flash_attn_3(flash_attn_3)
    return _attend(
        (q, k, v), None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, return_lse=return_lse, sinks=sinks,
        seqused_q=seqused_q, seqused_k=seqused_k, q_offset=q_offset, alignment=alignment,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Output:
    """``flash_attn_func`` of ``qkv.unbind(2)``; its gradient is written as one packed tensor.

    Parameters
    ----------
    qkv : Tensor (batch, seqlen, 3, heads, head_dim)
    dropout_p, softmax_scale, ..., **more
        As in ``flash_attn_func``.
    """
    _check_packed(qkv, "qkv", 3, 2)
    return _attend(
        (qkv,), 2, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **more,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Output:
    """``flash_attn_func`` of q and ``kv.unbind(2)``; kv's gradient is written as one tensor.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads_q, head_dim)
    kv : Tensor (batch, seqlen_k, 2, heads_k, head_dim)
    dropout_p, softmax_scale, ..., **more
        As in ``flash_attn_func``.
    """
    _check_packed(kv, "kv", 2, 2)
    return _attend(
        (q, kv), 2, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **more,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    alignment: Alignment = "bottom-right",
    **flash_attn_3: Any,
) -> Output:
    """``flash_attn_func`` on packed sequences, each on its own.

    Parameters
    ----------
    q : Tensor (total_q, heads_q, head_dim)
    k : Tensor (total_k, heads_k, head_dim)
    v : Tensor (total_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : int32 Tensor (batch + 1)
        Sequence b has the rows from ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``. Rows outside
        all sequences get out 0, lse -inf and gradients 0.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths, which save workspace. 0: none.
    block_table : None
        Must be None.
    dropout_p, softmax_scale, ...
        As in ``flash_attn_func``.

    Returns
    -------
    out : Tensor (total_q, heads_q, head_dim_v)
    lse : Tensor (heads_q, total_q)
    """
    if flash_attn_3:
        _check_flash_attn_3(flash_attn_3)
    if block_table is not None:
        raise NotImplementedError(
            "flashgrad: block_table: given, want None: paged keys and values are not supported"
        )
    return _attend(
        (q, k, v), None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, return_lse=return_lse, sinks=sinks, seqused_q=seqused_q,
        seqused_k=seqused_k, q_offset=q_offset, alignment=alignment,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Output:
    """``flash_attn_varlen_func`` of ``qkv.unbind(1)``; its gradient is written as one tensor.

    Parameters
    ----------
    qkv : Tensor (total, 3, heads, head_dim)
    cu_seqlens, max_seqlen, dropout_p, ..., **more
        As in ``flash_attn_varlen_func``.
    """
    _check_packed(qkv, "qkv", 3, 1)
    return _attend(
        (qkv,), 1, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **more,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Output:
    """``flash_attn_varlen_func`` of q and ``kv.unbind(1)``; kv's gradient is written as one tensor.

    Parameters
    ----------
    q : Tensor (total_q, heads_q, head_dim)
    kv : Tensor (total_k, 2, heads_k, head_dim)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, ..., **more
        As in ``flash_attn_varlen_func``.
    """
    _check_packed(kv, "kv", 2, 1)
    return _attend(
        (q, kv), 1, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        **more,
    )  # fmt: skip
