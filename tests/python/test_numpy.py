# SPDX-License-Identifier: Apache-2.0
"""flashgrad.forward and backward on NumPy arrays."""

import threading

import flashgrad
import ml_dtypes
import numpy as np
import pytest
import textbook
import torch


def arrays(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def expect(q, k, v, dout, dlse, sinks=None, **options):
    """Textbook results by name."""
    tensors = [torch.tensor(x.astype(np.float64), requires_grad=True) for x in (q, k, v)]
    if sinks is not None:
        tensors.append(torch.tensor(sinks.astype(np.float64), requires_grad=True))
        options["sinks"] = tensors[3]
    out, lse = textbook.attention(*tensors[:3], **options)
    loss = (out * torch.tensor(dout.astype(np.float64))).sum()
    loss = loss + (lse * torch.tensor(dlse.astype(np.float64))).sum()
    names = ("dq", "dk", "dv", "dsinks")
    gradients = dict(zip(names, (x.numpy() for x in torch.autograd.grad(loss, tensors))))
    return {"out": out.detach().numpy(), "lse": lse.detach().numpy(), **gradients}


def close(got, want, tolerance=2e-5):
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance)


OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"right": 0}),
    ({"causal": True, "alignment": "top-left"}, {"right": 0, "shift": 0}),
    ({"window": (5, 3)}, {"left": 5, "right": 3}),
    ({"window": (-1, 4)}, {"left": -1, "right": 4}),
    ({"window": (4, None), "causal": True}, {"left": 4, "right": 0}),
    ({"scale": -0.3, "softcap": 1.5}, {"scale": -0.3, "softcap": 1.5}),
    ({"scale": 0.0}, {"scale": 0.0}),
]


