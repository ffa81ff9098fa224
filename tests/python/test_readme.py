# SPDX-License-Identifier: Apache-2.0
"""The Python programs of the README, docs/python.md and the docstrings run as they stand; and what
importing the package costs."""

import doctest
import importlib
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = "".join((ROOT / name).read_text() for name in ("README.md", "docs/python.md"))
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
# The program for Transformers names a model that would have to be downloaded; test_transformers.py
# has its like.
COMPLETE = [program for program in PROGRAMS if "from_pretrained" not in program]


def test_programs_are_found():
    assert len(PROGRAMS) == len(COMPLETE) + 1
    assert [re.match(r"import (\w+)", x)[1] for x in COMPLETE] == ["torch", "jax", "flashgrad"]


@pytest.mark.parametrize("program", COMPLETE, ids=lambda program: program.splitlines()[0])
def test_program_runs(program):
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "name",
    [
        "_functions",
        "torch._flash_attn",
        "torch._sdpa",
        "jax._attention",
        "jax._dot_product_attention",
        "transformers",
    ],
)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"flashgrad.{name}"))
    assert result.attempted > 0 and result.failed == 0


def run(program):
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


def test_import_is_light():
    heavy = ("numpy", "torch", "jax", "jaxlib", "ml_dtypes", "transformers")
    assert run(f"import sys, flashgrad; sys.exit(any(x in sys.modules for x in {heavy}))") == 0


def test_import_is_quick():
    # Of the import alone, since starting Python takes longer; of the processor, since a busy
    # machine is no fault of the package.
    program = (
        "import time; start = time.process_time(); import flashgrad; "
        "print(time.process_time() - start)"
    )
    seconds = [
        float(subprocess.check_output([sys.executable, "-c", program], text=True))
        for _ in range(5)
    ]
    assert statistics.median(seconds) < 0.05
