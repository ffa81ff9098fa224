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
// The others: one CTA per (query block, head); 16 lanes read a row, 16 bytes each where strides
// allow it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/packed_order.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPreparedRows = kBlockM * 16 / kPrepareThreads;  // by 16 lanes at once

template <class T>
__device__ __forceinline__ float dot_8(uint4 a, uint4 b) {
  const T* x = reinterpret_cast<const T*>(&a);
  const T* y = reinterpret_cast<const T*>(&b);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  }
  return sum;
}

// <out, dout> of one row, the part of lane `lane` of 16. `wide`: 16-byte loads are legal.
template <class T>
__device__ __forceinline__ float partial_dot(const T* out, const T* dout, std::int64_t dout_stride,
                                             std::int64_t columns, int lane, bool wide) {
  float sum = 0;
  if (wide) {
    for (std::int64_t c = 8 * lane; c < columns; c += 8 * 16) {
      sum += dot_8<T>(*reinterpret_cast<const uint4*>(out + c),
                      *reinterpret_cast<const uint4*>(dout + c));
    }
  } else {
    // In the same order, so that delta's bits do not depend on strides.
    for (std::int64_t first = 8 * lane; first < columns; first += 8 * 16) {
      float part = 0;
      for (std::int64_t c = first; c < first + 8 && c < columns; ++c) {
        part = fmaf(static_cast<float>(out[c]), static_cast<float>(dout[c * dout_stride]), part);
      }
      sum += part;
    }
  }
  return sum;
}

FG_HOST_DEVICE inline bool is_wide(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.dim_stride == 1 &&
         t.row_stride % 8 == 0 && t.head_stride % 8 == 0 && t.batch_stride % 8 == 0;
}

// Whether out and dout can be read 16 bytes at a time.
FG_HOST_DEVICE inline bool all_wide(const RowInputs& p) {
  return p.dout && is_wide(p.out) && is_wide(p.dout) && p.head_dim_v % 8 == 0;
}

