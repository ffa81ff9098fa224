#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Every test that needs a Hopper GPU, side by side: most of them wait for what the host computes.
#
#   tests/cuda/run_all.sh DIRECTORY [REPEATS]
#
# DIRECTORY is a build (build/dev), or has the programs side by side, with libflashgrad.so.0 and
# data/ beside them. REPEATS is of the determinism check, 20 if not given (a thousand repeats are
# among gpu_context_test's). Prints a line a run, and below it what failed; logs go to the folder
# that LOGS names, or a new one of /tmp. Exit status 1 if something failed, or did not end in LIMIT
# seconds (300); 77 without a Hopper GPU.
set -u
directory=$(cd "${1:?the build, or the folder of the test programs}" && pwd) || exit 2
repeats=${2:-20}
export directory LIMIT=${LIMIT:-300} LOGS=${LOGS:-$(mktemp -d)}
export LD_LIBRARY_PATH=$directory${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if [ -d "$directory/data" ]; then
  export FLASHGRAD_TEST_DATA=$directory/data
fi
mkdir -p "$LOGS"

# THREADS [VARIABLE=VALUE...] PROGRAM ARGUMENTS...
run() {
  local settings=("OMP_NUM_THREADS=$1" "OMP_WAIT_POLICY=passive") start=$SECONDS what program log status
  shift
  what="$*"
  while [[ $1 == *=* && $1 != -* ]]; do
    settings+=("$1")
    shift
  done
  for program in "$directory/$1" "$directory/tests/cuda/$1" "$directory/tests/conformance/$1"; do
    [ -x "$program" ] && break
  done
  log="$LOGS/${what//[^a-zA-Z0-9_]/-}"
  log="${log:0:120}.txt"
  timeout -k 2 "$LIMIT" env "${settings[@]}" "$program" "${@:2}" > "$log" 2>&1
  status=$?
  printf 'exit %3d, %3d s: %.100s: %s\n' "$status" $((SECONDS - start)) "$what" \
    "$(grep -E 'cases|PASSED|bit differs|skipped|FAILED' "$log" | tail -1)"
  [ "$status" = 0 ] && return 0
  grep -E 'FAIL|Failure|rror' "$log" | head -8
  [ "$status" = 77 ] && return 77
  return 1
}
export -f run

# The ones that fill the memory of the device come one after the other.
large='*over_2_31*:*int64_workspace*:*sequence_4m*:*gqa_memory*:*strides_overflow*'
cores=$(nproc)
grid_cases=63
{
  echo "run $cores conformance_test --backend sm90 --gtest_filter='$large'"
  for bounds in "193 256" "129 192" "65 128" "1 64"; do
    echo "run 1 sm90_backward check '' $bounds"
  done
  for shard in 0 1 2 3; do
    echo "run 4 FLASHGRAD_GRID_SEED=$((20260101 + grid_cases * shard)) FLASHGRAD_GRID_COUNT=$grid_cases" \
      "conformance_test --backend sm90 --gtest_filter=Grid.Sample"
  done
  echo "run 4 conformance_test --backend sm90 --gtest_filter='Table*:-$large'"
  echo "run 4 conformance_test --backend sm90 --gtest_filter='-Table*:Grid.Sample'"
  for width in 256 192 192v128 128 96 64; do
    echo "run 4 sm90_forward check d$width d${width}_f16"
  done
  echo "run 1 sm90_determinism $repeats"
  echo "run 4 gpu_context_test"
} | xargs -d '\n' -P "$cores" -I{} bash -c '{} || echo "$?" >> "$LOGS/failed"'
if [ -e "$LOGS/failed" ]; then
  grep -qv 77 "$LOGS/failed" && exit 1
  exit 77
fi
