# SPDX-License-Identifier: Apache-2.0
"""The GPU half of peers.py: flashgrad beside PyTorch's attention kernels on one NVIDIA GPU.

Every row is timed in two regimes, since the card's power cap pulls its clock down under load:

- cool: single calls, 40 ms apart, median of 10; cycles bind;
- sustained: calls back to back for 0.9 s after 0.4 s of warm-up; energy binds. MHz and joules per
  TFLOP (NVML's counter of energy) are printed beside it.

Contenders take turns row by row, on the same tensors. A contender that refuses a row is listed with
its own words. FLOPs: 4BHS^2d forward and 10BHS^2d backward (2 and 3 of the products have head_dim
columns, the rest head_dim_v), for the visible pairs only.
"""

import ctypes
import dataclasses
import random
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import capi
import contenders

COOL_CALLS = 10
COOL_GAP_SECONDS = 0.04
WARM_UP_SECONDS = 0.4
SUSTAINED_SECONDS = 0.9
# About 0.5 ms of an idle GPU in front of a timed call, in which the host prepares its launches.
SPIN_CYCLES = 1_000_000
FLUSH_BYTES = 256 << 20
TOKENS = 16384
HIDDEN = 2048
ZIPF_EXPONENT = 1.1
ZIPF_SEED = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention problem; `window` is None, "causal", or the left reach of a causal row."""

    head_dim: int
    seqlen: int
    window: object = None
    dtype: str = "bf16"
    heads_q: int = 16
    heads_kv: int = 16
    head_dim_v: int | None = None
    deterministic: bool = False
    lengths: tuple = ()  # of a packed batch

    @property
    def batch(self):
        """Sequences of a batch that is not packed."""
        return TOKENS // self.seqlen

    @property
    def width_v(self):
        """head_dim_v, or head_dim where they are the same."""
        return self.head_dim_v or self.head_dim

    def name(self):
        """The row in words."""
        width = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        mask = {None: "full", "causal": "causal"}.get(self.window, f"window {self.window},0")
        length = f"packed {len(self.lengths)}" if self.lengths else f"{self.seqlen // 1024}k"
        parts = [self.dtype, width, mask, length]
        if self.heads_kv != self.heads_q:
            parts.append(f"GQA {self.heads_q}/{self.heads_kv}")
        if self.deterministic:
            parts.append("deterministic")
        return " ".join(parts)

    def pairs(self):
        """Visible (query, key) pairs of one head."""

        def of(seqlen):
            if self.window is None:
                return seqlen**2
            if self.window == "causal":
                return seqlen**2 / 2
            reach = min(self.window + 1, seqlen)
            return reach * seqlen - reach * (reach - 1) // 2

        if self.lengths:
            return sum(of(n) for n in self.lengths)
        return self.batch * of(self.seqlen)

    def flops(self, which):
        """Multiplications and additions of a pass."""
        products = (1, 1) if which == "forward" else (3, 2)
        columns = products[0] * self.head_dim + products[1] * self.width_v
        return 2 * self.heads_q * self.pairs() * columns


def zipf_lengths(total=TOKENS):
    """Lengths n with P(n) ~ n**-1.1, until they fill `total` tokens; the last is cut."""
    chosen = random.Random(ZIPF_SEED)
    every = range(1, total + 1)
    weights = [n**-ZIPF_EXPONENT for n in every]
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(chosen.choices(every, weights)[0], total - sum(lengths)))
    return tuple(lengths)


def all_rows():
    """The rows of the table in docs/performance.md."""
    rows = []
    for window in (None, "causal"):
        for head_dim in (128, 64, 256):
            heads = HIDDEN // head_dim
            for seqlen in (16384, 4096, 1024):
                rows.append(Row(head_dim, seqlen, window, heads_q=heads, heads_kv=heads))
                if head_dim < 256:  # above, every backward is deterministic
                    rows.append(dataclasses.replace(rows[-1], deterministic=True))
    for seqlen in (16384, 4096):
        rows.append(Row(192, seqlen, "causal", head_dim_v=128))
        rows.append(Row(128, seqlen, "causal", heads_kv=4))
        rows.append(Row(128, seqlen, "causal", dtype="f16"))
    rows.append(Row(128, 16384, 1024))
    lengths = zipf_lengths()
    rows.append(Row(128, max(lengths), "causal", lengths=lengths))
    return rows


class Inputs:
    """Standard normal q, k, v, dout as (batch, seqlen, heads, head_dim); packed without batch."""

    def __init__(self, row):
        torch.manual_seed(0)
        dtype = contenders.DTYPES[row.dtype]
        tokens = (TOKENS,) if row.lengths else (row.batch, row.seqlen)

        def normal(heads, width):
            return torch.randn(*tokens, heads, width, device="cuda", dtype=dtype)

        self.q = normal(row.heads_q, row.head_dim)
        self.k = normal(row.heads_kv, row.head_dim)
        self.v = normal(row.heads_kv, row.width_v)
        self.dout = normal(row.heads_q, row.width_v)
        offsets = [0]
        for length in row.lengths:
            offsets.append(offsets[-1] + length)
        self.cu_seqlens = torch.tensor(offsets, device="cuda", dtype=torch.int32)


class Flashgrad:
    """flashgrad through its C interface."""

    name = "flashgrad"

    def __init__(self, row, inputs, library):
        options = {"deterministic": int(row.deterministic)}
        if row.window is not None:
            options["window_right"] = 0
        if isinstance(row.window, int):
            options["window_left"] = row.window
        shared = {name: getattr(inputs, name) for name in ("q", "k", "v")}
        shared["out"] = torch.empty_like(inputs.dout)
        if row.lengths:
            lse = (row.heads_q, TOKENS)
            shared |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_kv": inputs.cu_seqlens}
            options |= {"max_seqlen_q": max(row.lengths), "max_seqlen_kv": max(row.lengths)}
        else:
            lse = (row.batch, row.heads_q, row.seqlen)
        shared["lse"] = torch.empty(lse, device="cuda")
        self._out = shared["out"]
        self._gradients = {"d" + n: torch.empty_like(shared[n]) for n in ("q", "k", "v")}
        self.forward = capi.Call(library, capi.FORWARD, options, shared)
        self.forward()
        self._backward = capi.Call(
            library, capi.BACKWARD, options, {**shared, "dout": inputs.dout, **self._gradients}
        )
        self.workspace_bytes = self._backward.workspace_bytes

    def backward(self):
        """The backward call alone."""
        self._backward()

    def results(self):
        """out, dq, dk, dv."""
        self.backward()
        return [self._out, *self._gradients.values()]


class PyTorch:
    """scaled_dot_product_attention with one of its kernels, and no other."""

    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}

    def __init__(self, row, inputs, name):
        if row.lengths or isinstance(row.window, int):
            raise ValueError("scaled_dot_product_attention has neither windows nor packed batches")
        if row.deterministic and name != "flash2":
            raise ValueError("no deterministic backward to ask for")
        self.name = name
        self._row = row
        self._qkv = [
            x.transpose(1, 2).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)
        ]
        self._dout = inputs.dout.transpose(1, 2)
        self._out = self._attention()

    def _attention(self):
        with sdpa_kernel(self.kernels[self.name]):
            return F.scaled_dot_product_attention(
                *self._qkv,
                is_causal=self._row.window == "causal",
                enable_gqa=self._row.heads_q != self._row.heads_kv,
            )

    def forward(self):
        """Forward alone, without a graph."""
        with torch.no_grad():
            self._attention()

    def backward(self):
        """The backward operator alone."""
        torch.use_deterministic_algorithms(self._row.deterministic)
        gradients = torch.autograd.grad(self._out, self._qkv, self._dout, retain_graph=True)
        torch.use_deterministic_algorithms(False)
        return gradients

    def results(self):
        """out, dq, dk, dv."""
        return [x.transpose(1, 2) for x in (self._out.detach(), *self.backward())]


class Flex(PyTorch):
    """flex_attention, compiled, with the row's mask."""

    def __init__(self, row, inputs, name):
        from torch.nn.attention import flex_attention  # noqa: PLC0415 - slow to import

        if row.lengths or row.deterministic:
            raise ValueError("not asked of flex_attention here")
        mask = None
        if row.window is not None:
            reach = row.seqlen if row.window == "causal" else row.window

            def visible(_b, _h, i, j):
                return (j <= i) & (i - j <= reach)

            mask = flex_attention.create_block_mask(visible, None, None, row.seqlen, row.seqlen)
        compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
        gqa = row.heads_q != row.heads_kv
        self._attention = lambda: compiled(*self._qkv, block_mask=mask, enable_gqa=gqa)
        self._row, self.name = row, name
        self._qkv = [
            x.transpose(1, 2).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)
        ]
        self._dout = inputs.dout.transpose(1, 2)
        self._out = self._attention()


