#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times flashgrad beside PyTorch's attention in one run: on the CPU, or on one NVIDIA GPU.

    python benchmarks/peers.py                              # the shapes of docs/performance.md
    python benchmarks/peers.py --suite ratios               # flashgrad against itself
    python benchmarks/peers.py --suite memory               # peak memory of one long backward
    python benchmarks/peers.py --shapes 2,12,512,32 --json mine.json
    python benchmarks/peers.py --device cuda                # peers_cuda.py says how

Both libraries get the same tensors and the same number of threads. In each round each of the two
runs for a while, the order swapped from round to round; a row's ratio is the median of the rounds'
ratios, so that a machine that speeds up or slows down moves both. Rows are computed in processes
of their own (--processes), since short shapes can be slower or faster for the life of a process.
Before a row of the speed suite is timed, the two results are compared. Prints a Markdown table;
--json keeps the numbers with the command, the commit, the machine and the date. Exit status: 0, or
1 if results differ or a run failed.
"""

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import signal
import statistics
import subprocess
import sys

import table

ROOT = pathlib.Path(__file__).resolve().parent.parent

# (batch, heads, seqlen, head_dim)
SPEED_SHAPES = (
    (1, 8, 1024, 64), (1, 8, 4096, 64), (1, 8, 1024, 128), (1, 1, 4096, 128), (1, 8, 4096, 128),
)  # fmt: skip
PASSES = ("forward", "backward")


def problem(dtype, shape, window=None, heads_kv=None):
    """The fields of contenders.Problem."""
    batch, heads, seqlen, head_dim = shape
    return {
        "dtype": dtype,
        "batch": batch,
        "heads_q": heads,
        "heads_kv": heads_kv or heads,
        "seqlen": seqlen,
        "head_dim": head_dim,
        "window": window,
    }


def contest(title, which, first, second, measure):
    """A row: two (library, problem) pairs.

    Its ratio divides the second's `measure`, "speed" (FLOP/s) or "time", by the first's.
    """
    keys = ("library", "problem")
    return {
        "title": title,
        "pass": which,
        "first": dict(zip(keys, first, strict=True)),
        "second": dict(zip(keys, second, strict=True)),
        "measure": measure,
    }


def speed_rows(dtypes, shapes, passes):
    """flashgrad against PyTorch."""
    rows = []
    for dtype in dtypes:
        for which in passes:
            for shape in shapes:
                for window in (None, "causal"):
                    p = problem(dtype, shape, window)
                    rows.append(contest("speed", which, ("pytorch", p), ("flashgrad", p), "speed"))
    return rows


def ratio_rows(dtypes, passes):
    """flashgrad against itself: what a feature costs."""
    rows = []

    def add(title, which, first, second, measure):
        rows.append(contest(title, which, ("flashgrad", first), ("flashgrad", second), measure))

    for which in passes:
        for dtype in dtypes:
            for window in (None, "causal"):
                eight = problem(dtype, (1, 8, 4096, 128), window)
                one = problem(dtype, (1, 1, 4096, 128), window)
                add("one head / eight heads", which, eight, one, "speed")
            for head_dim in (64, 128):
                full = problem(dtype, (1, 8, 4096, head_dim))
                causal = problem(dtype, (1, 8, 4096, head_dim), "causal")
                gqa = problem(dtype, (1, 8, 4096, head_dim), heads_kv=2)
                add("GQA 8/2 / GQA 8/8", which, full, gqa, "time")
                add("causal / full", which, full, causal, "time")
            full = problem(dtype, (1, 1, 32768, 64))
            add("window 256 / full", which, full, problem(dtype, (1, 1, 32768, 64), 256), "time")
        for head_dim in (64, 128):
            shape = (1, 8, 4096, head_dim)
            add("f16 / f32", which, problem("f32", shape), problem("f16", shape), "speed")
    return rows


def memory_rows(dtypes, tokens):
    """The memory of one head's backward."""
    return [
        {
            "title": "memory",
            "pass": "backward",
            "library": library,
            "problem": problem(dtype, (1, 1, tokens, 64)),
        }
        for dtype in dtypes
        for library in ("flashgrad", "pytorch")
    ]


