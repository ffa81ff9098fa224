# SPDX-License-Identifier: Apache-2.0
"""The process that measures for peers.py: reads a job from stdin, writes a line of JSON per row."""

import dataclasses
import json
import pathlib
import platform
import sys
import time

import torch

import capi
import contenders


class Worker:
    """Measures the rows of one job."""

    def __init__(self, job):
        self._job = job
        self._library = capi.Library(job["library"])
        torch.set_num_threads(job["threads"])

    def facts(self):
        """Versions, and which OpenMP runtimes are loaded: one means that both share its threads."""
        runtimes = {
            pathlib.Path(line.split()[-1]).name
            for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
            if "omp" in line.split()[-1]
        }
        return {
            "flashgrad": self._library.version,
            "flashgrad_backends": [
                f"{name}: {detail}"
                for name, detail, available in self._library.backends()
                if available
            ],
            "pytorch": torch.__version__,
            "python": platform.python_version(),
            "openmp": sorted(runtimes),
        }

    def _contender(self, library, problem, inputs):
        if library == "pytorch":
            return contenders.PyTorch(problem, inputs)
        return contenders.Flashgrad(
            problem, inputs, self._library, self._job["threads"], self._job["backend"]
        )

    def contest(self, row):
        """Runs both sides of a row in turns; fills in seconds per call of every round."""
        which = row["pass"]
        sides = {}
        results = {}
        inputs = {}
        for side in ("first", "second"):
            problem = contenders.Problem(**row[side]["problem"])
            key = dataclasses.replace(problem, window=None)
            if key not in inputs:
                inputs[key] = contenders.Inputs(problem, self._job["layout"])
            contender = self._contender(row[side]["library"], problem, inputs[key])
            results[side] = {"out": contender.prepare()}
            if which == "backward":
                results[side] |= dict(zip(("dq", "dk", "dv"), contender.backward(), strict=True))
            if row[side]["library"] == "flashgrad":
                row[side] |= contender.facts(which)
            row[side]["flops"] = problem.flops(which)
            sides[side] = getattr(contender, which)
        if row["first"]["problem"] == row["second"]["problem"]:
            self._compare(row, results)
        row["seconds"] = {side: [] for side in sides}
        calls = {side: self._calls_per_block(call) for side, call in sides.items()}
        for index in range(self._job["rounds"]):
            for side in sides if index % 2 == 0 else reversed(sides):
                row["seconds"][side].append(self._time(sides[side], calls[side]))

    @staticmethod
    def _compare(row, results):
        bound = contenders.LOOSE_ERROR[row["first"]["problem"]["dtype"]]
        row["difference"] = {
            name: contenders.relative_error(x, results["first"][name])
            for name, x in results["second"].items()
        }
        name, worst = max(row["difference"].items(), key=lambda item: item[1])
        if worst > bound:
            row["wrong"] = f"{name} differs by {worst:.1e}, want at most {bound:.0e}"

    def _calls_per_block(self, call):
        call()
        begin = time.perf_counter()
        call()
        return max(1, round(self._job["block_seconds"] / (time.perf_counter() - begin)))

    @staticmethod
    def _time(call, calls):
        """Seconds per call, after one call that finds the caches full of the other's data."""
        call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls

    def memory(self, row):
        """The peak of the process during one backward, over what it held before the tensors."""
        small = contenders.Problem(**{**row["problem"], "seqlen": 256})
        self._backward_peak(row["library"], small)  # starts threads, loads what is loaded lazily
        problem = contenders.Problem(**row["problem"])
        baseline = _status_bytes("VmRSS")
        peak, facts = self._backward_peak(row["library"], problem)
        width = contenders.DTYPES[problem.dtype].itemsize
        # q, k, v, out, dout, dq, dk, dv
        tensors = problem.batch * problem.seqlen * problem.head_dim * width
        tensors *= 4 * problem.heads_q + 4 * problem.heads_kv
        row |= facts
        row |= {"baseline_bytes": baseline, "peak_bytes": peak, "tensor_bytes": tensors}
        row["ratio"] = (peak - baseline) / tensors

    def _backward_peak(self, library, problem):
        inputs = contenders.Inputs(problem, self._job["layout"])
        contender = self._contender(library, problem, inputs)
        contender.prepare()
        facts = {}
        if library == "flashgrad":
            contender.release_forward()
            contender.prepare_backward()
            facts = contender.facts("backward")
        # Sets the peak that the kernel keeps (VmHWM) back to what is held now.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        gradients = contender.backward()
        peak = _status_bytes("VmHWM")
        if not all(bool(g.isfinite().all()) for g in gradients):
            raise RuntimeError(f"{library}: a gradient is not finite")
        return peak, facts


def _status_bytes(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main():
    """From stdin to stdout."""
    job = json.load(sys.stdin)
    try:
        worker = Worker(job)
    except OSError as error:  # no library there, or not one that loads
        sys.exit(f"peers.py: {error}")
    for row in job["rows"]:
        (worker.memory if row["title"] == "memory" else worker.contest)(row)
        print(json.dumps({"row": row}), flush=True)
    print(json.dumps({"facts": worker.facts()}), flush=True)


if __name__ == "__main__":
    main()
