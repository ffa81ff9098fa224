// SPDX-License-Identifier: Apache-2.0
// Rows of 16-bit elements that begin anywhere, moved in pieces of 16 bytes at multiples of 16: a
// row touches one piece more than it fills, and its first and last piece are partly others'.
#pragma once

#include <cstdint>

namespace flashgrad::sm90 {

inline constexpr int kPieceElements = 8;

// Elements of the piece in which the row at `begin` begins, before it.
__device__ __forceinline__ int elements_before(const std::uint16_t* begin) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(begin) / 2 % kPieceElements);
}

// The 16 bytes that begin `skipped` bytes (even, below 16) behind the begin of `low`; `high`
// follows it.
__device__ __forceinline__ uint4 shift_pieces(const uint4& low, const uint4& high,
                                              unsigned skipped) {
  const std::uint32_t in[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const bool skips_4 = (skipped & 4) != 0;
  const bool skips_8 = (skipped & 8) != 0;
  std::uint32_t pairs[5];
#pragma unroll
  for (int w = 0; w < 5; ++w) {
    pairs[w] = skips_8 ? (skips_4 ? in[w + 3] : in[w + 2]) : (skips_4 ? in[w + 1] : in[w]);
  }
  const unsigned bits = skipped % 4 * 8;
  return make_uint4(
      __funnelshift_r(pairs[0], pairs[1], bits), __funnelshift_r(pairs[1], pairs[2], bits),
      __funnelshift_r(pairs[2], pairs[3], bits), __funnelshift_r(pairs[3], pairs[4], bits));
}

// Writes columns `column` (maybe negative) to `column` + 7 of a row of `columns`, those that there
// are, to the piece at `to`.
__device__ __forceinline__ void store_piece(std::uint16_t* to, const uint4& piece, int column,
                                            int columns) {
  if (column >= 0 && column + kPieceElements <= columns) {
    *reinterpret_cast<uint4*>(to) = piece;
    return;
  }
  const std::uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int c = column + 2 * w;
    const bool first = c >= 0 && c < columns;
    const bool second = c + 1 >= 0 && c + 1 < columns;
    if (first && second) {
      reinterpret_cast<std::uint32_t*>(to)[w] = pairs[w];
    } else if (first) {
      to[2 * w] = static_cast<std::uint16_t>(pairs[w]);
    } else if (second) {
      to[2 * w + 1] = static_cast<std::uint16_t>(pairs[w] >> 16);
    }
  }
}

}  // namespace flashgrad::sm90
