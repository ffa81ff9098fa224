# SPDX-License-Identifier: Apache-2.0
"""``forward`` and ``backward`` on NumPy arrays, PyTorch tensors and other DLPack tensors."""

from __future__ import annotations

import operator
import sys
import typing
from typing import Any, Literal

from ._call import SLOT, Call, kind, outside_of_dynamo, pack_options
from ._library import BACKWARD, FORWARD, UNBOUNDED, ArgumentError

Alignment = Literal["bottom-right", "top-left"]
_ALIGNMENTS = typing.get_args(Alignment)

LENGTHS = ("sinks", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "q_offset")
_LENGTH_SLOTS = tuple(SLOT[name] for name in LENGTHS)


@outside_of_dynamo
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    alignment: Alignment = "bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    q_offset: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    out: Any = None,
    lse: Any = None,
    num_threads: int = 0,
    backend: str | None = None,
    stream: int | None = None,
) -> tuple[Any, Any]:
    """Computes attention.

    ``s = scale * q k^T``, ``s = softcap * tanh(s / softcap)`` if ``softcap > 0``;
    ``lse_i = log(sum_j exp(s_ij) + exp(sink))`` over the keys j that row i sees,
    ``out_i = sum_j exp(s_ij - lse_i) v_j``.
    A row that sees nothing gets out 0 and lse -inf (its sink, if there is one).

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim) or packed (total_q, heads_q, head_dim)
        float32, bfloat16 (ml_dtypes), float16, or float64 on the reference backend. All arrays may
        have any strides whose last is 1, and may be read-only.
    k : array, (batch, seqlen_kv, heads_kv, head_dim) or (total_kv, heads_kv, head_dim)
        q's dtype. heads_q is a multiple of heads_kv; query head h reads key head
        ``h // (heads_q // heads_kv)``.
    v : array, (batch, seqlen_kv, heads_kv, head_dim_v) or (total_kv, heads_kv, head_dim_v)
        q's dtype. head_dim and head_dim_v go from 1 to 256, independently.
    causal : bool
        Closes the right side of the window at 0.
    window : (left, right)
        Row i sees key j iff ``i + shift - left <= j <= i + shift + right``. None is unbounded;
        negative numbers move the side across the diagonal (here -1 does not mean unbounded).
    alignment : "bottom-right" or "top-left"
        ``shift`` is seqlen_kv - seqlen_q, or 0.
    scale : float, optional
        1 / sqrt(head_dim) if None. 0 and negative values are legal.
    softcap : float
        0: none.
    sinks : array (heads_q), optional
        A logit per head that joins the softmax without a value; float32 (float64 with float64 q).
    cu_seqlens_q, cu_seqlens_kv : int32 array (batch + 1), optional
        Offsets of the sequences in packed tensors; both or neither.
    seqused_q, seqused_kv : int32 array (batch), optional
        How many rows and keys of each sequence count.
    q_offset : int64 array (batch), optional
        Where the first query of each sequence stands among its keys; replaces the shift.
    max_seqlen_q, max_seqlen_kv : int
        Upper bounds of the packed lengths, which save workspace. 0: the totals.
    out : array, optional
        Receives out: q's shape with v's last size, q's dtype.
    lse : array or False, optional
        Receives lse: (batch, heads_q, seqlen_q) or (heads_q, total_q), float32 (float64 with
        float64). False leaves it out.
    num_threads : int
        0: OpenMP's own number. The result is the same bits for any number.
    backend : str, optional
        The name of one of ``backends()``; None: FLASHGRAD_BACKEND, else the first that supports the call.
    stream : int, optional
        The cudaStream_t of CUDA tensors; None: PyTorch's current one on their device.

    Returns
    -------
    out, lse
        ``out`` and ``lse`` where given, else new tensors: PyTorch's for PyTorch tensors, NumPy
        arrays for all others. lse is None if False was given. Autograd records nothing:
        ``flashgrad.torch`` has the functions with gradients.

    Raises
    ------
    ValueError
        A tensor or an option contradicts the rules; nothing was written. The message names it.
    NotImplementedError
        No backend serves the call; the message has each backend's reason. Or PyTorch records or
        transforms the call (``torch.jit.trace``, ``make_fx``, ``torch.func``); ``torch.compile``
        breaks its graph instead.
    RuntimeError
        The device reported an error.
    TypeError
        An argument is no tensor.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.random.default_rng(0).normal(size=(1, 16, 2, 8)).astype(np.float32)
    >>> out, lse = forward(q, k, v, causal=True)
    >>> out.shape, lse.shape
    ((1, 16, 2, 8), (1, 2, 16))
    """
    how = _kind_of(q, k, v)
    if out is None:
        out = _empty(how, tuple(q.shape[:-1]) + tuple(v.shape[-1:]), q.dtype, q, stream)
    if lse is None:
        lse = _empty_lse(how, q, stream)
    call = Call()
    call.add(0, q)
    call.add(1, k)
    call.add(2, v)
    call.add(3, out, True)
    if lse is False:
        lse = None
    else:
        call.add(4, lse, True)
    _add_lengths(call, (sinks, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset))
    _run(
        call, FORWARD, how, q, causal, window, alignment, scale, softcap, False, num_threads,
        max_seqlen_q, max_seqlen_kv, backend, stream,
    )  # fmt: skip
    _mark_written(out, lse)
    return out, lse


