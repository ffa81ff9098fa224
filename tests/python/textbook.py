# SPDX-License-Identifier: Apache-2.0
"""Attention as the textbook has it, in float64 with PyTorch's autograd: what the tests compare to."""

import math

import torch


def attention(
    q, k, v, *, left=None, right=None, shift=None, scale=None, softcap=0.0, sinks=None, seen=None
):
    """out and lse of (batch, seqlen, heads, dim) tensors; `seen` is one more (.., L, S) mask."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    s = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    shift = torch.as_tensor(keys - rows if shift is None else shift)
    i = torch.arange(rows)[:, None] + shift.reshape(-1, 1, 1, 1)
    j = torch.arange(keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        visible = visible & (j >= i - left)
    if right is not None:
        visible = visible & (j <= i + right)
    if seen is not None:
        visible = visible & seen
    s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = torch.where(s == -math.inf, 0, (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp())
    return (p[..., :keys] @ v).transpose(1, 2), lse
