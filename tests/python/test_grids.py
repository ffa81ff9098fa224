# SPDX-License-Identifier: Apache-2.0
"""Shapes and options as flash-attn's own tests combine them, judged as they judge.

The error of an output or gradient against float64 is at most twice that of standard attention on
matrices of the input's dtype (three times with softcap), plus the rounding of one addition.
"""

import math
import random

import flashgrad.torch as fgt
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
SEQLENS = (
    (1, 239), (3, 799), (97, 97), (113, 203), (128, 217), (113, 211), (108, 256), (128, 128),
    (200, 200), (256, 512), (512, 256), (127, 512), (384, 384), (799, 3), (1023, 1024),
    (1024, 1023),
)  # fmt: skip
NUM_CASES = 200 if DEVICE == "cuda" else 32


def standard(q, k, v, visible, softcap):
    """(batch, seqlen, heads, dim) in the dtype of q, every matrix rounded to it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ (k / math.sqrt(q.shape[-1])).mT
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    p = s.masked_fill(~visible, -math.inf).softmax(-1)
    p = p.masked_fill(~visible, 0)  # also rows that see nothing, which are NaN
    return (p @ v).transpose(1, 2)


def results(attend, inputs, dout):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [x.detach() for x in (out, *torch.autograd.grad(out, inputs, dout))]


def check(got, inputs, dout, visible, softcap):
    """``got``: out and the gradients of q, k and v."""
    exact = results(
        lambda *x: standard(*x, visible, softcap), [x.double() for x in inputs], dout.double()
    )
    rounded = results(lambda *x: standard(*x, visible, softcap), inputs, dout)
    for name, x, n, o in zip(("out", "dq", "dk", "dv"), got, rounded, exact):
        r = o.to(x.dtype)
        slack = 2 * ((r + 0.3 - 0.3) - r).double().abs().max()
        if softcap and name != "out":
            slack += 3e-4
        error, allowed = (x.double() - o).abs().max(), (n.double() - o).abs().max()
        assert error <= (3 if softcap else 2) * allowed + slack, name


def band(rows, keys, causal, window):
    distance = torch.arange(keys, device=DEVICE) - torch.arange(rows, device=DEVICE)[:, None]
    distance -= keys - rows
    left, right = window
    visible = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)
    if left >= 0:
        visible &= distance >= -left
    if causal or right >= 0:
        visible &= distance <= (0 if causal else right)
    return visible


def case(seed):
    choose = random.Random(seed)
    rows, keys = choose.choice(SEQLENS)
    dim = choose.choice(HEAD_DIMS)
    dim_v = choose.choice((dim, dim, choose.choice(HEAD_DIMS)))
    heads = 6
    heads_kv = choose.choice((6, 2, 1))
    dtype = choose.choice((torch.bfloat16, torch.float16))
    causal = choose.random() < 0.5
    window = choose.choice(((-1, -1), (choose.randrange(keys), choose.randrange(keys))))
    softcap = choose.choice((0.0, 0.0, 50.0))
    form = choose.choice(("apart", "packed", "varlen", "varlen packed"))
    options = {
        "causal": causal, "window_size": window, "softcap": softcap,
        "deterministic": choose.random() < 0.5,
    }  # fmt: skip
    if "packed" in form:
        dim_v = dim
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (2, rows, heads, dim), (2, keys, heads_kv, dim), (2, keys, heads_kv, dim_v),
        (2, rows, heads, dim_v),
    )  # fmt: skip
    tensors = [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]
    lengths = None
    if "varlen" in form:
        lengths = [(choose.randint(0, rows), choose.randint(0, keys)) for _ in range(2)]
        lengths[choose.randrange(2)] = (rows, keys)
    return tensors[:3], tensors[3], form, lengths, options


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_grid(seed):
    inputs, dout, form, lengths, options = case(seed)
    judged = {"softcap": options["softcap"]}
    mask = {"causal": options["causal"], "window": options["window_size"]}
    if lengths is None:
        got = results(lambda *x: call(form, x, options), inputs, dout)
        check(got, inputs, dout, band(dout.shape[1], inputs[1].shape[1], **mask), **judged)
        return
    # The two sequences one after the other, of their own lengths.
    packed = [
        torch.cat([x[b, : lengths[b][side]] for b in range(2)])
        for x, side in zip((*inputs, dout), (0, 1, 1, 0))
    ]
    cu = [
        torch.tensor([0, first, first + second], dtype=torch.int32, device=DEVICE)
        for first, second in zip(*lengths)
    ]
    maxima = [max(x[s] for x in lengths) for s in (0, 1)]
    got = results(lambda *x: call(form, x, options, (*cu, *maxima)), packed[:3], packed[3])
    starts = [0, 0]
    for rows, keys in lengths:
        parts = [
            x[starts[s] : starts[s] + (rows, keys)[s]][None]
            for x, s in zip((*got, *packed), (0, 0, 1, 1, 0, 1, 1, 0))
        ]
        starts = [starts[0] + rows, starts[1] + keys]
        if rows and keys:
            check(parts[:4], parts[4:7], parts[7], band(rows, keys, **mask), **judged)
        else:
            assert not any(x.any() for x in parts[:4])


def call(form, inputs, options, offsets=()):
    q, k, v = inputs
    if "packed" in form:
        kv = torch.stack([k, v], k.ndim - 2)
        function = fgt.flash_attn_varlen_kvpacked_func if offsets else fgt.flash_attn_kvpacked_func
        return function(q, kv, *offsets, **options)
    function = fgt.flash_attn_varlen_func if offsets else fgt.flash_attn_func
    return function(q, k, v, *offsets, **options)
