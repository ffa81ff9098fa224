// SPDX-License-Identifier: Apache-2.0
// Backward, pass 1 of 3. Per row i of every query head:
//   (1) delta_i = <dout_i, out_i>
//   (2) neg_lse_log2_i = -lse_i * log2(e), neg_delta_i = dlse_i - delta_i
//   (3) dsink_h += exp(sink_h - lse_i) * (dlse_i - delta_i), here summed over a block of 64 rows
// and the block's dq accumulators are zeroed, or the counters of an ordered main kernel are set.
// Where the main kernel serves units (unit_pipeline.hpp), only the first ones are prepared here.
// Some CTAs list the main kernel's tiles. Rows that see nothing, and rows with an infinite lse, get
// -inf and 0, whatever their out and dout; a block with such a row is marked, so that the main
// kernel keeps its NaN away from the others.
//
// The others: one CTA per (query block, head), 16 rows a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_rows.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/packed_order.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

inline constexpr int kPrepareThreads = 128;
inline constexpr int kPackedOrderThreads = 256;

// CTAs of prepare that describe the main kernel's tiles, a thread a cluster of tiles.
FG_HOST_DEVICE constexpr unsigned key_tile_ctas(const KeyTileParams& tiles) {
  return tiles.tiles == nullptr ? 0 : (tiles.num_tiles + kPrepareThreads - 1) / kPrepareThreads;
}

// The tiles of a cluster, by one thread.
__device__ __forceinline__ void describe_tiles(const BwdParams& main, const KeyTileParams& tiles,
                                               std::uint32_t index, const PackedTile& place) {
#pragma unroll 1
  for (int rank = 0; rank < tiles.form.cluster; ++rank) {
    tiles.tiles[index * tiles.form.cluster + rank] = key_tile_at(main, tiles.form, place, rank);
  }
}

// Cluster number `index` of the main kernel of a batch of fixed length. Where units are served
// (unit_pipeline.hpp) each section begins with the clusters that do.
__device__ __forceinline__ void describe_cluster(const BwdParams& main, const KeyTileParams& tiles,
                                                 std::uint32_t index) {
  std::int64_t number = index;
  if (main.pipeline.serves()) {
    const ServedOrder order(index, main.section, main.num_kv_blocks, main.num_units,
                            main.pipeline.last_parts);
    if (order.unit >= 0) {
      KeyTile tile{};
      tile.num_steps = kServesUnit;
      tile.batch_index = static_cast<int>(order.unit / main.heads_kv);
      tile.head_kv = static_cast<int>(order.unit % main.heads_kv);
      tile.turn = static_cast<int>(order.part);
      for (int rank = 0; rank < tiles.form.cluster; ++rank) {
        tiles.tiles[index * tiles.form.cluster + rank] = tile;
      }
      return;
    }
    number = order.tile;
  }
  describe_tiles(main, tiles, index,
                 tile_place(main, std::int64_t{tiles.form.block_n} * tiles.form.cluster,
                            static_cast<std::uint32_t>(number)));
}

// Cluster number `index` of a packed batch, in the order that bwd_packed_order has made.
__device__ __forceinline__ void describe_packed_cluster(const BwdParams& main,
                                                        const KeyTileParams& tiles,
                                                        std::uint32_t index) {
  if (index >= tiles.num_tiles) {
    return;
  }
  if (index < *tiles.num_packed_tiles) {
    describe_tiles(main, tiles, index, tiles.packed_tiles[index]);
  } else {
    for (int rank = 0; rank < tiles.form.cluster; ++rank) {
      tiles.tiles[index * tiles.form.cluster + rank] = KeyTile{};  // no steps, writes no rows
    }
  }
}

// Puts the tiles of a packed batch in order; before prepare, one CTA.
__global__ __launch_bounds__(kPackedOrderThreads) void bwd_packed_order(
    const __grid_constant__ Sequences sequences, const __grid_constant__ KeyTileParams tiles) {
  ptx::grid_dependency_launch();
  make_packed_order<kPackedOrderThreads>(tiles.packed, sequences, tiles.num_tiles,
                                         tiles.packed_tiles, tiles.num_packed_tiles);
}

// dq = 0 in the rows of a block that no key reaches.
__device__ __forceinline__ void clear_dq(const BwdPrepareParams& p, const SequenceSpan& sequence,
                                         std::int64_t row_begin, std::int64_t head) {
  const std::int64_t left = sequence.q.end - sequence.q.begin - row_begin;
  const std::int64_t total = (left < kBlockM ? left : kBlockM) * p.head_dim;
  for (std::int64_t i = threadIdx.x; i < total; i += kPrepareThreads) {
    const std::int64_t row = sequence.q.begin + row_begin + i / p.head_dim;
    const std::int64_t at = p.dq.offset(sequence.batch_index, row, head) + i % p.head_dim;
    if (p.dq.dtype == DType::kF32) {
      static_cast<float*>(p.dq.data)[at] = 0;
    } else {
      static_cast<std::uint16_t*>(p.dq.data)[at] = 0;
    }
  }
}