@pytest.mark.parametrize("options, textbook_options", OPTIONS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_matches_textbook(options, textbook_options, with_sinks):
    q, k, v, dout, dlse, sinks = arrays(
        (2, 19, 4, 8), (2, 23, 2, 8), (2, 23, 2, 12), (2, 19, 4, 12), (2, 4, 19), (4,)
    )
    if not with_sinks:
        sinks = None
    out, lse = flashgrad.forward(q, k, v, sinks=sinks, **options)
    want = expect(q, k, v, dout, dlse, sinks, **textbook_options)
    close(out, want["out"])
    close(lse, want["lse"])
    gradients = flashgrad.backward(dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, **options)
    assert len(gradients) == (4 if with_sinks else 3)
    for name, gradient in zip(("dq", "dk", "dv", "dsinks"), gradients):
        assert gradient.dtype == np.float32
        close(gradient, want[name], 5e-5)


@pytest.mark.parametrize(
    "dtype, backend, tolerance",
    [
        (ml_dtypes.bfloat16, None, 6e-2),
        (np.float16, None, 1e-2),
        (np.float32, "reference", 1e-6),
        (np.float64, None, 1e-12),
    ],
)
def test_dtypes(dtype, backend, tolerance):
    q, k, v, dout = arrays(*[(1, 17, 2, 8)] * 4, dtype=dtype)
    dlse = np.zeros((1, 2, 17))
    out, lse = flashgrad.forward(q, k, v, causal=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    want = expect(q, k, v, dout, dlse, right=0)
    close(out, want["out"], tolerance)
    gradients = flashgrad.backward(dout, q, k, v, out, lse, causal=True, backend=backend)
    for name, gradient in zip(("dq", "dk", "dv"), gradients):
        assert gradient.dtype == dtype
        close(gradient, want[name], tolerance)


def test_strides_and_read_only_inputs():
    # (batch, heads, seqlen, dim) in memory, as slices of one buffer that may not be written.
    (buffer,) = arrays((3, 2, 4, 11, 8))
    buffer.flags.writeable = False
    q, k, v = (x.transpose(0, 2, 1, 3) for x in buffer)
    out, _ = flashgrad.forward(q, k, v)
    want, _ = flashgrad.forward(q.copy(), k.copy(), v.copy())
    assert np.array_equal(out, want)
    backwards, _ = flashgrad.forward(q[:, ::-1], k[::-1], v[::-1])
    want, _ = flashgrad.forward(q[:, ::-1].copy(), k[::-1].copy(), v[::-1].copy())
    assert np.array_equal(backwards, want)


def test_preallocated_outputs():
    q, k, v = arrays(*[(2, 7, 2, 8)] * 3)
    out = np.full((2, 2, 7, 8), np.nan, np.float32).transpose(0, 2, 1, 3)
    lse = np.full((2, 2, 7), np.nan, np.float32)
    got = flashgrad.forward(q, k, v, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    want, want_lse = flashgrad.forward(q, k, v)
    assert np.array_equal(out, want) and np.array_equal(lse, want_lse)
    assert flashgrad.forward(q, k, v, lse=False)[1] is None

    dout = np.broadcast_to(np.float32(1), out.shape)  # strides 0
    buffer = np.empty((2, 7, 3, 2, 8), np.float32)
    dq, dk, dv = (buffer[:, :, i] for i in range(3))
    got = flashgrad.backward(dout, q, k, v, out, lse, dq=dq, dk=False, dv=dv)
    assert got[0] is dq and got[1] is None and got[2] is dv
    want = flashgrad.backward(dout.copy(), q, k, v, out, lse)
    assert np.array_equal(dq, want[0]) and np.array_equal(dv, want[2])


def test_gradients_in_float32():
    q, k, v, dout = arrays(*[(1, 9, 2, 8)] * 4, dtype=ml_dtypes.bfloat16)
    out, lse = flashgrad.forward(q, k, v)
    dq = np.empty(q.shape, np.float32)
    flashgrad.backward(dout, q, k, v, out, lse, dq=dq, dk=False, dv=False)
    rounded = flashgrad.backward(dout, q, k, v, out, lse)[0]
    assert np.array_equal(dq.astype(ml_dtypes.bfloat16), rounded)
    assert not np.array_equal(dq, rounded.astype(np.float32))


def test_only_dlse():
    q, k, v, dlse = arrays(*[(1, 9, 2, 8)] * 3, (1, 2, 9))
    out, lse = flashgrad.forward(q, k, v)
    gradients = flashgrad.backward(None, q, k, v, out, lse, dlse=dlse)
    want = expect(q, k, v, np.zeros_like(out), dlse)
    for name, gradient in zip(("dq", "dk", "dv"), gradients):
        close(gradient, want[name])


def test_packed_is_each_sequence_alone():
    lengths = [(5, 9), (0, 3), (7, 7)]
    q, k, v, dout = arrays((12, 4, 8), (19, 2, 8), (19, 2, 8), (12, 4, 8))
    cu_q, cu_kv = (np.cumsum([0, *n], dtype=np.int32) for n in zip(*lengths))
    packed = {
        "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "max_seqlen_q": 7, "max_seqlen_kv": 9,
        "causal": True,
    }  # fmt: skip
    out, lse = flashgrad.forward(q, k, v, **packed)
    assert lse.shape == (4, 12)
    gradients = flashgrad.backward(dout, q, k, v, out, lse, **packed)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        alone = (q[None, rows], k[None, keys], v[None, keys])
        out_b, lse_b = flashgrad.forward(*alone, causal=True)
        assert np.array_equal(out[rows], out_b[0]) and np.array_equal(lse[:, rows], lse_b[0])
        gradients_b = flashgrad.backward(dout[None, rows], *alone, out_b, lse_b, causal=True)
        for gradient, part, gradient_b in zip(gradients, (rows, keys, keys), gradients_b):
            assert np.array_equal(gradient[part], gradient_b[0])


def test_seqused_and_q_offset():
    q, k, v = arrays((2, 6, 2, 8), (2, 10, 2, 8), (2, 10, 2, 8))
    used_q, used_kv = np.array([6, 4], np.int32), np.array([10, 3], np.int32)
    out, lse = flashgrad.forward(q, k, v, seqused_q=used_q, seqused_kv=used_kv, causal=True)
    alone, _ = flashgrad.forward(q[1:, :4], k[1:, :3], v[1:, :3], causal=True)
    assert np.array_equal(out[1:, :4], alone)
    assert not out[1, 4:].any() and np.all(lse[1, :, 4:] == -np.inf)

    offset = np.array([1, 3], np.int64)
    out, _ = flashgrad.forward(q, k, v, q_offset=offset, causal=True)
    tensors = [torch.tensor(x) for x in (q, k, v)]
    want, _ = textbook.attention(*tensors, right=0, shift=offset)
    close(out, want.numpy())


def test_empty():
    q, k, v = arrays((2, 0, 2, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    out, lse = flashgrad.forward(q, k, v)
    assert out.shape == (2, 0, 2, 8) and lse.shape == (2, 2, 0)
    dq, dk, dv = flashgrad.backward(out, q, k, v, out, lse)
    assert dq.shape == q.shape and not dk.any() and not dv.any()
    out, lse = flashgrad.forward(k, q, q)
    assert not out.any() and np.all(lse == -np.inf)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"k": np.zeros((1, 4, 2, 9), np.float32)}, ValueError, "k: shape"),
        ({"k": np.zeros((1, 4, 2, 8), np.float16)}, ValueError, "k: dtype f16, want f32"),
        ({"q": np.zeros((1, 4, 2, 8), np.int8)}, NotImplementedError, "q: dtype i8"),
        ({"q": np.zeros((1, 4, 2, 8), ">f4")}, NotImplementedError, "dtype >f4"),
        ({"q": np.zeros((4, 2, 8), np.float32)}, ValueError, "q: 3 dimensions"),
        ({"q": np.zeros((1,) * 5, np.float32)}, ValueError, "q: 5 dimensions"),
        ({"q": np.zeros((1, 4, 2, 257), np.float32)}, NotImplementedError, "head_dim 257"),
        ({"q": [[1.0]]}, TypeError, "q: a builtins.list"),
        ({"k": None}, TypeError, "k: a builtins.NoneType"),
        ({"v": [[1.0]]}, TypeError, "v: a builtins.list"),
        ({"sinks": [0.0, 0.0]}, TypeError, "sinks: a builtins.list"),
        ({"out": np.broadcast_to(np.float32(0), (1, 4, 2, 8))}, ValueError, "out: is read-only"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": "1"}, ValueError, "softcap: '1', want a number"),
        ({"alignment": "middle"}, ValueError, "alignment: 'middle'"),
        ({"alignment": ["top-left"]}, ValueError, r"alignment: \['top-left'\]"),
        ({"backend": "gpu"}, ValueError, 'backend: "gpu"'),
        ({"backend": 3}, ValueError, "backend: 3, want a name"),
        ({"backend": "cpu\0"}, ValueError, "backend: 'cpu.x00', want a name"),
        ({"q": np.ma.zeros((1, 4, 2, 8), np.float32)}, TypeError, "q: a numpy.ma.MaskedArray"),
        ({"num_threads": -1}, ValueError, "num_threads"),
        ({"scale": float("nan")}, ValueError, "scale: nan, want a finite number, or None"),
        ({"scale": float("inf")}, ValueError, "scale: inf, want a finite number, or None"),
        ({"scale": np.ones(2)}, ValueError, "scale: array.*, want a number"),
        ({"scale": "1"}, RuntimeError, "scale: '1', want a number"),
        ({"max_seqlen_q": 2**70}, ValueError, "max_seqlen_q: 118.*, want a whole number of 64"),
        ({"num_threads": 1.5}, ValueError, "num_threads: 1.5, want a whole number of 32 bits"),
        ({"window": (1.5, 0)}, ValueError, "window_left: 1.5, want a whole number"),
        ({"window": (1,)}, ValueError, r"window: \(1,\), want \(left, right\)"),
        ({"window": 3}, ValueError, r"window: 3, want \(left, right\)"),
        ({"q": np.zeros((1, 4, 2, 8), np.complex64)}, NotImplementedError, "q: dtype c64"),
        ({"causal": True, "window": (None, 3)}, ValueError, "window: right side 3"),
        ({"sinks": np.zeros(2, np.float64)}, ValueError, "sinks: dtype f64"),
    ],
)
def test_refusals(change, error, words):
    q, k, v = arrays(*[(1, 4, 2, 8)] * 3)
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(error, match=words):
        flashgrad.forward(**arguments)


def test_options_that_are_arrays_are_read_each_time():
    torch = pytest.importorskip("torch")
    q, k, v = arrays(*[(1, 9, 2, 8)] * 3)
    for make in (np.array, torch.tensor):
        numbers = {"scale": make(0.5), "softcap": make(2.0), "window": (make(3), make(0))}
        flashgrad.forward(q, k, v, **numbers)
        numbers["scale"][...] = 0.25
        numbers["softcap"][...] = 3.0
        numbers["window"][0][...] = 1
        got, _ = flashgrad.forward(q, k, v, **numbers)
        want, _ = flashgrad.forward(q, k, v, scale=0.25, softcap=3.0, window=(1, 0))
        assert np.array_equal(got, want)


def test_overlapping_outputs_are_refused():
    q, k, v = arrays(*[(1, 4, 2, 8)] * 3)
    with pytest.raises(ValueError, match="out: overlaps q"):
        flashgrad.forward(q, k, v, out=q)


def test_threads_do_not_share_calls():
    q, k, v = arrays(*[(1, 33, 2, 8)] * 3)
    inputs = [(q * n, k, v) for n in (1, 2, 3)]
    want = [flashgrad.forward(*x)[0] for x in inputs]
    wrong = []

    def work(n):
        for _ in range(100):
            if not np.array_equal(flashgrad.forward(*inputs[n])[0], want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_backends_and_version():
    names = [backend.name for backend in flashgrad.backends()]
    assert names[-1] == "reference" and "cpu" in names
    assert flashgrad.__version__ == flashgrad._library.library().version().decode()
