# SPDX-License-Identifier: Apache-2.0
"""Tests of the Python package: `pytest` in the root, with the package installed.

To test a build without installing it: `FLASHGRAD_LIBRARY=build/release/src/libflashgrad.so pytest`
takes the Python files from the source tree.
"""

import os
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]
if "FLASHGRAD_LIBRARY" in os.environ:
    os.environ["FLASHGRAD_LIBRARY"] = str(pathlib.Path(os.environ["FLASHGRAD_LIBRARY"]).resolve())
    sys.path.insert(0, str(_ROOT / "python"))
    # For the tests that start a Python of their own.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_ROOT / "python"), os.environ.get("PYTHONPATH")])
    )
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
# Read when JAX starts: two CPU devices for shard_map, and memory of a GPU left to PyTorch.
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
