# SPDX-License-Identifier: Apache-2.0
"""flashgrad.torch: flash-attn's functions and their gradients."""

import inspect
import math
import subprocess
import sys

import flashgrad
import flashgrad.torch as fgt
import pytest
import textbook
import torch
from flashgrad._functions import LENGTHS
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from torch_inputs import FORWARD, close, operator_options, qkv, tensors

SINCE_2_5 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)


@pytest.mark.parametrize(
    "options, textbook_options",
    [
        ({}, {}),
        ({"causal": True}, {"right": 0}),
        ({"causal": True, "window_size": (4, 4)}, {"left": 4, "right": 0}),
        ({"window_size": (3, -1)}, {"left": 3}),
        ({"window_size": (None, 2)}, {"right": 2}),
        ({"window_size": (5, 2), "alignment": "top-left"}, {"left": 5, "right": 2, "shift": 0}),
        ({"softmax_scale": 0.4, "softcap": 2.0}, {"scale": 0.4, "softcap": 2.0}),
    ],
)
def test_flash_attn_func(options, textbook_options):
    inputs = qkv()
    (sinks,) = tensors((4,))
    dout, dlse = tensors((2, 13, 4, 8), (2, 4, 13), seed=1, requires_grad=False)
    results, gradients = [], []
    for function, kwargs in (
        (fgt.flash_attn_func, {**options, "return_lse": True}),
        (textbook.attention, textbook_options),
    ):
        out, lse = function(*inputs, sinks=sinks, **kwargs)
        results.append((out, lse))
        gradients.append(
            torch.autograd.grad((out, lse), (*inputs, sinks), (dout.to(out), dlse.to(lse)))
        )
    for got, want in (*zip(*results), *zip(*gradients)):
        close(got, want)


def test_return_forms():
    inputs = qkv()
    out, lse = fgt.flash_attn_func(*inputs, return_lse=True)
    probs = fgt.flash_attn_func(*inputs, return_attn_probs=True)
    assert torch.equal(fgt.flash_attn_func(*inputs), out)
    assert torch.equal(probs[0], out) and torch.equal(probs[1], lse) and probs[2] is None
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 13)


CU = torch.tensor([0, 4, 4, 18], dtype=torch.int32)
# A packed form, the tensors' shapes, and the same by the form with q, k and v apart.
PACKED = {
    "qkv": (
        fgt.flash_attn_qkvpacked_func,
        [(2, 9, 3, 2, 8)],
        lambda qkv, **o: fgt.flash_attn_func(*qkv.unbind(2), **o),
    ),
    "kv": (
        fgt.flash_attn_kvpacked_func,
        [(2, 9, 4, 8), (2, 7, 2, 2, 8)],
        lambda q, kv, **o: fgt.flash_attn_func(q, *kv.unbind(2), **o),
    ),
    "varlen qkv": (
        lambda x, **o: fgt.flash_attn_varlen_qkvpacked_func(x, CU, 14, **o),
        [(18, 3, 2, 8)],
        lambda x, **o: fgt.flash_attn_varlen_func(*x.unbind(1), CU, CU, 14, 14, **o),
    ),
    "varlen kv": (
        lambda q, kv, **o: fgt.flash_attn_varlen_kvpacked_func(q, kv, CU, CU, 14, 14, **o),
        [(18, 4, 8), (18, 2, 2, 8)],
        lambda q, kv, **o: fgt.flash_attn_varlen_func(q, *kv.unbind(1), CU, CU, 14, 14, **o),
    ),
}


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("packed, shapes, apart", PACKED.values(), ids=PACKED.keys())
def test_packed_forms(packed, shapes, apart, with_sinks):
    inputs = tensors(*shapes)
    sinks = tensors(shapes[0][-2:-1], seed=3) if with_sinks else []
    options = {"causal": True, "sinks": sinks[0] if sinks else None}
    want = apart(*inputs, **options)
    dout = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (*inputs, *sinks), dout)

    def check(function, inputs=inputs):
        got = function(*inputs, **options)
        assert torch.equal(got, want)
        results = torch.autograd.grad(got, (*inputs, *sinks), dout)
        assert all(map(torch.equal, results, gradients))
        return results

    assert all(x.is_contiguous() for x in check(packed))
    check(lambda *x, **o: checkpoint(packed, *x, use_reentrant=False, **o))
    check(torch.compile(packed, fullgraph=True, backend="aot_eager"))
    check(packed, [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs])
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x
    ):
        check(packed)
    with torch.no_grad():
        assert torch.equal(packed(*inputs, **options), want)
    frozen = [x.detach() for x in inputs[:-1]]  # all but the packed one
    out = packed(*frozen, inputs[-1], **options)
    assert torch.equal(torch.autograd.grad(out, inputs[-1], dout)[0], gradients[len(frozen)])


