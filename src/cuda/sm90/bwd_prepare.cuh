// SPDX-License-Identifier: Apache-2.0
// Backward, pass 1 of 3. Per row i of every query head:
//   (1) delta_i = <dout_i, out_i>
//   (2) neg_lse_log2_i = -lse_i * log2(e), neg_delta_i = dlse_i - delta_i
//   (3) dsink_h += exp(sink_h - lse_i) * (dlse_i - delta_i), here summed over a block of 64 rows
// and the sums of dq become 0, or the counters of an ordered main kernel are set.
// Where the main kernel serves units (unit_pipeline.hpp), only the first ones are prepared here.
// Rows that see nothing, and rows with an infinite lse, get -inf and 0, whatever their out and
// dout; a block with such a row is marked, so that the main kernel keeps its NaN away from the
// others.
//
// | CTAs          | do                                                                          |
// |---------------|-----------------------------------------------------------------------------|
// | key_tile_ctas | describe the main kernel's tiles, and set the counters of units             |
// | (the rest)    | a query block of a head each, a warp 16 rows                                |
// | zero_ctas     | zeros; the last, since the memory takes reads and writes faster apart (H200,|
// |               | 134 MB of each: 66 us one behind the other, 74 us mixed)                    |
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_rows.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/packed_order.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/query_block.cuh"

