# SPDX-License-Identifier: Apache-2.0
"""The Python package on CUDA tensors: PyTorch's ways to use a GPU."""

import flashgrad
import flashgrad.torch as fgt
import pytest
import textbook
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def qkv(rows=150, keys=200, heads=4, heads_kv=2, dim=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, rows, heads, dim), *[(2, keys, heads_kv, dim)] * 2)
    return [
        torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes
    ]


def close(got, want, tolerance=4e-2):
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), rtol=0, atol=tolerance)


def gradients(out, inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator).to(out)
    return torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options, textbook_options",
    [
        ({}, {}),
        ({"causal": True}, {"right": 0}),
        ({"window_size": (40, 3)}, {"left": 40, "right": 3}),
        ({"softcap": 2.0, "softmax_scale": 0.2}, {"softcap": 2.0, "scale": 0.2}),
    ],
)
def test_matches_textbook(options, textbook_options, dtype):
    inputs = qkv(dtype=dtype)
    out, lse = fgt.flash_attn_func(*inputs, return_lse=True, **options)
    on_cpu = [x.detach().cpu().double().requires_grad_() for x in inputs]
    want, want_lse = textbook.attention(*on_cpu, **textbook_options)
    close(out, want)
    close(lse, want_lse, 1e-3)
    for got, gradient in zip(gradients(out, inputs), gradients(want, on_cpu)):
        close(got, gradient, 8e-2)


def test_same_numbers_as_the_cpu():
    inputs = qkv()
    on_cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    sinks = [torch.linspace(-1, 1, 4, device=d).requires_grad_() for d in ("cuda", "cpu")]
    outs = [
        fgt.flash_attn_func(*x, causal=True, sinks=s) for x, s in zip((inputs, on_cpu), sinks)
    ]
    close(*outs)
    pairs = zip(*(gradients(o, (*x, s)) for o, x, s in zip(outs, (inputs, on_cpu), sinks)))
    for (got, want), tolerance in zip(pairs, (4e-2, 4e-2, 4e-2, 1e-1)):
        close(got, want, tolerance)


def test_varlen_and_packed():
    (packed,) = (torch.randn(300, 3, 4, 64, device="cuda").bfloat16().requires_grad_(),)
    cu = torch.tensor([0, 120, 120, 300], dtype=torch.int32, device="cuda")
    out = fgt.flash_attn_varlen_qkvpacked_func(packed, cu, 180, causal=True)
    for first, last in ((0, 120), (120, 300)):
        alone = fgt.flash_attn_qkvpacked_func(packed[None, first:last], causal=True)
        close(out[first:last], alone[0], 1e-2)
    assert torch.isfinite(gradients(out, packed)[0]).all()


def test_padding_mask_in_sdpa():
    q, k, v = (x.transpose(1, 2) for x in qkv(heads_kv=4))
    mask = torch.ones(2, 1, 150, 200, dtype=torch.bool, device="cuda")
    mask[1, ..., :60] = False
    got = fgt.scaled_dot_product_attention(q, k, v, mask)
    close(got, torch.nn.functional.scaled_dot_product_attention(q, k, v, mask))


def test_deterministic_repeats():
    inputs = qkv(rows=700, keys=700)
    out = fgt.flash_attn_func(*inputs, causal=True, deterministic=True)
    first = gradients(out, inputs)
    for _ in range(3):
        out = fgt.flash_attn_func(*inputs, causal=True, deterministic=True)
        assert all(map(torch.equal, gradients(out, inputs), first))


def test_graph_capture():
    static = qkv()
    dout = torch.randn(2, 150, 4, 64, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up, as capture asks for
        torch.autograd.grad(fgt.flash_attn_func(*static, causal=True), static, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fgt.flash_attn_func(*static, causal=True)
        captured = torch.autograd.grad(out, static, dout)
    fresh = qkv(seed=5)
    with torch.no_grad():
        for x, y in zip(static, fresh):
            x.copy_(y)
    graph.replay()
    want = fgt.flash_attn_func(*fresh, causal=True)
    assert torch.equal(out, want)
    for got, gradient in zip(captured, torch.autograd.grad(want, fresh, dout)):
        close(got, gradient, 1e-2)


def test_streams():
    inputs = qkv(rows=1024, keys=1024)
    want = fgt.flash_attn_func(*inputs)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for stream in streams:
        with torch.cuda.stream(stream):
            outs.append(fgt.flash_attn_func(*inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_compile_autocast_checkpoint():
    inputs = [x.detach().float().requires_grad_() for x in qkv()]

    def layer(q, k, v):
        return fgt.flash_attn_func(q, k, v, causal=True).float()

    with torch.autocast("cuda", torch.bfloat16):
        out = checkpoint(layer, *inputs, use_reentrant=False)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(out, compiled)
    for got, want in zip(gradients(out, inputs), gradients(compiled, inputs)):
        assert got.dtype == torch.float32
        close(got, want, 1e-2)


def test_refusals_name_the_device():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="f32"):
        fgt.flash_attn_func(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="k: is on cpu, want cuda"):
        fgt.flash_attn_func(q, k.cpu(), v)


def test_forward_and_backward_without_autograd():
    q, k, v = (x.detach() for x in qkv())
    out, lse = flashgrad.forward(q, k, v, causal=True)
    assert out.is_cuda
    dout = torch.ones_like(out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(fgt.flash_attn_func(*leaves, causal=True), leaves, dout)
    got = flashgrad.backward(dout, q, k, v, out, lse, causal=True)
    for x, y in zip(got, want):
        close(x, y, 1e-2)
