# SPDX-License-Identifier: Apache-2.0
"""Plans of flashgrad.torch: a call is served by that of an earlier one only if it is like it."""

import threading

import flashgrad.torch as fgt
import numpy as np
import pytest
import torch
from flashgrad.torch import _plans
from torch.utils._python_dispatch import TorchDispatchMode
from torch_inputs import BACKWARD, FORWARD, close, operator_options, qkv, tensors

has_plans = pytest.mark.skipif(
    _plans._PLAIN_THREAD is None, reason="this PyTorch always takes the dispatcher"
)


@pytest.fixture
def made(monkeypatch):
    """The plans that were made since the test began."""
    plans = []
    init = _plans.Plan.__init__

    def watch(plan, *args):
        init(plan, *args)
        plans.append(plan)

    monkeypatch.setattr(_plans, "_plans", {})
    monkeypatch.setattr(_plans.Plan, "__init__", watch)
    return plans


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


def check(inputs):
    """flash_attn_func beside the operators, on copies that no plan has seen."""
    out, lse = fgt.flash_attn_func(*inputs, causal=True, return_lse=True)
    copies = [x.detach().clone() for x in inputs]
    want = FORWARD(*copies, *operator_options())
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    needs = [x.requires_grad for x in inputs]
    if any(needs):
        got = gradients(out, [x for x, need in zip(inputs, needs) if need])
        dout = torch.ones_like(out)
        wanted = BACKWARD(dout, None, *copies, *want, *operator_options(), *needs, False)
        assert all(map(torch.equal, got, [x for x, need in zip(wanted, needs) if need]))


@has_plans
def test_a_call_like_an_earlier_one_has_its_plan(made):
    for seed in range(3):
        check(qkv(seed=seed))
    assert len(made) == 1 and len(made[0]._forms) == 1
    assert len(made[0]._idle) == 1 and len(made[0]._forms[0].idle) == 1


@has_plans
def test_the_plan_used_last_is_looked_at_first(made):
    for rows in (13, 14, 15, 13):
        fgt.flash_attn_func(*qkv(seqlen_q=rows))
    ((first, *others),) = _plans._plans.values()
    assert first is made[0] and set(others) == set(made[1:]) and len(made) == 3


def packed(kind, seed):
    """A call's tensors, its options by flash_attn_varlen_func, and by the operators."""
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in qkv(seed=seed))
    cu_q = torch.tensor([0, 5 + seed, 26], dtype=torch.int32)
    cu_k = torch.tensor([0, 20 - seed, 34], dtype=torch.int32)
    if kind == "same offsets":
        k, v = (x.detach()[:26].requires_grad_() for x in (k, v))
        cu_k = cu_q
    others = {}
    if "sinks" in kind:
        others["sinks"] = tensors((4,), seed=seed)[0].requires_grad_(kind == "sinks")
    if kind == "seqused":
        others["seqused_k"] = torch.tensor([3, 4 + seed], dtype=torch.int32)
        others["q_offset"] = torch.tensor([seed, 2])
    options = (
        others.get("sinks"), cu_q, cu_k, None, others.get("seqused_k"), others.get("q_offset"), 26,
        34, None, 0, False, None, 0.0, False,
    )  # fmt: skip
    return (q, k, v), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **others}, options


@has_plans
@pytest.mark.parametrize("kind", ["same offsets", "sinks", "frozen sinks", "seqused"])
def test_packed_calls_have_plans(kind, made):
    for seed in range(3):
        inputs, others, options = packed(kind, seed)
        got = fgt.flash_attn_varlen_func(
            *inputs, **others, max_seqlen_q=26, max_seqlen_k=34, causal=True, return_lse=True
        )
        copies = [x.detach().clone() for x in inputs]
        want = FORWARD(*copies, *options)
        assert all(map(torch.equal, got, want))
        needs = (True, True, True, kind == "sinks")
        for douts in ((torch.ones_like(want[0]), None), (None, torch.ones_like(want[1]))):
            ((root, dout),) = [(x, g) for x, g in zip(got, douts) if g is not None]
            leaves = [*inputs, others["sinks"]] if kind == "sinks" else inputs
            found = torch.autograd.grad(root, leaves, dout, retain_graph=True)
            for a, b in zip(found, BACKWARD(*douts, *copies, *want, *options, *needs)):
                assert torch.equal(a, b)
    assert len(made) == 1 and len(made[0]._forms) == 1


