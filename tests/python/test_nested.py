# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of jagged nested tensors against a loop over their sequences."""

import flashgrad.torch as fgt
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_inputs import close

# What an older PyTorch's nested tensors lack is not flashgrad's to give.
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5), reason="needs PyTorch 2.5"
)


def jagged(offsets, heads, dim=8, seed=0):
    """A leaf (batch, seqlen, heads, dim)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(int(offsets[-1]), heads, dim, generator=generator)
    return torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()


def each(q, k, v, causal):
    """The values of the result, sequence by sequence."""
    results = []
    for sequence in zip(q.unbind(), k.unbind(), v.unbind()):
        group = sequence[0].shape[1] // sequence[1].shape[1]
        a, b, c = (x.transpose(0, 1) for x in sequence)
        b, c = (x.repeat_interleave(group, 0) for x in (b, c))
        results.append(sdpa(a, b, c, is_causal=causal).transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("other_keys", [False, True])
def test_matches_a_loop(causal, heads_kv, other_keys):
    offsets = torch.tensor([0, 3, 3, 8, 9])
    offsets_kv = torch.tensor([0, 2, 5, 12, 16]) if other_keys else offsets
    inputs = (
        jagged(offsets, 4), jagged(offsets_kv, heads_kv, seed=1),
        jagged(offsets_kv, heads_kv, dim=5, seed=2),
    )  # fmt: skip
    out = fgt.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in inputs), is_causal=causal, enable_gqa=heads_kv < 4
    )
    assert out.is_nested and out.shape == (4, 4, inputs[0].shape[1], 5)
    got, want = out.transpose(1, 2).values(), each(*inputs, causal)
    close(got, want)
    dout = torch.randn(got.shape, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(got, inputs, dout)
    for x, a, b in zip(inputs, gradients, torch.autograd.grad(want, inputs, dout)):
        assert a.shape == x.shape
        close(a.values(), b.values())


def test_lengths_within_offsets():
    """A tensor narrowed from a padded one has rows that do not count."""
    padded = torch.randn(2, 9, 4, 8, generator=torch.Generator().manual_seed(0))
    x = torch.nested.narrow(
        padded, 1, torch.tensor([0, 1]), torch.tensor([4, 5]), layout=torch.jagged
    )
    out = fgt.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3)
    got = torch.cat(list(out.transpose(1, 2).unbind()))
    close(got, each(x, x, x, False))


def test_under_compile():
    compiled = torch.compile(
        lambda x: fgt.scaled_dot_product_attention(x, x, x, is_causal=True) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    for offsets in ([0, 3, 8, 9], [0, 4, 5, 12]):
        x = jagged(torch.tensor(offsets), 4)
        got = compiled(x.transpose(1, 2)).transpose(1, 2).values()
        close(got, 2 * each(x, x, x, True))


def test_refusals():
    offsets = torch.tensor([0, 3, 8, 9])
    q, k = (jagged(offsets, heads).transpose(1, 2) for heads in (4, 2))
    other = jagged(torch.tensor([0, 4, 8, 9]), 4).transpose(1, 2)
    attend = fgt.scaled_dot_product_attention
    with pytest.raises(ValueError, match="key: 2 heads"):
        attend(q, k, k)
    with pytest.raises(ValueError, match="value: a nested tensor of other lengths"):
        attend(q, q, other)
    with pytest.raises(NotImplementedError, match="attn_mask: given with nested tensors"):
        attend(q, q, q, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="query: a nested tensor, want a dense one"):
        attend(q.transpose(1, 2), q, q)
    with pytest.raises(NotImplementedError, match="query: a nested tensor, want a dense one"):
        attend(q, torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8))
