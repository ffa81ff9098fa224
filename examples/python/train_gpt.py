# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte GPT with flashgrad's attention, with PyTorch's, or with both side by side.

    python examples/python/train_gpt.py                             # flashgrad alone
    python examples/python/train_gpt.py --attention torch           # PyTorch's attention alone
    python examples/python/train_gpt.py --attention both --seeds 3 --png result.png   # both

Side by side, both models start from the same weights, get the same batches and take their steps in
turn, so that what else the machine does meets both; the ratio of their speeds is the median over
the steps. The text is this repository's own sources and documents, or the files of --text.

On a GPU a step of so small a model is over before Python has launched the next one's kernels, so a
step is captured in a CUDA graph and replayed; --no-graph launches them one by one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time

import gpt
import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

ATTENTIONS = {"flashgrad": gpt.flashgrad_attention, "torch": gpt.torch_attention}
WARM_UP_STEPS = 3  # not timed
VALIDATION_BATCHES = 4
# How a profile names attention's own work: autograd functions and operators, both passes.
ATTENTION_EVENTS = {
    "flashgrad": ("_Planned", "_PlannedBackward", "_Forward", "_ForwardBackward"),
    "torch": (
        "aten::scaled_dot_product_attention",
        "ScaledDotProductFlashAttentionForCpuBackward0",
        "ScaledDotProductFlashAttentionBackward0",
        "ScaledDotProductCudnnAttentionBackward0",
        "ScaledDotProductEfficientAttentionBackward0",
    ),
}


class Trainer:
    """One model in training."""

    def __init__(
        self,
        name: str,
        attention: gpt.Attention,
        seed: int,
        arguments: argparse.Namespace,
        text: torch.Tensor,
    ) -> None:
        torch.manual_seed(seed)
        self.name = name
        self.device = torch.device(arguments.device)
        self.shape = (arguments.batch, arguments.seqlen)
        self.text = text
        self.batches = torch.Generator().manual_seed(seed)
        self.model = gpt.GPT(attention, arguments.seqlen).to(self.device)
        # A graph reads the learning rate where it lies.
        self.wants_graph = self.device.type == "cuda" and arguments.graph
        rate = arguments.learning_rate
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=torch.tensor(rate, device=self.device) if self.wants_graph else rate,
            capturable=self.wants_graph,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / arguments.warm_up)
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.wants_graph:
            self.stream = torch.cuda.Stream(self.device)
            self.static_batch = torch.zeros(2, *self.shape, dtype=torch.long, device=self.device)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def sample(self, generator: torch.Generator, text: torch.Tensor) -> torch.Tensor:
        """Tokens and targets, (2, batch, seqlen)."""
        return torch.stack(gpt.sample(text, *self.shape, generator)).to(self.device)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(*batch)

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, after one step of the optimizer on it."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def update_by_graph(self, batch: torch.Tensor) -> torch.Tensor:
        """``update`` on a stream of its own: the first times, to warm up, one by one."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if len(self.losses) < WARM_UP_STEPS - 1:
                loss = self.update(batch)
            else:
                self.static_batch.copy_(batch)
                if self.graph is None:
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph, stream=self.stream):
                        self.static_loss = self.update(self.static_batch)
                self.graph.replay()
                loss = self.static_loss
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def step(self) -> None:
        start = time.perf_counter()
        batch = self.sample(self.batches, self.text)
        loss = self.update_by_graph(batch) if self.wants_graph else self.update(batch)
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def validate(self, text: torch.Tensor, batches: int = VALIDATION_BATCHES) -> float:
        generator = torch.Generator().manual_seed(0)
        return statistics.mean(
            self.loss(self.sample(generator, text)).item() for _ in range(batches)
        )

    def tokens_per_second(self) -> float:
        return self.shape[0] * self.shape[1] / statistics.median(self.seconds[WARM_UP_STEPS:])

    def attention_share(self) -> float:
        """Attention's part of the time of two steps; on a GPU, of the time in which it works."""
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=activities) as record:
            start = time.perf_counter()
            for _ in range(2):  # not by a graph, whose kernels nothing ties to attention
                self.update(self.sample(self.batches, self.text)).item()
            total = (time.perf_counter() - start) * 1e6
        events = record.key_averages()
        if on_gpu:  # the kernels, but neither who launched them nor what they are summed up in
            total = sum(
                event.self_device_time_total
                for event in events
                if event.device_type == torch.autograd.DeviceType.CUDA
                and not getattr(event, "is_user_annotation", False)
            )
        attribute = "device_time_total" if on_gpu else "cpu_time_total"
        attention = sum(
            getattr(event, attribute)
            for event in events
            if event.key in ATTENTION_EVENTS[self.name]
        )
        return attention / total


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def measure_memory(arguments: argparse.Namespace, text: torch.Tensor) -> int:
    """Peak memory that three steps take beyond what the process holds before."""
    name = arguments.attention
    trainer = Trainer(name, ATTENTIONS[name], 0, arguments, text)
    if trainer.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            trainer.step()
        return torch.cuda.max_memory_allocated() - before
    before = resident_bytes("VmRSS")
    for _ in range(3):
        trainer.step()
    return resident_bytes("VmHWM") - before


