# SPDX-License-Identifier: Apache-2.0
"""Tensors of other libraries, which flashgrad knows by DLPack alone."""

import flashgrad
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


class Foreign:
    """An array that speaks DLPack 1 (versioned capsules) or only the older protocol."""

    def __init__(self, array, versioned):
        self._array, self._versioned = array, versioned
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        if self._versioned:
            return self._array.__dlpack__(max_version=options["max_version"])
        if options:
            raise TypeError("unexpected keyword argument")
        return self._array.__dlpack__()


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(1, 5, 2, 8)).astype(np.float32) for _ in range(3)]


@pytest.mark.parametrize("versioned", [False, True])
def test_both_capsules(qkv, versioned):
    want, want_lse = flashgrad.forward(*qkv, causal=True)
    foreign = [Foreign(x, versioned) for x in qkv]
    out, lse = flashgrad.forward(*foreign, causal=True)
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, want) and np.array_equal(lse, want_lse)
    dq, dk, dv = flashgrad.backward(out, *foreign, out, lse, causal=True)
    for got, reference in zip((dq, dk, dv), flashgrad.backward(want, *qkv, want, lse, causal=True)):
        assert np.array_equal(got, reference)
    given = np.empty_like(want)
    assert isinstance(flashgrad.forward(*foreign, causal=True, out=Foreign(given, versioned))[0], Foreign)
    assert np.array_equal(given, want)


def test_read_only(qkv):
    want = flashgrad.forward(*qkv)[0]
    for x in qkv:
        x.flags.writeable = False
    foreign = [Foreign(x, True) for x in qkv]
    assert np.array_equal(flashgrad.forward(*foreign)[0], want)
    want.flags.writeable = False
    with pytest.raises(ValueError, match="out: is read-only"):
        flashgrad.forward(*foreign, out=Foreign(want, True))


def test_other_devices_are_refused(qkv):
    class OnGpu(Foreign):
        def __dlpack_device__(self):
            return 2, 0

    with pytest.raises(NotImplementedError, match="DLPack device type 2"):
        flashgrad.forward(OnGpu(qkv[0], True), *qkv[1:], out=qkv[0], lse=False)


def test_torch_tensors(qkv):
    want, want_lse = flashgrad.forward(*qkv)
    tensors = [torch.tensor(x, requires_grad=True) for x in qkv]
    out, lse = flashgrad.forward(*tensors)
    assert isinstance(out, torch.Tensor) and not out.requires_grad
    assert np.array_equal(out.numpy(), want) and np.array_equal(lse.numpy(), want_lse)
    gradients = flashgrad.backward(out, *tensors, out, lse)
    for got, reference in zip(gradients, flashgrad.backward(want, *qkv, want, want_lse)):
        assert np.array_equal(got.numpy(), reference)
    bf16 = [x.bfloat16() for x in tensors]
    assert flashgrad.forward(*bf16)[0].dtype == torch.bfloat16


def test_lazily_negated_tensors(qkv):
    """Their memory has the other sign."""
    q, k, v = map(torch.from_numpy, qkv)
    negated = torch.complex(v, v).conj().imag
    assert negated.is_neg()
    want, want_lse = flashgrad.forward(q, k, -v)
    out, lse = flashgrad.forward(q, k, negated)
    assert torch.equal(out, want)
    gradients = flashgrad.backward(torch._neg_view(out), q, k, negated, out, lse)
    for got, reference in zip(gradients, flashgrad.backward(-want, q, k, -v, want, want_lse)):
        assert torch.equal(got, reference)
    with pytest.raises(ValueError, match="out: is lazily negated, but would be written"):
        flashgrad.forward(q, k, v, out=torch._neg_view(want))


def test_recording_is_refused(qkv):
    """The recorded program would not have the call in it."""
    q, k, v = map(torch.from_numpy, qkv)
    call = lambda q: flashgrad.forward(q, k, v)[0]

    def with_fake_tensors():
        with FakeTensorMode(allow_non_fake_inputs=True):
            call(q)

    for record in (
        lambda: torch.jit.trace(call, (q,)),
        lambda: make_fx(call)(q),
        lambda: torch.func.vmap(call)(q[None]),
        lambda: torch.func.grad(lambda q: call(q).sum())(q),
        with_fake_tensors,
    ):
        with pytest.raises(NotImplementedError, match="use the functions of flashgrad.torch"):
            record()


def test_tensors_without_memory_are_refused(qkv):
    q, k, v = map(torch.from_numpy, qkv)
    for nowhere in (k.to("meta"), k.to_sparse()):
        with pytest.raises(NotImplementedError, match="k: a tensor without memory of its own"):
            flashgrad.forward(q, nowhere, v)


def test_what_autograd_saved_is_not_overwritten_in_silence(qkv):
    q, k, v = map(torch.from_numpy, qkv)
    saved = torch.ones_like(q)
    factor = torch.ones_like(q, requires_grad=True)
    (factor * saved).sum().backward()
    product = (factor * saved).sum()
    out, lse = flashgrad.forward(q, k, v, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    product = (factor * saved).sum()
    flashgrad.backward(torch.ones_like(q), q, k, v, out.clone(), lse, dq=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    saved_lse = torch.ones_like(lse)
    product = (torch.ones_like(lse, requires_grad=True) * saved_lse).sum()
    flashgrad.forward(q, k, v, lse=saved_lse)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        flashgrad.forward(q, k, v, out=torch.empty_like(q))


def test_arrays_of_jax_are_not_written(qkv):
    jnp = pytest.importorskip("jax.numpy")
    given = jnp.zeros(qkv[0].shape)
    with pytest.raises(ValueError, match="out: a jax.Array, which can't be changed"):
        flashgrad.forward(*qkv, out=given)
    assert not given.any()
    want = flashgrad.forward(*qkv)[0]
    assert np.array_equal(flashgrad.forward(*map(jnp.asarray, qkv))[0], want)