@pytest.mark.parametrize("start", [None, 2])
def test_padded_heads_first_calls_match(start, made):
    """With seqused_kv alone, and as packed sequences, whose offsets are new tensors each time."""
    for seed in range(3):
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv(seed=seed, heads_k=4))
        mask = torch.ones(2, 1, 1, 17, dtype=torch.bool)
        mask[1, ..., 15:] = False
        if start is not None:
            mask[1, ..., :start] = False
        results = []
        for attention in (
            fgt.scaled_dot_product_attention,
            torch.nn.functional.scaled_dot_product_attention,
        ):
            out = attention(q, k, v, mask)
            results.append((out, *gradients(out, (q, k, v))))
        for a, b in zip(*results):
            close(a, b)
    assert len(made) <= 1


def changed(what):
    """Inputs unlike qkv()'s in one respect."""
    q, k, v = qkv()
    if what == "rows":
        return qkv(seqlen_q=14)
    if what == "heads":
        return qkv(heads_k=4)
    if what == "dtype":
        return [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    if what == "strides":
        k = k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    if what == "last stride":
        v = v.detach().mT.contiguous().mT.requires_grad_()
    if what == "sliced":
        q = torch.cat([q.detach(), q.detach()], -1)[..., :8].requires_grad_()
    if what == "frozen":
        k = k.detach()
    if what == "all frozen":
        q, k, v = (x.detach() for x in (q, k, v))
    if what == "parameters":
        q, k, v = (torch.nn.Parameter(x.detach()) for x in (q, k, v))
    if what == "one tensor twice":
        v = k
    if what == "negated":
        q = torch._neg_view(q.detach()).requires_grad_()
    return q, k, v


@pytest.mark.parametrize(
    "what",
    [
        "rows", "heads", "dtype", "strides", "last stride", "sliced", "frozen", "all frozen",
        "parameters", "one tensor twice", "negated",
    ],
)  # fmt: skip
def test_another_call_has_another_plan_or_none(what, made):
    for _ in range(2):
        check(qkv())
    first = list(made)
    inputs = changed(what)
    if what == "one tensor twice":
        out = fgt.flash_attn_func(*inputs, causal=True)
        want = fgt.flash_attn_func(inputs[0], inputs[1], inputs[1].clone(), causal=True)
        assert torch.equal(out, want)
        got = gradients(out, inputs[:2])
        for a, b in zip(got, gradients(want, inputs[:2])):
            close(a, b)
    else:
        for _ in range(2):
            check(inputs)
    assert [x.guard(*inputs) for x in first] == [False] * len(first)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_options_that_are_arrays_are_read_each_time(make):
    q, k, v = qkv()
    scale = make(0.5)
    for factor in (1.0, 2.0):
        scale *= factor
        got = fgt.flash_attn_func(q, k, v, softmax_scale=scale)
        assert torch.equal(got, fgt.flash_attn_func(q, k, v, softmax_scale=float(scale)))


def test_a_mode_sees_the_call_that_has_a_plan():
    inputs = [x.detach() for x in qkv()]
    want = fgt.flash_attn_func(*inputs)
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Dispatch():
        assert torch.equal(fgt.flash_attn_func(*inputs), want)
    assert FORWARD in seen

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append("function mode")
            return function(*args, **(kwargs or {}))

    with Function():
        assert torch.equal(fgt.flash_attn_func(*inputs), want)
    assert "function mode" in seen
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = fgt.flash_attn_func(*inputs)
    assert isinstance(fake, torch._subclasses.FakeTensor) and fake.shape == want.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fgt.flash_attn_func(*inputs).dtype == torch.bfloat16


def test_without_guards_the_numbers_are_the_same(monkeypatch, made):
    monkeypatch.setattr(_plans, "_TensorGuards", None)
    for _ in range(2):
        check(qkv())
    assert not made


def test_shapes_that_keep_changing_do_not_keep_their_plans(made):
    for rows in range(1, _plans._MAX_PLANS + 10):
        fgt.flash_attn_func(*qkv(seqlen_q=rows))
    assert sum(map(len, _plans._plans.values())) <= _plans._MAX_PLANS
    inputs = qkv()
    out = fgt.flash_attn_func(*inputs, causal=True)
    want = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    for n in range(2 * _plans._MAX_BACKWARD_FORMS):
        dout = torch.ones(*out.shape[:3], out.shape[3] + n)[..., : out.shape[3]]
        got = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        assert all(map(torch.equal, got, want))
    assert all(len(plan._forms) <= _plans._MAX_BACKWARD_FORMS for plan in made)


@pytest.mark.parametrize("layout", ["compact", "heads first"])
@pytest.mark.parametrize("expanded", [False, True])
def test_planned_calls_match_the_operators(layout, expanded):
    inputs = qkv(seqlen_q=11)
    if layout == "heads first":
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    for seed in range(3):  # the first makes the plan, the others use it
        q, k, v = inputs = [x.detach() + seed for x in inputs]
        dout, dlse = tensors((2, 11, 4, 8), (2, 4, 11), seed=seed, requires_grad=False)
        if expanded:
            dout, dlse = dout[:, :, :, :1].expand(2, 11, 4, 8), dlse[0, 0, 0].expand(2, 4, 11)
        want = FORWARD(q, k, v, *operator_options())
        for needs in ((True, True, True, False), (False, True, False, False)):
            for cotangents in ((dout, None), (None, dlse), (dout, dlse)):
                leaves = [x.clone().requires_grad_(need) for x, need in zip(inputs, needs)]
                out, lse = fgt.flash_attn_func(*leaves, causal=True, return_lse=True)
                assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
                roots = [(x, g) for x, g in zip((out, lse), cotangents) if g is not None]
                torch.autograd.backward(*zip(*roots))
                gradients = BACKWARD(*cotangents, q, k, v, *want, *operator_options(), *needs)
                for leaf, need, gradient in zip(leaves, needs, gradients):
                    assert torch.equal(leaf.grad, gradient) if need else leaf.grad is None


def test_plan_survives_a_change_of_backend_and_threads(monkeypatch):
    inputs = qkv(seqlen_q=64, seqlen_k=128)
    threads = torch.get_num_threads()

    def run():
        out = fgt.flash_attn_func(*inputs)
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))

    want = run()
    for backend in ("reference", "cpu"):
        monkeypatch.setenv("FLASHGRAD_BACKEND", backend)
        for number in (1, 4, threads):
            torch.set_num_threads(number)
            for x, y in zip(run(), want):
                close(x, y)


def test_threads_do_not_share_plans():
    inputs = [[x.detach() * (n + 1) for x in qkv(seqlen_q=33)] for n in range(3)]
    want = [fgt.flash_attn_func(*x) for x in inputs]
    wrong = []

    def work(n):
        for _ in range(100):
            if not torch.equal(fgt.flash_attn_func(*inputs[n]), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_saved_tensors_may_be_replaced():
    inputs = qkv()

    def pack(x):
        return x.flip(0)  # unpacked again with other strides

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.mT.contiguous().mT.flip(0)):
        out = fgt.flash_attn_func(*inputs)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    want = torch.autograd.grad(fgt.flash_attn_func(*inputs), inputs, dout)
    assert all(map(torch.equal, got, want))
