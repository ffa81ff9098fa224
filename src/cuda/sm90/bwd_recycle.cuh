// SPDX-License-Identifier: Apache-2.0
// What the dq warpgroup does for an earlier unit (dq_ring.hpp) while its own tile is still being
// loaded: it turns a share of that unit's sums into dq and leaves zeros.
#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_order.cuh"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/dq_ring.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

// The number of the tile's unit in the order of launches.
__device__ __forceinline__ int unit_of(const BwdParams& p, const KeyTile& tile) {
  return p.sequences.packed() ? tile.head_kv
                              : tile.batch_index * static_cast<int>(p.heads_kv) + tile.head_kv;
}

// How many warps count on each of a unit's counters.
template <BwdConfig C>
__device__ __forceinline__ std::uint32_t warps_per_unit(const BwdParams& p) {
  return 4U * C.cluster * static_cast<std::uint32_t>(p.num_kv_blocks);
}

// Waits until a counter shows that all have done what it counts. One warp.
__device__ __forceinline__ void wait_for_all(const std::uint32_t* counter, std::uint32_t all) {
  while (ptx::load_acquire(counter) != all) {
  }
  __syncwarp();
}

// Counts this warp, after all that its lanes have done to memory.
__device__ __forceinline__ void count_warp(std::uint32_t* counter, int lane) {
  __syncwarp();
  if (lane == 0) {
    ptx::reduce_release(counter, 1);
  }
}

__device__ __forceinline__ void clear_sums(float* sums) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    ptx::store_sum(sums + j * 128, 0, 0, 0, 0);
  }
}

// Waits until the slot of the tile's own unit has been cleared.
template <BwdConfig C>
__device__ __forceinline__ void wait_for_slot(const BwdParams& p, int unit) {
  const int before = unit - p.dq_ring.slots;
  if (before >= 0) {
    wait_for_all(p.dq_ring.counters + 2 * before + 1, warps_per_unit<C>(p));
  }
}

template <BwdConfig C, class T>
__device__ __forceinline__ void recycle_dq(const BwdParams& p, const KeyTile& tile, int warp,
                                           int lane) {
  constexpr int kBoxes = C.head_dim / 64;
  const int unit = unit_of(p, tile) - p.dq_ring.distance;
  if (unit < 0) {
    return;
  }
  const int group = static_cast<int>(p.group);
  const int head_blocks = p.dq_ring.head_blocks;
  const DqShare share =
      dq_share(tile.kv_row / C.block_n(), p.num_kv_blocks * C.cluster, group * head_blocks);
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int batch = unit / heads_kv;
  const int first_head = (unit - batch * heads_kv) * group;
  const auto q_rows = static_cast<int>(p.sequences.rows_q);
  const bool clear = p.dq_ring.reused(unit, p.num_units);
  const bool wide = p.dq.dtype != DType::kF32 &&
                    reinterpret_cast<std::uintptr_t>(p.dq.data) % 16 == 0 &&
                    p.dq.row_stride % 8 == 0 && p.dq.head_stride % 8 == 0 &&
                    p.dq.batch_stride % 8 == 0 && C.head_dim == p.head_dim;
  float* const unit_sums =
      p.dq_accumulator +
      std::int64_t{unit % p.dq_ring.slots} * (group * head_blocks) * (kBlockM * C.head_dim) +
      tile::fragment_order<C.head_dim>(warp * 32 + lane, 0);
  wait_for_all(p.dq_ring.counters + 2 * unit, warps_per_unit<C>(p));
#pragma unroll 1
  for (int i = share.begin * kBoxes; i < share.end * kBoxes; ++i) {
    const int block = i / kBoxes;
    const int column = i % kBoxes * 64;
    const int head = block / head_blocks;
    const int row = (block - head * head_blocks) * kBlockM + warp * 16;
    float* const sums =
        unit_sums + std::int64_t{block} * (kBlockM * C.head_dim) + i % kBoxes * 1024;
    if (wide) {
      PackedRows x;
      load_rows<T>(x, sums, p.scale);
      if (clear) {
        clear_sums(sums);
      }
      store_packed(x, p.dq, batch, row, q_rows - row, first_head + head, column, lane);
    } else {
      finish_elements<T>(p, sums, batch, row, q_rows - row, first_head + head, column, lane);
      if (clear) {
        clear_sums(sums);
      }
    }
  }
  count_warp(p.dq_ring.counters + 2 * unit + 1, lane);
}

}  // namespace flashgrad::sm90
