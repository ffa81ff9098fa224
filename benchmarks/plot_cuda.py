#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a result of `peers.py --device cuda`.

    python benchmarks/plot_cuda.py benchmarks/results/FILE.json docs/figures

Writes h200_forward.svg and h200_backward.svg into the folder: above, TFLOP/s against the sequence
length in the cool regime; below, what the sustained rate is of the tensor cores' peak at the clock
that was measured (4096 FLOP per SM and clock in bf16). One column per mask, one colour per head
dim; flashgrad is drawn through, the best peer dashed.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FLOP_PER_SM_AND_CLOCK = 4096
COLOURS = {64: "tab:green", 128: "tab:blue", 256: "tab:red"}


def points(result, which, head_dim, window):
    """[(seqlen, flashgrad's timing, the best peer's timing)] of the plain bf16 rows."""
    found = []
    for record in result["rows"]:
        row = record["row"]
        plain = (
            row["head_dim"] == head_dim
            and row["window"] == window
            and row["dtype"] == "bf16"
            and row["heads_q"] == row["heads_kv"]
            and not row["deterministic"]
            and not row["lengths"]
            and row["head_dim_v"] is None
        )
        if plain:
            sides = {n: r[which] for n, r in record["results"].items() if which in r}
            ours = sides.pop("flashgrad")
            best = max(sides.values(), key=lambda t: t["cool_tflops"], default=None)
            found.append((row["seqlen"], ours, best))
    return sorted(found, key=lambda point: point[0])


def draw(result, which):
    """The figure of one pass."""
    peak_per_mhz = result["versions"]["multiprocessors"] * FLOP_PER_SM_AND_CLOCK * 1e6 / 1e12
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), sharex=True, sharey="row")
    values = (
        lambda timing: timing["cool_tflops"],
        lambda timing: timing["sustained_tflops"] / (peak_per_mhz * timing["mhz"]),
    )
    for column, window in enumerate((None, "causal")):
        for head_dim, colour in COLOURS.items():
            line = points(result, which, head_dim, window)
            for axis, value in zip(axes[:, column], values, strict=True):
                axis.plot(
                    [seqlen for seqlen, _, _ in line],
                    [value(ours) for _, ours, _ in line],
                    "o-", color=colour, label=f"flashgrad, head_dim {head_dim}",
                )  # fmt: skip
                peers = [(seqlen, value(best)) for seqlen, _, best in line if best]
                axis.plot(*zip(*peers, strict=True), "x--", color=colour, alpha=0.6,
                          label=f"best peer, head_dim {head_dim}")  # fmt: skip
        axes[0, column].set_title(f"{which}, {window or 'full'}")
        axes[1, column].set_xscale("log", base=2)
        axes[1, column].set_xlabel("sequence length (16k tokens in all, hidden 2048, bf16)")
    axes[0, 0].set_ylabel("TFLOP/s, cool")
    axes[1, 0].set_ylabel("of the peak at its clock, sustained")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    versions = result["versions"]
    figure.suptitle(
        f"{versions['device']}, driver {versions['driver']}, cuDNN {versions['cudnn']}, "
        f"{result['date'][:10]}, commit {(result['commit'] or 'unknown')[:8]}",
        fontsize=9,
    )
    figure.tight_layout()
    return figure


def main(argv):
    """Draws both passes."""
    if len(argv) != 2:
        sys.exit(__doc__)
    result = json.loads(pathlib.Path(argv[0]).read_text())
    folder = pathlib.Path(argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "flashgrad"  # the same file from the same numbers
    for which in result["passes"]:
        draw(result, which).savefig(folder / f"h200_{which}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
