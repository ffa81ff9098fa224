# SPDX-License-Identifier: Apache-2.0
"""The Python programs outside of the package run: those of examples, and of benchmarks on the CPU."""

import json
import pathlib
import subprocess
import sys

from flashgrad._library import library_path

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(program, *arguments):
    subprocess.run([sys.executable, "-W", "ignore", ROOT / program, *arguments], check=True)


def test_train_gpt(tmp_path):
    path = tmp_path / "result.json"
    shape = ["--steps", "5", "--batch", "1", "--seqlen", "64", "--device", "cpu"]
    run("examples/python/train_gpt.py", *shape, "--attention", "both", "--json", path)
    result = json.loads(path.read_text())
    assert {run["attention"] for run in result["runs"]} == {"flashgrad", "torch"}
    # A profile finds the work of both by its events' names.
    assert all(0 < run["attention_share"] < 1 for run in result["runs"])
    assert result["comparison"]["loss_difference_largest"] < 1e-2


def test_overhead():
    run("benchmarks/overhead.py", "--rounds", "1")


def test_precision():
    run("benchmarks/precision.py", "--seeds", "1", "--steps", "0", "--seqlens", "64")


def test_peers(tmp_path):
    path = tmp_path / "result.json"
    few = ["--processes", "1", "--rounds", "1", "--block-seconds", "0.01", "--dtypes", "bf16"]
    shape = ["--shapes", "1,1,16,8", "--library", library_path()]
    run("benchmarks/peers.py", *shape, *few, "--json", path)
    run("benchmarks/table.py", path)
