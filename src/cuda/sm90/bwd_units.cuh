// SPDX-License-Identifier: Apache-2.0
// What a tile does for other units (unit_pipeline.hpp) while its own keys are still being loaded: the dq
// warpgroup turns a share of an earlier unit's sums into dq and leaves zeros; the consumers prepare
// a share of the rows of a later one.
#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_order.cuh"
#include "cuda/sm90/bwd_prepare.cuh"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/unit_pipeline.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

// The number of the tile's unit in the order of launches.
__device__ __forceinline__ int unit_of(const BwdParams& p, const KeyTile& tile) {
  return p.sequences.packed() ? tile.head_kv
                              : tile.batch_index * static_cast<int>(p.heads_kv) + tile.head_kv;
}

__device__ __forceinline__ std::uint32_t* unit_counter(const BwdParams& p, int unit,
                                                       UnitPipeline::Count count) {
  return p.pipeline.counters + unit * UnitPipeline::kNumCounts + count;
}

// How many warps count, when `per_tile` of each tile of a unit do.
template <BwdConfig C>
__device__ __forceinline__ std::uint32_t all_warps(const BwdParams& p, int per_tile) {
  return static_cast<std::uint32_t>(per_tile * C.cluster) *
         static_cast<std::uint32_t>(p.num_kv_blocks);
}

// Of numbers that are not negative; takes half as long as the signed division.
__device__ __forceinline__ int quotient(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

// The share of the tile in what is done for another unit.
template <BwdConfig C>
__device__ __forceinline__ UnitShare share_of(const BwdParams& p, const KeyTile& tile) {
  return unit_share(tile.kv_row / C.block_n(), static_cast<int>(p.num_kv_blocks) * C.cluster,
                    static_cast<int>(p.group) * p.pipeline.head_blocks);
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
  const int before = unit - p.pipeline.slots;
  if (before >= 0) {
    wait_for_all(unit_counter(p, before, UnitPipeline::kFinished), all_warps<C>(p, 4));
  }
}

// Waits until the rows of the tile's own unit have been prepared; what the copy engine loads may
// then be among them.
template <BwdConfig C>
__device__ __forceinline__ void wait_for_rows(const BwdParams& p, int unit) {
  if (p.pipeline.lead > 0 && unit >= p.pipeline.lead) {
    wait_for_all(unit_counter(p, unit, UnitPipeline::kPrepared), all_warps<C>(p, 8));
    ptx::fence_proxy_async_global();
  }
}

// By the consumers.
template <BwdConfig C, class T>
__device__ __forceinline__ void prepare_unit_share(const BwdParams& p, const KeyTile& tile, int thread) {
  const int unit = unit_of(p, tile) + p.pipeline.lead;
  if (p.pipeline.lead == 0 || unit >= p.num_units) {
    return;
  }
  const int head_blocks = p.pipeline.head_blocks;
  const UnitShare share = share_of<C>(p, tile);
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int batch = quotient(unit, heads_kv);
  const int first_head = (unit - batch * heads_kv) * static_cast<int>(p.group);
  const SequenceSpan sequence = sequence_span(p.sequences, batch);
  const int lane = thread % 32;
  // Each warp 16 rows at a time, a quarter of a block.
#pragma unroll 1
  for (int i = 4 * share.begin + thread / 32; i < 4 * share.end; i += 4 * BwdConfig::kConsumers) {
    const int in_group = quotient(i / 4, head_blocks);
    const int block = i / 4 - in_group * head_blocks;
    const int head = first_head + in_group;
    const std::int64_t slot = head * p.rows.num_blocks + std::int64_t{batch} * head_blocks + block;
    const int in_block = i % 4 * 16 + lane / 16 * 8;
    const PreparedRow row = prepare_rows<T, 8, true>(
        p.inputs, p.rows, p.sequences.rows_q, sequence, std::int64_t{block} * kBlockM + in_block,
        head, slot * kBlockM + in_block, lane % 16);
    const unsigned marks = __reduce_or_sync(0xffffffffU, static_cast<unsigned>(row.marks));
    if (marks != 0 && lane == 0) {
      atomicOr(p.rows.unreadable + slot, static_cast<int>(marks));
    }
  }
  count_warp(unit_counter(p, unit, UnitPipeline::kPrepared), lane);
}

template <BwdConfig C, class T>
__device__ __forceinline__ void finish_unit_share(const BwdParams& p, const KeyTile& tile, int warp,
                                           int lane) {
  constexpr int kBoxes = C.head_dim / 64;
  const int unit = unit_of(p, tile) - p.pipeline.lag;
  if (unit < 0) {
    return;
  }
  const int group = static_cast<int>(p.group);
  const int head_blocks = p.pipeline.head_blocks;
  const UnitShare share = share_of<C>(p, tile);
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int batch = quotient(unit, heads_kv);
  const int first_head = (unit - batch * heads_kv) * group;
  const auto q_rows = static_cast<int>(p.sequences.rows_q);
  const bool clear = p.pipeline.reused(unit, p.num_units);
  const bool wide = p.dq.dtype != DType::kF32 &&
                    reinterpret_cast<std::uintptr_t>(p.dq.data) % 16 == 0 &&
                    p.dq.row_stride % 8 == 0 && p.dq.head_stride % 8 == 0 &&
                    p.dq.batch_stride % 8 == 0 && C.head_dim == p.head_dim;
  float* const unit_sums =
      p.dq_accumulator +
      std::int64_t{unit % p.pipeline.slots} * (group * head_blocks) * (kBlockM * C.head_dim) +
      tile::fragment_order<C.head_dim>(warp * 32 + lane, 0);
  wait_for_all(unit_counter(p, unit, UnitPipeline::kAdded), all_warps<C>(p, 4));
#pragma unroll 1
  for (int i = share.begin * kBoxes; i < share.end * kBoxes; ++i) {
    const int block = i / kBoxes;
    const int column = i % kBoxes * 64;
    const int head = quotient(block, head_blocks);
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
  count_warp(unit_counter(p, unit, UnitPipeline::kFinished), lane);
}

}  // namespace flashgrad::sm90