@pytest.mark.parametrize("packed, shapes, apart", PACKED.values(), ids=PACKED.keys())
def test_refusals_of_packed_forms(packed, shapes, apart):
    inputs = tensors(*shapes)
    (gradient,) = torch.autograd.grad(packed(*inputs).sum(), inputs[-1], create_graph=True)
    assert torch.equal(gradient, torch.autograd.grad(apart(*inputs).sum(), inputs[-1])[0])
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        gradient.sum().backward()
    with pytest.raises(ValueError, match="kv: shape"):
        packed(*inputs[:-1], inputs[-1].repeat_interleave(2, -3))
    with pytest.raises(NotImplementedError, match="dropout_p: 0.5"):
        packed(*inputs, dropout_p=0.5)


def test_windows_and_maxima_may_be_tensors():
    """flash-attn's own tests pass such windows, Transformers such maxima."""
    inputs = qkv()
    window = torch.tensor([3, -1])
    assert torch.equal(
        fgt.flash_attn_func(*inputs, window_size=window),
        fgt.flash_attn_func(*inputs, window_size=(3, -1)),
    )
    window[0] = 1
    got = fgt.flash_attn_func(*inputs, window_size=window)
    assert torch.equal(got, fgt.flash_attn_func(*inputs, window_size=(1, -1)))
    sides = (torch.tensor(3), torch.tensor(0))
    fgt.flash_attn_func(*inputs, window_size=sides)
    sides[0].fill_(1)
    got = fgt.flash_attn_func(*inputs, window_size=sides)
    assert torch.equal(got, fgt.flash_attn_func(*inputs, window_size=(1, 0)))
    (packed,) = tensors((18, 3, 2, 8))
    want = fgt.flash_attn_varlen_qkvpacked_func(packed, CU, 14)
    got = fgt.flash_attn_varlen_qkvpacked_func(packed, CU, CU.diff().max())
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="length 14"):
        fgt.flash_attn_varlen_qkvpacked_func(packed, CU, torch.tensor(13))


def test_packed_sequences_are_apart():
    (packed,) = tensors((18, 3, 2, 8))
    out = fgt.flash_attn_varlen_qkvpacked_func(packed, CU, 14, causal=True)
    for first, last in ((0, 4), (4, 18)):
        alone = fgt.flash_attn_qkvpacked_func(packed[None, first:last], causal=True)
        assert torch.equal(out[first:last], alone[0])


FLASH_ATTN = {  # flash-attn 2.8's parameters after the tensors
    "flash_attn_func": (
        "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
        "alibi_slopes=None deterministic=False return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
        "alibi_slopes=None deterministic=False return_attn_probs=False block_table=None"
    ),
}