template <class T>
__global__ __launch_bounds__(kPrepareThreads,
                             3) void bwd_prepare(const __grid_constant__ BwdPrepareParams p,
                                                 const __grid_constant__ BwdParams main,
                                                 const __grid_constant__ KeyTileParams tiles) {
  ptx::grid_dependency_launch();
  const unsigned tile_ctas = key_tile_ctas(tiles);
  // A packed batch's come behind half of the others, when the order has long been made.
  const unsigned before = tiles.packed_tiles != nullptr ? (gridDim.x - tile_ctas) / 2 : 0;
  if (blockIdx.x - before < tile_ctas) {
    const std::uint32_t cluster = (blockIdx.x - before) * kPrepareThreads + threadIdx.x;
    if (tiles.packed_tiles != nullptr) {
      ptx::grid_dependency_wait();
      describe_packed_cluster(main, tiles, cluster);
    } else if (cluster < tiles.num_tiles) {
      describe_cluster(main, tiles, cluster);
    }
    return;
  }
  const unsigned index = blockIdx.x - (blockIdx.x < before ? 0 : tile_ctas);
  const auto heads = static_cast<unsigned>(p.heads_q);
  const std::int64_t block = index / heads;
  const std::int64_t head = index % heads;
  const Sequences& s = p.sequences;
  const std::int64_t span = span_of_block_by_warp(s, block);
  const std::int64_t first = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM);
  const SequenceSpan sequence = sequence_span(s, span);
  const std::int64_t row_begin = (block - first) * kBlockM;
  const std::int64_t slot = head * p.rows.num_blocks + block;

  if (p.order.counters != nullptr) {
    const Range keys = sequence.band.kv_range(row_begin, row_begin + kBlockM);
    if (threadIdx.x < 2) {
      p.order.counters[2 * slot + threadIdx.x] =
          kNothingYet |
          static_cast<std::uint32_t>(keys.begin) / static_cast<std::uint32_t>(p.keys_per_turn);
    }
    if (keys.empty()) {
      clear_dq(p, sequence, row_begin, head);
    }
  }
  const auto group = static_cast<unsigned>(p.group);
  const auto head_kv = static_cast<unsigned>(head) / group;
  const std::int64_t unit = s.packed() ? head_kv : span * (heads / group) + head_kv;
  if (p.order.ticket != nullptr && index == 0 && threadIdx.x == 0) {
    *p.order.ticket = 0;
  }
  if (p.dq_accumulator != nullptr) {
    // Slot u is unit u's at first.
    if (unit < p.pipeline.slots) {
      const std::int64_t in_head = s.packed() ? block : block - first;
      float4* accumulator = reinterpret_cast<float4*>(
          p.dq_accumulator +
          ((unit * group + static_cast<unsigned>(head) % group) * p.pipeline.head_blocks +
           in_head) *
              p.block_floats);
      for (int i = static_cast<int>(threadIdx.x); i < p.block_floats / 4; i += kPrepareThreads) {
        accumulator[i] = make_float4(0, 0, 0, 0);
      }
    }
  }
  const std::int64_t thread = std::int64_t{index} * kPrepareThreads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x - tile_ctas} * kPrepareThreads;
  if (p.pipeline.counters != nullptr) {
    for (std::int64_t i = thread; i < p.num_units * UnitPipeline::kNumCounts; i += threads) {
      p.pipeline.counters[i] = 0;
    }
  }
  if (p.pipeline.lead > 0) {
    // Who prepares later units only adds marks.
    for (std::int64_t i = thread; i < p.heads_q * p.rows.num_blocks; i += threads) {
      const auto of_head = static_cast<unsigned>(i / p.rows.num_blocks);
      const auto of_block = static_cast<unsigned>(i % p.rows.num_blocks);
      const unsigned batch = of_block / static_cast<unsigned>(p.pipeline.head_blocks);
      if (batch * (heads / group) + of_head / group >= static_cast<unsigned>(p.pipeline.lead)) {
        p.rows.unreadable[i] = 0;
      }
    }
  }
  if (p.pipeline.lead > 0 && unit >= p.pipeline.lead) {
    return;
  }

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const PreparedRow row = prepare_rows<T, true, kMaxHeadDim>(
      p.inputs, p.wide, p.rows, p.ragged ? sequence.q.end : s.rows_q, sequence,
      row_begin + 16 * warp, head, slot * kBlockM + 16 * warp, lane);
  const bool any_unreadable = __syncthreads_or(row.marks & 1) != 0;
  const bool any_nan = __syncthreads_or(row.marks & kHasNan) != 0;
  if (threadIdx.x == 0) {
    p.rows.unreadable[slot] = (any_unreadable ? 1 : 0) + (any_nan ? kHasNan : 0);
  }
  if (p.rows.dsink_partial != nullptr) {
    __shared__ float partial[kPrepareThreads / 32];
    float sum = row.dsink;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, step);
    }
    if (lane == 0) {
      partial[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = 0;
      for (const float x : partial) {
        sum += x;
      }
      p.rows.dsink_partial[slot] = sum;
    }
  }
}

}  // namespace flashgrad::sm90
