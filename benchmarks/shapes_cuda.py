# SPDX-License-Identifier: Apache-2.0
"""Many shapes beside PyTorch's kernels on one NVIDIA GPU: what the rows of peers.py don't show.

    python benchmarks/shapes_cuda.py [--only TEXT] [--library LIB] [--against LIB] [--json FILE]

Microseconds of whole calls, cool: single calls 6 ms apart, the L2 flushed before each, the median
of 5. The peer is cuDNN, or, for what it refuses, PyTorch's FlashAttention-2. `--against` times
another build of flashgrad on the same tensors instead. out, dq, dk and dv are compared with the
peer's; exit status 1 if they are not the same attention.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import capi
import contenders
import peers_cuda

CALLS = 5
GAP_SECONDS = 0.006
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call. `rows` and `keys` are of each of the `batch` sequences."""

    batch: int
    rows: int
    keys: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool = False
    head_dim_v: int | None = None
    window: int | None = None  # how far to the left a row sees; causal
    deterministic: bool = False
    packed: bool = False  # the same sequences by cu_seqlens
    f32_gradients: bool = False

    def name(self):
        """The shape in words."""
        length = (
            str(self.rows) if self.rows == self.keys else f"{self.rows} rows and {self.keys} keys"
        )
        heads = str(self.heads_q) + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        width = str(self.head_dim) + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        mask = "causal" if self.causal else "full"
        parts = [f"batch {self.batch}", length, f"heads {heads}", f"head_dim {width}", mask]
        if self.window is not None:
            parts[-1] = f"window {self.window}"
        parts += [w for w in ("packed", "deterministic") if getattr(self, w)]
        if self.f32_gradients:
            parts.append("f32 gradients")
        return ", ".join(parts)


def _same(batch, length, heads_q, heads_kv, head_dim, **more):
    return Shape(batch, length, length, heads_q, heads_kv, head_dim, **more)