@pytest.mark.parametrize("form", ["", "qkvpacked_", "kvpacked_"])
@pytest.mark.parametrize("name", FLASH_ATTN)
def test_signatures_are_those_of_flash_attn(name, form):
    function = getattr(fgt, name.replace("func", form + "func"))
    want = FLASH_ATTN[name]
    if form:
        want = want.replace(" block_table=None", "")
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    names = [p.name for p in parameters]
    first = names.index("dropout_p")
    assert " ".join(f"{p.name}={p.default}" for p in parameters[first:]) == want
    tensors = {"": "q k v", "qkvpacked_": "qkv", "kvpacked_": "q kv"}[form]
    if "varlen" in name:
        tensors += (
            " cu_seqlens max_seqlen"
            if form == "qkvpacked_"
            else " cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
        )
    assert " ".join(names[:first]) == tensors


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dropout_p": 0.1}, "dropout_p: 0.1"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
    ],
)
def test_refused_options(change, words):
    with pytest.raises(NotImplementedError, match=words):
        fgt.flash_attn_func(*qkv(), **change)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"softmax_scale": [0.5]}, r"scale: \[0.5\], want a number"),
        ({"softcap": {}}, "softcap: {}, want a number"),
        ({"window_size": ([1], 0)}, r"window_size: \(\[1\], 0\), want \(left, right\)"),
        ({"window_size": 3}, r"window_size: 3, want \(left, right\)"),
        ({"alignment": {}}, "alignment: {}, want one of"),
    ],
)
def test_options_of_other_types(change, words):
    # PyTorch 2.4 has only the operator, which refuses numbers in its own words.
    own_words = SINCE_2_5 or not {"softmax_scale", "softcap"} & change.keys()
    with pytest.raises(RuntimeError, match=words if own_words else next(iter(change))[-5:]):
        fgt.flash_attn_func(*qkv(), **change)


@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
def test_a_number_that_requires_grad_is_refused(option):
    """A learned temperature would stay as it is without a word."""
    inputs = qkv()
    number = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(NotImplementedError, match="a tensor that requires grad, want a number"):
        fgt.flash_attn_func(*inputs, **{option: number})
    with torch.no_grad():
        got = fgt.flash_attn_func(*inputs, **{option: number})
    assert torch.equal(got, fgt.flash_attn_func(*inputs, **{option: 0.5}))


def test_arguments_of_flash_attn_3():
    inputs = qkv()
    want = fgt.flash_attn_func(*inputs)
    tuning = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8}
    neutral = {"qv": None, "q_descale": None, "k_descale": None, "v_descale": None}
    got = fgt.flash_attn_func(*inputs, attention_chunk=0, **tuning, **neutral)
    assert torch.equal(got, want)
    (packed,) = tensors((18, 3, 2, 8))
    packed = packed.unbind(1)
    for options in ({"attention_chunk": 5}, {"qv": inputs[0]}, {"q_descale": torch.ones(2, 2)}):
        (name,) = options
        with pytest.raises(NotImplementedError, match=f"{name}: given, want (None|0)"):
            fgt.flash_attn_func(*inputs, **options)
        with pytest.raises(NotImplementedError, match=f"{name}: given, want (None|0)"):
            fgt.flash_attn_varlen_func(*packed, CU, CU, 14, 14, **options)
    with pytest.raises(TypeError, match="num_split: an unexpected argument"):
        fgt.flash_attn_func(*inputs, num_split=3)


def test_errors_are_pytorchs_too():
    q, k, v = qkv()
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="k: dtype f64, want f32"):
            fgt.flash_attn_func(q, k.double(), v)
        with pytest.raises(error, match="alignment"):
            fgt.flash_attn_func(q, k, v, alignment="left")
        with pytest.raises(error, match=r"window_size: None, want \(left, right\)"):
            fgt.flash_attn_func(q, k, v, window_size=None)


