# SPDX-License-Identifier: Apache-2.0
"""flashgrad.torch.scaled_dot_product_attention against PyTorch's own."""

import math

import flashgrad.torch as fgt
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

BATCH, HEADS, ROWS, KEYS, DIM = 3, 4, 9, 12, 8
SINCE_2_5 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
# An older PyTorch takes every call through its dispatcher.
PLANNED = hasattr(torch._C.DispatchKeySet, "raw_repr")


def tensors(rows=ROWS, keys=KEYS, heads_kv=HEADS, lead=(BATCH,), dim_v=DIM):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (*lead, HEADS, rows, DIM),
        (*lead, heads_kv, keys, DIM),
        (*lead, heads_kv, keys, dim_v),
    )
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def reference(q, k, v, mask=None, enable_gqa=False, **options):
    """PyTorch's function, with what it lacks before 2.5: GQA, and 0 in rows that see nothing."""
    if SINCE_2_5:
        return sdpa(q, k, v, mask, enable_gqa=enable_gqa, **options)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if type(mask) is not torch.Tensor:
        return sdpa(q, k, v, mask, **options)
    blind = ~mask.any(-1, keepdim=True)
    return sdpa(q, k, v, mask | blind, **options).masked_fill(blind, 0)


def compare(inputs, *args, **kwargs):
    """Both functions, forward and backward."""
    got = fgt.scaled_dot_product_attention(*inputs, *args, **kwargs)
    want = reference(*inputs, *args, **kwargs)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    dout = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad(got, inputs, dout), torch.autograd.grad(want, inputs, dout)
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2, "is_causal": True}])
@pytest.mark.parametrize("rows, keys", [(9, 12), (12, 9)])
def test_matches_pytorch(options, rows, keys):
    compare(tensors(rows, keys), **options)


def test_dimensions():
    compare(tensors(heads_kv=2), enable_gqa=True, is_causal=True)
    compare(tensors(dim_v=5))
    compare(tensors(lead=()))  # (heads, L, E)
    compare(tensors(lead=(2, 3)))
    q, k, v = (x[0, 0].detach().requires_grad_() for x in tensors())
    compare((q, k, v))  # (L, E)
    q, k, v = tensors()
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    compare((q, k, v))  # one key sequence for the whole batch
    k, v = (x[:, :1].detach().requires_grad_() for x in (k, v))
    compare((q, k, v))  # one key head
    for single in ((0,), (2,), (1,), (0, 1)):
        inputs = [
            (x[:, :1] if i in single else x).detach().requires_grad_()
            for i, x in enumerate(tensors())
        ]
        compare(inputs)


@pytest.mark.parametrize("lead", [(3, 4), (4,), ()])
@pytest.mark.parametrize("rows, keys", [(0, 7), (9, 0)])
def test_empty(lead, rows, keys):
    shapes = ((*lead, rows, 8), (*lead, keys, 8), (*lead, keys, 8))
    compare([torch.ones(shape, requires_grad=True) for shape in shapes])


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases(bias):
    inputs = tensors()
    compare(inputs, bias(ROWS, KEYS))
    with pytest.raises(ValueError, match="a causal bias for"):
        fgt.scaled_dot_product_attention(*inputs, bias(ROWS, KEYS + 1))


def padding(start, stop):
    j = torch.arange(KEYS)
    start, stop = torch.tensor(start), torch.tensor(stop)
    return ((j >= start[:, None]) & (j < stop[:, None]))[:, None, None]


