#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: check_isa_objects.sh NM OBJECT...
# The objects of src/cpu/isa are compiled for newer machines than the rest. They must define no weak symbol: the linker
# could pick such a copy of a shared inline function for code that runs everywhere. Nor any function that others could call
# by name: each offers one table (cpu/dispatch.hpp).
set -eu
nm=$1
shift
test $# -gt 0 || { echo "no objects to check" >&2; exit 1; }
status=0
for object in "$@"; do
  leaks=$("$nm" -C --defined-only "$object" | grep -E '^[0-9a-f]+ [TWVu] ' || true)
  if [ -n "$leaks" ]; then
    echo "$object defines:"
    echo "$leaks"
    status=1
  fi
done
exit $status