class Nvml:
    """Clock and energy of one GPU."""

    def __init__(self, index):
        """By its UUID: NVML counts the GPUs that CUDA_VISIBLE_DEVICES hides too."""
        self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        self._lib.nvmlInit_v2()
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        if self._lib.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)) != 0:
            raise RuntimeError(f"NVML does not know {uuid}")

    def joules(self):
        """Energy since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._lib.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def mhz(self):
        """The SMs' clock now."""
        clock = ctypes.c_uint()
        self._lib.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(clock))
        return clock.value

    def driver(self):
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        self._lib.nvmlSystemGetDriverVersion(text, 96)
        return text.value.decode()


def _timed(call):
    """Seconds of one call on the GPU, with the host's share hidden behind a spinning kernel."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure_cool(call, flush, calls=COOL_CALLS, gap_seconds=COOL_GAP_SECONDS):
    """Median seconds of single calls."""
    seconds = []
    for _ in range(calls):
        flush.zero_()
        torch.cuda.synchronize()
        time.sleep(gap_seconds)
        seconds.append(_timed(call))
    return statistics.median(seconds)


def measure_sustained(call, seconds_per_call, nvml):
    """Seconds per call, MHz and watts of calls back to back."""

    def burst(seconds):
        calls = max(1, round(seconds / seconds_per_call))
        for _ in range(calls):
            call()
        return calls

    burst(WARM_UP_SECONDS)
    torch.cuda.synchronize()
    joules = nvml.joules()
    begin = time.perf_counter()
    calls = burst(SUSTAINED_SECONDS)
    # Most launches are queued by now and the GPU is in the middle of them.
    mhz = nvml.mhz()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
    return {
        "seconds": elapsed / calls,
        "mhz": mhz,
        "watts": (nvml.joules() - joules) / elapsed,
    }


def _contender(name, row, inputs, library):
    if name == "flashgrad":
        return Flashgrad(row, inputs, library)
    return (Flex if name == "flex" else PyTorch)(row, inputs, name)


def measure(row, names, passes, library, nvml, flush):
    """The record of one row."""
    inputs = Inputs(row)
    record = {"row": dataclasses.asdict(row), "name": row.name(), "results": {}}
    reference = None
    for name in names:
        result = record["results"].setdefault(name, {})
        try:
            contender = _contender(name, row, inputs, library)
            outputs = contender.results()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            result["refused"] = str(error).strip().splitlines()[0][:200]
            continue
        if reference is None:
            reference = outputs
        else:
            result["difference"] = max(
                contenders.relative_error(x.float(), y.float())
                for x, y in zip(outputs, reference, strict=True)
            )
            if not result["difference"] < contenders.LOOSE_ERROR[row.dtype]:
                result["wrong"] = True
        del outputs
        for which in passes:
            if row.deterministic and which == "forward":  # which always is
                continue
            call = getattr(contender, which)
            flops = row.flops(which)
            cool = measure_cool(call, flush)
            sustained = measure_sustained(call, cool, nvml)
            result[which] = {
                "cool_seconds": cool,
                "cool_tflops": flops / cool / 1e12,
                "sustained_tflops": flops / sustained["seconds"] / 1e12,
                "joules_per_tflop": sustained["watts"] * sustained["seconds"] / flops * 1e12,
                **sustained,
            }
        if hasattr(contender, "workspace_bytes"):
            result["workspace_bytes"] = contender.workspace_bytes
    return record


class Bench:
    """The GPU, the library and the rows."""

    def __init__(self, names, passes, library_path):
        self._names, self._passes = names, passes
        self._library = capi.Library(library_path)
        self._nvml = Nvml(torch.cuda.current_device())
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def facts(self):
        """The device and the versions."""
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "driver": self._nvml.driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "pytorch": torch.__version__,
            "flashgrad": self._library.version,
        }

    def records(self, only=None):
        """Measures row after row; of those whose name contains `only`."""
        for row in all_rows():
            if not only or only in row.name():
                yield measure(
                    row, self._names, self._passes, self._library, self._nvml, self._flush
                )


def render(result):
    """A Markdown table per pass: TFLOP/s cool / sustained, and against the best peer."""
    names = result["contenders"]
    versions = result["versions"]
    parts = [
        f"`{result['command']}`\n{result['date']}, commit {(result['commit'] or 'unknown')[:12]}, "
        f"{versions['device']}, driver {versions['driver']}, CUDA {versions['cuda']}, "
        f"cuDNN {versions['cudnn']}, PyTorch {versions['pytorch']}. "
        "TFLOP/s cool / sustained (MHz, J/TFLOP)."
    ]
    for which in result["passes"]:
        header = [which, *names, "best peer"]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for record in result["rows"]:
            if not any(which in r for r in record["results"].values()):
                continue
            cells = []
            for name in names:
                timing = record["results"][name].get(which)
                cells.append(
                    f"{timing['cool_tflops']:.0f} / {timing['sustained_tflops']:.0f} "
                    f"({timing['mhz']}, {timing['joules_per_tflop']:.2f})"
                    if timing
                    else "refused"
                )
            cells.append(_against_best(record, which))
            lines.append("| " + " | ".join([record["name"], *cells]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _against_best(record, which):
    ours = record["results"]["flashgrad"].get(which)
    peers = [r[which] for n, r in record["results"].items() if n != "flashgrad" and which in r]
    if not ours or not peers:
        return ""
    return " / ".join(
        f"{ours[key] / max(p[key] for p in peers):.2f}x"
        for key in ("cool_tflops", "sustained_tflops")
    )
