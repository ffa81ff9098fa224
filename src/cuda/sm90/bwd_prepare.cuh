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
// | CTAs          | do                                                                         |
// |---------------|----------------------------------------------------------------------------|
// | key_tile_ctas | describe the main kernel's tiles                                           |
// | row_ctas      | a query block and some heads each, a warp 16 rows                          |
// | zero_ctas     | zeros; the last, since the memory takes reads and writes faster apart (134 |
// |               | MB of each, H200: 63 us behind each other, 71 us mixed)                    |
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
inline constexpr int kPrepareWarps = kPrepareThreads / 32;
static_assert(16 * kPrepareWarps == kBlockM);
inline constexpr int kMaxHeadsTogether = 8;
inline constexpr int kZerosPerThread = 64;  // floats
inline constexpr int kPackedOrderThreads = 256;

// CTAs of prepare that describe the main kernel's tiles, a thread a cluster of tiles.
FG_HOST_DEVICE constexpr unsigned key_tile_ctas(const KeyTileParams& tiles) {
  return tiles.tiles == nullptr ? 0 : (tiles.num_tiles + kPrepareThreads - 1) / kPrepareThreads;
}

FG_HOST_DEVICE constexpr std::int64_t zero_ctas(const BwdPrepareParams& p) {
  constexpr int kZeros = kPrepareThreads * kZerosPerThread;
  return p.dq_accumulator == nullptr ? 0 : (p.num_zeros + kZeros - 1) / kZeros;
}

// The tiles of a cluster, by one thread.
__device__ __forceinline__ void describe_tiles(const BwdParams& main, const KeyTileParams& tiles,
                                               std::uint32_t index, const PackedTile& place) {
#pragma unroll 1
  for (int rank = 0; rank < tiles.form.cluster; ++rank) {
    tiles.tiles[index * tiles.form.cluster + rank] = key_tile_at(main, tiles.form, place, rank);
  }
}

// A cluster that does part `part` of what serves a unit.
__device__ __forceinline__ void describe_server(const KeyTileParams& tiles, std::uint32_t index,
                                                int batch_index, int head_kv, int part) {
  KeyTile tile{};
  tile.num_steps = kServesUnit;
  tile.batch_index = batch_index;
  tile.head_kv = head_kv;
  tile.turn = part;
  for (int rank = 0; rank < tiles.form.cluster; ++rank) {
    tiles.tiles[index * tiles.form.cluster + rank] = tile;
  }
}