def all_shapes():
    """Few key heads, few heads, short sequences, rows unlike keys, head dims, other options."""
    for causal in (True, False):
        for length in (1024, 2048, 4096, 16384):
            for heads_kv in (16, 8, 4, 2, 1):
                yield _same(16384 // length, length, 16, heads_kv, 128, causal=causal)
    for length in (1024, 4096):
        for heads_kv in (8, 1):
            yield _same(16384 // length, length, 32, heads_kv, 64, causal=True)
        for heads_kv in (2, 1):
            yield _same(16384 // length, length, 8, heads_kv, 256, causal=True)
    for batch, length, heads_q, heads_kv, head_dim in (
        (1, 16384, 1, 1, 128), (1, 16384, 2, 2, 128), (1, 16384, 8, 1, 128), (1, 8192, 4, 1, 128),
        (1, 8192, 8, 1, 128), (1, 4096, 4, 4, 128), (1, 4096, 8, 8, 128), (1, 4096, 32, 8, 128),
        (1, 2048, 2, 2, 64), (1, 1024, 16, 16, 128),
    ):  # fmt: skip
        yield _same(batch, length, heads_q, heads_kv, head_dim, causal=True)
    for length in (16, 32, 49, 64, 100, 128, 197, 256, 512):
        for head_dim in (64, 128):
            for causal in (False, True):
                yield _same(16384 // length, length, 16, 16, head_dim, causal=causal)
    yield _same(512, 32, 12, 12, 64)
    yield _same(4096, 49, 4, 4, 32)
    yield _same(256, 64, 16, 4, 128, causal=True)
    for length in (1, 32, 128):
        yield _same(16384 // length, length, 16, 16, 64, causal=True, packed=True)
    for batch, length in ((16, 1000), (10, 1500), (5, 3000), (3, 5000)):
        for causal in (False, True):
            yield _same(batch, length, 16, 16, 128, causal=causal)
    for heads_q, heads_kv, head_dim in ((32, 8, 64), (16, 4, 96), (12, 12, 128)):
        yield _same(3, 1500, heads_q, heads_kv, head_dim, causal=True)
    yield Shape(4, 128, 16384, 16, 16, 128)
    yield Shape(4, 16384, 128, 16, 16, 128)
    yield Shape(2, 1, 16384, 16, 4, 128)
    yield Shape(1, 1, 131072, 32, 8, 128)
    yield Shape(8, 1, 4096, 16, 16, 128)
    yield Shape(8, 16, 4096, 32, 8, 128)
    yield Shape(2, 77, 4096, 10, 10, 64)
    yield Shape(2, 4096, 77, 10, 10, 64)
    for head_dim in (40, 72, 80, 96, 112, 160, 192, 256):
        yield _same(4, 4096, 16, 16, head_dim, causal=True)
    for head_dim in (59, 63, 100, 127, 129, 191):
        yield _same(4, 4096, 16, 16, head_dim, causal=True)
    yield _same(16, 1024, 16, 16, 80, causal=True)
    yield _same(4, 4096, 16, 1, 192, head_dim_v=128, causal=True)
    yield _same(16, 1024, 16, 16, 192, head_dim_v=128, causal=True)
    yield _same(4, 4096, 16, 16, 128, causal=True, f32_gradients=True)
    for window in (128, 512, 4096):
        yield _same(1, 16384, 16, 16, 128, causal=True, window=window)
    for length in (1024, 4096):
        for heads_kv in (16, 2, 1):
            yield _same(16384 // length, length, 16, heads_kv, 128, causal=True, deterministic=True)


def make_inputs(shape):
    """Standard normal q, k, v, dout as (batch, rows, heads, head_dim)."""
    torch.manual_seed(0)

    def normal(rows, heads, width):
        return torch.randn(shape.batch, rows, heads, width, device="cuda", dtype=torch.bfloat16)

    width_v = shape.head_dim_v or shape.head_dim
    return {
        "q": normal(shape.rows, shape.heads_q, shape.head_dim),
        "k": normal(shape.keys, shape.heads_kv, shape.head_dim),
        "v": normal(shape.keys, shape.heads_kv, width_v),
        "dout": normal(shape.rows, shape.heads_q, width_v),
    }


class Flashgrad:
    """flashgrad through its C interface."""

    def __init__(self, shape, inputs, library):
        options = {"deterministic": int(shape.deterministic)}
        if shape.causal:
            options["window_right"] = 0
        if shape.window is not None:
            options["window_left"] = shape.window
        lse = (shape.batch, shape.heads_q, shape.rows)
        offsets = {}
        if shape.packed:
            inputs = {name: x.flatten(0, 1) for name, x in inputs.items()}
            lse = (shape.heads_q, shape.batch * shape.rows)
            options |= {"max_seqlen_q": shape.rows, "max_seqlen_kv": shape.keys}
            count = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32)
            offsets = {"cu_seqlens_q": count * shape.rows, "cu_seqlens_kv": count * shape.keys}
        shared = {name: inputs[name] for name in ("q", "k", "v")} | offsets
        shared |= {"out": torch.empty_like(inputs["dout"]), "lse": torch.empty(lse, device="cuda")}
        dtype = torch.float32 if shape.f32_gradients else None
        gradients = {"d" + n: torch.empty_like(shared[n], dtype=dtype) for n in ("q", "k", "v")}
        self.forward = capi.Call(library, capi.FORWARD, options, shared)
        self.forward()
        self.backward = capi.Call(
            library, capi.BACKWARD, options, shared | {"dout": inputs["dout"]} | gradients
        )
        self.backward()
        self.results = [shared["out"], *gradients.values()]


class PyTorch:
    """scaled_dot_product_attention with one of its kernels, and no other."""

    def __init__(self, shape, inputs, name):
        if shape.causal and shape.rows != shape.keys:
            raise ValueError("its causal mask is aligned to the top left")
        if shape.window is not None:
            raise ValueError("no windows")
        self._kernel = PEERS[name]
        self._options = {
            "is_causal": shape.causal,
            "enable_gqa": shape.heads_q != shape.heads_kv,
        }
        self._qkv = [inputs[n].transpose(1, 2).detach().requires_grad_() for n in ("q", "k", "v")]
        self._dout = inputs["dout"].transpose(1, 2)
        self._out = self._attention()
        self.results = [x.transpose(1, 2) for x in (self._out.detach(), *self.backward())]

    def _attention(self):
        with sdpa_kernel(self._kernel):
            return F.scaled_dot_product_attention(*self._qkv, **self._options)

    def forward(self):
        """Forward alone, without a graph."""
        with torch.no_grad():
            self._attention()

    def backward(self):
        """The backward operator alone."""
        return torch.autograd.grad(self._out, self._qkv, self._dout, retain_graph=True)


def make_peer(shape, inputs, against):
    """(name, contender) of the first that takes the shape, or (None, None)."""
    if against is not None:
        return "against", Flashgrad(shape, inputs, against)
    warnings.filterwarnings("ignore", category=UserWarning)  # why a kernel does not take the shape
    for name in PEERS:
        try:
            return name, PyTorch(shape, inputs, name)
        except (RuntimeError, ValueError):
            continue
    return None, None


def measure(shape, library, against, flush):
    """The record of one shape."""
    inputs = make_inputs(shape)
    record = {"call": shape.name()}
    ours = Flashgrad(shape, inputs, library)
    name, peer = make_peer(shape, inputs, against)
    record["peer"] = name
    for which in PASSES:
        record[which] = [
            None
            if contender is None
            else round(
                1e6 * peers_cuda.measure_cool(getattr(contender, which), flush, CALLS, GAP_SECONDS),
                1,
            )
            for contender in (ours, peer)
        ]
    if peer is not None:
        pairs = list(zip(ours.results, peer.results, strict=True))
        if shape.keys == 1:  # dq and dk are 0 but for roundings
            pairs = [pairs[0], pairs[3]]
        record["difference"] = max(
            contenders.relative_error(x.float(), y.float().reshape(x.shape)) for x, y in pairs
        )
    return record


def render(record):
    """A line of a Markdown table."""
    cells = [record["call"], record["peer"] or ""]
    for which in PASSES:
        ours, peer = record[which]
        cells += [
            f"{ours:.0f}",
            f"{peer:.0f}" if peer else "",
            f"{peer / ours:.2f}" if peer else "",
        ]
    return "| " + " | ".join(cells) + " |"


def main():
    """Parses the arguments, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", help="shapes whose name contains it")
    parser.add_argument("--library", help="libflashgrad.so")
    parser.add_argument("--against", help="another libflashgrad.so, in the peers' place")
    parser.add_argument("--commit", help="for the result file")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    arguments = parser.parse_args()
    library = capi.Library(arguments.library)
    against = capi.Library(arguments.against) if arguments.against else None
    flush = torch.empty(peers_cuda.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    print("| us | peer | forward: flashgrad | peer | peer / ours | backward: flashgrad | peer | |")
    print("|---|---|---|---|---|---|---|---|")
    records = []
    for shape in all_shapes():
        if not arguments.only or arguments.only in shape.name():
            records.append(measure(shape, library, against, flush))
            print(render(records[-1]), flush=True)
    if arguments.json:
        result = {
            "suite": "shapes",
            "what": "us of whole calls, cool (6 ms apart, L2 flushed, median of 5): [ours, peer]",
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": arguments.commit,
            "versions": {
                "device": torch.cuda.get_device_name(),
                "driver": peers_cuda.Nvml(torch.cuda.current_device()).driver(),
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
                "pytorch": torch.__version__,
                "flashgrad": library.version,
            },
            "rows": records,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    wrong = [r for r in records if r.get("difference", 0) > contenders.LOOSE_ERROR["bf16"]]
    for record in wrong:
        print(f"not the same attention: {record['call']}: {record['difference']:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
