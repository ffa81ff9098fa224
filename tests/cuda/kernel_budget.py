#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel and checks what ptxas says of it against tests/cuda/kernel_budget.json.

Fails if ptxas serialises wgmma products, ignores setmaxnreg or refuses a shape (messages C75xx, C76xx),
if a kernel spills more than its budget allows, or if a kernel of the budget does not exist. Needs nvcc,
no GPU. Kernels are compiled as the build does, so ccache has the answers if the build had PTXAS too.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

PTXAS = "-Xptxas=-v"
PROPERTIES = re.compile(r"Function properties for (\S+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def short(mangled):
    """The kernel's name without namespaces, return type and parameters."""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"^void ", "", name).replace("flashgrad::sm90::", "")
    return re.sub(r">\(.*$", ">", name) if ">(" in name else name.split("(")[0]


def compile_one(entry, launcher):
    """Kernels and faults of an entry of compile_commands.json."""
    command = launcher + shlex.split(entry["command"])
    if PTXAS not in command:
        command.insert(command.index("-x"), PTXAS)
    with tempfile.TemporaryDirectory() as folder:
        command[command.index("-o") + 1] = f"{folder}/kernels.o"
        command += ["-MD", "-MT", "kernels.o", "-MF", f"{folder}/kernels.d"]  # as Ninja asks, and ccache compares
        result = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode != 0:
        return [], [f"{entry['file']}: {output}"]
    kernels, faults, current = [], [], None
    for line in output.splitlines():
        if re.search(r"\(C7[56]\d\d\)", line):
            mangled = re.search(r"'(_Z\S+)'", line)
            faults.append(re.sub(r"'_Z\S+'", short(mangled.group(1)) if mangled else "?", line.strip()))
        if match := PROPERTIES.search(line):
            current = {"name": short(match.group(1))}
            kernels.append(current)
        if current is not None and (match := SPILLS.search(line)):
            current["spill_bytes"] = int(match.group(1))
        if current is not None and (match := USED.search(line)):
            current["registers"] = int(match.group(1))
    return kernels, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", help="the build's compile_commands.json")
    parser.add_argument("--launcher", default="", help="the build's compiler launcher, which the commands lack")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    here = pathlib.Path(__file__).resolve().parent
    kernels_folder = here.parent.parent / "src/cuda"
    allowed = json.loads((here / "kernel_budget.json").read_text())["spill_bytes"]
    entries = [entry for entry in json.loads(pathlib.Path(arguments.commands).read_text())
               if entry["file"].endswith(".cu") and kernels_folder in pathlib.Path(entry["file"]).parents]
    launcher = shlex.split(arguments.launcher)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda entry: compile_one(entry, launcher), entries))
    faults = [fault for _, of_file in results for fault in of_file]
    kernels = [kernel for of_file, _ in results for kernel in of_file]
    for kernel in sorted(kernels, key=lambda k: k["name"]):
        spill, limit = kernel.get("spill_bytes", 0), allowed.get(kernel["name"], 0)
        print(f"{kernel['name']:60} {kernel.get('registers', 0):4} registers, {spill:3} bytes spilled")
        if spill > limit:
            faults.append(f"{kernel['name']}: {spill} bytes spilled, want at most {limit}")
    faults += [f"{name}: in the budget, but no such kernel" for name in allowed
               if name not in {kernel["name"] for kernel in kernels}]
    for fault in faults:
        print("FAIL", fault)
    print(f"{len(kernels)} kernels, {len(faults)} faults")
    return 1 if faults or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
