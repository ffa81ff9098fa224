# SPDX-License-Identifier: Apache-2.0
"""Every way into flashgrad.torch on CUDA tensors: the numbers of the CPU, under PyTorch's tools."""

import flashgrad.torch as fgt
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint
from torch_inputs import FORWARD, operator_options

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BATCH, ROWS, KEYS, HEADS, DIM = 2, 150, 200, 4, 64
CU_Q, CU_K = [0, 70, 70, 300], [0, 130, 190, 400]


def qkv(heads_kv=2, dim_v=DIM, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (BATCH, ROWS, HEADS, DIM), (BATCH, KEYS, heads_kv, DIM), (BATCH, KEYS, heads_kv, dim_v),
    )  # fmt: skip
    return [
        torch.randn(s, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for s in shapes
    ]


def gradients(results, inputs):
    """Those of a weighted sum of all results, whose weights are the same on every device."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    # Not by autograd.grad, which reentrant checkpointing refuses.
    for x in inputs:
        x.grad = None
    torch.autograd.backward(results, weights)
    return [x.grad for x in inputs]


def close(got, want, tolerance=4e-2):
    """Also where numbers are large: four roundings to bf16."""
    for x, y in zip(got, want, strict=True):
        x, y = (z.detach().double().cpu() for z in (x, y))
        torch.testing.assert_close(x, y, rtol=2**-6, atol=tolerance)


def lengths(like, *values):
    return [torch.tensor(x, dtype=torch.int32, device=like.device) for x in values]


def varlen(q, k, v, **options):
    cu_q, cu_k = lengths(q, CU_Q, CU_K)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    return fgt.flash_attn_varlen_func(*packed, cu_q, cu_k, 230, 210, **options)


def sdpa(q, k, v, mask=None, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return fgt.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)


def band_and_padding(q):
    """A window of both sides, and a sequence whose first keys are padding."""
    rows, keys = (torch.arange(n, device=q.device) for n in (ROWS, KEYS))
    distance = keys - rows[:, None]
    mask = ((distance >= -20) & (distance <= 60)).repeat(BATCH, 1, 1, 1)
    mask[1, ..., :33] = False
    return mask


# Of q, k and v to one or more results.
WAYS = {
    "lse": lambda *x: fgt.flash_attn_func(*x, causal=True, return_lse=True),
    "top-left": lambda *x: fgt.flash_attn_func(*x, causal=True, alignment="top-left"),
    "deterministic": lambda *x: fgt.flash_attn_func(*x, deterministic=True),
    "varlen": lambda *x: varlen(*x, causal=True),
    "varlen lse window": lambda *x: varlen(*x, window_size=(30, 10), return_lse=True),
    "varlen sinks": lambda *x: varlen(
        *x, causal=True, sinks=torch.linspace(-1, 1, HEADS, device=x[0].device)
    ),
    "seqused": lambda *x: fgt.flash_attn_func(
        *x, causal=True, seqused_k=lengths(x[0], [KEYS, 40])[0]
    ),
    "sdpa": lambda *x: sdpa(*x, is_causal=True, scale=0.2),
    "sdpa upper left": lambda *x: sdpa(*x, causal_upper_left(ROWS, KEYS)),
    "sdpa lower right": lambda *x: sdpa(*x, causal_lower_right(ROWS, KEYS)),
    "sdpa mask": lambda *x: sdpa(*x, band_and_padding(x[0])),
    "heads first": lambda *x: fgt.flash_attn_func(
        *(y.transpose(1, 2).contiguous().transpose(1, 2) for y in x)
    ),
    "last stride 2": lambda *x: fgt.flash_attn_func(
        *(torch.stack((y, y), -1)[..., 0] for y in x), causal=True
    ),
    "vmap": lambda *x: torch.func.vmap(
        lambda *y: fgt.flash_attn_func(*(z[None] for z in y), causal=True)[0]
    )(*x),
    "checkpoint": lambda *x: checkpoint(
        lambda *y: fgt.flash_attn_func(*y, causal=True), *x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [{}, {"heads_kv": 1, "dim_v": 40}], ids=["equal", "mqa40"])
def test_same_numbers_as_the_cpu(way, shape):
    results = []
    for device in ("cuda", "cpu"):
        inputs = qkv(**shape, device=device)
        found = WAYS[way](*inputs)
        found = found if isinstance(found, tuple) else (found,)
        assert all(x.device.type == device for x in found)
        results.append((*found, *gradients(found, inputs)))
    # A row's lse is -inf where it sees no key, on both.
    close(*results)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs(frozen):
    inputs = qkv()
    want = gradients((fgt.flash_attn_func(*inputs, causal=True),), inputs)
    inputs[frozen].requires_grad_(False)
    needed = [x for x in inputs if x.requires_grad]
    got = gradients((fgt.flash_attn_func(*inputs, causal=True),), needed)
    close(got, [x for n, x in enumerate(want) if n != frozen], 1e-2)


def test_expanded_dout():
    inputs = qkv()
    got = torch.autograd.grad(fgt.flash_attn_func(*inputs).sum(), inputs)
    out = fgt.flash_attn_func(*inputs)
    close(got, torch.autograd.grad(out, inputs, torch.ones_like(out)), 1e-2)


def test_opcheck():
    q, k, v = qkv()
    options = list(operator_options())
    options[-1] = True  # deterministic: the results of two runs are compared
    torch.library.opcheck(FORWARD, (q, k, v, *options), rtol=0, atol=1e-2)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_by_inductor(mode):
    """In one graph, between operations that inductor fuses; reduce-overhead captures it."""

    def layer(q, k, v):
        return fgt.flash_attn_func(2 * q, k, v.sin(), causal=True, deterministic=True).relu()

    inputs = qkv()
    want = layer(*inputs)
    want = [want, *gradients((want,), inputs)]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(*inputs)
        close((got.clone(), *gradients((got,), inputs)), want, 2e-2)


def test_torch_func_grad():
    q, k, v = (x.detach() for x in qkv())

    def loss(*x):
        return fgt.flash_attn_func(*x, causal=True).float().square().sum()

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(loss(*inputs), inputs)
    close(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), want, 2e-2)


def test_mask_while_capturing_is_refused():
    q, k, v = qkv()
    mask = band_and_padding(q)
    side = torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        with pytest.raises(NotImplementedError, match="captur"):
            sdpa(q, k, v, mask)


def test_double_backward_says_so():
    inputs = qkv()
    out = fgt.flash_attn_func(*inputs)
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()
