// SPDX-License-Identifier: Apache-2.0
// The CTAs of the main kernel that serve units (unit_pipeline.hpp) instead of computing a tile, and
// what tiles wait for.
#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_order.cuh"
#include "cuda/sm90/bwd_rows.cuh"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/unit_pipeline.hpp"

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

// Warps that count: of the dq warpgroups of a unit's tiles, and of the CTAs that serve one.
template <BwdConfig C>
__device__ __forceinline__ std::uint32_t adding_warps(const BwdParams& p) {
  return 4U * C.cluster * static_cast<std::uint32_t>(p.num_kv_blocks);
}
template <BwdConfig C>
inline constexpr int kServingWarps = C.cluster* BwdConfig::kThreads / 32;

// Of numbers that are not negative; takes half as long as the signed division.
__device__ __forceinline__ int quotient(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

// Waits until a counter shows that all have done what it counts, and returns it. One warp.
__device__ __forceinline__ std::uint32_t wait_for_all(const std::uint32_t* counter,
                                                      std::uint32_t all) {
  std::uint32_t seen;
  while (((seen = ptx::load_acquire(counter)) & ~kSomeMarked) != all) {
    __nanosleep(500);
  }
  __syncwarp();
  return seen;
}

// Counts this warp, after all that its lanes have done to memory.
__device__ __forceinline__ void count_warp(std::uint32_t* counter, int lane) {
  __syncwarp();
  if (lane == 0) {
    ptx::reduce_release(counter, 1);
  }
}

// Waits until the slot of a unit has been cleared.
template <BwdConfig C>
__device__ __forceinline__ void wait_for_slot(const BwdParams& p, int unit) {
  const int before = unit - p.pipeline.slots;
  if (before >= 0) {
    wait_for_all(unit_counter(p, before, UnitPipeline::kFinished), kServingWarps<C>);
  }
}

// Waits until the rows of the tile's own unit have been prepared; the copy engine may load them
// then. Returns whether all are known to be readable.
template <BwdConfig C>
__device__ __forceinline__ bool wait_for_rows(const BwdParams& p, const KeyTile& tile) {
  const int unit = unit_of(p, tile);
  if (p.pipeline.lead == 0 || unit < p.pipeline.lead) {
    return false;
  }
  bool readable = tile.rows_ready == kRowsReadable;
  if (tile.rows_ready == 0) {
    readable = (wait_for_all(unit_counter(p, unit, UnitPipeline::kPrepared), kServingWarps<C>) &
                kSomeMarked) == 0;
  }
  ptx::fence_proxy_async_global();
  return readable;
}

// Counts this warp among those that have prepared a unit; the last one tells the unit's tiles, each
// of which then needs no other look.
template <BwdConfig C>
__device__ __forceinline__ void count_prepared(const BwdParams& p, int unit, int lane) {
  __syncwarp();
  std::uint32_t before = 0;
  if (lane == 0) {
    before = ptx::add_acquire_release(unit_counter(p, unit, UnitPipeline::kPrepared), 1);
  }
  before = __shfl_sync(0xffffffffU, before, 0);
  if ((before & ~kSomeMarked) != kServingWarps<C> - 1) {
    return;
  }
  const std::uint32_t ready = (before & kSomeMarked) == 0 ? kRowsReadable : kRowsMarked;
  const int num_tiles = static_cast<int>(p.num_kv_blocks) * C.cluster;
  const std::int64_t first =
      ServedOrder::cluster_of(unit, 0, p.section, p.num_kv_blocks, p.num_units);
  const std::int64_t second =
      ServedOrder::cluster_of(unit, 1, p.section, p.num_kv_blocks, p.num_units);
  for (int i = lane; i < num_tiles; i += 32) {
    KeyTile* const tile =
        p.tiles + (first + i / C.cluster * (second - first)) * C.cluster + i % C.cluster;
    ptx::store_release(&tile->rows_ready, ready);
  }
}

// Prepares the rows of a unit, by `warps` warps, 16 rows each at a time.
template <class T>
__device__ __forceinline__ void prepare_unit(const BwdParams& p, int unit, int warp, int warps,
                                             int lane) {
  const int head_blocks = p.pipeline.head_blocks;
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int batch = quotient(unit, heads_kv);
  const int first_head = (unit - batch * heads_kv) * static_cast<int>(p.group);
  const SequenceSpan sequence = sequence_span(p.sequences, batch);
  const int items = 4 * static_cast<int>(p.group) * head_blocks;
  // All rows at once from memory into the L2, since a warp's loads wait for each other.
#pragma unroll 1
  for (int i = warp; i < items; i += warps) {
    const int in_group = quotient(i / 4, head_blocks);
    const int row = (i / 4 - in_group * head_blocks) * kBlockM + i % 4 * 16 + lane / 2;
    const int column = lane % 2 * 64;  // two lines of 128 bytes a row
    if (row < sequence.band.seqlen_q && column < p.head_dim_v) {
      const auto line = [&](const Tensor& t) {
        return static_cast<const T*>(t.data) + t.offset(batch, row, first_head + in_group) + column;
      };
      ptx::prefetch_l2(line(p.inputs.out));
      ptx::prefetch_l2(line(p.inputs.dout));
    }
  }
#pragma unroll 1
  for (int i = warp; i < items; i += warps) {
    const int in_group = quotient(i / 4, head_blocks);
    const int block = i / 4 - in_group * head_blocks;
    const int head = first_head + in_group;
    const std::int64_t slot = head * p.rows.num_blocks + std::int64_t{batch} * head_blocks + block;
    const int in_block = i % 4 * 16 + lane / 16 * 8;
    const int own_marks = prepare_rows<T, 8>(p.inputs, p.rows, p.sequences.rows_q, sequence,
                                             std::int64_t{block} * kBlockM + in_block, head,
                                             slot * kBlockM + in_block, lane % 16);
    const unsigned marks = __reduce_or_sync(0xffffffffU, static_cast<unsigned>(own_marks));
    if (marks != 0 && lane == 0) {
      atomicOr(p.rows.unreadable + slot, static_cast<int>(marks));
      atomicOr(unit_counter(p, unit, UnitPipeline::kPrepared), kSomeMarked);
    }
  }
}

// Turns the sums of a unit into dq and leaves zeros for the next unit of the slot, by `warps`
// warps, 16 rows and a piece of the columns each at a time.
template <BwdConfig C, class T>
__device__ __forceinline__ void finish_unit(const BwdParams& p, int unit, int warp, int warps,
                                            int lane) {
  constexpr int kColumns = C.dq_columns();
  constexpr int kPieces = C.dq_pieces();
  const int group = static_cast<int>(p.group);
  const int head_blocks = p.pipeline.head_blocks;
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int batch = quotient(unit, heads_kv);
  const int first_head = (unit - batch * heads_kv) * group;
  const auto q_rows = static_cast<int>(p.sequences.rows_q);
  const bool clear = p.pipeline.reused(unit, p.num_units);
  float* const unit_sums = p.dq_accumulator + std::int64_t{unit % p.pipeline.slots} *
                                                  (group * head_blocks) * (kBlockM * C.head_dim);
  const int items = 4 * kPieces * group * head_blocks;
  const auto sums_of = [&](int i) {
    return unit_sums + std::int64_t{i / (4 * kPieces)} * (kBlockM * C.head_dim) +
           tile::fragment_order<C.head_dim>(i / kPieces % 4 * 32 + lane, 0) +
           i % kPieces * (16 * kColumns);
  };
  const auto place = [&](int i, auto&& store) {
    const int block = i / (4 * kPieces);
    const int in_group = quotient(block, head_blocks);
    const int row = (block - in_group * head_blocks) * kBlockM + i / kPieces % 4 * 16;
    store(row, first_head + in_group, i % kPieces * kColumns);
  };
  const auto clear_sums = [&](float* sums) {
    if (clear) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        ptx::store_sum(sums + j * 128, 0, 0, 0, 0);
      }
    }
  };
  if (!has_aligned_rows(p.dq)) {
#pragma unroll 1
    for (int i = warp; i < items; i += warps) {
      place(i, [&](int row, int head, int column) {
        finish_elements<kColumns, T>(p, sums_of(i), batch, row, q_rows - row, head, column, lane);
      });
      clear_sums(sums_of(i));
    }
    return;
  }
  // The loads of an item are under way while the one before is stored.
  float4 next[kColumns / 8];
  const auto load = [&](int i) {
    if (i < items) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        next[j] = ptx::load_sum(sums_of(i) + j * 128);
      }
    }
  };
  load(warp);
