# SPDX-License-Identifier: Apache-2.0
"""What attention's number formats cost: training and gradients with one of them lowered at a time.

    python benchmarks/precision.py --json result.json --png result.png
    python benchmarks/precision.py --device cuda --processes 14 --seeds 7 --seqlens ...   # on GPUs
    python benchmarks/precision.py --steps 0 ...      # gradients alone; --seqlens: training alone
    python benchmarks/precision.py --draw result.json other.json --png both.png

The variants are switches of a study implementation in PyTorch, in this file; the library has none
of them. It follows docs/semantics.md: bf16 tensors, f32 statistics and accumulators.

    designed        as the library rounds: lse in f32, sums in f32
    lse_f16         lse rounded to f16 between the passes
    max_sum_f16     each row's maximum and sum rounded to f16 instead of lse in f32
    accumulate_f16  dq, dk and dv summed in f16, a block of 64 at a time
    standard        softmax and its gradient on bf16 matrices of seqlen x seqlen, by autograd
    library         flashgrad itself: the control, since it differs from `designed` in the order
                    of its sums only

Trained models have attention heads whose logits are large. --logit-scales multiplies q: in the
gradients' inputs, and in the training by what it does to the initial weights that make q.

That p recomputed twice gives the same bits is checked with the library, in two backward calls that
are timed against one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import pathlib
import statistics
import sys
import time

import torch
from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "python"))

import gpt  # noqa: E402
import train_gpt  # noqa: E402

BLOCK = 64  # rows or keys between two roundings of an f16 accumulator
VALIDATION_BATCHES = 32
VARIANTS = ("designed", "lse_f16", "max_sum_f16", "accumulate_f16", "standard", "library")


def _round(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the dtype's values, as f32."""
    return x.to(dtype).float()


def _accumulate(terms: list[torch.Tensor], in_f16: bool) -> torch.Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = _round(total + term, torch.float16) if in_f16 else total + term
    return total


class StudyAttention(torch.autograd.Function):
    """Causal attention on (batch, heads, seqlen, head_dim), with one format lowered."""

    @staticmethod
    def forward(ctx, q, k, v, variant):
        s = _logits(q.float(), k.float())
        largest = s.amax(-1, keepdim=True)
        p = (s - largest).exp()
        total = p.sum(-1, keepdim=True)
        out = (_round(p, q.dtype) @ v.float() / total).to(q.dtype)
        if variant == "max_sum_f16":
            lse = _round(largest, torch.float16) + _round(total, torch.float16).log()
        else:
            lse = largest + total.log()
            if variant == "lse_f16":
                lse = _round(lse, torch.float16)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.variant = variant
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dtype = q.dtype
        q, k, v, out, dout = (x.float() for x in (q, k, v, out, dout))
        # The power of two that brings dout near 1, and f16 sums of it into range: the best that
        # loss scaling can do.
        scale = torch.exp2(-dout.abs().max().log2().round())
        dout = dout * scale
        p = (_logits(q, k) - lse).exp()
        delta = (dout * out).sum(-1, keepdim=True)
        ds = _round(p * (dout @ v.transpose(2, 3) - delta), dtype) * q.shape[-1] ** -0.5
        p = _round(p, dtype)
        blocks = [slice(i, i + BLOCK) for i in range(0, q.shape[2], BLOCK)]
        in_f16 = ctx.variant == "accumulate_f16"
        dq = _accumulate([ds[..., b] @ k[:, :, b] for b in blocks], in_f16)
        dk = _accumulate([ds[:, :, b].transpose(2, 3) @ q[:, :, b] for b in blocks], in_f16)
        dv = _accumulate([p[:, :, b].transpose(2, 3) @ dout[:, :, b] for b in blocks], in_f16)
        return *((x / scale).to(dtype) for x in (dq, dk, dv)), None


def _logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    return s.masked_fill(~visible, -torch.inf)


def attention(variant: str) -> gpt.Attention:
    """Causal attention of a variant, as the model takes it."""

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        if variant == "library":
            return gpt.flashgrad_attention(qkv)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        with torch.autocast(q.device.type, enabled=False):
            if variant == "standard":
                return (_logits(q, k).softmax(-1) @ v).transpose(1, 2)
            return StudyAttention.apply(q, k, v, variant).transpose(1, 2)

    return attend


