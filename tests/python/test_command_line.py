# SPDX-License-Identifier: Apache-2.0
"""The command line that comes with the wheel, in an environment without anything else."""

import json
import pathlib
import re
import subprocess
import sys

import flashgrad
import numpy as np
import pytest

PROGRAM = pathlib.Path(sys.prefix) / "bin" / "flashgrad"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"no {PROGRAM}: not the wheel")

# glibc's, some of which newer versions have inside of libc, and GCC's runtime libraries.
SYSTEM = "linux-vdso ld-linux-x86-64 libc libm libdl librt libpthread libgcc_s libstdc++ libgomp"


def command(*arguments, folder):
    """What the program prints, started without any environment."""
    run = subprocess.run(
        [PROGRAM, *arguments], cwd=folder, env={}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_needs_nothing_that_only_a_build_has():
    files = [PROGRAM, *pathlib.Path(flashgrad.__file__).parent.glob("*.so")]
    assert len(files) >= 2
    for file in files:
        run = subprocess.run(["ldd", file], capture_output=True, text=True, check=True)
        names = re.findall(r"^\s*(?:\S*/)?([^\s/]+?)\.so", run.stdout, re.MULTILINE)
        assert "libc" in names
        others = set(names) - set(SYSTEM.split())
        # The handlers' library finds the other one by its name, when that is loaded.
        assert others <= ({"libflashgrad"} if file.name == "libflashgrad_xla.so" else set())


def write_safetensors(path, tensors):
    header, begin = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": x.shape, "data_offsets": [begin, begin + x.nbytes]}
        begin += x.nbytes
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, x in header.items():
        begin, end = (8 + length + offset for offset in x["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], np.float32).reshape(x["shape"])
    return tensors


def test_run(tmp_path):
    inputs = np.random.default_rng(0).normal(size=(4, 2, 33, 4, 16)).astype(np.float32)
    q, k, v, dout = inputs
    write_safetensors(tmp_path / "in.safetensors", dict(zip(("q", "k", "v", "dout"), inputs)))
    files = ("--input", "in.safetensors", "--output", "out.safetensors")
    command("run", *files, "--causal", "--check", folder=tmp_path)
    got = read_safetensors(tmp_path / "out.safetensors")
    out, lse = flashgrad.forward(q, k, v, causal=True)
    gradients = flashgrad.backward(dout, q, k, v, out, lse, causal=True)
    for name, want in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients)):
        np.testing.assert_array_equal(got[name], want)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("info",), "reference"),
        (("check", "--shape", "b=1,hq=2,hkv=1,sq=33,sk=40,d=16", "--causal"), "ok"),
        (("bench", "--help"), "--json"),
        (("plan", "roofline"), "h200"),
    ],
)
def test_other_commands(arguments, words, tmp_path):
    assert words in command(*arguments, folder=tmp_path)
