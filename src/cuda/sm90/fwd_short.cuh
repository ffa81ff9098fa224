// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper where sequences are short: a CTA is one warpgroup and has one tile
// of 64 query rows. A tile of few key blocks spends most of its time waiting for loads, for one
// product or for the exponentials of one block; here several CTAs on a multiprocessor hide these
// from each other, where fwd.cuh has one.
//
// The arithmetic is that of fwd.cuh, equations (1) to (5), row by row in the same order: the same
// key blocks from the last to the first, the same products, the same softmax of 16 rows a warp. So
// the bits are the same too, whichever of the two runs. A kernel with narrower key blocks is for
// sequences that have no more keys: what the wider block adds to their sums is zeros.
//
// K has one place in shared memory and so has V. The next block's K is loaded once the scores are
// made, the next V once it has been used:
//
// | waited for           | loads under way |
// | Q, K(n)              | V(n)            |
// | scores of n          |                 |
// | V(n)                 | K(n - 1)        |
// | out of n             |                 |
//
// Loads are cp.async, 16 bytes a thread, which needs no tensor map and reads no row that is not
// the sequence's own.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_short_config.hpp"
#include "cuda/sm90/fwd_softmax.cuh"
#include "cuda/sm90/fwd_store.cuh"
#include "cuda/sm90/fwd_tile.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// By a CTA: `num_rows` rows of a head, the first at `source`, into a tile of kRows rows, zeros past
// `columns`, and with kClear in the rows behind. Where `vectors`, what arrives is waited for as
// cp.async.
template <int kRows, int kColumns, bool kClear>
__device__ __forceinline__ void load_rows(std::uint32_t destination, const std::uint16_t* source,
                                          const Tensor& tensor, bool vectors, int num_rows,
                                          int columns) {
  using Tile = tile::SwizzledTile<kRows>;
  // A thread has the same 8 columns of every kStep-th row.
  constexpr int kVectors = FwdConfig::boxes(kColumns) * tile::kBoxColumns / 8;
  constexpr int kStep = FwdShortConfig::kThreads / kVectors;
  static_assert(kStep % 8 == 0 && kRows % kStep == 0, "of equal place in the swizzle");
  const int first = ptx::thread_index() / kVectors;
  const int column = ptx::thread_index() % kVectors * 8;
  if (column >= kColumns) {
    return;
  }
  destination += static_cast<std::uint32_t>(Tile::offset(first, column));
  const int count = min(max(columns - column, 0), 8);
  source += first * tensor.row_stride + (count > 0 ? column : 0) * tensor.dim_stride;
  const std::int64_t step = kStep * tensor.row_stride;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const bool exists = first + i * kStep < num_rows;
      if (kClear || exists) {
        ptx::copy_async(destination + i * kStep * tile::kBoxRowBytes, source,
                        exists ? static_cast<std::uint32_t>(2 * count) : 0U);
      }
      source += step;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows / kStep; ++i) {
    std::uint32_t values[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (c < count && first + i * kStep < num_rows) {
        values[c / 2] |= static_cast<std::uint32_t>(source[c * tensor.dim_stride]) << (c % 2 * 16);
      }
    }
    ptx::store_shared(destination + i * kStep * tile::kBoxRowBytes, values[0], values[1], values[2],
                      values[3]);
    source += step;
  }
}

// By a warp: out = 0 and lse = -inf in rows [begin, end) of a batch entry's head.
__device__ __forceinline__ void clear_out(const FwdParams& p, std::int64_t batch,
                                          std::int64_t begin, std::int64_t end, int head,
                                          int lane) {
#pragma unroll 1
  for (std::int64_t row = begin; row < end; ++row) {
    auto* const out = static_cast<std::uint16_t*>(p.out.data) + p.out.offset(batch, row, head);
#pragma unroll 1
    for (int c = lane; c < p.head_dim_v; c += 32) {
      out[c] = 0;
    }
    if (p.lse && lane == 0) {
      static_cast<float*>(p.lse.data)[p.lse.offset(batch, row, head)] = -CUDART_INF_F;
    }
  }
}

// As many as the CTAs at the end of a packed batch's grid, which clear the rows before the first
// sequence and after the last.
inline constexpr std::uint32_t kFwdShortOutside = 64;

// By a warp of CTA number `cta` of them.
__device__ __forceinline__ void clear_outside(const FwdParams& p, std::uint32_t cta, int lane) {
#pragma unroll 1
  for (std::int64_t span = 0; span <= p.sequences.batch + 1; span += p.sequences.batch + 1) {
    const Span rows =
        packed_span(p.sequences.cu_seqlens_q, p.sequences.batch, p.sequences.rows_q, span);
#pragma unroll 1
    for (std::int64_t row = rows.begin + cta; row < rows.end; row += kFwdShortOutside) {
#pragma unroll 1
      for (std::uint32_t head = 0; head < p.heads_q; ++head) {
        clear_out(p, 0, row, row + 1, static_cast<int>(head), lane);
      }
    }
  }
}

