// SPDX-License-Identifier: Apache-2.0
// Loads of tiles that the copy engine can't do alone: tensors that it can't address, and tiles with
// rows that must not be read because nothing visible depends on them. One warp each.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
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

// 64 * kNumBoxes columns of rows `row` on of one head into a tile of kRows rows, then one arrival
// on `full`. With `clear` the loader first waits for the tile at its own barrier `landing` (of
// parity `parity`, kept in shared memory) and zeroes the rows that keep() refuses; needed where
// !mapped.
template <int kRows, int kNumBoxes, class Keep>
__device__ __forceinline__ void load_operand(const CUtensorMap* map, bool mapped,
                                             const Tensor& tensor, int batch, int row, int head,
                                             int columns, std::uint32_t destination,
                                             std::uint32_t full, std::uint32_t landing, int& parity,
                                             bool clear, int lane, Keep&& keep) {
  constexpr std::uint32_t kBoxBytes = kRows * tile::kBoxRowBytes;
  if (mapped) {
    const std::uint32_t barrier = clear ? landing : full;
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect(barrier, kNumBoxes * kBoxBytes);
#pragma unroll
      for (int box = 0; box < kNumBoxes; ++box) {
        ptx::tensor_load(destination + box * kBoxBytes, map, barrier, 64 * box, row, head, batch);
      }
    }
    __syncwarp();
    if (!clear) {
      return;
    }
    ptx::mbarrier_wait(landing, static_cast<std::uint32_t>(parity));
    __syncwarp();
    clear_rows<kRows, 64 * kNumBoxes>(destination, lane, keep);
  } else {
    load_tile<kRows, 64 * kNumBoxes>(destination, tensor, batch, row, head, 0, columns, lane, keep);
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (ptx::elect_one()) {
    if (mapped) {
      parity ^= 1;
    }
    ptx::mbarrier_arrive(full);
  }
  __syncwarp();
}

}  // namespace flashgrad::sm90
