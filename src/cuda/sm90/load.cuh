// SPDX-License-Identifier: Apache-2.0
// Loads of tiles that the copy engine can't do alone: tensors that it can't address, and tiles with
// rows that must not be read because nothing visible depends on them. One warp each.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// Writes `kRows` x `kColumns` elements to the swizzled tile at `destination`: row r of `tensor`
// from (batch, row + r, head), zero where !keep(r) or past `columns`. 16-bit elements, any strides.
template <int kRows, int kColumns, class Keep>
__device__ __forceinline__ void load_tile(std::uint32_t destination, const Tensor& tensor,
                                          int batch, int row, int head, int first_column,
                                          int columns, int lane, Keep&& keep) {
  using Tile = tile::SwizzledTile<kRows>;
  const auto* base = static_cast<const std::uint16_t*>(tensor.data);
#pragma unroll 1
  for (int i = lane; i < kRows * (kColumns / 8); i += 32) {
    const int r = i / (kColumns / 8);
    const int column = i % (kColumns / 8) * 8;
    std::uint32_t values[4] = {0, 0, 0, 0};
    if (base != nullptr && keep(r)) {
      const std::uint16_t* source =
          base + tensor.offset(batch, row + r, head) + (first_column + column) * tensor.dim_stride;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (first_column + column + c < columns) {
          values[c / 2] |= static_cast<std::uint32_t>(*source) << (c % 2 * 16);
        }
        source += tensor.dim_stride;
      }
    }
    ptx::store_shared(destination + static_cast<std::uint32_t>(Tile::offset(r, column)), values[0],
                      values[1], values[2], values[3]);
  }
}

// Zeroes the rows of a tile in shared memory for which !keep(r).
template <int kRows, int kColumns, class Keep>
__device__ __forceinline__ void clear_rows(std::uint32_t destination, int lane, Keep&& keep) {
  using Tile = tile::SwizzledTile<kRows>;
#pragma unroll 1
  for (int i = lane; i < kRows * (kColumns / 8); i += 32) {
    const int r = i / (kColumns / 8);
    if (!keep(r)) {
      ptx::store_shared(
          destination + static_cast<std::uint32_t>(Tile::offset(r, i % (kColumns / 8) * 8)), 0, 0,
          0, 0);
    }
  }
}

}  // namespace flashgrad::sm90
