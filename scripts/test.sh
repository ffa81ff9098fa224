#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that must hold before a change lands, stage after stage; `make test` and CI run all of them.
# Usage: test.sh [STAGE...]   STAGE: format release python asan-ubsan tsan tidy docs; all without one
# A failing stage does not stop the others; a table at the end names them with their times.
set -uo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
# The library is built several times: here, as a part of another project, for its budget of registers, in the wheel.
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache CCACHE_NOHASHDIR=1
fi

# All files of ours with the given endings, the build folders aside.
sources() {
  local pattern=$1
  find include src tools tests examples benchmarks -regextype egrep -regex ".*\.($pattern)" 2>/dev/null | LC_ALL=C sort
}

build_and_test() {
  local preset=$1
  shift
  cmake --preset "$preset" "$@" && cmake --build --preset "$preset" && ctest --preset "$preset" --parallel "$jobs"
}

stage_format() { sources 'c|cpp|h|hpp|cu|cuh' | xargs clang-format-14 --dry-run -Werror; }
# What ptxas says goes to tests/cuda/kernel_budget.py, by way of ccache.
stage_release() {
  build_and_test release -DFLASHGRAD_WARNINGS_AS_ERRORS=ON -DCMAKE_CUDA_FLAGS=-Xptxas=-v |
    grep --invert-match --extended-regexp '^(ptxas info|    [0-9]+ bytes stack frame)'
}
stage_python() { scripts/test_python.sh; }
stage_asan-ubsan() { build_and_test asan-ubsan; }
stage_tsan() { build_and_test tsan; }
# This preset's database has every source, with clang's flags.
stage_tidy() {
  cmake --preset asan-ubsan &&
    run-clang-tidy-14 -quiet -j "$jobs" -p build/asan-ubsan "^$PWD/(src|tools|tests|benchmarks)/" |
    sed $'s/\e\[[0-9;]*m//g'
}
stage_docs() { mkdir -p build && doxygen docs/Doxyfile; }

stages=("$@")
if [[ ${#stages[@]} == 0 ]]; then
  stages=(format release python asan-ubsan tsan tidy docs)
fi
logs=build/test-logs
mkdir -p "$logs"
table=()
failed=0
for stage in "${stages[@]}"; do
  printf '\n==== %s\n' "$stage"
  start=$SECONDS
  if "stage_$stage" 2>&1 | tee "$logs/$stage.log"; then
    result=passed
  else
    result=FAILED
    failed=1
  fi
  table+=("$(printf '%-12s %-8s %5d s' "$stage" "$result" $((SECONDS - start)))")
done

printf '\n==== closing lines of ctest and pytest\n'
for stage in "${stages[@]}"; do
  grep --extended-regexp 'tests passed|Total Test time|No tests were found|(passed|failed|error|no tests ran).* in [0-9.]+s' "$logs/$stage.log" | sed "s/^/$stage: /"
done
printf '\n==== all stages (%d s)\n' "$SECONDS"
printf '%s\n' "${table[@]}"
exit "$failed"