def test_what_is_no_dense_tensor():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="q: a NoneType, want a Tensor"):
        fgt.flash_attn_func(None, k, v)
    with pytest.raises(TypeError, match="k: a NoneType, want a Tensor"):
        fgt.flash_attn_func(q, None, v)
    with pytest.raises(TypeError, match="v: a list, want a Tensor"):
        fgt.flash_attn_func(q, k, [v])
    with pytest.raises(TypeError, match="kv: a NoneType, want a Tensor"):
        fgt.flash_attn_kvpacked_func(q, None)
    nested = torch.nested.nested_tensor([q[0].detach(), q[1, :3].detach()])
    with pytest.raises(NotImplementedError, match="q: a nested tensor"):
        fgt.flash_attn_func(nested, k, v)
    with pytest.raises(ValueError, match="k: on meta, want cpu|k: on cpu, want meta"):
        FORWARD(q, k.to("meta"), v, *operator_options())
    with pytest.raises(ValueError, match="v: on cpu, want meta"):
        FORWARD(q.to("meta"), k.to("meta"), v, *operator_options())
    for i, name in enumerate(LENGTHS):
        options = list(operator_options())
        options[i] = torch.zeros(2, device="meta")
        with pytest.raises(ValueError, match=f"{name}: on meta, want cpu"):
            FORWARD(q, k, v, *options)
    with pytest.raises(NotImplementedError, match="q: torch.sparse_coo, want a dense tensor"):
        fgt.flash_attn_func(q.detach().to_sparse(), k, v)
    with pytest.raises(TypeError, match="cu_seqlens_kv: a list, want a Tensor"):
        fgt.flash_attn_varlen_func(q[0], k[0], v[0], CU, CU.tolist(), 14, 14)


def test_errors_of_the_library():
    q, k, v = qkv()
    cu = torch.tensor([0, 26], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_table"):
        fgt.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 13, 17, block_table=cu)
    with pytest.raises(ValueError, match="k: dtype bf16, want f32"):
        fgt.flash_attn_func(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="cu_seqlens_q: dtype i64, want i32"):
        fgt.flash_attn_varlen_func(q[0], k[0], v[0], cu.long(), cu, 13, 17)
    for dtype, name in ((torch.int32, "i32"), (torch.int16, "i16"), (torch.int64, "i64")):
        with pytest.raises(NotImplementedError, match=f"q: dtype {name}"):
            fgt.flash_attn_func(*(x.detach().to(dtype) for x in (q, k, v)))
    with pytest.raises(ValueError, match="q: 3 dimensions"):
        fgt.flash_attn_func(q[0], k, v)
    with pytest.raises(ValueError, match="alignment: 'left'"):
        fgt.flash_attn_func(q, k, v, alignment="left")


@pytest.mark.parametrize("causal, softcap", [(False, 0.0), (True, 1.3)])
def test_gradcheck(causal, softcap):
    inputs = tensors((1, 4, 2, 3), (1, 5, 1, 3), (1, 5, 1, 2), (2,), dtype=torch.float64)

    def function(q, k, v, sinks):
        return fgt.flash_attn_func(
            q, k, v, causal=causal, softcap=softcap, sinks=sinks, return_lse=True
        )

    assert gradcheck(function, inputs)


def test_gradcheck_varlen():
    inputs = tensors((6, 2, 3), (7, 1, 3), (7, 1, 2), dtype=torch.float64)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 6], [0, 4, 7]))
    assert gradcheck(
        lambda *x: fgt.flash_attn_varlen_func(*x, cu_q, cu_k, 4, 4, causal=True, return_lse=True),
        inputs,
    )


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_are_not_computed(frozen, monkeypatch):
    inputs = qkv()
    want = torch.autograd.grad(fgt.flash_attn_func(*inputs).sum(), inputs)
    inputs[frozen].requires_grad_(False)
    computed = []
    launch = flashgrad._call.Call.try_launch

    def watch(call, *args):
        computed.append([pointer != 0 for pointer in call.pointers[7:10]])
        return launch(call, *args)

    monkeypatch.setattr(flashgrad._call.Call, "try_launch", watch)
    fgt.flash_attn_func(*inputs).sum().backward()
    assert computed[-1] == [i != frozen for i in range(3)]
    assert inputs[frozen].grad is None
    for i in range(3):
        if i != frozen:
            assert torch.equal(inputs[i].grad, want[i])