def memory_in_own_process(name: str, arguments: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--attention", name, "--memory"]
    for option in ("batch", "seqlen", "device", "threads"):
        command += [f"--{option}", str(getattr(arguments, option))]
    command += [] if arguments.graph else ["--no-graph"]
    for path in arguments.text or ():
        command += ["--text", str(path)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(run.stdout)


def train(seed: int, arguments: argparse.Namespace, text: torch.Tensor) -> list[dict]:
    """Trains with each attention in turn; what came out, a record for each."""
    split = len(text) * 9 // 10
    names = list(ATTENTIONS) if arguments.attention == "both" else [arguments.attention]
    trainers = [Trainer(n, ATTENTIONS[n], seed, arguments, text[:split]) for n in names]
    bar = tqdm(range(arguments.steps), desc=f"seed {seed}", unit="step", mininterval=1)
    for step in bar:
        for trainer in trainers if step % 2 == 0 else reversed(trainers):
            trainer.step()
        bar.set_postfix({t.name: f"{t.losses[-1]:.4f}" for t in trainers})
    records = []
    for trainer in trainers:
        records.append(
            {
                "seed": seed,
                "attention": trainer.name,
                "tokens_per_second": trainer.tokens_per_second(),
                "validation_loss": trainer.validate(text[split:]),
                "losses": list(trainer.losses),
                "seconds": list(trainer.seconds),
                "attention_share": trainer.attention_share(),
            }
        )
    return records


def compare(records: list[dict]) -> dict:
    """How far the loss curves of the same seed are apart, and flashgrad's speed over PyTorch's."""
    curves = {(r["seed"], r["attention"]): r for r in records}
    pairs = [(curves[s, "flashgrad"], curves[s, "torch"]) for s, a in curves if a == "torch"]
    differences = [abs(x - y) for f, t in pairs for x, y in zip(f["losses"], t["losses"])]
    last = [statistics.mean(f["losses"][-10:]) for f, _ in pairs]
    ratios = [
        y / x
        for f, t in pairs
        for x, y in zip(f["seconds"][WARM_UP_STEPS:], t["seconds"][WARM_UP_STEPS:])
    ]

    def sum_of(record: dict) -> float:
        return sum(record["seconds"][WARM_UP_STEPS:])

    return {
        "loss_difference_largest": max(differences),
        "loss_difference_mean": statistics.mean(differences),
        "validation_loss_differences": [
            f["validation_loss"] - t["validation_loss"] for f, t in pairs
        ],
        "loss_spread_of_seeds": max(last) - min(last),
        "speed_ratio_of_means": statistics.mean(sum_of(t) for _, t in pairs)
        / statistics.mean(sum_of(f) for f, _ in pairs),
        "speed_ratio_median_of_each_seed": [
            statistics.median(
                y / x for x, y in zip(f["seconds"][WARM_UP_STEPS:], t["seconds"][WARM_UP_STEPS:])
            )
            for f, t in pairs
        ],
        "speed_ratio_median": statistics.median(ratios),
        "speed_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def plot(records: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 7))
    styles = {"flashgrad": ("tab:blue", "-"), "torch": ("tab:orange", "--")}
    for record in records:
        color, line = styles[record["attention"]]
        label = record["attention"] if record["seed"] == 0 else None
        top.plot(record["losses"], color=color, linestyle=line, linewidth=1, label=label)
    top.set_ylabel("loss, nats per byte")
    top.legend()
    by_seed: dict[int, dict[str, list[float]]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], {})[record["attention"]] = record["losses"]
    for seed, curves in by_seed.items():
        if len(curves) == 2:
            difference = [x - y for x, y in zip(curves["flashgrad"], curves["torch"])]
            bottom.plot(difference, linewidth=1, label=f"seed {seed}")
    bottom.axhline(0, color="black", linewidth=0.5)
    bottom.set_ylabel("flashgrad - torch")
    bottom.set_xlabel("step")
    if len(by_seed) and any(len(curves) == 2 for curves in by_seed.values()):
        bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def provenance(arguments: argparse.Namespace, text: torch.Tensor) -> dict:
    """What the numbers depend on."""
    root = pathlib.Path(__file__).resolve().parents[2]

    def git(*command: str) -> str:
        run = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True)
        return run.stdout.strip()

    if arguments.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
        machine = f"{model}, {os.cpu_count()} CPUs, {platform.machine()}"
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "-s", "-uno")),
        "machine": machine,
        "load_average_before": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "text_bytes": len(text),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=[*ATTENTIONS, "both"], default="flashgrad")
    parser.add_argument("--seeds", type=int, default=1, help="train with seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=20, help="steps of rising learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="on GPUs"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--text", type=pathlib.Path, action="append", help="a file to train on")
    parser.add_argument("--json", type=pathlib.Path, help="write all numbers to this file")
    parser.add_argument("--png", type=pathlib.Path, help="draw the loss curves into this file")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    least = WARM_UP_STEPS + 2  # of one step's time there are no quartiles
    if arguments.steps < least:
        parser.error(f"--steps {arguments.steps}, want {least} or more: {WARM_UP_STEPS} not timed")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    text = gpt.read_text(arguments.text) if arguments.text else gpt.own_text()
    if arguments.memory:
        print(measure_memory(arguments, text))
        return
    result = provenance(arguments, text)
    records = [r for seed in range(arguments.seeds) for r in train(seed, arguments, text)]
    names = sorted({record["attention"] for record in records})
    result["peak_memory_bytes"] = {n: memory_in_own_process(n, arguments) for n in names}
    print("attention  seed  tokens/s attention     loss validation")
    for r in records:
        print(
            f"{r['attention']:10} {r['seed']:4} {r['tokens_per_second']:9.0f} "
            f"{r['attention_share']:9.1%} {r['losses'][-1]:8.4f} {r['validation_loss']:10.4f}"
        )
    for name, num_bytes in result["peak_memory_bytes"].items():
        print(f"{name}: {num_bytes / 1e6:.0f} MB more at the peak than before training")
    if arguments.attention == "both":
        result["comparison"] = compare(records)
        for name, value in result["comparison"].items():
            print(f"{name}: {value}")
    result["runs"] = records
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.png:
        plot(records, arguments.png)


if __name__ == "__main__":
    main()