namespace flashgrad::sm90 {

inline constexpr int kPrepareThreads = 128;
inline constexpr int kPrepareWarps = kPrepareThreads / 32;
static_assert(16 * kPrepareWarps == kBlockM);
inline constexpr int kPackedOrderThreads = 256;
inline constexpr int kZerosPerThread = 64;  // floats

// Tiles that a warp describes, a lane each: that is a long way for a thread, and longer beside
// lanes that go other ways. H200, full 1k, prepare: 2 lanes 19.2 us, 8 lanes 18.6, 32 lanes 23.9.
inline constexpr int kDescribedPerWarp = 8;

// CTAs of prepare that describe the main kernel's tiles.
FG_HOST_DEVICE constexpr unsigned key_tile_ctas(const KeyTileParams& tiles) {
  constexpr unsigned kAtOnce = kPrepareWarps * kDescribedPerWarp;
  return tiles.tiles == nullptr ? 0
                                : (tiles.num_tiles * tiles.form.cluster + kAtOnce - 1) / kAtOnce;
}

// CTAs that write zeros.
FG_HOST_DEVICE constexpr std::int64_t num_zeros(const BwdPrepareParams& p) {
  return p.dq_accumulator == nullptr
             ? 0
             : p.pipeline.slots * p.group * p.pipeline.head_blocks * p.block_floats;
}
FG_HOST_DEVICE constexpr std::int64_t zero_ctas(const BwdPrepareParams& p) {
  constexpr int kAtOnce = kPrepareThreads * kZerosPerThread;
  return (num_zeros(p) + kAtOnce - 1) / kAtOnce;
}

// CTA `rank` of cluster number `index` of the main kernel of a batch of fixed length. Where units
// are served (unit_pipeline.hpp) each section begins with the clusters that do.
__device__ __forceinline__ KeyTile describe(const BwdParams& main, const KeyTileForm& form,
                                            std::uint32_t index, std::uint32_t rank) {
  std::int64_t number = index;
  if (main.pipeline.serves()) {
    std::int64_t unit = -1;
    std::int64_t part = 0;
    if (form.ordered) {
      const PreparedOrder::Work work = prepared_order(main).work(index);
      unit = work.unit;
      number = work.tile;
    } else {
      const ServedOrder order(index, main.section, main.num_kv_blocks, main.num_units,
                              main.pipeline.last_parts);
      unit = order.unit;
      part = order.part;
      number = order.tile;
    }
    if (unit >= 0) {
      KeyTile tile{};
      tile.num_steps = kServesUnit;
      tile.batch_index = static_cast<int>(unit / main.heads_kv);
      tile.head_kv = static_cast<int>(unit % main.heads_kv);
      tile.turn = static_cast<int>(part);
      return tile;
    }
  }
  return key_tile_at(main, form,
                     tile_place(main, std::int64_t{form.block_n} * form.cluster,
                                static_cast<std::uint32_t>(number)),
                     rank);
}

// The same of a packed batch, in the order that bwd_packed_order has made.
__device__ __forceinline__ KeyTile describe_packed(const BwdParams& main,
                                                   const KeyTileParams& tiles, std::uint32_t index,
                                                   std::uint32_t rank) {
  return index < *tiles.num_packed_tiles
             ? key_tile_at(main, tiles.form, tiles.packed_tiles[index], rank)
             : KeyTile{};  // no steps, writes no rows
}

// A counter of an ordered main kernel before anybody has added to the block, which `keys` reach.
__device__ __forceinline__ std::uint32_t first_turn(const BwdPrepareParams& p, const Range& keys) {
  return kNothingYet |
         static_cast<std::uint32_t>(keys.begin) / static_cast<std::uint32_t>(p.keys_per_turn);
}

// Where units are served: the counters of all units, and what others find who prepare later ones.
// By threads `number` of `numbers`.
__device__ __forceinline__ void begin_units(const BwdPrepareParams& p, unsigned number,
                                            unsigned numbers) {
  if (p.pipeline.counters != nullptr) {
#pragma unroll 1
    for (std::int64_t i = number; i < p.num_units * UnitPipeline::kNumCounts; i += numbers) {
      p.pipeline.counters[i] = 0;
    }
  }
  if (p.pipeline.lead == 0) {
    return;
  }
  // Who prepares a unit only adds marks, and sets no turns: not all who add to a block wait for it
  // to be prepared.
  const auto head_blocks = static_cast<unsigned>(p.pipeline.head_blocks);
  const auto group = static_cast<unsigned>(p.group);
  const auto heads_kv = static_cast<unsigned>(p.heads_q) / group;
#pragma unroll 1
  for (std::int64_t i = number; i < p.heads_q * p.rows.num_blocks; i += numbers) {
    const auto head = static_cast<unsigned>(i / p.rows.num_blocks);
    const auto block = static_cast<unsigned>(i % p.rows.num_blocks);
    const unsigned batch = block / head_blocks;
    if (batch * heads_kv + head / group < static_cast<unsigned>(p.pipeline.lead)) {
      continue;
    }
    p.rows.unreadable[i] = 0;
    if (p.order.counters != nullptr) {
      const std::int64_t begin = std::int64_t{block - batch * head_blocks} * kBlockM;
      const Range keys = sequence_span(p.sequences, batch).band.kv_range(begin, begin + kBlockM);
      p.order.counters[2 * i] = p.order.counters[2 * i + 1] = first_turn(p, keys);
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

template <class T>
__global__ __launch_bounds__(kPrepareThreads,
                             4) void bwd_prepare(const __grid_constant__ BwdPrepareParams p,
                                                 const __grid_constant__ BwdParams main,
                                                 const __grid_constant__ KeyTileParams tiles) {
  ptx::grid_dependency_launch();
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const unsigned tile_ctas = key_tile_ctas(tiles);
  const unsigned block_ctas = gridDim.x - tile_ctas - static_cast<unsigned>(zero_ctas(p));
  // A packed batch's come behind half of the others, when the order has long been made.
  const unsigned before = tiles.packed_tiles != nullptr ? block_ctas / 2 : 0;
  if (blockIdx.x - before < tile_ctas) {
    const unsigned tile = ((blockIdx.x - before) * kPrepareWarps + warp) * kDescribedPerWarp + lane;
    const auto cluster = static_cast<unsigned>(tiles.form.cluster);
    const unsigned index = tile / cluster;
    if (lane < kDescribedPerWarp && index < tiles.num_tiles) {
      if (tiles.packed_tiles != nullptr) {
        ptx::grid_dependency_wait();
        tiles.tiles[tile] = describe_packed(main, tiles, index, tile % cluster);
      } else {
        tiles.tiles[tile] = describe(main, tiles.form, index, tile % cluster);
      }
    }
    begin_units(p, blockIdx.x * kPrepareThreads + threadIdx.x, tile_ctas * kPrepareThreads);
    return;
  }
  const unsigned index = blockIdx.x - (blockIdx.x < before ? 0 : tile_ctas);
  if (index >= block_ctas) {
    const std::int64_t begin = std::int64_t{index - block_ctas} * kPrepareThreads * kZerosPerThread;
    const std::int64_t left = num_zeros(p) - begin;
#pragma unroll
    for (int i = 0; i < kZerosPerThread / 4; ++i) {
      const int at = 4 * (i * kPrepareThreads + thread);
      if (at < left) {
        *reinterpret_cast<float4*>(p.dq_accumulator + begin + at) = make_float4(0, 0, 0, 0);
      }
    }
    return;
  }
  const auto heads = static_cast<unsigned>(p.heads_q);
  const std::int64_t block = index / heads;
  const std::int64_t head = index % heads;
  const Sequences& s = p.sequences;
  const QueryBlock of = find_query_block(s, block);
  const SequenceSpan& sequence = of.sequence;
  const std::int64_t slot = head * p.rows.num_blocks + block;
  const auto heads_kv = heads / static_cast<unsigned>(p.group);
  const std::int64_t unit = of.span * heads_kv + head / static_cast<unsigned>(p.group);
  const bool prepares = p.pipeline.lead == 0 || unit < p.pipeline.lead;

  if (!prepares) {
    return;
  }

  WarpRows<T> rows(p.inputs, sequence, of.row_begin() + 16 * warp, head, lane);
  // Rows past the end of the tensor, or the sequence, come as zeros from the copy engine.
  const std::int64_t rows_end = (p.ragged ? sequence.q.end : s.rows_q) - sequence.q.begin;
  float dsink = 0;
  const int marks = rows.finish(p.rows, rows_end, slot * kBlockM + 16 * warp, &dsink);
  if (p.order.counters != nullptr && prepares) {
    const Range keys = sequence.band.kv_range(of.row_begin(), of.row_begin() + kBlockM);
    if (thread < 2) {
      p.order.counters[2 * slot + thread] = first_turn(p, keys);
    }
    if (keys.empty()) {
      clear_dq(p.dq, p.head_dim, sequence, of.row_begin(), kBlockM, head, thread, kPrepareThreads);
    }
  }
  if (p.order.ticket != nullptr && index == 0 && thread == 0) {
    *p.order.ticket = 0;
  }
  const bool any_unreadable = __syncthreads_or(marks & 1) != 0;
  const bool any_nan = __syncthreads_or(marks & kHasNan) != 0;
  if (thread == 0) {
    p.rows.unreadable[slot] = (any_unreadable ? 1 : 0) + (any_nan ? kHasNan : 0);
  }
  if (p.rows.dsink_partial != nullptr) {
    __shared__ float partial[kPrepareWarps];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      dsink += __shfl_xor_sync(0xffffffffU, dsink, step);
    }
    if (lane == 0) {
      partial[warp] = dsink;
    }
    __syncthreads();
    if (thread == 0) {
      p.rows.dsink_partial[slot] = partial[0] + partial[1] + partial[2] + partial[3];
    }
  }
}

}  // namespace flashgrad::sm90
