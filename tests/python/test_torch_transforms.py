# SPDX-License-Identifier: Apache-2.0
"""flashgrad.torch under what PyTorch does to functions: compile, checkpoint, autocast, torch.func."""

import flashgrad
import flashgrad.torch as fgt
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_inputs import BACKWARD, FORWARD, close, operator_options, qkv, tensors

SINCE_2_5 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(packed, dtype):
    q, k, v = qkv(seqlen_q=17, dtype=dtype)
    (sinks,) = tensors((4,))
    cu = None
    if packed:
        q, k, v = (x[0].detach().requires_grad_() for x in (q, k, v))
        cu = torch.tensor([0, 5, 17], dtype=torch.int32)
    arguments = operator_options(sinks, cu, 12 if packed else 0, left=6)
    torch.library.opcheck(FORWARD, (q, k, v, *arguments))
    with torch.no_grad():
        out, lse = FORWARD(q, k, v, *arguments)
        for needs in ((True, True, True, True), (False, True, False, False)):
            torch.library.opcheck(
                BACKWARD,
                (torch.ones_like(out), None, *(x.detach() for x in (q, k, v)), out, lse)
                + (sinks.detach(), *arguments[1:], *needs),
            )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_has_no_graph_break(dynamic):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def compiled(q, k, v):
        out, lse = fgt.flash_attn_func(
            q * 2, k, v, causal=True, window_size=(7, 0), return_lse=True
        )
        return out.sin(), lse

    for seqlen in (13, 11) if dynamic else (13,):
        inputs = qkv(seqlen_q=seqlen)
        got = compiled(*inputs)
        gradients = torch.autograd.grad(got[0].sum() + got[1].sum(), inputs)
        q, k, v = inputs
        out, lse = fgt.flash_attn_func(
            q * 2, k, v, causal=True, window_size=(7, 0), return_lse=True
        )
        want = (out.sin(), lse)
        assert all(map(torch.equal, got, want))
        reference = torch.autograd.grad(want[0].sum() + want[1].sum(), inputs)
        for a, b in zip(gradients, reference):
            close(a, b, 1e-6)


