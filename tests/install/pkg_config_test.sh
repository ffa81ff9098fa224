#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs a C program with nothing but the flags of pkg-config.
# Usage: pkg_config_test.sh CC SOURCE LIBDIR OUTPUT
set -euo pipefail

cc=$1 source=$2 libdir=$3 output=$4
export PKG_CONFIG_PATH=$libdir/pkgconfig
read -ra flags < <(pkg-config --cflags --libs flashgrad)
"$cc" -std=c11 "$source" "${flags[@]}" -lm -o "$output"
LD_LIBRARY_PATH=$libdir "$output"
