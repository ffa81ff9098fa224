# SPDX-License-Identifier: Apache-2.0
"""examples/python/train_gpt.py runs, and finds attention's work in its profile."""

import json
import pathlib
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples/python/train_gpt.py"


def test_train_gpt(tmp_path):
    path = tmp_path / "result.json"
    shape = ["--steps", "5", "--batch", "1", "--seqlen", "64", "--device", "cpu"]
    command = [sys.executable, EXAMPLE, *shape, "--attention", "both", "--json", path]
    subprocess.run(command, check=True)
    result = json.loads(path.read_text())
    assert {run["attention"] for run in result["runs"]} == {"flashgrad", "torch"}
    assert all(0 < run["attention_share"] < 1 for run in result["runs"])
    assert result["comparison"]["loss_difference_largest"] < 1e-2