struct FwdShortParams {
  FwdParams base;  // num_m_blocks and mapped are of fwd_short()
  Band band;       // of every sequence if same_band: nothing on the device says anything about them
  bool same_band;
};

// A CTA's tile, and where the rows of its head begin in the tensors: of q the tile's, of k and v
// the sequence's.
struct FwdShortTile {
  FwdTile tile;
  const std::uint16_t *q, *k, *v;
};

// By a warp: describes the tile of this CTA, which is empty (num_rows) if it has none, and clears
// the rows of it that are not used.
//
// CTAs go through the sequences; within one from the block that sees the most keys to the one that
// sees the fewest, and within a block through the heads, which lie side by side in memory.
template <int kBlockN>
__device__ __forceinline__ void find_tile(const FwdShortParams& params, FwdShortTile* shared,
                                          int lane) {
  const FwdParams& p = params.base;
  const std::uint32_t of_sequence = p.num_m_blocks * p.heads_q;
  const std::uint32_t index = blockIdx.x / of_sequence;
  const std::uint32_t in_sequence = blockIdx.x - index * of_sequence;
  if (index >= p.sequences.batch) {
    clear_outside(p, blockIdx.x - static_cast<std::uint32_t>(p.sequences.batch) * of_sequence,
                  lane);
    shared->tile.num_rows = 0;
    return;
  }
  const std::uint32_t rank = in_sequence / p.heads_q;
  const auto head = static_cast<std::int32_t>(in_sequence - rank * p.heads_q);
  const auto m_begin = static_cast<std::int32_t>(
      FwdShortConfig::kBlockM * (p.last_block_first ? p.num_m_blocks - 1 - rank : rank));
  const SequenceSpan s =
      params.same_band
          ? SequenceSpan{index, {0, p.sequences.rows_q}, {0, p.sequences.rows_kv}, params.band}
          : sequence_span(p.sequences, p.sequences.packed() ? index + 1 : index);
  const auto m_end = static_cast<std::int32_t>(
      min(static_cast<std::int64_t>(m_begin) + FwdShortConfig::kBlockM, s.q.end - s.q.begin));
  const std::int32_t used_end = min(m_end, static_cast<std::int32_t>(s.band.seqlen_q));
  describe_tile<FwdShortConfig::kBlockM, kBlockN>(p, s, {m_begin, used_end}, head, &shared->tile,
                                                  lane);
  const auto first_row = [&](const Tensor& tensor, std::int64_t row, std::int64_t of_head) {
    return static_cast<const std::uint16_t*>(tensor.data) +
           tensor.offset(s.batch_index, row, of_head);
  };
  const std::int64_t head_kv = static_cast<std::uint32_t>(head) / p.group;
  shared->q = first_row(p.q, s.q.begin + m_begin, head);
  shared->k = first_row(p.k, s.kv.begin, head_kv);
  shared->v = first_row(p.v, s.kv.begin, head_kv);
  if (used_end < m_end) {
    clear_out(p, s.batch_index, s.q.begin + max(m_begin, used_end), s.q.begin + m_end, head, lane);
  }
}

