// SPDX-License-Identifier: Apache-2.0
// What a tile does for other units (dq_ring.hpp) while its own keys are still being loaded: the dq
// warpgroup turns a share of an earlier unit's sums into dq and leaves zeros; the consumers prepare
// a share of the rows of a later one.
#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_order.cuh"
#include "cuda/sm90/bwd_prepare.cuh"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/dq_ring.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

// The number of the tile's unit in the order of launches.
__device__ __forceinline__ int unit_of(const BwdParams& p, const KeyTile& tile) {
  return p.sequences.packed() ? tile.head_kv
                              : tile.batch_index * static_cast<int>(p.heads_kv) + tile.head_kv;
}

__device__ __forceinline__ std::uint32_t* unit_counter(const BwdParams& p, int unit,
                                                       DqRing::Count count) {
  return p.dq_ring.counters + unit * DqRing::kNumCounts + count;
}

// How many warps count, when `per_tile` of each tile of a unit do.
template <BwdConfig C>
__device__ __forceinline__ std::uint32_t all_warps(const BwdParams& p, int per_tile) {
  return static_cast<std::uint32_t>(per_tile * C.cluster) *
         static_cast<std::uint32_t>(p.num_kv_blocks);
}

// The share of the tile in what is done for another unit.
template <BwdConfig C>
__device__ __forceinline__ DqShare share_of(const BwdParams& p, const KeyTile& tile) {
  return dq_share(tile.kv_row / C.block_n(), p.num_kv_blocks * C.cluster,
                  p.group * p.dq_ring.head_blocks);
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
    wait_for_all(unit_counter(p, before, DqRing::kFinished), all_warps<C>(p, 4));
  }
}

// Waits until the rows of the tile's own unit have been prepared; what the copy engine loads may
// then be among them.
template <BwdConfig C>
__device__ __forceinline__ void wait_for_rows(const BwdParams& p, int unit) {
  if (p.dq_ring.ahead > 0 && unit >= p.dq_ring.ahead) {
    wait_for_all(unit_counter(p, unit, DqRing::kPrepared), all_warps<C>(p, 8));
    ptx::fence_proxy_async_global();
  }
}

// By the consumers.
template <BwdConfig C, class T>
__device__ __forceinline__ void prepare_ahead(const BwdParams& p, const KeyTile& tile, int thread) {
  static_assert(kPrepareThreads == 128 * BwdConfig::kConsumers);
  const int unit = unit_of(p, tile) + p.dq_ring.ahead;
  if (p.dq_ring.ahead == 0 || unit >= p.num_units) {
    return;
  }
  const int head_blocks = p.dq_ring.head_blocks;
  const DqShare share = share_of<C>(p, tile);
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int batch = unit / heads_kv;
  const int first_head = (unit - batch * heads_kv) * static_cast<int>(p.group);
  const SequenceSpan sequence = sequence_span(p.sequences, batch);
#pragma unroll 1
  for (int i = share.begin; i < share.end; i += 2) {
    const auto block = [&](int b) {
      const int head = b / head_blocks;
      const int in_head = b - head * head_blocks;
      return PrepareBlock{
          sequence, std::int64_t{in_head} * kBlockM, first_head + head,
          (first_head + head) * p.rows.num_blocks + std::int64_t{batch} * head_blocks + in_head};
    };
    const PrepareBlock blocks[2] = {block(i), block(i + 1)};
    prepare_rows<T, 2, true>(p.inputs, p.rows, p.sequences.rows_q, blocks, share.end - i, thread,
                              6);
  }
  count_warp(unit_counter(p, unit, DqRing::kPrepared), thread % 32);
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
  const DqShare share = share_of<C>(p, tile);
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
  wait_for_all(unit_counter(p, unit, DqRing::kAdded), all_warps<C>(p, 4));
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
  count_warp(unit_counter(p, unit, DqRing::kFinished), lane);
}

}  // namespace flashgrad::sm90