def gradient_errors(seqlens: list[int], seeds: int, logit_scale: float) -> list[dict]:
    """Relative errors, in the Frobenius norm, of each variant's gradients against float64.

    q is standard normal times ``logit_scale``, so that the logits have that standard deviation.
    """
    rows = []
    for seqlen in seqlens:
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            q, k, v, dout = (
                torch.randn(1, seqlen, 1, 64, generator=generator) for _ in range(4)
            )
            inputs = [x.bfloat16() for x in (q * logit_scale, k, v)]
            dout = dout.bfloat16()
            exact = _gradients("library", [x.double() for x in inputs], dout.double())
            for variant in VARIANTS:
                got = _gradients(variant, inputs, dout)
                errors = {
                    name: ((x - o).norm() / o.norm()).item()
                    for name, x, o in zip(("dq", "dk", "dv"), got, exact)
                }
                rows.append(
                    {"seqlen": seqlen, "seed": seed, "logit_scale": logit_scale,
                     "variant": variant, **errors}
                )  # fmt: skip
    return rows


def _gradients(
    variant: str, inputs: list[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    inputs = [x.requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(attention(variant)(torch.stack(inputs, 2)), inputs, dout)
    for x in inputs:
        x.requires_grad_(False)
    return [x.double() for x in gradients]


def recomputed_twice(seqlen: int, rounds: int) -> dict:
    """One backward call against two that recompute p each: dq in one, dk and dv in the other."""
    q, k, v, dout = (torch.randn(1, seqlen, 4, 64).bfloat16() for _ in range(4))
    import flashgrad

    out, lse = flashgrad.forward(q, k, v, causal=True)

    def once():
        return flashgrad.backward(dout, q, k, v, out, lse, causal=True)

    def twice():
        dq = flashgrad.backward(dout, q, k, v, out, lse, causal=True, dk=False, dv=False)[0]
        return dq, *flashgrad.backward(dout, q, k, v, out, lse, causal=True, dq=False)[1:]

    same = all(torch.equal(x, y) for x, y in zip(once(), twice()))
    ratios = []
    for _ in range(rounds):
        seconds = []
        for function in (once, twice):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
    return {"seqlen": seqlen, "same_bits": same, "time_ratio": statistics.median(ratios)}


def train(
    seed: int, logit_scale: float, device: str, arguments: argparse.Namespace
) -> list[dict]:
    """Trains each variant from the same weights over the same batches."""
    arguments = argparse.Namespace(**{**vars(arguments), "device": device}, graph=False)
    text = gpt.own_text()
    split = len(text) * 9 // 10
    trainers = []
    for variant in VARIANTS:
        trainer = train_gpt.Trainer(variant, attention(variant), seed, arguments, text[:split])
        with torch.no_grad():
            for block in trainer.model.blocks:
                width = block.qkv.in_features
                block.qkv.weight[:width] *= logit_scale  # what makes q
                block.qkv.bias[:width] *= logit_scale
        trainers.append(trainer)
    for _ in range(arguments.steps):
        for trainer in trainers:
            trainer.step()
    # On the same pieces of text for every seed and variant.
    return [
        {
            "seed": seed,
            "logit_scale": logit_scale,
            "variant": t.name,
            "losses": t.losses,
            "validation_loss": t.validate(text[split:], VALIDATION_BATCHES),
        }
        for t in trainers
    ]


def start_training(
    pool: concurrent.futures.Executor, arguments: argparse.Namespace
) -> list[concurrent.futures.Future[list[dict]]]:
    """Every seed at every scale of the logits, on the GPUs in turn; nothing without steps."""
    if arguments.steps == 0:
        return []
    jobs = [(seed, scale) for seed in range(arguments.seeds) for scale in arguments.logit_scales]
    count = torch.cuda.device_count() if arguments.device == "cuda" else 0
    devices = [f"cuda:{i % count}" if count else arguments.device for i in range(len(jobs))]
    return [pool.submit(train, *job, device, arguments) for job, device in zip(jobs, devices)]


def differences(records: list[dict]) -> list[dict]:
    """Validation losses less that of `designed`: by variant and scale of the logits, over seeds."""
    losses = {(r["logit_scale"], r["variant"], r["seed"]): r["validation_loss"] for r in records}
    rows = []
    for scale in sorted({scale for scale, _, _ in losses}):
        seeds = sorted(s for sc, v, s in losses if sc == scale and v == "designed")
        for variant in VARIANTS[1:]:
            values = [losses[scale, variant, s] - losses[scale, "designed", s] for s in seeds]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            rows.append(
                {"logit_scale": scale, "variant": variant, "mean": statistics.mean(values),
                 "standard_error": error, "values": values}
            )  # fmt: skip
    return rows


def plot_losses(axes, rows: list[dict], colors: dict[str, str]) -> None:
    scales = sorted({row["logit_scale"] for row in rows})
    heights = [
        VARIANTS.index(row["variant"]) + 0.35 * scales.index(row["logit_scale"]) for row in rows
    ]
    for row, y in zip(rows, heights):
        color = colors[row["variant"]]
        axes.plot(row["values"], [y] * len(row["values"]), ".", color=color, alpha=0.4)
        axes.errorbar(row["mean"], y, xerr=2 * (row["standard_error"] or 0), fmt="d", color=color)
    axes.set_yticks(heights, [f"{r['variant']}, logits x {r['logit_scale']:g}" for r in rows])
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set_xlabel(
        "validation loss less that of designed\n(dots: seeds; bars: two standard errors)"
    )


def plot_gradients(axes, rows: list[dict], colors: dict[str, str]) -> None:
    for scale, style in zip(sorted({row["logit_scale"] for row in rows}), ("--", "-", ":")):
        for variant in VARIANTS:
            errors: dict[int, list[float]] = {}
            for row in rows:
                if row["variant"] == variant and row["logit_scale"] == scale:
                    errors.setdefault(row["seqlen"], []).append(row["dq"])
            means = [statistics.mean(x) for x in errors.values()]
            spread = [(max(x) - min(x)) / 2 for x in errors.values()]
            axes.errorbar(
                list(errors), means, spread, marker=".", linestyle=style, color=colors[variant],
                label=f"{variant}, {scale:g}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("seqlen")
    axes.set_ylabel("relative error of dq, by the deviation of the logits")
    axes.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(0, 0.9))


def plot_cost(axes, twice: dict) -> None:
    axes.bar(["once", "twice"], [1, twice["time_ratio"]], width=0.5)
    axes.set_ylabel(f"time of a backward call, seqlen {twice['seqlen']}")
    axes.set_xlabel("p recomputed\n(the same bits)")


def plot(results: list[dict], path: pathlib.Path) -> None:
    """Losses and gradients of the results that have them; what p recomputed twice costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = dict(zip(VARIANTS, plt.rcParams["axes.prop_cycle"].by_key()["color"]))
    panels = [
        (3, lambda axes, rows=result[name], draw=draw: draw(axes, rows, colors))
        for name, draw in (("loss_differences", plot_losses), ("gradients", plot_gradients))
        for result in results
        if result[name]
    ]
    panels.append((1, lambda axes: plot_cost(axes, results[0]["recomputed_twice"])))
    widths = [width for width, _ in panels]
    figure, row = plt.subplots(
        1, len(panels), figsize=(2 * sum(widths), 5), squeeze=False, width_ratios=widths
    )
    for axes, (_, draw) in zip(row[0], panels):
        draw(axes)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of the training; 0: none")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=512, help="of the training")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=20, help="steps of rising learning rate")
    parser.add_argument("--seqlens", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--logit-scales", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--device", default="cpu", help="of the training; cuda takes all GPUs")
    parser.add_argument("--processes", type=int, default=1, help="that train at the same time")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--png", type=pathlib.Path)
    parser.add_argument(
        "--draw", type=pathlib.Path, nargs="+", metavar="RESULT", help="only draw --png from these"
    )
    arguments = parser.parse_args()
    if arguments.draw:
        plot([json.loads(path.read_text()) for path in arguments.draw], arguments.png)
        return
    result = train_gpt.provenance(arguments, gpt.own_text())
    result["recomputed_twice"] = recomputed_twice(4096, 5)
    print("p recomputed twice:", result["recomputed_twice"])
    result["training"], result["loss_differences"] = [], []
    with concurrent.futures.ProcessPoolExecutor(
        arguments.processes, multiprocessing.get_context("spawn")
    ) as pool:
        training = start_training(pool, arguments)
        result["gradients"] = [
            row
            for scale in arguments.logit_scales
            for row in gradient_errors(arguments.seqlens, arguments.seeds, scale)
        ]
        done = concurrent.futures.as_completed(training)
        for job in tqdm(done, total=len(training), desc="training", unit="seed"):
            result["training"] += job.result()
            result["loss_differences"] = differences(result["training"])
            if arguments.json:  # after each, so that a run that is cut short leaves something
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for scale in arguments.logit_scales if arguments.seqlens else ():
        print(f"relative errors of dq, dk, dv; logits of standard deviation {scale:g}")
        for variant in VARIANTS:
            rows = [
                r
                for r in result["gradients"]
                if r["variant"] == variant and r["logit_scale"] == scale
            ]
            cells = []
            for seqlen in arguments.seqlens:
                same = [r for r in rows if r["seqlen"] == seqlen]
                means = (statistics.mean(r[name] for r in same) for name in ("dq", "dk", "dv"))
                cells.append(f"{seqlen}: " + " ".join(f"{x:.2e}" for x in means))
            print(f"  {variant:15}", "   ".join(cells))
    for row in result["loss_differences"]:
        print(
            f"  {row['variant']:15} logits x {row['logit_scale']:g}: {row['mean']:+.5f} "
            f"+- {row['standard_error'] or math.nan:.5f}"
        )
    if arguments.png:
        plot([result], arguments.png)


if __name__ == "__main__":
    main()