BAND = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(2).triu(-3)
CAUSAL = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)
MASKS = {
    "full": torch.ones(ROWS, KEYS, dtype=torch.bool),
    "band": BAND,
    "band off the diagonal": torch.ones(ROWS, KEYS, dtype=torch.bool).triu(2),
    "empty": torch.zeros(ROWS, KEYS, dtype=torch.bool),
    "right padding": padding([0, 0, 0], [12, 5, 1]),
    "left padding": padding([0, 4, 11], [12, 12, 12]),
    "both sides, one sequence empty": padding([2, 0, 5], [9, 12, 5]),
    "causal and left padding": CAUSAL & padding([0, 3, 7], [12, 12, 12]),
    "band and padding, for each head": (BAND & padding([1, 0, 2], [12, 6, 9])).repeat(
        1, HEADS, 1, 1
    ),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_boolean_masks(mask):
    compare(tensors(), mask)


def as_bias(mask, hidden=-math.inf, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks_as_biases(mask):
    """torch.nn.MultiheadAttention makes them of boolean masks."""
    inputs = tensors()
    want = fgt.scaled_dot_product_attention(*inputs, mask)
    lowest = torch.finfo(torch.float32).min
    got = fgt.scaled_dot_product_attention(*inputs, as_bias(mask))
    assert torch.equal(got, want)
    if mask.any(-1).all():
        got = fgt.scaled_dot_product_attention(*inputs, as_bias(mask, lowest))
        assert torch.equal(got, want)
        reference_out = sdpa(*inputs, as_bias(mask, lowest))
        torch.testing.assert_close(got, reference_out, rtol=0, atol=1e-5)
    else:  # there PyTorch returns the mean of the values
        with pytest.raises(NotImplementedError, match="a bias of dtype torch.float32 of another"):
            fgt.scaled_dot_product_attention(*inputs, as_bias(mask, lowest))


@pytest.mark.parametrize("options", [{}, {"attn_mask": "causal"}, {"key_padding_mask": True}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_in_multihead_attention(options, batch_first, monkeypatch):
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first)
    x = torch.randn(3, 7, 16, requires_grad=True)
    if "attn_mask" in options:
        length = 7 if batch_first else 3
        options = {"attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(length)}
    if "key_padding_mask" in options:
        shape = (3, 7) if batch_first else (7, 3)
        options = {
            "key_padding_mask": torch.arange(shape[1]) >= torch.arange(1, shape[0] + 1)[:, None]
        }
        options["key_padding_mask"][:, 0] = False

    def run():
        out, _ = layer(x, x, x, need_weights=False, **options)
        return out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))

    want = run()
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", fgt.scaled_dot_product_attention
    )
    for a, b in zip(run(), want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
def test_left_padding_of_gqa(layout):
    inputs = tensors(heads_kv=2)
    if layout == "rows first":
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        inputs = [x.requires_grad_() for x in inputs]
    compare(inputs, MASKS["causal and left padding"], enable_gqa=True)


def other_masks():
    hole = MASKS["full"].clone()
    hole[4, 5] = False
    heads = BAND.repeat(BATCH, HEADS, 1, 1)
    heads[1, 2] = True
    rows = padding([0, 0, 0], [12, 12, 12]).repeat(1, 1, ROWS, 1)
    rows[1, :, 3] = False
    return {"a hole": hole, "heads differ": heads, "a row sees nothing": rows}


@pytest.mark.parametrize("mask", other_masks().values(), ids=other_masks().keys())
def test_other_boolean_masks_are_refused(mask):
    with pytest.raises(NotImplementedError, match="attention mask: a boolean mask of another form"):
        fgt.scaled_dot_product_attention(*tensors(), mask)


def test_refusals():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="a bias of dtype torch.float32 of another form"):
        fgt.scaled_dot_product_attention(q, k, v, torch.ones(ROWS, KEYS))
    with pytest.raises(NotImplementedError, match="torch.float32 that requires grad"):
        fgt.scaled_dot_product_attention(q, k, v, torch.zeros(ROWS, KEYS, requires_grad=True))
    with pytest.raises(NotImplementedError, match="a bias of dtype torch.int64"):
        fgt.scaled_dot_product_attention(q, k, v, torch.zeros(ROWS, KEYS, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="a tensor that torch.func transforms"):
        torch.func.vmap(lambda mask: fgt.scaled_dot_product_attention(q, k, v, mask))(BAND[None])
    with pytest.raises(NotImplementedError, match="dropout_p"):
        fgt.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(ValueError, match="attn_mask: given with is_causal"):
        fgt.scaled_dot_product_attention(q, k, v, MASKS["band"], is_causal=True)
    with pytest.raises(ValueError, match="attention mask: shape"):
        fgt.scaled_dot_product_attention(q, k, v, MASKS["band"][:, :-1])
    with pytest.raises(ValueError, match="key: 2 heads"):
        fgt.scaled_dot_product_attention(q, *tensors(heads_kv=2)[1:])
    with pytest.raises(ValueError, match="query: 1 dimensions"):
        fgt.scaled_dot_product_attention(q[0, 0, 0], k, v)
    with pytest.raises(ValueError, match=r"shapes \(3, 4, 9, 8\).* do not broadcast"):
        fgt.scaled_dot_product_attention(q, k[:2], v)
    with pytest.raises(RuntimeError, match="key: 2 heads"):  # PyTorch's error
        fgt.scaled_dot_product_attention(q, *tensors(heads_kv=2)[1:])
    with pytest.raises(ValueError, match="attention mask: on meta, want cpu"):
        fgt.scaled_dot_product_attention(q, k, v, BAND.to("meta"))
    with pytest.raises(TypeError, match="value: a NoneType, want a Tensor"):
        fgt.scaled_dot_product_attention(q, k, None)
    with pytest.raises(TypeError, match="attn_mask: a list, want a Tensor"):
        fgt.scaled_dot_product_attention(q, k, v, [True])
    nested = torch.nested.nested_tensor([q[0].detach(), q[1].detach()])
    with pytest.raises(NotImplementedError, match="query: a nested tensor"):
        fgt.scaled_dot_product_attention(nested, nested, nested)


def test_masks_under_grad():
    """What torch.func.grad has wrapped can be read; a bias whose gradient it wants is refused."""
    q, k, v = (x.detach() for x in tensors())

    def loss(q, mask):
        return fgt.scaled_dot_product_attention(q, k, v, mask.clone()).square().sum()

    bias = torch.zeros(ROWS, KEYS).masked_fill(~BAND, -math.inf)
    want = torch.func.grad(lambda q: reference(q, k, v, BAND).square().sum())(q)
    for mask in (BAND, bias):
        got = torch.func.grad(loss)(q, mask)
        torch.testing.assert_close(got, want, rtol=0, atol=3e-5)
    words = "torch.float32 that requires grad"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.grad(loss, 1)(q, bias)
    with pytest.raises(NotImplementedError, match=words):
        torch.func.grad(lambda bias: torch.func.grad(loss)(q, bias).sum())(bias)


def test_masks_on_meta():
    q, k, v = (x.detach().to("meta") for x in tensors())
    assert fgt.scaled_dot_product_attention(q, k, v, BAND.to("meta")).shape == q.shape


def test_masks_under_compile_are_refused():
    compiled = torch.compile(fgt.scaled_dot_product_attention, fullgraph=True, backend="eager")
    # The compiler of PyTorch 2.4 keeps the words of an exception to itself.
    words = "a tensor under torch.compile" if SINCE_2_5 else "Observed exception.*read_mask"
    with pytest.raises(Exception, match=f"(?s){words}"):
        compiled(*tensors(), MASKS["band"])


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias_under_compile(bias):
    inputs = tensors()
    mask = bias(ROWS, KEYS)
    compiled = torch.compile(
        lambda q, k, v: fgt.scaled_dot_product_attention(q, k, v, mask),
        fullgraph=True,
        backend="aot_eager",
    )
    want = fgt.scaled_dot_product_attention(*inputs, mask)
    assert torch.equal(compiled(*inputs), want)


def rows_first(x):
    """The same tensor with the memory of (batch, seqlen, heads, dim)."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


MEMORY = {
    "heads first": lambda x: x.detach().clone(),
    "rows first": rows_first,
    "a slice": lambda x: torch.stack((x.detach(), x.detach()), 1)[:, 1],
    "expanded": lambda x: x.detach()[:1].expand(x.shape),
}


def transposed_flash_attn(*inputs):
    return fgt.flash_attn_func(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)


def out_and_gradients(function, inputs, dout, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY.keys())
@pytest.mark.parametrize("dim_v", [1, DIM])
def test_is_flash_attn_func_heads_first(memory, dim_v):
    """The same bits, in memory as a model lays them out: gradients as their inputs, out by rows."""
    inputs = [memory(x) for x in tensors(heads_kv=2, dim_v=dim_v)]
    generator = torch.Generator().manual_seed(1)
    for memory_of_dout in (*MEMORY.values(), lambda x: x.new_ones(()).expand(x.shape)):
        dout = memory_of_dout(torch.randn(BATCH, HEADS, ROWS, dim_v, generator=generator))
        got = out_and_gradients(
            fgt.scaled_dot_product_attention, inputs, dout, enable_gqa=True
        )
        want = out_and_gradients(transposed_flash_attn, inputs, dout)
        assert all(map(torch.equal, got, want))
        assert got[0].transpose(1, 2).is_contiguous()
        for x, gradient in zip(inputs, got[1:] if PLANNED else ()):
            if x.is_contiguous():
                assert gradient.is_contiguous()
            elif x.transpose(1, 2).is_contiguous():
                assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_heads_first(frozen):
    inputs = tensors()
    dout = torch.randn(BATCH, HEADS, ROWS, DIM, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(fgt.scaled_dot_product_attention(*inputs), inputs, dout)
    inputs[frozen].requires_grad_(False)
    fgt.scaled_dot_product_attention(*inputs).backward(dout)
    for n, (x, gradient) in enumerate(zip(inputs, want)):
        assert x.grad is None if n == frozen else torch.equal(x.grad, gradient)


def test_general_backward_heads_first():
    """Where the plan is left: other strides of saved tensors, and a graph of the gradients."""
    inputs = tensors()
    dout = torch.randn(BATCH, HEADS, ROWS, DIM, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(fgt.scaled_dot_product_attention(*inputs), inputs, dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT):
        out = fgt.scaled_dot_product_attention(*inputs)
    assert all(map(torch.equal, torch.autograd.grad(out, inputs, dout), want))
    out = fgt.scaled_dot_product_attention(*inputs)
    got = torch.autograd.grad(out, inputs, dout, create_graph=True)
    assert all(map(torch.equal, got, want))
    with pytest.raises(NotImplementedError, match="double backward"):
        got[0].sum().backward()
