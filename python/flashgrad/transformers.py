# SPDX-License-Identifier: Apache-2.0
"""flashgrad for Hugging Face Transformers: ``attn_implementation="flashgrad"``.

``register()`` enters an attention function and a mask function under that name. The mask function
evaluates a model's mask row by row, and hands the layers what it found: a diagonal band, a range
of keys for each sequence, or both. So padding on either side, sliding windows and caches work
without a dense mask, and a mask that is none of these is refused instead of dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from .torch._masks import REFUSED, KeyBand, band_attention, read_mask, recognise, seen_keys
from .torch._attention import attention
from .torch._layout import HEADS_FIRST_TO_ROWS

NAME = "flashgrad"

# The mask is evaluated for that many rows at a time, so that its memory is linear in the length.
_MASK_ROWS = 256


# Functions whose result is the same mask.
_COPIES = {
    "__getitem__", "bool", "clone", "contiguous", "cpu", "cuda", "detach", "expand", "to",
}  # fmt: skip


class Unserved(NamedTuple):
    """A mask that the layers refuse, unless offsets of packed sequences stand in for it."""

    reason: str


class FinishedMask(torch.Tensor):
    """What a mask function found, in the form of a mask that is ready.

    Transformers takes a four-dimensional tensor for one, and hands it to the layers as it is, also
    if it was made before the forward pass (for a static cache). This one has no elements.
    """

    band: KeyBand | Unserved = Unserved("that the model has changed")

    @staticmethod
    def of(band: KeyBand | Unserved) -> FinishedMask:
        finished = torch.empty((1, 1, 0, 0), dtype=torch.bool).as_subclass(FinishedMask)
        finished.band = band
        return finished

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies and slices mean the same: activation checkpointing hands a layer one.

        What a model changes in its layers (as those that choose keys by their content) means
        something else, and nobody can read it from this.
        """
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:  # its shape does not fit the others'
            raise NotImplementedError(
                REFUSED.format("that the model computes with in its layers")
            ) from error
        if isinstance(result, FinishedMask):
            same = func.__name__ in _COPIES and isinstance(args[0], FinishedMask)
            result.band = args[0].band if same else FinishedMask.band
        return result


