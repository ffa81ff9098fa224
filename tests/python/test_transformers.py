# SPDX-License-Identifier: Apache-2.0
"""flashgrad.transformers: small models of three kinds against Transformers' own eager attention."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flashgrad.transformers as fgt  # noqa: E402
from small_models import configs  # noqa: E402

SINCE_2_5 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = configs(SIZES, window=5, experts_per_token=1)


@pytest.fixture(autouse=True, scope="module")
def registered():
    fgt.register()
    fgt.register()


def model(kind, implementation):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[kind](), attn_implementation=implementation
    )
    with torch.no_grad():  # gpt-oss leaves its sinks as they are in memory
        for name, parameter in made.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return made


def loss_and_gradients(made, inputs, attention_mask):
    # The first token is predicted by the row before it, which may be padding.
    seen = torch.nn.functional.pad(attention_mask, (1, 0))[:, :-1] * attention_mask
    labels = inputs.masked_fill(seen == 0, -100)
    output = made(inputs, attention_mask=attention_mask, labels=labels, use_cache=False)
    gradients = torch.autograd.grad(output.loss, list(made.parameters()))
    return output.loss, output.logits, gradients


def batch(padding):
    inputs = torch.randint(1, 50, (3, 11), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(inputs)
    if padding == "left":
        mask[0, :4], mask[1, :9] = 0, 0
    elif padding == "right":
        mask[0, 8:], mask[1, 2:] = 0, 0
    return inputs.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_trains_as_eager_does(kind, padding):
    inputs, mask = batch(padding)
    eager, ours = (model(kind, name) for name in ("eager", "flashgrad"))
    assert ours.config._attn_implementation == "flashgrad"
    want, got = (loss_and_gradients(x, inputs, mask) for x in (eager, ours))
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-5)
    rows = mask.bool()
    torch.testing.assert_close(got[1][rows], want[1][rows], rtol=0, atol=1e-4)
    for a, b in zip(got[2], want[2]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_padding_matters():
    """The left-padded batch differs from the same batch without its mask."""
    inputs, mask = batch("left")
    ours = model("llama", "flashgrad")
    padded, plain = (ours(inputs, attention_mask=m).logits for m in (mask, None))
    assert (padded - plain)[mask.bool()].abs().max() > 1e-3


def test_no_mask_and_gradient_checkpointing():
    inputs, mask = batch("none")
    want = loss_and_gradients(model("gemma2", "eager"), inputs, mask)
    ours = model("gemma2", "flashgrad")
    ours.gradient_checkpointing_enable()
    ours.train()
    output = ours(inputs, labels=inputs, use_cache=False)
    gradients = torch.autograd.grad(output.loss, list(ours.parameters()))
    for a, b in zip(gradients, want[2]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_reentrant_checkpointing_of_a_mask(padding):
    """It detaches every tensor that it hands a layer, the mask included."""
    inputs, mask = batch(padding)
    config = transformers.BertConfig(
        **{name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    gradients = []
    for name in ("eager", "flashgrad"):
        torch.manual_seed(0)
        made = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=name)
        if name == "flashgrad":
            made.gradient_checkpointing_enable({"use_reentrant": True})
            made.enable_input_require_grads()
        made.train()
        made(
            inputs, attention_mask=mask, labels=inputs.masked_fill(mask == 0, -100)
        ).loss.backward()
        gradients.append([p.grad for p in made.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_generates_as_eager_does(kind, padding, cache):
    inputs, mask = batch(padding)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    tokens = [
        model(kind, name).generate(inputs, attention_mask=mask, disable_compile=True, **options)
        for name in ("eager", "flashgrad")
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    "kind, padding", [("llama", "none"), ("llama", "left"), ("gemma2", "right")]
)
def test_compiled(kind, padding):
    """A mask that has to be evaluated breaks the graph."""
    inputs, mask = batch(padding)
    ours = model(kind, "flashgrad")
    want = loss_and_gradients(ours, inputs, mask)
    torch._dynamo.reset()
    got = loss_and_gradients(torch.compile(ours, backend="aot_eager"), inputs, mask)
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not SINCE_2_5, reason="PyTorch 2.4 can't trace Transformers in one graph")
def test_compiled_in_one_graph():
    inputs, _ = batch("none")
    ours = model("llama", "flashgrad")
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs).logits, ours(inputs).logits, rtol=0, atol=1e-5)


def test_packed_batch():
    """Sequences packed into a batch of 1, with their offsets."""
    inputs, _ = batch("none")
    ours = model("llama", "flashgrad")
    want = ours(inputs).logits
    cu = torch.arange(0, 34, 11, dtype=torch.int32)
    positions = torch.arange(11).repeat(3)[None]
    offsets = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    got = ours(inputs.reshape(1, -1), position_ids=positions, use_cache=False, **offsets).logits
    torch.testing.assert_close(got.reshape(want.shape), want, rtol=0, atol=1e-4)
    with pytest.raises(NotImplementedError, match="packed sequences"):
        ours(inputs.reshape(1, -1), position_ids=positions, use_cache=False)


def test_refusals():
    inputs, mask = batch("left")
    mask[2, 5] = 0  # a hole
    ours = model("llama", "flashgrad")
    with pytest.raises(NotImplementedError, match="attention mask"):
        ours(inputs, attention_mask=mask)
    ours.config.attention_dropout = 0.1
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.1
    ours.train()
    with pytest.raises(NotImplementedError, match="dropout"):
        ours(inputs)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "position_bias"])
def test_what_would_be_ignored_is_refused(name):
    """Sparse attention of DeepSeek and MiniMax hands its choice of keys to the function, not a mask."""
    q = torch.ones(1, 2, 5, 8)
    attend = functools.partial(fgt.attend, torch.nn.Module(), q, q, q, None)
    attend(**{name: None})
    with pytest.raises(NotImplementedError, match=f"{name}.*: not supported"):
        attend(**{name: torch.zeros(1, 5, 2, dtype=torch.int32)})


def test_a_mask_that_the_model_changed_is_refused():
    """It has no elements; the first token's may meet one of a single element."""
    mask = fgt.mask(1, 1, 1)
    hidden = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    q = torch.ones(1, 2, 1, 8)
    attend = functools.partial(fgt.attend, torch.nn.Module(), q, q, q)
    copies = (mask.clone(), mask.to("cpu"), mask[:, :, :, :1], mask.bool(), mask.detach())
    for same in (mask, *copies):
        assert torch.equal(attend(same)[0], attend(None)[0])
    wider = torch.nn.functional.pad(mask, (0, 3)), torch.cat([mask, mask], -1)  # DeepSeek V4's
    for changed in (mask & ~hidden, mask.masked_fill(hidden, False), ~mask, *wider, *mask.unbind()):
        with pytest.raises(NotImplementedError, match="that the model has changed"):
            attend(changed)
    with pytest.raises(NotImplementedError, match="that the model computes with"):
        torch.ones(1, 5, 5) + mask[:, 0]


def test_deterministic_is_handed_on(monkeypatch):
    """ModernBERT's config has it."""
    given = []
    attention = fgt.attention

    def record(*tensors, **options):
        given.append(options["deterministic"])
        return attention(*tensors, **options)

    monkeypatch.setattr(fgt, "attention", record)
    q = torch.ones(1, 2, 5, 8)
    for deterministic in (None, True):
        fgt.attend(torch.nn.Module(), q, q, q, None, deterministic=deterministic)
    assert given == [False, True]


def test_models_that_would_not_call_it_are_refused():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(NotImplementedError, match="BloomForCausalLM, whose attention does not"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashgrad")


def test_own_mask_tensor():
    inputs, _ = batch("none")
    ours = model("llama", "flashgrad")
    causal = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    bias = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    for mask in (causal.expand(3, -1, -1, -1), bias.expand(3, -1, -1, -1)):
        got = ours(inputs, attention_mask=mask, use_cache=False).logits
        assert torch.equal(got, ours(inputs).logits)


def test_other_names_are_still_checked():
    with pytest.raises((ValueError, ImportError)):
        model("llama", "flash_attention_9")
