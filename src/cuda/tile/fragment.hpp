// SPDX-License-Identifier: Apache-2.0
// Which element of a 64 x N product each register of a warpgroup holds, and the order in which f32
// accumulators of dq lie in global memory.
#pragma once

#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::tile {

struct Coordinate {
  int row;
  int column;
  bool operator==(const Coordinate&) const = default;
};

// Accumulator i of thread t (0 to 127) of a warpgroup. PTX ISA, "Register Fragments for
// wgmma.mma_async.m64nNk16".
FG_HOST_DEVICE constexpr Coordinate accumulator_coordinate(int thread, int i) {
  const int warp = thread / 32;
  const int lane = thread % 32;
  return {warp * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

// A 64 x head_dim block of dq in "fragment order": warp w's 16 rows come first to last, and in them
// for each 8 columns the four accumulators of lane 0, of lane 1, ... So a warp's 16-byte reductions
// cover 512 contiguous bytes (H200, d128: row-major reductions cost 22 %). Index of accumulator i,
// i % 4 == 0.
template <int kHeadDim>
FG_HOST_DEVICE constexpr int fragment_order(int thread, int i) {
  return thread / 32 * 16 * kHeadDim + i / 4 * 128 + thread % 32 * 4;
}

}  // namespace flashgrad::tile
