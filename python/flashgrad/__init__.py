# SPDX-License-Identifier: Apache-2.0
"""flashgrad: exact attention for training, forward and backward.

``forward`` and ``backward`` take NumPy arrays and anything that speaks DLPack.
``flashgrad.torch`` and ``flashgrad.jax`` have functions with gradients, ``flashgrad.transformers``
registers flashgrad with Hugging Face Transformers. Importing flashgrad imports none of these
libraries.
"""

from ._functions import backward, forward
from ._library import Backend, backends

__all__ = ["Backend", "__version__", "backends", "backward", "forward"]

# The library's own; a test compares the two.
__version__ = "0.1.0"