template <FwdShortVariant kVariant, bool kScoreFunction, class T>
__global__ void __launch_bounds__(FwdShortConfig::kThreads, fwd_short_config(kVariant).ctas)
    fwd_short(const __grid_constant__ FwdShortParams params) {
  static constexpr FwdShortConfig C = fwd_short_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  static_assert(C.valid(), "shared memory");
  const FwdParams& p = params.base;
  static_assert(sizeof(FwdShortTile) <= C.kTileBytes);
  using QTile = tile::SwizzledTile<C.kBlockM>;
  using KvTile = tile::SwizzledTile<C.block_n>;
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t memory[];
  const std::uint32_t q_tile = ptx::shared_address(memory);
  const std::uint32_t k_tile = q_tile + C.k_offset();
  const std::uint32_t v_tile = q_tile + C.v_offset();
  auto* const all_row_keys = reinterpret_cast<int2*>(memory + C.row_keys_offset());
  auto* const shared = reinterpret_cast<FwdShortTile*>(memory + C.tile_offset());
  const int warp = ptx::thread_index() / 32;
  const int lane = ptx::thread_index() % 32;
  if (warp == 0) {
    find_tile<C.block_n>(params, shared, lane);
  }
  __syncthreads();
  const FwdTile& tile = shared->tile;
  const int num_rows = tile.num_rows;
  if (num_rows <= 0) {
    return;
  }
  const FwdBlocks blocks = tile.blocks;
  const auto num_keys = static_cast<int>(tile.band.seqlen_kv);
  const auto load_k = [&](int n) {
    load_rows<C.block_n, W.head_dim, false>(k_tile, shared->k + n * (C.block_n * p.k.row_stride),
                                            p.k, (p.mapped & kFwdMapK) != 0,
                                            num_keys - n * C.block_n, p.head_dim);
    ptx::copy_async_commit();
  };
  const auto load_v = [&](int n) {
    load_rows<C.block_n, W.head_dim_v, true>(v_tile, shared->v + n * (C.block_n * p.v.row_stride),
                                             p.v, (p.mapped & kFwdMapV) != 0,
                                             num_keys - n * C.block_n, p.head_dim_v);
    ptx::copy_async_commit();
  };
  // Until what all threads have loaded is there, but for the last load.
  const auto wait = [&] {
    ptx::copy_async_wait<1>();
    ptx::fence_proxy_async();
    __syncthreads();
  };

  float o[W.head_dim_v / 2];
#pragma unroll
  for (float& x : o) {
    x = 0.0F;
  }
  SoftmaxRows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Rows that do not exist must not decide when the warp rescales: their +inf never grows.
    rows.maximum[r] = 16 * warp + lane / 4 + 8 * r < num_rows ? -CUDART_INF_F : CUDART_INF_F;
    rows.sum[r] = 0.0F;
  }
  const bool has_rows = 16 * warp < num_rows;
  if (blocks.begin < blocks.end) {
    load_rows<C.kBlockM, W.head_dim, false>(q_tile, shared->q, p.q, (p.mapped & kFwdMapQ) != 0,
                                            num_rows, p.head_dim);
    load_k(blocks.end - 1);
    load_v(blocks.end - 1);
    list_row_keys<C.kBlockM, C.kThreads>(tile, all_row_keys, ptx::thread_index());
    const int2* const row_keys = all_row_keys + 16 * warp + lane / 4;
    int n = blocks.end - 1;
    do {
      float s[C.block_n / 2];
      std::uint32_t probabilities[C.block_n / 4];
      wait();
      ptx::wgmma_fence();
      const std::uint64_t q_descriptor = QTile::k_major_descriptor(q_tile);
      const std::uint64_t k_descriptor = KvTile::k_major_descriptor(k_tile);
      ptx::wgmma_ss<C.block_n, T, false, 0, 0>(s, q_descriptor, k_descriptor);  // (1)
#pragma unroll
      for (int k = 1; k < W.head_dim / 16; ++k) {
        ptx::wgmma_ss<C.block_n, T, true, 0, 0>(s, q_descriptor + QTile::k_major_step(k),
                                                k_descriptor + KvTile::k_major_step(k));
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      if (n > blocks.begin) {
        __syncthreads();
        load_k(n - 1);
      } else {
        ptx::copy_async_commit();
      }
      if (has_rows) {
        float rescale[2];
        const int first_key = n * C.block_n + 2 * (lane % 4);
        const bool grown =  // (2)
            n >= blocks.full_begin && n < blocks.full_end
                ? softmax_block<C.block_n, kScoreFunction, false>(s, &rows, rescale, row_keys,
                                                                  first_key, p)
                : softmax_block<C.block_n, kScoreFunction, true>(s, &rows, rescale, row_keys,
                                                                 first_key, p);
        if (grown) {  // (3)
#pragma unroll
          for (int i = 0; i < W.head_dim_v / 2; ++i) {
            o[i] *= rescale[i / 2 % 2];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < C.block_n / 4; ++i) {
        probabilities[i] = ptx::pack<T>(s[2 * i], s[2 * i + 1]);
      }
      wait();
      ptx::wgmma_fence();
      const std::uint64_t v_descriptor = KvTile::mn_major_descriptor(v_tile);
#pragma unroll
      for (int k = 0; k < C.block_n / 16; ++k) {  // (4)
        ptx::wgmma_rs<W.head_dim_v, T, true, 1>(o, probabilities + 4 * k,
                                                v_descriptor + KvTile::mn_major_step(k));
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      if (n > blocks.begin) {
        __syncthreads();
        load_v(n - 1);
      }
    } while (--n >= blocks.begin);
  }
  if (has_rows) {
    finish_rows<W.head_dim_v, kScoreFunction, T>(p, tile, rows, o, warp, NoCopy{});  // (5)
  }
}

}  // namespace flashgrad::sm90