@outside_of_dynamo
def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    alignment: Alignment = "bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    q_offset: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    num_threads: int = 0,
    backend: str | None = None,
    stream: int | None = None,
) -> tuple[Any, ...]:
    """Computes the gradients of ``sum(dout * out) + sum(dlse * lse)``.

    ``ds_ij = p_ij (<dout_i, v_j> - <dout_i, out_i> + dlse_i)``, times ``1 - (s_ij / softcap)^2``
    with softcap; ``dv_j = sum_i p_ij dout_i``, ``dk_j = scale sum_i ds_ij q_i``,
    ``dq_i = scale sum_j ds_ij k_j``, ``dsink = sum_i exp(sink - lse_i) (dlse_i - <dout_i, out_i>)``.

    Parameters
    ----------
    dout : array as out, or None
        The gradient of out, with any strides, 0 included. None: 0, and dlse is required.
    q, k, v, sinks, ...
        Those of the forward call.
    out, lse : array
        What ``forward`` returned.
    dlse : array as lse, optional
        The gradient of lse; None: 0.
    deterministic : bool
        The same bits run after run also on a GPU; the CPU always is.
    dq, dk, dv : array or False, optional
        Receive the gradients, in q's dtype or float32; they are written, not added to. None: a new
        tensor in q's dtype. False: the gradient is not computed.
    dsinks : array (heads_q) or False, optional
        Likewise, float32 (float64 with float64); needs sinks.

    Returns
    -------
    dq, dk, dv
        And dsinks, if sinks were given. None for those that were not computed.

    Raises
    ------
    ValueError, NotImplementedError, RuntimeError, TypeError
        As ``forward``.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.random.default_rng(0).normal(size=(1, 16, 2, 8)).astype(np.float32)
    >>> out, lse = forward(q, k, v, causal=True)
    >>> dq, dk, dv = backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    """
    how = _kind_of(q, k, v)
    if dq is None:
        dq = _empty(how, tuple(q.shape), q.dtype, q, stream)
    if dk is None:
        dk = _empty(how, tuple(k.shape), k.dtype, q, stream)
    if dv is None:
        dv = _empty(how, tuple(v.shape), v.dtype, q, stream)
    if dsinks is None and sinks is not None:
        kind(type(sinks), "sinks")
        dsinks = _empty(how, tuple(sinks.shape), sinks.dtype, q, stream)
    call = Call()
    for slot, tensor in enumerate((q, k, v, out, lse)):
        call.add(slot, tensor)
    for slot, tensor in ((5, dout), (6, dlse)):
        if tensor is not None:
            call.add(slot, tensor)
    gradients = [None if tensor is False else tensor for tensor in (dq, dk, dv, dsinks)]
    for slot, tensor in enumerate(gradients, 7):
        if tensor is not None:
            call.add(slot, tensor, True)
    _add_lengths(call, (sinks, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset))
    _run(
        call, BACKWARD, how, q, causal, window, alignment, scale, softcap, deterministic,
        num_threads, max_seqlen_q, max_seqlen_kv, backend, stream,
    )  # fmt: skip
    _mark_written(*gradients)
    return tuple(gradients) if sinks is not None else tuple(gradients[:3])