#pragma unroll 1
  for (int i = warp; i < items; i += warps) {
    PackedRows<kColumns> x;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      x[0][j / 4][j % 4] = ptx::pack<T>(next[j].x * p.scale, next[j].y * p.scale);
      x[1][j / 4][j % 4] = ptx::pack<T>(next[j].z * p.scale, next[j].w * p.scale);
    }
    load(i + warps);
    clear_sums(sums_of(i));
    place(i, [&](int row, int head, int column) {
      store_packed<kColumns>(x, p.dq, batch, row, q_rows - row, head, column, lane);
    });
  }
}

// What a CTA does that serves units instead of computing a tile: part `part` of what is to be done,
// in its cluster CTA `rank`. One half of its warps begins with reading rows from memory, the other
// with sums, which are in the L2.
template <BwdConfig C, class T>
__device__ __forceinline__ void serve_units(const BwdParams& p, int unit, int part, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = part * kServingWarps<C> + rank * (BwdConfig::kThreads / 32) +
                   static_cast<int>(threadIdx.x) / 32;
  const int parts = unit < p.num_units ? 1 : p.pipeline.last_parts;
  const int later = unit + p.pipeline.lead;
  const int earlier = unit - p.pipeline.lag;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    if ((half + warp) % 2 == 0) {
      if (p.pipeline.lead > 0 && later < p.num_units) {
        prepare_unit<T>(p, later, warp, kServingWarps<C>, lane);
        count_prepared<C>(p, later, lane);
      }
    } else if (p.pipeline.lag > 0 && earlier >= 0) {
      wait_for_all(unit_counter(p, earlier, UnitPipeline::kAdded), adding_warps<C>(p));
      wait_for_slot<C>(p, earlier);  // as no tile of it did if none sees a row
      finish_unit<C, T>(p, earlier, warp, parts * kServingWarps<C>, lane);
      count_warp(unit_counter(p, earlier, UnitPipeline::kFinished), lane);
    }
  }
}

}  // namespace flashgrad::sm90