def test_compile_varlen_and_sdpa():
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v, cu):
        packed = fgt.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 8, 8, causal=True)
        return packed, fgt.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )

    inputs = qkv(seqlen_k=13)
    packed, out = compiled(*inputs, cu)
    q, k, v = inputs
    assert torch.equal(
        packed, fgt.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 8, 8, causal=True)
    )
    assert torch.equal(out.transpose(1, 2), fgt.flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    inputs = qkv()
    out = checkpoint(fgt.flash_attn_func, *inputs, use_reentrant=use_reentrant)
    out.sum().backward()
    want = torch.autograd.grad(fgt.flash_attn_func(*inputs).sum(), inputs)
    for x, gradient in zip(inputs, want):
        assert torch.equal(x.grad, gradient)


def test_autocast():
    inputs = qkv()
    (sinks,) = tensors((4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fgt.flash_attn_func(*inputs, sinks=sinks)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, fgt.flash_attn_func(*(x.bfloat16() for x in inputs), sinks=sinks))
    gradients = torch.autograd.grad(out.float().sum(), (*inputs, sinks))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    doubles = [x.double() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fgt.flash_attn_func(*doubles).dtype == torch.float64


def test_fake_tensors_and_meta():
    q, k, v = (x.to("meta") for x in qkv(dtype=torch.bfloat16))
    out, lse = fgt.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == (2, 13, 4, 8) and out.dtype == torch.bfloat16 and out.device.type == "meta"
    assert lse.shape == (2, 4, 13) and lse.dtype == torch.float32


def pytorch(q, k, v):
    """PyTorch's attention on (batch, seqlen, heads, dim) tensors of MHA."""
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def top_left(q, k, v):
    return fgt.flash_attn_func(q, k, v, causal=True, alignment="top-left")


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2)),
    "grad of a product": lambda f: torch.func.grad(lambda q, k, v: f(q * 2, k, v)[0, 0, 0, 0]),
    "vjp": lambda f: lambda q, k, v: torch.func.vjp(lambda k: f(q, k, v), k)[1](q.sin()),
    "jacrev": lambda f: lambda q, k, v: torch.func.jacrev(lambda v: f(q, k, v)[:, ::2])(v),
    "compiled grad": lambda f: torch.compile(
        lambda q, k, v: torch.func.grad(lambda q: f(q, k, v).square().sum())(q),
        backend="aot_eager",
        fullgraph=True,
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_torch_func(transform):
    q, k, v = (x.detach()[:, :5, :, :4] for x in qkv(heads_k=4))
    inputs = (q, k, v)
    got, want = (transform(f)(*inputs) for f in (top_left, pytorch))
    for a, b in zip(got, want) if isinstance(got, tuple) else ((got, want),):
        close(a, b)


NESTED = {
    "grad of vjp's value": lambda f, k, v: torch.func.grad(
        lambda q: torch.func.vjp(lambda k: f(q, k, v), k)[0].square().sum()
    ),
    "backward through vjp's value": lambda f, k, v: lambda q: torch.autograd.grad(
        torch.func.vjp(lambda k: f(q, k, v), k)[0].square().sum(), q
    )[0],
    "grad of vmap of grad's value": lambda f, k, v: torch.func.grad(
        lambda q: torch.func.vmap(
            lambda q: torch.func.grad_and_value(lambda k: f(q, k, v).square().sum())(k)[1]
        )(q[None]).sum()
    ),
}  # fmt: skip


@pytest.mark.parametrize("transform", NESTED.values(), ids=NESTED.keys())
def test_nested_torch_func(transform):
    """The inner transform is of k only; the outer one must see q."""
    q, k, v = (x[:, :5, :, :4] for x in qkv(heads_k=4))
    got, want = (transform(f, k.detach(), v.detach())(q) for f in (top_left, pytorch))
    assert want.abs().max() > 0.1
    close(got, want)


def test_what_nested_torch_func_can_not_do_is_refused():
    q, k, v = (x.detach() for x in qkv())
    gradient = torch.func.grad(lambda q, k: fgt.flash_attn_func(q, k, v).square().sum())
    words = "double backward is not supported"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.grad(lambda q: gradient(q, k).sum())(q)
    with pytest.raises(NotImplementedError, match=words):
        torch.func.vmap(torch.func.grad(lambda k: gradient(q, k).sum()))(k[None])
    words = "forward-mode differentiation .* is not supported"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(
            lambda q: torch.func.vjp(lambda k: fgt.flash_attn_func(q, k, v), k)[0], (q,), (q,)
        )


def each(function, dims, *inputs):
    """What vmap means: function at each index of the mapped axes, stacked."""
    count = next(x.shape[d] for x, d in zip(inputs, dims) if d is not None)
    results = [
        function(*(x if d is None else x.select(d, i) for x, d in zip(inputs, dims)))
        for i in range(count)
    ]
    return [torch.stack(x) for x in zip(*results)]


@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (1, None, None, 0), (None, 2, 0, None)])
@pytest.mark.parametrize("sinks", ["none", "shared", "mapped"])
def test_vmap(dims, sinks):
    shapes = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 5, 4, 8)]
    shapes = [s if d is None else (*s[:d], 3, *s[d:]) for s, d in zip(shapes, dims)]
    inputs = tensors(*shapes, requires_grad=False)
    if sinks != "none":
        dims = (*dims, 0 if sinks == "mapped" else None)
        inputs += tensors((3, 4) if sinks == "mapped" else (4,), seed=1, requires_grad=False)

    def run(q, k, v, dout, sinks=None):
        def attend(q, k, v, *sinks):
            return fgt.flash_attn_func(q, k, v, causal=True, sinks=sinks[0] if sinks else None)

        out, pullback = torch.func.vjp(attend, q, k, v, *([] if sinks is None else [sinks]))
        return out, *pullback(dout)

    for a, b in zip(torch.func.vmap(run, dims)(*inputs), each(run, dims, *inputs)):
        close(a, b, 1e-6)
    nested = torch.func.vmap(torch.func.vmap(run, dims), (0,) * len(dims))
    got = nested(*(torch.stack([x, 2 * x]) for x in inputs))
    for half, scale in enumerate((1, 2)):
        for a, b in zip(got, each(run, dims, *(scale * x for x in inputs))):
            close(a[half], b, 1e-6)


