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
  std::uint32_t halves[6];  // from the 8 bytes on in which it begins
#pragma unroll
  for (int w = 0; w < 6; ++w) {
    halves[w] = (skipped & 8) != 0 ? in[w + 2] : in[w];
  }
  std::uint32_t pairs[5];  // from the 4 bytes on
#pragma unroll
  for (int w = 0; w < 5; ++w) {
    pairs[w] = (skipped & 4) != 0 ? halves[w + 1] : halves[w];
  }
  const unsigned bits = skipped % 4 * 8;
  return make_uint4(
      __funnelshift_r(pairs[0], pairs[1], bits), __funnelshift_r(pairs[1], pairs[2], bits),
      __funnelshift_r(pairs[2], pairs[3], bits), __funnelshift_r(pairs[3], pairs[4], bits));
}

__device__ __forceinline__ std::uint16_t element(const uint4& piece, int i) {
  const std::uint32_t left = (i & 2) != 0 ? piece.y : piece.x;
  const std::uint32_t right = (i & 2) != 0 ? piece.w : piece.z;
  const std::uint32_t pair = (i & 4) != 0 ? right : left;
  return static_cast<std::uint16_t>((i & 1) != 0 ? pair >> 16 : pair);
}

// Writes columns `column` (maybe negative) to `column` + 7 of a row of `columns`, those that there
// are, to the piece at `to`, in as few stores as there can be.
__device__ __forceinline__ void store_piece(std::uint16_t* to, const uint4& piece, int column,
                                            int columns) {
  const int begin = column < 0 ? -column : 0;
  const int end = columns - column < kPieceElements ? columns - column : kPieceElements;
  if (end - begin == kPieceElements) {
    *reinterpret_cast<uint4*>(to) = piece;
    return;
  }
  if (begin > 0 && end < kPieceElements) {
    for (int i = begin; i < end; ++i) {
      to[i] = element(piece, i);
    }
    return;
  }
  // A row's first piece is written from its end, the last one from its begin.
  const bool is_last = begin == 0;
  const int count = end - begin;
  if ((count & 4) != 0) {
    *reinterpret_cast<uint2*>(to + (is_last ? 0 : 4)) =
        is_last ? make_uint2(piece.x, piece.y) : make_uint2(piece.z, piece.w);
  }
  if ((count & 2) != 0) {
    const int at = is_last ? count & 4 : begin + (begin & 1);
    const std::uint32_t left = is_last ? piece.x : piece.y;
    const std::uint32_t right = is_last ? piece.z : piece.w;
    *reinterpret_cast<std::uint32_t*>(to + at) = (at & 4) != 0 ? right : left;
  }
  if ((count & 1) != 0) {
    const int at = is_last ? count - 1 : begin;
    to[at] = element(piece, at);
  }
}

}  // namespace flashgrad::sm90
