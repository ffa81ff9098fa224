#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails unless the symbols that a shared library exports are exactly those listed.
# Usage: check_exports.sh NM LIBRARY LIST
set -euo pipefail

nm=$1 library=$2 list=$3
# The version node itself is an absolute symbol (type A), no function.
"$nm" --dynamic --defined-only --format=posix "$library" | awk '$2 != "A" {sub(/@.*/, "", $1); print $1}' | LC_ALL=C sort |
  diff --unified --label expected --label exported "$list" -
