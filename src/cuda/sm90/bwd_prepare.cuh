// SPDX-License-Identifier: Apache-2.0
// Backward, pass 1 of 3. Per row i of every query head:
//   (1) delta_i = <dout_i, out_i>
//   (2) neg_lse_log2_i = -lse_i * log2(e), neg_delta_i = dlse_i - delta_i
//   (3) dsink_h += exp(sink_h - lse_i) * (dlse_i - delta_i), here summed over a block of 64 rows
// and the sums of dq become 0, or the counters of an ordered main kernel are set; where the main
// kernel writes dq, rows that no key reaches become 0.
// Where the main kernel serves units (unit_pipeline.hpp), only the first ones are prepared here.
// Rows that see nothing, and rows with an infinite lse, get -inf and 0, whatever their out and
// dout; a block with such a row is marked, so that the main kernel keeps its NaN away from the
// others.
//
// | CTAs          | do                                                                          |
// |---------------|-----------------------------------------------------------------------------|
// | key_tile_ctas | describe the main kernel's tiles                                            |
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
  if (!main.pipeline.serves()) {
    return key_tile_at(main, form,
                       tile_place(main, std::int64_t{form.block_n} * form.cluster, index), rank);
  }
  const ServedOrder order(index, main.section, main.num_kv_blocks, main.num_units,
                          main.pipeline.last_parts);
  if (!order.serves()) {
    return key_tile_at(main, form, served_place(main, order), rank);
  }
  KeyTile tile{};
  tile.num_steps = kServesUnit;
  tile.batch_index = static_cast<int>(order.unit / main.heads_kv);
  tile.head_kv = static_cast<int>(order.unit % main.heads_kv);
  tile.turn = static_cast<int>(order.part);
  return tile;
}

// The same of a packed batch, in the order that bwd_packed_order has made.
__device__ __forceinline__ KeyTile describe_packed(const BwdParams& main,
                                                   const KeyTileParams& tiles, std::uint32_t index,
                                                   std::uint32_t rank) {
  return index < *tiles.num_packed_tiles
             ? key_tile_at(main, tiles.form, tiles.packed_tiles[index], rank)
             : KeyTile{};  // no steps, writes no rows
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

// 128 columns of out and dout in 16 rows, a lane's part: rows lane / 4 and 8 more, in each four
// times 8 columns, those of the four lanes of a row next to each other.
struct RowPieces {
  uint4 out[2][4];
  uint4 dout[2][4];
};

// 8 elements, as many as `count`, the others 0.
template <class T>
__device__ __forceinline__ uint4 gather_8(const T* from, std::int64_t stride, int count) {
  std::uint32_t pairs[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) {
      pairs[i / 2] |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(from)[i * stride]}
                      << (i % 2 * 16);
    }
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Loads columns from `column` on. `out` and `dout` are the lane's first row; rows from `left` on,
// counted from there, are zeros.
template <class T>
__device__ __forceinline__ void load_pieces(RowPieces& pieces, const RowInputs& p, bool wide,
                                            const T* out, const T* dout, int left, int column) {
  const auto columns = static_cast<int>(p.head_dim_v);
  const auto load = [&](auto&& load_8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int c = column + 32 * k;
        pieces.out[i][k] = pieces.dout[i][k] = make_uint4(0, 0, 0, 0);
        if (8 * i < left && c < columns) {
          load_8(pieces.out[i][k], pieces.dout[i][k], 8 * i, c);
        }
      }
    }
  };
  if (wide) {
    load([&](uint4& x, uint4& y, int row, int c) {
      x = __ldcs(reinterpret_cast<const uint4*>(out + row * p.out.row_stride + c));
      y = *reinterpret_cast<const uint4*>(dout + row * p.dout.row_stride + c);
    });
  } else {
    load([&](uint4& x, uint4& y, int row, int c) {
      if (p.dout) {
        x = gather_8(out + row * p.out.row_stride + c, 1, columns - c);
        y = gather_8(dout + row * p.dout.row_stride + c * p.dout.dim_stride, p.dout.dim_stride,
                     columns - c);
      }
    });
  }
}

