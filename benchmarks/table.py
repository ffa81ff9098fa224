#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns result files of peers.py into Markdown.

    python benchmarks/table.py benchmarks/results/FILE.json ...
"""

import json
import pathlib
import statistics
import sys


def mask_name(window):
    """Words for contenders.Problem.window."""
    if window is None:
        return "full"
    return window if isinstance(window, str) else f"window {window}"


def _shape(problem):
    heads = f"{problem['heads_q']}"
    if problem["heads_kv"] != problem["heads_q"]:
        heads += f"/{problem['heads_kv']}"
    return f"{problem['batch']},{heads},{problem['seqlen']},{problem['head_dim']}"


def _markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _speed(rows):
    """One table per dtype, forward and backward side by side."""
    parts = []
    for dtype in dict.fromkeys(row["first"]["problem"]["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["first"]["problem"]["dtype"] == dtype]
        passes = list(dict.fromkeys(row["pass"] for row in of_dtype))
        header = ["B,H,S,d", "mask"]
        for which in passes:
            header += [f"{which}: PyTorch GFLOP/s", "flashgrad GFLOP/s", "ratio (rounds)"]
        lines = {}
        for row in of_dtype:
            p = row["first"]["problem"]
            line = lines.setdefault((_shape(p), mask_name(p["window"])), {})
            low, high = row["ratio_range"]
            line[row["pass"]] = [
                f"{row['first']['gflops']:.0f}",
                f"{row['second']['gflops']:.0f}",
                f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
            ]
        body = [[*key, *(cell for w in passes for cell in line[w])] for key, line in lines.items()]
        for name, of in (("geometric mean", statistics.geometric_mean), ("lowest", min)):
            body.append([name, ""])
            for which in passes:
                ratios = [row["ratio"] for row in of_dtype if row["pass"] == which]
                body[-1] += ["", "", f"{of(ratios):.2f}"]
        parts.append(f"{dtype}:\n\n" + _markdown(header, body))
    return "\n\n".join(parts)


def _ratios(rows):
    header = ["second / first", "pass", "first", "second", "first ms", "second ms", "of", "ratio"]
    body = []
    for row in rows:
        first, second = row["first"], row["second"]
        body.append([row["title"], row["pass"]])
        for side in (first, second):
            p = side["problem"]
            body[-1].append(f"{p['dtype']} {_shape(p)} {mask_name(p['window'])}")
        body[-1] += [f"{side['seconds'] * 1e3:.1f}" for side in (first, second)]
        body[-1] += [row["measure"], f"{row['ratio']:.3f}"]
    return _markdown(header, body)


def _memory(rows):
    header = ["library", "dtype", "B,H,S,d", "tensors MB", "workspace MB", "peak - baseline MB",
              "/ tensors"]  # fmt: skip
    body = []
    for row in rows:
        workspace = row.get("workspace_bytes")
        body.append([
            row["library"], row["problem"]["dtype"], _shape(row["problem"]),
            f"{row['tensor_bytes'] / 1e6:.1f}",
            "" if workspace is None else f"{workspace / 1e6:.1f}",
            f"{(row['peak_bytes'] - row['baseline_bytes']) / 1e6:.1f}",
            f"{row['ratio']:.2f}",
        ])  # fmt: skip
    return _markdown(header, body)


def _caption(result):
    commit = (result["commit"] or "unknown")[:12]
    if result.get("uncommitted_changes"):
        commit += " with uncommitted changes"
    machine, versions = result["machine"], result["versions"]
    return "\n".join([
        f"`{result['command']}`",
        f"{result['date']}, commit {commit}, {result['threads']} threads, load average before "
        f"{result['load_average_before']:.1f}, {machine['cpu']} "
        f"(family/model {machine['family_model']}; {', '.join(machine['isa'])}), "
        f"PyTorch {versions['pytorch']}, flashgrad {versions['flashgrad']} "
        f"({'; '.join(versions['flashgrad_backends'])}).",
    ])  # fmt: skip


TABLES = {"speed": _speed, "ratios": _ratios, "memory": _memory}


def render(result):
    """The Markdown of one result: a caption and its tables."""
    return _caption(result) + "\n\n" + TABLES[result["suite"]](result["rows"])


def main(names):
    """Prints the results of these files."""
    if not names or names[0] in ("-h", "--help"):
        sys.exit(__doc__)
    results = [json.loads(pathlib.Path(name).read_text()) for name in names]
    for name, result in zip(names, results):
        suite = result.get("suite")
        if suite not in TABLES:
            sys.exit(f"{name}: suite {suite}, want one of peers.py on the CPU: {', '.join(TABLES)}")
    print("\n\n".join(render(result) for result in results))


if __name__ == "__main__":
    main(sys.argv[1:])