def test_expanded_dout_is_read_in_place():
    inputs = qkv()
    got = torch.autograd.grad(fgt.flash_attn_func(*inputs).sum(), inputs)
    want = torch.autograd.grad(fgt.flash_attn_func(*inputs), inputs, torch.ones(2, 13, 4, 8))
    assert all(map(torch.equal, got, want))
    out, lse = fgt.flash_attn_func(*inputs, return_lse=True)
    got = torch.autograd.grad(lse.sum(), inputs)
    assert not got[2].any()
    want = torch.autograd.grad(textbook.attention(*inputs)[1].sum(), inputs[:2])
    for a, b in zip(got, want):
        close(a, b)


def test_noncontiguous_inputs():
    inputs = [x.detach() for x in qkv()]
    want = fgt.flash_attn_func(*inputs)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    dim_first = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in inputs]
    for other in (heads_first, dim_first):
        other = [x.requires_grad_() for x in other]
        out = fgt.flash_attn_func(*other)
        assert torch.equal(out, want)
        dout = torch.randn(8, 2, 13, 4).permute(1, 2, 3, 0)
        got = torch.autograd.grad(out, other, dout)
        fresh = [x.clone().requires_grad_() for x in inputs]
        reference = torch.autograd.grad(fgt.flash_attn_func(*fresh), fresh, dout.contiguous())
        assert all(map(torch.equal, got, reference))


@pytest.mark.parametrize("which", ["cu_seqlens", "seqused_k", "q_offset", "sinks"])
@pytest.mark.parametrize("way", ["plan", "kernel", "operator"])
def test_what_changes_before_backward_is_noticed(way, which):
    """A buffer of lengths that the next batch is written into would give other gradients."""
    q, k, v = (torch.randn(9, 2, 16)[..., :8] for _ in range(3))
    if way == "kernel":  # a stride that no plan serves
        q = torch.randn(9, 2, 16)[..., ::2]
    q.requires_grad_()
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    others = {
        "seqused_k": torch.tensor([4, 5], dtype=torch.int32),
        "q_offset": torch.zeros(2, dtype=torch.int64),
        "sinks": torch.zeros(2),
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "operator"):
        out = fgt.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, **others)
    {"cu_seqlens": cu, **others}[which][1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_double_backward_says_so():
    inputs = qkv()
    (dq,) = torch.autograd.grad(fgt.flash_attn_func(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dq.sum().backward()


@pytest.mark.parametrize("enabled", [False, True])
def test_deterministic_algorithms_are_asked_for(enabled, monkeypatch):
    """A GPU's gradients depend on it; here one sees what the functions hand on."""
    asked = []
    attend = fgt._attention.attend

    def noted(*call):
        asked.append(call[3][-1])
        return attend(*call)

    for module in (fgt._flash_attn, fgt._attention):
        monkeypatch.setattr(module, "attend", noted)
    q, k, v = qkv()
    torch.use_deterministic_algorithms(enabled)
    try:
        fgt.flash_attn_func(q, k, v)
        fgt.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(asked) >= 2 and all(x is enabled for x in asked)


def test_rows_that_see_nothing():
    q, k, v = qkv(seqlen_q=5, seqlen_k=3)
    out, lse = fgt.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert not out[:, :2].any() and torch.all(lse[:, :, :2] == -math.inf)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_training_step_in_a_module():
    """A layer learns to copy its input, through the same lines that a user would write."""
    torch.manual_seed(0)
    project = torch.nn.Linear(16, 48)
    optimizer = torch.optim.Adam(project.parameters(), 0.02)
    x = torch.randn(4, 12, 16)
    losses = []
    for _ in range(40):
        q, k, v = project(x).view(4, 12, 3, 2, 8).unbind(2)
        loss = (fgt.flash_attn_func(q, k, v, causal=True).flatten(2) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_import_leaves_torch_alone():
    code = "import sys, flashgrad; assert 'torch' not in sys.modules; import flashgrad.torch"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