def run_worker(job, on_row, environment=None):
    """Runs rows in a process of their own; calls on_row with each finished one."""
    worker = subprocess.Popen(
        [sys.executable, str(pathlib.Path(__file__).with_name("worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    facts = None
    try:
        worker.stdin.write(json.dumps(job))
        worker.stdin.close()
        for line in worker.stdout:
            message = json.loads(line)
            if "facts" in message:
                facts = message["facts"]
            else:
                on_row(message["row"])
        if worker.wait() != 0:
            sys.exit(f"peers.py: the worker ended with status {worker.returncode}")
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    return facts


class Progress:
    """A bar on stderr; one line per row where stderr is no terminal."""

    def __init__(self, total):
        self._total = total
        self._done = 0

    def step(self, text):
        """One row more is done."""
        self._done += 1
        filled = 30 * self._done // self._total
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {self._done}/{self._total} {text}"
        if sys.stderr.isatty():
            end = "\n" if self._done == self._total else ""
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def describe(row):
    """A row in one line."""
    p = row.get("problem") or row["second"]["problem"]
    mask = table.mask_name(p["window"])
    return (
        f"{row['title']} {row['pass']} {p['dtype']} "
        f"({p['batch']},{p['heads_q']},{p['seqlen']},{p['head_dim']}) {mask}"
    )


def summarise(row):
    """Adds what follows from the rounds."""
    for side in ("first", "second"):
        seconds = statistics.median(row["seconds"][side])
        row[side]["seconds"] = seconds
        row[side]["gflops"] = row[side]["flops"] / seconds / 1e9
    work = row["second"]["flops"] / row["first"]["flops"] if row["measure"] == "speed" else 1
    times = zip(row["seconds"]["first"], row["seconds"]["second"], strict=True)
    ratios = [work * a / b if row["measure"] == "speed" else b / a for a, b in times]
    row["ratio"] = statistics.median(ratios)
    row["ratio_range"] = [min(ratios), max(ratios)]


def machine():
    """What the numbers depend on, as lscpu knows it."""
    try:
        text = subprocess.run(["lscpu", "-J"], capture_output=True, text=True, check=True).stdout
        fields = {f["field"].rstrip(":"): f["data"] for f in json.loads(text)["lscpu"]}
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError):
        fields = {}
    flags = fields.get("Flags", "").split()
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd")
    return {
        "cpu": fields.get("Model name", platform.processor()),
        "architecture": platform.machine(),
        "family_model": f"{fields.get('CPU family', '?')}/{fields.get('Model', '?')}",
        "cpus": os.cpu_count(),
        "isa": [f for f in flags if f in wanted],
        "caches": {k: v for k, v in fields.items() if "cache" in k},
        "hypervisor": fields.get("Hypervisor vendor"),
        "system": f"{platform.system()} {platform.release()}",
    }


def commit():
    """The commit that is checked out, and whether tracked files differ from it."""

    def git(*args):
        run = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        return run.stdout.strip() if run.returncode == 0 else None

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(git("status", "-s", "-uno")),
        }
    except OSError:
        return {"commit": None, "uncommitted_changes": None}


def provenance(argv):
    """The command, the date and the commit of a result."""
    relative = [a.replace(f"{ROOT}/", "") for a in argv]
    return {
        "command": shlex.join(["python", "benchmarks/peers.py", *relative]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **commit(),
    }


def parse_shape(text):
    """B,H,S,D."""
    sizes = tuple(int(n) for n in text.split(","))
    if len(sizes) != 4 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"got '{text}', want BATCH,HEADS,SEQLEN,HEAD_DIM")
    return sizes


def positive(text):
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, want 1 or more")
    return number


def parse_arguments(argv):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--contenders", nargs="+", choices=("flashgrad", "cudnn", "flash2", "flex"),
                        default=("flashgrad", "cudnn", "flash2"), help="on a GPU")  # fmt: skip
    parser.add_argument("--only", help="on a GPU: rows whose name contains this")
    parser.add_argument("--suite", choices=("speed", "ratios", "memory"), default="speed")
    parser.add_argument("--dtypes", nargs="+", choices=("f32", "bf16", "f16"),
                        help="default: f32 bf16 (memory: bf16)")  # fmt: skip
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=SPEED_SHAPES,
                        metavar="B,H,S,D", help="of the speed suite")  # fmt: skip
    parser.add_argument("--tokens", type=positive, default=65536, help="of the memory suite")
    parser.add_argument("--layout", choices=("bshd", "bhsd"), default="bshd",
                        help="order of the tensors in memory (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=7, help="per process")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--block-seconds", type=float, default=0.1,
                        help="how long one contender runs in a round")  # fmt: skip
    parser.add_argument("--backend", help="of flashgrad; default: its own choice")
    parser.add_argument("--library", help="libflashgrad.so; default: $FLASHGRAD_LIBRARY, else "
                        "build/release")  # fmt: skip
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    arguments.dtypes = arguments.dtypes or {"memory": ["bf16"]}.get(
        arguments.suite, ["f32", "bf16"]
    )
    return arguments