// CTAs of prepare that describe the main kernel's tiles, a thread a cluster of tiles; one that puts
// those of a packed batch in order.
FG_HOST_DEVICE constexpr unsigned key_tile_ctas(const KeyTileParams& tiles) {
  return tiles.tiles == nullptr ? 0
         : tiles.packed_tiles != nullptr
             ? 1
             : (tiles.num_tiles + kPrepareThreads - 1) / kPrepareThreads;
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

// Between prepare and the main kernel of a packed batch.
__global__ __launch_bounds__(kPrepareThreads) void bwd_packed_tiles(
    const __grid_constant__ BwdParams main, const __grid_constant__ KeyTileParams tiles) {
  ptx::grid_dependency_launch();
  const std::uint32_t index = blockIdx.x * kPrepareThreads + threadIdx.x;
  ptx::grid_dependency_wait();
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

// What prepare_rows found for the lane's own row.
struct PreparedRow {
  int marks;    // of RowStatistics::unreadable
  float dsink;  // what it adds in (3)
};

// (1) and (2) for kRows rows of a sequence from row `row_begin` on, whose first is number
// `statistic` of the row statistics. 16 lanes, `lane` of them; both halves of a warp together. The
// lane's own row is lane * kRows / 16, so 16 / kRows lanes share one, and the first of them speaks
// for it. kWide: the inputs are all_wide() and head_dim_v is at most 128.
//
// The loads of all rows are issued together, also of rows that turn out not to count: waiting for
// lse first would double the latency.
template <class T, int kRows, bool kWide>
__device__ __forceinline__ PreparedRow prepare_rows(const RowInputs& p, const RowStatistics& rows,
                                                    std::int64_t rows_q,
                                                    const SequenceSpan& sequence,
                                                    std::int64_t row_begin, std::int64_t head,
                                                    std::int64_t statistic, int lane) {
  constexpr int kSharing = 16 / kRows;
  const std::int64_t b = sequence.batch_index;
  const std::int64_t first_row = sequence.q.begin + row_begin;
  const int left = static_cast<int>(clamp_to(sequence.band.seqlen_q - row_begin, 0, kRows));
  const int own = lane / kSharing;
  const std::int64_t row = row_begin + own;
  const bool exists = own < left;
  const float lse =
      exists ? static_cast<const float*>(p.lse.data)[p.lse.offset(b, first_row + own, head)]
             : INFINITY;
  const float dlse =
      exists && p.dlse
          ? static_cast<const float*>(p.dlse.data)[p.dlse.offset(b, first_row + own, head)]
          : 0.0F;
  float delta[kRows];
  if (kWide || (all_wide(p) && p.head_dim_v <= 8 * 16)) {
    const int columns_left = 8 * lane < p.head_dim_v ? left : 0;
    const T* const out =
        static_cast<const T*>(p.out.data) + p.out.offset(b, first_row, head) + 8 * lane;
    const T* const dout =
        static_cast<const T*>(p.dout.data) + p.dout.offset(b, first_row, head) + 8 * lane;
    uint4 x[kRows];
    uint4 y[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = y[i] = make_uint4(0, 0, 0, 0);
      if (i < columns_left) {
        x[i] = __ldcs(reinterpret_cast<const uint4*>(out + i * p.out.row_stride));
        y[i] = *reinterpret_cast<const uint4*>(dout + i * p.dout.row_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      delta[i] = dot_8<T>(x[i], y[i]);
    }
  } else {
    const bool wide = all_wide(p);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      delta[i] = 0;
      if (p.dout && i < left) {
        delta[i] = partial_dot<T>(
            static_cast<const T*>(p.out.data) + p.out.offset(b, first_row + i, head),
            static_cast<const T*>(p.dout.data) + p.dout.offset(b, first_row + i, head),
            p.dout.dim_stride, p.head_dim_v, lane, wide);
      }
    }
  }
  // Sums over the lanes; while a lane has several rows it gives half of them away.
#pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    const int half = kRows * step / 16;
    const bool upper = (lane & step) != 0;
    if (half == 0) {
      delta[0] += __shfl_xor_sync(0xffffffffU, delta[0], step);
    }
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? delta[i] : delta[i + half];
      delta[i] = (upper ? delta[i + half] : delta[i]) + __shfl_xor_sync(0xffffffffU, given, step);
    }
  }
  const bool read = exists && !sequence.band.kv_range(row, row + 1).empty() && !isinf(lse);
  const float neg_delta = read ? dlse - delta[0] : 0.0F;
  PreparedRow result{0, 0};
  if (lane % kSharing == 0) {
    constexpr float kLog2E = 1.4426950408889634F;
    rows.neg_lse_log2[statistic + own] = read ? -lse * kLog2E : -INFINITY;
    rows.neg_delta[statistic + own] = neg_delta;
    const float sink = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
    if (!kWide && !isinf(lse) && sink != -INFINITY) {
      result.dsink = expf(sink - lse) * (read ? neg_delta : dlse);
    }
    // Rows past the end of the tensor come as zeros from the copy engine.
    const bool unreadable = !read && first_row + own < rows_q;
    result.marks = unreadable ? 1 : read && isnan(lse + neg_delta) ? kHasNan : 0;
  }
  return result;
}

template <class T>
__global__ __launch_bounds__(kPrepareThreads,
                             3) void bwd_prepare(const __grid_constant__ BwdPrepareParams p,
                                                 const __grid_constant__ BwdParams main,
                                                 const __grid_constant__ KeyTileParams tiles) {
  ptx::grid_dependency_launch();
  const unsigned tile_ctas = key_tile_ctas(tiles);
  if (blockIdx.x < tile_ctas) {
    const std::uint32_t cluster = blockIdx.x * kPrepareThreads + threadIdx.x;
    if (tiles.packed_tiles != nullptr) {
      make_packed_order<kPrepareThreads>(tiles.packed, p.sequences, tiles.num_tiles,
                                         tiles.packed_tiles, tiles.num_packed_tiles);
    } else if (cluster < tiles.num_tiles) {
      describe_cluster(main, tiles, cluster);
    }
    return;
  }
  const unsigned index = blockIdx.x - tile_ctas;
  const auto heads = static_cast<unsigned>(p.heads_q);
  const std::int64_t block = index / heads;
  const std::int64_t head = index % heads;
  const Sequences& s = p.sequences;
  const std::int64_t span = span_of_block(s.cu_seqlens_q, s.batch, s.rows_q, block, kBlockM);
  const std::int64_t first = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM);
  const SequenceSpan sequence = sequence_span(s, span);
  const std::int64_t row_begin = (block - first) * kBlockM;
  const std::int64_t slot = head * p.rows.num_blocks + block;

  if (p.order.counters != nullptr) {
    const Range keys = sequence.band.kv_range(row_begin, row_begin + kBlockM);
    if (threadIdx.x < 2) {
      p.order.counters[2 * slot + threadIdx.x] =
          kNothingYet | static_cast<std::uint32_t>(keys.begin / p.keys_per_turn);
    }
    if (keys.empty()) {
      clear_dq(p, sequence, row_begin, head);
    }
  }
  if (p.order.ticket != nullptr && index == 0 && threadIdx.x == 0) {
    *p.order.ticket = 0;
  }
  const auto group = static_cast<unsigned>(p.group);
  const auto head_kv = static_cast<unsigned>(head) / group;
  const std::int64_t unit = s.packed() ? head_kv : span * (heads / group) + head_kv;
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
  const int in_block = static_cast<int>(threadIdx.x) / 16 * kPreparedRows;
  const PreparedRow row = prepare_rows<T, kPreparedRows, false>(
      p.inputs, p.rows, s.rows_q, sequence, row_begin + in_block, head, slot * kBlockM + in_block,
      static_cast<int>(threadIdx.x) % 16);
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
    if (threadIdx.x % 32 == 0) {
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
