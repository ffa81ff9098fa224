# SPDX-License-Identifier: Apache-2.0
"""What a call costs in Python before and after the library works, on problems too small to matter.

    python benchmarks/overhead.py --json result.json
    python benchmarks/overhead.py --device cuda --json result.json

    flash_attn_func   forward and backward on (1, 1, 1, 8), beside PyTorch's own
                      scaled_dot_product_attention; on a GPU on (1, 128, 4, 64), and beside
                      two of its kernels; likewise flash_attn_varlen_func on one sequence, and
                      flashgrad's scaled_dot_product_attention
    forward           on NumPy arrays, beside its two calls of the C library
    import flashgrad  in a fresh process

Each figure is the least of many rounds, taken in turn with what it is compared to: overhead has no
spread of its own, only what a busy machine adds to it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import flashgrad
import numpy as np
import peers
import torch
import torch.nn.functional as F
from flashgrad import _call
from flashgrad.torch import (
    flash_attn_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

CALLS = 40  # in a round: shorter than a time slice of a busy machine


def microseconds(
    functions: dict[str, Callable[[], object]],
    rounds: int,
    contexts: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] | None = None,
) -> dict[str, float]:
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            with contexts[name]() if contexts else contextlib.nullcontext():
                start = time.perf_counter()
                for _ in range(CALLS):
                    function()
                least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e6)
    return least


def packed(rows: int) -> Callable[..., torch.Tensor]:
    """flash_attn_varlen_func on one sequence, which lies where the tensors do."""
    offsets: dict[torch.device, torch.Tensor] = {}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cu = offsets.get(q.device)
        if cu is None:
            cu = offsets[q.device] = torch.tensor([0, rows], dtype=torch.int32, device=q.device)
        return flash_attn_varlen_func(q, k, v, cu, cu, rows, rows)

    return attention


def on_torch(rounds: int) -> dict[str, float]:
    def step(attention: Callable[..., torch.Tensor], *shape: int) -> Callable[[], None]:
        inputs = [torch.randn(shape, requires_grad=True) for _ in "qkv"]
        dout = torch.randn(shape)

        def both() -> None:
            attention(*inputs).backward(dout)
            for x in inputs:
                x.grad = None

        return both

    functions = {
        "flash_attn_func": step(flash_attn_func, 1, 1, 1, 8),
        "flash_attn_varlen_func": step(packed(1), 1, 1, 8),
        "flashgrad's sdpa": step(scaled_dot_product_attention, 1, 1, 1, 8),
        "sdpa": step(F.scaled_dot_product_attention, 1, 1, 1, 8),
    }
    return microseconds(functions, rounds)


def on_cuda(rounds: int) -> dict[str, float]:
    """One sequence of 128 rows, 4 heads of 64, bf16, until the host has launched the kernels.

    Their work is over before that. Rows first for flash_attn_func, heads first for the others.
    """

    def tensors(*shape: int) -> list[torch.Tensor]:
        return [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
        ]

    rows_first, heads_first, rows = (
        tensors(*shape) for shape in ((1, 128, 4, 64), (1, 4, 128, 64), (128, 4, 64))
    )
    douts = {id(x): torch.randn_like(x[0]) for x in (rows_first, heads_first, rows)}

    def forward(attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
        with torch.no_grad():
            attention(*inputs)

    def both(attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
        attention(*inputs).backward(douts[id(inputs)])
        for x in inputs:
            x.grad = None

    functions = {
        "flash_attn_func": (flash_attn_func, rows_first, None),
        "flash_attn_varlen_func": (packed(128), rows, None),
        "flashgrad's sdpa": (scaled_dot_product_attention, heads_first, None),
        "sdpa": (F.scaled_dot_product_attention, heads_first, None),
        "sdpa, flash": (
            F.scaled_dot_product_attention, heads_first, SDPBackend.FLASH_ATTENTION
        ),
        "sdpa, cuDNN": (
            F.scaled_dot_product_attention, heads_first, SDPBackend.CUDNN_ATTENTION
        ),
    }  # fmt: skip

    def context(backend: SDPBackend | None) -> contextlib.AbstractContextManager[Any]:
        """Entered once a round: PyTorch's choice of a kernel takes as long as a forward."""
        return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)

    return {
        f"{name}, {step.__name__}": least
        for step in (forward, both)
        for name, least in microseconds(
            {n: lambda s=step, f=f, x=x: s(f, x) for n, (f, x, _) in functions.items()},
            rounds,
            {n: lambda b=b: context(b) for n, (_, _, b) in functions.items()},
        ).items()
    }


def on_numpy(rounds: int) -> dict[str, float]:
    q = k = v = np.ones((1, 1, 1, 8), np.float32)
    call = _call.Call()
    for slot, x in enumerate((q, k, v, np.empty_like(q), np.empty((1, 1, 1), np.float32))):
        call.add(slot, x)
    options = _call.pack_options(
        2**63 - 1, 2**63 - 1, False, None, 0.0, False, 0, 0, 0, None
    )
    workspace = np.empty(call.prepare(0, options), np.uint8)
    address = workspace.ctypes.data

    def in_c() -> None:
        call.prepare(0, options)
        call.launch(0, address, workspace.size, 0)

    return microseconds({"forward": lambda: flashgrad.forward(q, k, v), "c_calls": in_c}, rounds)


def import_seconds(rounds: int) -> float:
    program = (
        "import time; start = time.perf_counter(); import flashgrad; "
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", program]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **peers.commit(),
        "machine": peers.machine(),
        "load_average_before": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if arguments.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
        result["cuda_us"] = on_cuda(arguments.rounds)
    else:
        pair = result["torch_us"] = on_torch(arguments.rounds)
        result["torch_ratio"] = pair["flash_attn_func"] / pair["sdpa"]
        pair = result["numpy_us"] = on_numpy(arguments.rounds)
        result["numpy_over_c_us"] = pair["forward"] - pair["c_calls"]
        result["import_seconds"] = import_seconds(10)
    for name, value in result.items():
        if name.endswith(("us", "ratio", "seconds")):
            print(name, value)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