// Cluster number `index` of the main kernel of a batch of fixed length. Where units are served
// (unit_pipeline.hpp) each section begins with the clusters that do.
__device__ __forceinline__ void describe_cluster(const BwdParams& main, const KeyTileParams& tiles,
                                                 std::uint32_t index) {
  const auto clear_parts = static_cast<std::uint32_t>(main.pipeline.clear_parts());
  if (index < clear_parts) {
    describe_server(tiles, index, 0, 0, static_cast<int>(index));
    return;
  }
  std::int64_t number = index - clear_parts;
  if (main.pipeline.serves()) {
    const ServedOrder order(index, main.section, main.num_kv_blocks, main.num_units,
                            main.pipeline.last_parts);
    if (order.unit >= 0) {
      describe_server(tiles, index, static_cast<int>(order.unit / main.heads_kv),
                      static_cast<int>(order.unit % main.heads_kv), static_cast<int>(order.part));
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
  const auto clear_parts = static_cast<std::uint32_t>(main.pipeline.clear_parts());
  if (index < clear_parts) {
    describe_server(tiles, index, 0, 0, static_cast<int>(index));
  } else if (index - clear_parts < *tiles.num_packed_tiles) {
    describe_tiles(main, tiles, index, tiles.packed_tiles[index - clear_parts]);
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
  const unsigned tile_ctas = key_tile_ctas(tiles);
  const unsigned row_ctas = gridDim.x - tile_ctas - static_cast<unsigned>(zero_ctas(p));
  // A packed batch's come behind half of the others, when the order has long been made.
  const unsigned before = tiles.packed_tiles != nullptr ? row_ctas / 2 : 0;
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
  const auto thread = static_cast<int>(threadIdx.x);
  if (index >= row_ctas) {
    float* const zeros =
        p.dq_accumulator + std::int64_t{index - row_ctas} * (kPrepareThreads * kZerosPerThread);
    const std::int64_t left = p.dq_accumulator + p.num_zeros - zeros;
#pragma unroll
    for (int i = 0; i < kZerosPerThread / 4; ++i) {
      const int at = 4 * (i * kPrepareThreads + thread);
      if (at < left) {
        *reinterpret_cast<float4*>(zeros + at) = make_float4(0, 0, 0, 0);
      }
    }
    return;
  }
  const auto heads = static_cast<unsigned>(p.heads_q);
  const auto together = static_cast<unsigned>(p.heads_together);
  const std::int64_t block = index / (heads / together);
  const unsigned first_head = index % (heads / together) * together;
  const Sequences& s = p.sequences;
  const std::int64_t span = span_of_block_by_warp(s, block);
  const std::int64_t first = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM);
  const SequenceSpan sequence = sequence_span(s, span);
  const std::int64_t row_begin = (block - first) * kBlockM;

  if (p.order.counters != nullptr) {
    const Range keys = sequence.band.kv_range(row_begin, row_begin + kBlockM);
    const std::uint32_t turn =
        static_cast<std::uint32_t>(keys.begin) / static_cast<std::uint32_t>(p.keys_per_turn);
    if (thread < 2 * static_cast<int>(together)) {
      p.order.counters[2 * ((first_head + thread / 2) * p.rows.num_blocks + block) + thread % 2] =
          kNothingYet | turn;
    }
    if (keys.empty()) {
      for (unsigned h = 0; h < together; ++h) {
        clear_dq(p, sequence, row_begin, first_head + h);
      }
    }
  }
  if (p.order.ticket != nullptr && index == 0 && thread == 0) {
    *p.order.ticket = 0;
  }
  const std::int64_t number = std::int64_t{index} * kPrepareThreads + thread;
  const std::int64_t numbers = std::int64_t{row_ctas} * kPrepareThreads;
  if (p.pipeline.counters != nullptr) {
    for (std::int64_t i = number; i < p.num_counters; i += numbers) {
      p.pipeline.counters[i] = 0;
    }
  }
  const auto group = static_cast<unsigned>(p.group);
  unsigned num_heads = together;
  if (p.pipeline.lead > 0) {
    // Who prepares later units only adds marks.
    const auto lead = static_cast<unsigned>(p.pipeline.lead);
    for (std::int64_t i = number; i < p.heads_q * p.rows.num_blocks; i += numbers) {
      const auto of_head = static_cast<unsigned>(i / p.rows.num_blocks);
      const auto of_block = static_cast<unsigned>(i % p.rows.num_blocks);
      const unsigned batch = of_block / static_cast<unsigned>(p.pipeline.head_blocks);
      if (batch * (heads / group) + of_head / group >= lead) {
        p.rows.unreadable[i] = 0;
      }
    }
    const unsigned heads_before = static_cast<unsigned>(span) * heads + first_head;
    num_heads = lead * group > heads_before ? lead * group - heads_before : 0;
    num_heads = num_heads < together ? num_heads : together;
  }

  const int warp = thread / 32;
  const int lane = thread % 32;
  const std::int64_t row = row_begin + 16 * warp + lane / 4;
  const int left = static_cast<int>(clamp_to(sequence.band.seqlen_q - row, 0, 16));
  // Rows past the end of the tensor, or the sequence, come as zeros from the copy engine.
  const std::int64_t rows_end = (p.ragged ? sequence.q.end : s.rows_q) - sequence.q.begin;
  const int left_to_load = static_cast<int>(clamp_to(rows_end - row, 0, 16));
  const bool sees[2] = {!sequence.band.kv_range(row, row + 1).empty(),
                        !sequence.band.kv_range(row + 8, row + 9).empty()};
  // Of the first head.
  const auto offset = [&](const Tensor& t) {
    return t.offset(sequence.batch_index, sequence.q.begin + row, first_head);
  };
  const T* out = static_cast<const T*>(p.inputs.out.data) + offset(p.inputs.out);
  const T* dout = static_cast<const T*>(p.inputs.dout.data) + offset(p.inputs.dout);
  const float* lse = static_cast<const float*>(p.inputs.lse.data) + offset(p.inputs.lse);
  const float* dlse = static_cast<const float*>(p.inputs.dlse.data) + offset(p.inputs.dlse);
  std::int64_t slot = first_head * p.rows.num_blocks + block;
  // The lanes that get the diagonals.
  const bool speaks = lane % 4 == lane / 8;
  __shared__ std::uint32_t marks[kMaxHeadsTogether][kPrepareWarps];
  __shared__ float dsinks[kMaxHeadsTogether][kPrepareWarps];
#pragma unroll 1
  for (unsigned h = 0; h < num_heads; ++h) {
    // Also of rows that turn out not to count: waiting for lse first would double the latency.
    RowPieces pieces;
    load_pieces(pieces, p.inputs, p.wide, out, dout, left, lane % 4 * 8);
    float row_lse[2];
    float row_dlse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = speaks && 8 * i < left;
      row_lse[i] = exists ? lse[8 * i * p.inputs.lse.row_stride] : INFINITY;
      row_dlse[i] = exists && p.inputs.dlse ? dlse[8 * i * p.inputs.dlse.row_stride] : 0.0F;
    }
    float products[2][4] = {};
    multiply_pieces<T>(products, pieces);
#pragma unroll 1
    for (int column = 128; column < p.inputs.head_dim_v; column += 128) {
      load_pieces(pieces, p.inputs, p.wide, out, dout, left, column + lane % 4 * 8);
      multiply_pieces<T>(products, pieces);
    }
    std::uint32_t row_marks = 0;
    float dsink = 0;
    if (speaks) {
      const float sink = p.inputs.sinks != nullptr ? p.inputs.sinks[first_head + h] : -INFINITY;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float delta = lane / 4 % 2 == 0 ? products[i][2 * i] : products[i][2 * i + 1];
        const bool read = 8 * i < left && sees[i] && !isinf(row_lse[i]);
        const float neg_delta = read ? row_dlse[i] - delta : 0.0F;
        constexpr float kLog2E = 1.4426950408889634F;
        const std::int64_t statistic = slot * kBlockM + 16 * warp + lane / 4 + 8 * i;
        p.rows.neg_lse_log2[statistic] = read ? -row_lse[i] * kLog2E : -INFINITY;
        p.rows.neg_delta[statistic] = neg_delta;
        const bool unreadable = !read && 8 * i < left_to_load;
        row_marks |= unreadable ? 1 : read && isnan(row_lse[i] + neg_delta) ? kHasNan : 0;
        if (!isinf(row_lse[i]) && sink != -INFINITY) {
          dsink += expf(sink - row_lse[i]) * (read ? neg_delta : row_dlse[i]);
        }
      }
    }
    row_marks = __reduce_or_sync(0xffffffffU, row_marks);
    if (p.rows.dsink_partial != nullptr) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        dsink += __shfl_xor_sync(0xffffffffU, dsink, step);
      }
    }
    if (lane == 0) {
      marks[h][warp] = row_marks;
      dsinks[h][warp] = dsink;
    }
    out += p.inputs.out.head_stride;
    dout += p.inputs.dout.head_stride;
    lse += p.inputs.lse.head_stride;
    dlse += p.inputs.dlse.head_stride;
    slot += p.rows.num_blocks;
  }
  __syncthreads();
  if (thread < static_cast<int>(num_heads)) {
    std::uint32_t all_marks = 0;
    float dsink = 0;
#pragma unroll
    for (int w = 0; w < kPrepareWarps; ++w) {
      all_marks |= marks[thread][w];
      dsink += dsinks[thread][w];
    }
    const std::int64_t at = (first_head + thread) * p.rows.num_blocks + block;
    p.rows.unreadable[at] = static_cast<std::int32_t>(all_marks);
    if (p.rows.dsink_partial != nullptr) {
      p.rows.dsink_partial[at] = dsink;
    }
  }
}

}  // namespace flashgrad::sm90
