# SPDX-License-Identifier: Apache-2.0
"""JAX functions over flashgrad: attention with gradients, and JAX's own dot_product_attention.

They work under ``jit``, ``grad``, ``vmap`` and ``shard_map``, on the CPU and on CUDA. Importing
this module registers flashgrad with XLA, which programs that were exported with it need too.
"""

from ._attention import attention
from ._dot_product_attention import dot_product_attention
from ._ffi import register

__all__ = ["attention", "dot_product_attention"]

register()