def measure_contests(arguments, rows, settings):
    """Times rows in --processes processes and merges the rounds."""
    progress = Progress(len(rows) * arguments.processes)
    merged = [None] * len(rows)
    facts = None
    for _ in range(arguments.processes):
        index = 0

        def take(row):
            nonlocal index
            if merged[index] is None:
                merged[index] = row
            else:
                for side, seconds in row["seconds"].items():
                    merged[index]["seconds"][side] += seconds
            summarise(merged[index])
            progress.step(f"{describe(row)}: {merged[index]['ratio']:.3f}")
            index += 1

        facts = run_worker({**settings, "rows": rows}, take)
    return merged, facts


def measure_memory(rows, settings):
    """Each row in a process of its own, with malloc told to give freed blocks back at once."""
    progress = Progress(len(rows))
    finished = []
    facts = None
    for row in rows:
        facts = run_worker(
            {**settings, "rows": [row]}, finished.append, {"MALLOC_MMAP_THRESHOLD_": "65536"}
        )
        progress.step(f"{describe(row)} {row['library']}: {finished[-1]['ratio']:.2f}")
    return finished, facts


def main_cuda(arguments, argv):
    """The rows of peers_cuda.py; the same kinds of output and exit status."""
    import peers_cuda  # noqa: PLC0415 - only where a GPU is asked for

    bench = peers_cuda.Bench(arguments.contenders, arguments.passes, arguments.library)
    rows = []
    result = {
        "suite": "cuda",
        **provenance(argv),
        "contenders": arguments.contenders,
        "passes": arguments.passes,
        "versions": bench.facts(),
        "rows": rows,
    }
    for record in bench.records(arguments.only):
        print(record["name"], file=sys.stderr, flush=True)
        for name, side in record["results"].items():
            words = side.get("refused") or ", ".join(
                f"{which} {side[which]['cool_tflops']:.0f}/{side[which]['sustained_tflops']:.0f}"
                for which in arguments.passes
                if which in side
            )
            print(f"    {name}: {words}", file=sys.stderr, flush=True)
        rows.append(record)
        if arguments.json:  # after each row: a run that is cut short keeps what it has
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(peers_cuda.render(result))
    wrong = [
        f"{row['name']}: {name}"
        for row in rows
        for name, side in row["results"].items()
        if side.get("wrong") or (name == "flashgrad" and "refused" in side)
    ]
    for line in wrong:
        print(f"peers.py: {line}: refused, or the results differ", file=sys.stderr)
    return 1 if wrong else 0


def main(argv):
    """Measures, prints, writes; returns the exit status."""
    arguments = parse_arguments(argv)
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"peers.py: {sys.executable} has no PyTorch; see benchmarks/README.md")
    if arguments.device == "cuda":
        return main_cuda(arguments, argv)
    # So that a peers.py that is told to end takes its worker with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"peers.py: the load average is {load:.1f} before anything runs: what shares the "
            "machine makes barriers slow, and ratios wrong",
            file=sys.stderr,
        )
    settings = {
        name: getattr(arguments, name)
        for name in ("layout", "threads", "rounds", "block_seconds", "backend", "library")
    }
    if arguments.suite == "memory":
        rows, facts = measure_memory(memory_rows(arguments.dtypes, arguments.tokens), settings)
    else:
        rows = (
            speed_rows(arguments.dtypes, arguments.shapes, arguments.passes)
            if arguments.suite == "speed"
            else ratio_rows(arguments.dtypes, arguments.passes)
        )
        rows, facts = measure_contests(arguments, rows, settings)
    result = {
        "suite": arguments.suite,
        **provenance(argv),
        "machine": machine(),
        "load_average_before": load,
        "processes": arguments.processes,
        **{k: v for k, v in settings.items() if k != "library"},
        "versions": facts,
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_", "FLASHGRAD_CPU_"))
        },
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table.render(result))
    wrong = [row for row in rows if row.get("wrong")]
    for row in wrong:
        print(f"peers.py: {describe(row)}: {row['wrong']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