def register() -> None:
    """Enters flashgrad as an attention implementation; more than one call does no harm.

    Examples
    --------
    >>> import flashgrad.transformers
    >>> flashgrad.transformers.register()
    >>> # model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashgrad")
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if not hasattr(check, "_flashgrad"):
        PreTrainedModel._check_and_adjust_attn_implementation = _accept_name(check)


def _accept_name(check: Callable[..., str]) -> Callable[..., str]:
    """Transformers takes any name with "flash" in it for a build of flash-attention, and replaces
    it where a model has a list of such builds (gpt-oss has); this name is none of them. It also
    takes any name for models that would not call what is registered under it."""

    @functools.wraps(check)
    def accept(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation != NAME:
            return check(self, attn_implementation, *args, **kwargs)
        # Transformers guesses from the source; of the models of others it can't.
        own = type(self).__module__.startswith("transformers.")
        if own and not (self._supports_attention_backend or self._can_set_attn_implementation()):
            raise NotImplementedError(
                f"flashgrad: attn_implementation: {NAME!r} for {type(self).__name__}, whose "
                "attention does not go through Transformers' attention interface"
            )
        return NAME

    accept._flashgrad = True  # type: ignore[attr-defined]
    return accept


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> KeyBand | Unserved | FinishedMask:
    """Transformers' mask interface: what the layers of a forward pass see.

    A causal mask without padding is known at once. Any other is evaluated, which takes one
    synchronisation for each kind of mask of a model, and breaks the graph of torch.compile. (Under
    torch.compile and without a cache every mask is such: Transformers looks for packed sequences.)
    A mask that is no band with a range of keys (chunked attention, blocks of image tokens, packed
    sequences) becomes an Unserved.
    """
    causal = attention_mask is None and mask_function is causal_mask_function
    if causal and torch.compiler.is_compiling() and isinstance(q_offset, int):
        return KeyBand(None, q_offset - kv_offset)
    return _finish(
        causal, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
        attention_mask, use_vmap, device,
    )  # fmt: skip


@torch.compiler.disable
def _finish(
    causal: bool,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    *evaluated: Any,
) -> FinishedMask:
    q_offset = int(q_offset)  # a static cache's is a tensor
    if causal:
        return FinishedMask.of(KeyBand(None, q_offset - kv_offset))
    return FinishedMask.of(
        _evaluate(batch_size, q_length, kv_length, q_offset, kv_offset, *evaluated)
    )


def _evaluate(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    use_vmap: bool,
    device: Any,
) -> KeyBand | Unserved:
    """What a mask that is not simply causal turns out to be."""
    if 0 in (batch_size, q_length, kv_length):
        return KeyBand(None, None)
    parts = []
    for begin in range(0, q_length, _MASK_ROWS):
        rows = sdpa_mask(
            batch_size=batch_size,
            q_length=min(_MASK_ROWS, q_length - begin),
            kv_length=kv_length,
            q_offset=q_offset + begin,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_torch_fix=False,  # what an old PyTorch needs: rows that see nothing see all
            use_vmap=use_vmap,
            device=device,
        )
        parts.append(seen_keys(rows[:, 0]))
    first, last, count = (torch.cat(part, -1) for part in zip(*parts))
    band = recognise(first, last, count, kv_length, torch.ones((), dtype=torch.bool, device=device))
    return band if band is not None else Unserved("of another form")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: KeyBand | Unserved | FinishedMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool | None = None,
    deterministic: bool | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface.

    Parameters
    ----------
    query : Tensor (batch, heads_q, seqlen_q, head_dim)
    key, value : Tensor (batch, heads_kv, seqlen_kv, head_dim or head_dim_v)
    attention_mask : KeyBand, FinishedMask, Tensor or None
        What ``mask`` returned, or a boolean tensor of the user's, read as in
        ``flashgrad.torch.scaled_dot_product_attention``. None: causal as ``is_causal`` or the
        module says, with its ``sliding_window``.
    s_aux : Tensor (heads_q), optional
        Attention sinks.
    cu_seq_lens_q, cu_seq_lens_k : int32 Tensor, optional
        Offsets of the sequences packed into a batch of 1; then the mask is not used.
    dropout, scaling, softcap, deterministic, ...
        As Transformers defines them.

    Returns
    -------
    Tensor (batch, seqlen_q, heads_q, head_dim_v), None

    Raises
    ------
    NotImplementedError
        Dropout, position biases, attention weights as output, chosen keys (``indices``), sinks that
        differ by row, other masks.
    """
    for name, refused in (
        ("dropout (set attention_dropout, in BERT attention_probs_dropout_prob, to 0)", dropout),
        ("position_bias", position_bias is not None),
        ("output_attentions", output_attentions),
        # DeepSeek's and MiniMax's sparse attention leave it to this function to see these keys only.
        ("indices", indices is not None),
        ("block_indices", block_indices is not None),
        ("sinks (a logit per row, not per head)", sinks is not None),
    ):
        if refused:
            raise NotImplementedError(f"flashgrad: {name}: not supported")
    if s_aux is not None:
        s_aux = s_aux.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    tensors = query, key, value
    options = {
        "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux,
        "deterministic": bool(deterministic),
    }  # fmt: skip
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        out, _ = attention(
            *(x.transpose(1, 2).flatten(0, 1) for x in tensors),
            cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_kv=cu_seq_lens_k,
            max_seqlen_q=max_length_q or 0,
            max_seqlen_kv=max_length_k or 0,
            **_window(causal, sliding_window),
            **options,
        )
        return out.unflatten(0, query.shape[:1] + query.shape[2:3]), None
    if isinstance(attention_mask, FinishedMask):
        attention_mask = attention_mask.band
    if isinstance(attention_mask, KeyBand):
        return band_attention(*tensors, attention_mask, HEADS_FIRST_TO_ROWS, **options), None
    if isinstance(attention_mask, Unserved):
        raise NotImplementedError(
            REFUSED.format(attention_mask.reason)
            + "; packed sequences need cu_seq_lens_q and cu_seq_lens_k, as "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them"
        )
    if attention_mask is not None:
        shape = (*query.shape[:3], key.shape[2])
        band = read_mask(attention_mask, shape, shape[0], query.device)
        return band_attention(*tensors, band, HEADS_FIRST_TO_ROWS, **options), None
    out, _ = attention(
        *tensors, layout=HEADS_FIRST_TO_ROWS, **_window(causal, sliding_window), **options
    )
    return out, None


def _window(causal: bool, sliding_window: int | None) -> dict[str, int | None]:
    """The band of a layer without a mask: row i sees the last ``sliding_window`` keys up to i."""
    if not causal:
        if sliding_window is not None:
            raise NotImplementedError(
                "flashgrad: sliding_window: not supported without a mask in a layer that is not causal"
            )
        return {}
    return {
        "window_left": None if sliding_window is None else sliding_window - 1,
        "window_right": 0,
    }