// Adds the products of 8 rows of dout and of out each, of whose 8 x 8 elements the diagonal is (1):
// with scalar products the instructions take as long as the memory.
template <class T>
__device__ __forceinline__ void multiply_pieces(float (&products)[2][4], const RowPieces& pieces) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 a = pieces.dout[0][k];
    const uint4 b = pieces.dout[1][k];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = pieces.out[i][k];
      ptx::multiply_16x8<T>(products[i], a.x, b.x, a.y, b.y, x.x, x.y);
      ptx::multiply_16x8<T>(products[i], a.z, b.z, a.w, b.w, x.z, x.w);
    }
  }
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

  const std::int64_t row = of.row_begin() + 16 * warp + lane / 4;  // the lane's first, relative
  const int left = prepares ? static_cast<int>(clamp_to(sequence.band.seqlen_q - row, 0, 16)) : 0;
  const auto offset = [&](const Tensor& t) {
    return t.offset(sequence.batch_index, sequence.q.begin + row, head);
  };
  const RowInputs& in = p.inputs;
  const T* const out = static_cast<const T*>(in.out.data) + offset(in.out);
  const T* const dout = static_cast<const T*>(in.dout.data) + offset(in.dout);
  const bool wide = all_wide(in);
  // Loads come first, also of rows that turn out not to count.
  RowPieces pieces;
  load_pieces(pieces, in, wide, out, dout, left, lane % 4 * 8);
  const bool speaks = lane % 4 == lane / 8;  // gets diagonals of the products
  float lse[2] = {INFINITY, INFINITY};
  float dlse[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (speaks && 8 * i < left) {
      lse[i] = static_cast<const float*>(in.lse.data)[offset(in.lse) + 8 * i * in.lse.row_stride];
      if (in.dlse) {
        dlse[i] =
            static_cast<const float*>(in.dlse.data)[offset(in.dlse) + 8 * i * in.dlse.row_stride];
      }
    }
  }
  const bool sees[2] = {!sequence.band.kv_range(row, row + 1).empty(),
                        !sequence.band.kv_range(row + 8, row + 9).empty()};
  // Rows past the end of the tensor, or the sequence, come as zeros from the copy engine.
  const std::int64_t rows_end = (p.ragged ? sequence.q.end : s.rows_q) - sequence.q.begin;
  const int left_to_load = static_cast<int>(clamp_to(rows_end - row, 0, 16));

  if (p.dq) {
    const Range keys = sequence.band.kv_range(of.row_begin(), of.row_begin() + kBlockM);
    if (p.order.counters != nullptr && thread < 2) {
      p.order.counters[2 * slot + thread] =
          kNothingYet |
          static_cast<std::uint32_t>(keys.begin) / static_cast<std::uint32_t>(p.keys_per_turn);
    }
    if (keys.empty()) {
      clear_dq(p, sequence, of.row_begin(), head);
    }
  }
  if (p.order.ticket != nullptr && index == 0 && thread == 0) {
    *p.order.ticket = 0;
  }
  const std::int64_t number = std::int64_t{index} * kPrepareThreads + thread;
  const std::int64_t numbers = std::int64_t{block_ctas} * kPrepareThreads;
  if (p.pipeline.counters != nullptr) {
    for (std::int64_t i = number; i < p.num_units * UnitPipeline::kNumCounts; i += numbers) {
      p.pipeline.counters[i] = 0;
    }
  }
  if (p.pipeline.lead > 0) {
    // Who prepares later units only adds marks.
    for (std::int64_t i = number; i < p.heads_q * p.rows.num_blocks; i += numbers) {
      const auto of_head = static_cast<unsigned>(i / p.rows.num_blocks);
      const auto of_block = static_cast<unsigned>(i % p.rows.num_blocks);
      const unsigned batch = of_block / static_cast<unsigned>(p.pipeline.head_blocks);
      if (batch * heads_kv + of_head / static_cast<unsigned>(p.group) >=
          static_cast<unsigned>(p.pipeline.lead)) {
        p.rows.unreadable[i] = 0;
      }
    }
    if (!prepares) {
      return;
    }
  }

  float products[2][4] = {};
  multiply_pieces<T>(products, pieces);
#pragma unroll 1
  for (int column = 128; column < in.head_dim_v; column += 128) {
    load_pieces(pieces, in, wide, out, dout, left, column + lane % 4 * 8);
    multiply_pieces<T>(products, pieces);
  }
  int marks = 0;
  float dsink = 0;
  if (speaks) {
    const float sink = in.sinks != nullptr ? in.sinks[head] : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float delta = lane / 4 % 2 == 0 ? products[i][2 * i] : products[i][2 * i + 1];
      const bool read = 8 * i < left && sees[i] && !isinf(lse[i]);
      const float neg_delta = read ? dlse[i] - delta : 0.0F;
      constexpr float kLog2E = 1.4426950408889634F;
      const std::int64_t statistic = slot * kBlockM + 16 * warp + lane / 4 + 8 * i;
      p.rows.neg_lse_log2[statistic] = read ? -lse[i] * kLog2E : -INFINITY;
      p.rows.neg_delta[statistic] = neg_delta;
      const bool unreadable = !read && 8 * i < left_to_load;
      marks |= unreadable ? 1 : read && isnan(lse[i] + neg_delta) ? kHasNan : 0;
      if (!isinf(lse[i]) && sink != -INFINITY) {
        dsink += expf(sink - lse[i]) * (read ? neg_delta : dlse[i]);
      }
    }
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