def band(causal: bool, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """The two sides of the band as the C library takes them."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"flashgrad: window: {window!r}, want (left, right)") from None
    if causal:
        if right is not None and right != 0:
            raise ValueError(f"flashgrad: window: right side {right} with causal, want None or 0")
        right = 0
    return _side(left), _side(right)


def is_top_left(alignment: Any) -> bool:
    """What an ``alignment`` says, if it is one."""
    if not isinstance(alignment, str) or alignment not in _ALIGNMENTS:
        raise ArgumentError(f"flashgrad: alignment: {alignment!r}, want one of {list(_ALIGNMENTS)}")
    return alignment == "top-left"


def _side(side: Any) -> Any:
    if side is None:
        return UNBOUNDED
    try:
        return min(operator.index(side), UNBOUNDED)
    except TypeError:
        return side  # pack_options says what it is


def _add_lengths(call: Call, tensors: tuple[Any, ...]) -> None:
    for slot, tensor in zip(_LENGTH_SLOTS, tensors):
        if tensor is not None:
            call.add(slot, tensor)


def _run(
    call: Call,
    which: int,
    how: str,
    q: Any,
    causal: bool,
    window: tuple[int | None, int | None],
    alignment: Alignment,
    scale: float | None,
    softcap: float,
    deterministic: bool,
    num_threads: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    backend: str | None,
    stream: int | None,
) -> None:
    left, right = band(causal, window)
    options = pack_options(
        left, right, is_top_left(alignment), scale, softcap,
        deterministic, num_threads, max_seqlen_q, max_seqlen_kv, backend,
    )  # fmt: skip
    num_bytes = call.prepare(which, options)
    if how == "torch":
        torch = sys.modules["torch"]
        workspace = _empty(how, (num_bytes,), torch.uint8, q, stream)
        address = workspace.data_ptr()
        if stream is None and q.is_cuda:
            stream = torch.cuda.current_stream(q.device).cuda_stream
    else:
        import numpy

        workspace = numpy.empty(num_bytes, numpy.uint8)
        address = workspace.ctypes.data
    call.launch(which, address, num_bytes, stream or 0)


def _kind_of(q: Any, k: Any, v: Any) -> str:
    """How q is taken, if all three are tensors, whose shapes can be read."""
    kinds = kind(type(q), "q"), kind(type(k), "k"), kind(type(v), "v")
    if "torch" in kinds:
        _refuse_recording(sys.modules["torch"])
    return kinds[0]


def _refuse_recording(torch: Any) -> None:
    """What runs below PyTorch would be missing in a program that PyTorch records or transforms."""
    modes = torch._C._TorchDispatchModeKey
    if (
        torch.jit.is_tracing()
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
        or torch._C._are_functorch_transforms_active()
    ):
        raise NotImplementedError(
            "flashgrad: forward and backward can't be recorded by torch.jit.trace, make_fx or "
            "FakeTensorMode, nor transformed by torch.func: use the functions of flashgrad.torch"
        )


def _mark_written(*tensors: Any) -> None:
    """Autograd must know that tensors which it may have saved are others now."""
    torch = sys.modules.get("torch")
    for x in tensors:
        if torch is not None and isinstance(x, torch.Tensor) and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _empty(how: str, shape: tuple[int, ...], dtype: Any, like: Any, stream: int | None) -> Any:
    """A new tensor for a result: PyTorch's for PyTorch, NumPy's for all others.

    PyTorch hands memory on as soon as the stream that it was made for has come there, so it must
    be made for the one that the call runs on.
    """
    if how == "torch":
        torch = sys.modules["torch"]
        if stream is None or not like.is_cuda:
            return torch.empty(shape, dtype=dtype, device=like.device)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device)):
            return torch.empty(shape, dtype=dtype, device=like.device)
    import numpy

    return numpy.empty(shape, dtype)


def _empty_lse(how: str, q: Any, stream: int | None) -> Any:
    shape = tuple(q.shape)
    # q of any other rank is refused by the library, whatever lse is.
    lse_shape = (*shape[:-3], shape[-2], shape[-3]) if len(shape) >= 3 else ()
    if how == "torch":
        torch = sys.modules["torch"]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    else:
        import numpy

        dtype = numpy.float64 if q.dtype == numpy.float64 else numpy.float32
    return _empty(how, lse_shape, dtype, q, stream)