@pytest.mark.skipif(not SINCE_2_5, reason="PyTorch 2.4 has no place for the rule")
@pytest.mark.parametrize("sinks, calls", [(None, 1), ("shared", 1), ("mapped", 3)])
def test_vmap_is_one_call_where_it_can_be(sinks, calls, monkeypatch, recwarn):
    count = []
    launch = flashgrad._call.Call.launch
    monkeypatch.setattr(flashgrad._call.Call, "launch", lambda *args: count.append(launch(*args)))
    q, k, v = tensors((3, 2, 5, 4, 8), *[(3, 2, 7, 2, 8)] * 2, requires_grad=False)
    if sinks is None:
        torch.func.vmap(fgt.flash_attn_func)(q, k, v)
    else:
        (sinks,) = tensors((3, 4) if sinks == "mapped" else (4,), requires_grad=False)
        torch.func.vmap(
            lambda q, k, v, sinks: fgt.flash_attn_func(q, k, v, sinks=sinks),
            (0, 0, 0, 0 if sinks.ndim == 2 else None),
        )(q, k, v, sinks)
    assert len(count) == calls
    assert not [w for w in recwarn if "performance drop" in str(w.message)]


@pytest.mark.skipif(not SINCE_2_5, reason="PyTorch 2.4 has no place for the rule")
@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (1, None, None, 0), (None, 2, 0, None)])
@pytest.mark.parametrize("sinks", ["none", "shared", "mapped"])
def test_vmap_over_nothing(dims, sinks):
    def run(q, k, v, dout, *sinks):
        def attend(q, k, v, *sinks):
            return fgt.flash_attn_func(q, k, v, causal=True, sinks=sinks[0] if sinks else None)

        out, pullback = torch.func.vjp(attend, q, k, v, *sinks)
        return out, *pullback(dout)

    shapes = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 5, 4, 8)]
    if sinks != "none":
        shapes, dims = [*shapes, (4,)], (*dims, 0 if sinks == "mapped" else None)
    got = torch.func.vmap(run, dims)(
        *(torch.zeros(s if d is None else (*s[:d], 0, *s[d:])) for s, d in zip(shapes, dims))
    )
    want = run(*map(torch.zeros, shapes))
    assert [(x.shape, x.dtype) for x in got] == [((0, *x.shape), x.dtype) for x in want]


def test_vmap_of_packed_sequences():
    q, k, v = tensors((3, 12, 4, 8), *[(3, 12, 2, 8)] * 2, requires_grad=False)
    cu = torch.tensor([[0, 5, 12], [0, 1, 12], [0, 12, 12]], dtype=torch.int32)

    def run(q, k, v, cu):
        return (fgt.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12),)

    (got,), (want,) = torch.func.vmap(run)(q, k, v, cu), each(run, (0,) * 4, q, k, v, cu)
    assert torch.equal(got, want)


