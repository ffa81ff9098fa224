# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a call come: with the heads first, or packed into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# q, k, v as the operators take them; packed along a dimension, (q, kv) or (qkv,); or one of those
# below.
Layout = int | str | None
# q, k and v come (batch, heads, seqlen, head_dim), and so are their gradients; out and dout
# likewise, or (batch, seqlen, heads, head_dim) as everywhere else.
HEADS_FIRST = "heads first"
HEADS_FIRST_TO_ROWS = "heads first, out not"


def parts(tensors: Sequence[Any], layout: Layout) -> Sequence[Any]:
    """q, k and v of what comes, as it comes heads first; a packed None: three None."""
    if not isinstance(layout, int):
        return tensors
    *separate, packed = tensors
    if packed is None:
        return [*separate, *[None] * (3 - len(separate))]
    return [*separate, *packed.unbind(layout)]


def empty_like(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The memory of a gradient: compact, or heads first in the order of x's dimensions."""
    if isinstance(layout, str):
        result = torch.empty_like(x)
        if result.stride(-1) == 1:
            return result
    return torch.empty_like(x, memory_format=torch.contiguous_format)
