// SPDX-License-Identifier: Apache-2.0
// How a 16-bit tile lies in shared memory, for the copy engine, wgmma and plain accesses alike.
//
// A tile of R rows and C columns is cut into boxes of 64 columns (128 bytes), one after the other,
// R * 128 bytes each. Inside a box row r stands at r * 128, and its eight 16-byte chunks are
// permuted: chunk c stands at c ^ (r % 8). That is CU_TENSOR_MAP_SWIZZLE_128B, and layout type 1 of
// the wgmma matrix descriptor (PTX ISA, "Shared Memory Matrix Layout"). Tiles start at multiples of
// 1024 bytes.
#pragma once

#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::tile {

inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kTileAlignment = 1024;

template <int kRows>
struct SwizzledTile {
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
  static constexpr int kBoxBytes = kRows * kBoxRowBytes;

  static constexpr int bytes(int columns) { return columns / kBoxColumns * kBoxBytes; }

  // Byte offset of element (row, column).
  FG_HOST_DEVICE static constexpr int offset(int row, int column) {
    const int chunk = column % kBoxColumns / 8;
    return column / kBoxColumns * kBoxBytes + row * kBoxRowBytes + ((chunk ^ (row % 8)) * 16) +
           column % 8 * 2;
  }

  // Both descriptors begin at (first row, column 0); the fields count 16-byte units. Adding the
  // k-step functions below moves along the contraction.

  // K-major operand: the contraction runs along the columns. The leading dimension is ignored;
  // groups of 8 rows are 1024 bytes apart.
  FG_HOST_DEVICE static constexpr std::uint64_t k_major_descriptor(std::uint32_t address) {
    return descriptor(address, 16, 1024);
  }
  // Advance by 16 columns, k times.
  FG_HOST_DEVICE static constexpr std::uint64_t k_major_step(int k) {
    return static_cast<std::uint64_t>(k / 4 * kBoxBytes + k % 4 * 32) >> 4;
  }

  // MN-major operand: the contraction runs along the rows, M or N along the columns. The leading
  // dimension is the distance between boxes.
  FG_HOST_DEVICE static constexpr std::uint64_t mn_major_descriptor(std::uint32_t address) {
    return descriptor(address, kBoxBytes, 1024);
  }
  // Advance by 16 rows, k times.
  FG_HOST_DEVICE static constexpr std::uint64_t mn_major_step(int k) {
    return static_cast<std::uint64_t>(k * 16 * kBoxRowBytes) >> 4;
  }

  // PTX ISA, "Matrix Descriptor Format": start address, leading and stride byte offsets, each
  // shifted right by 4, and the swizzle mode (1: 128 bytes) in bits 62 and 63.
  FG_HOST_DEVICE static constexpr std::uint64_t descriptor(std::uint32_t address,
                                                           std::uint32_t leading_bytes,
                                                           std::uint32_t stride_bytes) {
    return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) |
           static_cast<std::uint64_t>(leading_bytes >> 4) << 16 |
           static_cast<std::uint64_t>(stride_bytes >> 4) << 32 | std::uint64_t{1} << 62;
  }
};

}  // namespace flashgrad::tile