def test_many_gradients_of_one_output():
    inputs = qkv()
    out = fgt.flash_attn_func(*inputs)
    douts = torch.randn(3, *out.shape)
    got = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(out, inputs, dout, retain_graph=True) for dout in douts]
    for a, b in zip(got, zip(*want)):
        close(a, torch.stack(b), 1e-6)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(requires_grad):
    """A tangent must not get lost."""
    q, k, v = (x.detach().requires_grad_(requires_grad) for x in qkv())
    words = "forward-mode differentiation .* is not supported"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(lambda q: fgt.flash_attn_func(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match=words):
        torch.func.hessian(lambda q: fgt.flash_attn_func(q, k, v).sum())(q.detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=words), torch.no_grad():
            fgt.flash_attn_func(dual, k, v)
        assert torch.equal(fgt.flash_attn_func(q, k, v), fgt.flash_attn_func(q.clone(), k, v))


class Subclass(torch.Tensor):
    calls = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_subclasses_and_function_modes():
    q, k, v = qkv(heads_k=4)
    Subclass.calls.clear()
    out = fgt.flash_attn_func(q.as_subclass(Subclass), k, v)
    assert type(out) is Subclass and FORWARD in Subclass.calls
    assert torch.equal(out.as_subclass(torch.Tensor), fgt.flash_attn_func(q, k, v))
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        fgt.flash_attn_func(q, k, v)
    assert FORWARD in seen
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = fgt.scaled_dot_product_attention(q, k.as_subclass(Subclass), v)
    assert type(out) is Subclass and fgt.scaled_dot_product_attention in Subclass.calls


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return fgt.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_symbolic_trace():
    q, k, v = (x.transpose(1, 2) for x in qkv(heads_k=4))
    traced = torch.fx.symbolic_trace(Attention())
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [fgt.scaled_dot_product_attention]
    assert torch.equal(traced(q, k, v), Attention()(q, k, v))


def test_export_with_dynamic_shapes():
    q, k, v = (x.detach().transpose(1, 2) for x in qkv(heads_k=4))
    batch, rows, keys = (torch.export.Dim(name, min=2, max=64) for name in ("b", "s", "t"))
    shapes = {"q": {0: batch, 2: rows}, "k": {0: batch, 2: keys}, "v": {0: batch, 2: keys}}
    exported = torch.export.export(Attention(), (q, k, v), dynamic_shapes=shapes).module()
    for inputs in (
        (q, k, v),
        (q[:, :, :3].repeat(2, 1, 1, 1), *(x.repeat(2, 1, 1, 1) for x in (k, v))),
    ):
        assert torch.equal(exported(*inputs), Attention()(*inputs))


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_are_counted_as_pytorchs_are():
    """Of sequences of the same length, and of packed ones, each of which counts for itself."""
    inputs = qkv(heads_k=4)
    heads_first = [x.transpose(1, 2) for x in inputs]
    want = 2 * (2 * 4 * 13 * 17) * (2 + 5) * 8
    if SINCE_2_5:  # PyTorch 2.4 knows no FLOPs of its own attention on a CPU
        assert flops(lambda: sdpa(*heads_first).sum().backward()) == want
    for _ in range(2):  # the second call would have a plan
        assert flops(lambda: fgt.flash_attn_func(*inputs).sum().backward()) == want
        call = lambda: fgt.scaled_dot_product_attention(*heads_first).sum().backward()
        assert flops(call) == want

    cu = torch.tensor([0, 3, 13], dtype=torch.int32)
    packed = [x[0, :13] for x in inputs]
    pieces = [[x[None, a:b] for x in packed] for a, b in ((0, 3), (3, 13))]
    call = lambda: fgt.flash_attn_varlen_func(*packed, cu, cu).sum().backward()
    assert flops(call) == sum(
        flops(lambda: fgt.flash_attn_func(*piece).sum().backward()) for piece in pieces
    )


def test_flops_of_offsets_that_nobody_knows():
    with FakeTensorMode():
        q, k, v = (torch.empty(13, 4, 8) for _ in "qkv")
        cu = torch.empty(3, dtype=torch.int32)
        assert flops(lambda: fgt.flash_attn_varlen_func(q, k, v, cu, cu, 10, 9)) == (
            2 * 10 * 9 * 4 * 2 * (8 + 8)
        )
