#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs compute-sanitizer on the short tables of sm90_backward and sm90_forward, which reach every
# kernel. Needs a Hopper GPU.
#
#   tests/cuda/sanitize.sh DIRECTORY [JOBS [TOOL...]]
#
# DIRECTORY holds the two programs (build/dev/tests/cuda); JOBS runs at a time, 4 if not given; the
# tools are racecheck, memcheck, synccheck and initcheck if none is given. Prints a line a run, and
# below it the first findings; logs go to the folder that LOGS names, or a new one of /tmp. Exit
# status 1 if a tool finds something, a case fails, or a run does not end in LIMIT seconds (120).
set -u
programs=$(cd "${1:?the folder of sm90_backward and sm90_forward}" && pwd) || exit 2
jobs=${2:-4}
tools=("${@:3}")
[ ${#tools[@]} -gt 0 ] || tools=(racecheck memcheck synccheck initcheck)
export programs LIMIT=${LIMIT:-120} LOGS=${LOGS:-$(mktemp -d)}
mkdir -p "$LOGS"

# TOOL PROGRAM ARGUMENTS...
run() {
  local tool=$1 what="$*" start=$SECONDS status log
  log="$LOGS/${what//[^a-zA-Z0-9_]/-}.txt"
  # The reference that sm90_backward compares with is no part of the library; but initcheck must see
  # it write.
  local skip=()
  [ "$tool" = initcheck ] || skip=(--kernel-regex-exclude kns=reference_)
  timeout -k 2 "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 3 --print-limit 200 \
    "${skip[@]}" "$programs/$2" "${@:3}" > "$log" 2>&1
  status=$?
  printf '%-40s exit %3d, %3d s, %2d checks right; %s\n' "$what" "$status" $((SECONDS - start)) \
    "$(grep -c 'ok  ' "$log")" "$(grep -o '[A-Z]* SUMMARY: .*' "$log" | tail -1)"
  grep -E 'FAIL|Race reported|hazard detected|Uninit|Invalid|Barrier error|CUDA error' "$log" |
    sort | uniq -c | head -6
  return $((status != 0))
}
export -f run

for tool in "${tools[@]}"; do
  for bounds in "193 256" "129 192" "97 128" "65 96" "1 64"; do
    echo "$tool sm90_backward short '' $bounds"
  done
  for kernel in d64 d96 d128 d192v128 d192 d256 d128_f16; do
    echo "$tool sm90_forward short $kernel"
  done
done | xargs -d '\n' -P "$jobs" -I{} bash -c 'run {}' || exit 1
