# SPDX-License-Identifier: Apache-2.0
"""PyTorch functions over flashgrad: flash-attn's, and PyTorch's scaled_dot_product_attention.

They work under autograd, autocast, activation checkpointing and ``torch.compile(fullgraph=True)``.
"""

from . import _flops as _flops
from ._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._sdpa import scaled_dot_product_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "scaled_dot_product_attention",
]
