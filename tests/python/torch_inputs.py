# SPDX-License-Identifier: Apache-2.0
"""Inputs of the tests of flashgrad.torch, and how results are compared."""

import flashgrad.torch  # noqa: F401 (its operators)
import torch

FORWARD, BACKWARD = torch.ops.flashgrad.forward.default, torch.ops.flashgrad.backward.default


def tensors(*shapes, dtype=torch.float32, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for shape in shapes
    ]


def close(got, want, tolerance=3e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance)


def qkv(seqlen_q=13, seqlen_k=17, heads_q=4, heads_k=2, **options):
    return tensors(
        (2, seqlen_q, heads_q, 8), (2, seqlen_k, heads_k, 8), (2, seqlen_k, heads_k, 8), **options
    )


def operator_options(sinks=None, cu=None, max_seqlen=0, left=None, right=0):
    """The arguments of FORWARD after q, k and v."""
    return (
        sinks,
        cu,
        cu,
        None,
        None,
        None,
        max_seqlen,
        max_seqlen,
        left,
        right,
        False,
        None,
        0.0,
        False,
    )
