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
// The copy engine loads a tile at a time; where the sequences of a packed batch are much shorter,
// 16 rows, so that of others no more than that is read. What it can't address the threads load.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/common/divisor.hpp"
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

// By a warp: rows of a head from row `row` on into a tile of kRows rows by the copy engine. With
// `few_rows` only groups of 16 rows that `num_rows` reaches into, and with kClear zeros in the
// groups behind, else all.
template <int kRows, int kColumns, bool kClear>
__device__ __forceinline__ void copy_rows(std::uint32_t destination, std::uint32_t barrier,
                                          const CUtensorMap& map, bool few_rows, int row, int head,
                                          int batch, int num_rows, int lane) {
  constexpr int kFew = FwdShortConfig::kFewRows;
  constexpr int kBoxes = FwdConfig::boxes(kColumns);
  const int of_load = few_rows ? kFew : kRows;
  const int groups = !few_rows ? 1
                     : kClear  ? kRows / kFew
                               : (min(num_rows, kRows) + kFew - 1) / kFew;
  if (lane == 0) {
    ptx::mbarrier_arrive_expect(
        barrier, static_cast<std::uint32_t>(groups * of_load * kBoxes * tile::kBoxRowBytes));
  }
  __syncwarp();
  if (lane < groups * kBoxes) {
    const int box = lane % kBoxes;
    const int first = lane / kBoxes * of_load;
    // Rows before the tensor's first are zeros.
    const int from = first < num_rows ? row + first : -kFew;
    ptx::tensor_load(destination + (box * kRows + first) * tile::kBoxRowBytes, &map, barrier,
                     box * tile::kBoxColumns, from, head, batch);
  }
}

// By a CTA: `num_rows` rows of a head from `source` on into a tile of kRows rows, and zeros behind
// them and past `columns`; any strides.
template <int kRows, int kColumns>
__device__ __forceinline__ void read_rows(std::uint32_t destination, const Tensor& tensor,
                                          int batch, int row, int head, int num_rows, int columns) {
  using Tile = tile::SwizzledTile<kRows>;
  constexpr int kVectors = FwdConfig::boxes(kColumns) * tile::kBoxColumns / 8;
  const auto* const source =
      static_cast<const std::uint16_t*>(tensor.data) + tensor.offset(batch, row, head);
#pragma unroll 1
  for (int i = ptx::thread_index(); i < kRows * kVectors; i += FwdShortConfig::kThreads) {
    const int r = i / kVectors;
    const int column = i % kVectors * 8;
    std::uint32_t values[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (r < num_rows && column + c < columns) {
        values[c / 2] |= static_cast<std::uint32_t>(
                             source[r * tensor.row_stride + (column + c) * tensor.dim_stride])
                         << (c % 2 * 16);
      }
    }
    ptx::store_shared(destination + static_cast<std::uint32_t>(Tile::offset(r, column)), values[0],
                      values[1], values[2], values[3]);
  }
  ptx::fence_proxy_async();
  __syncthreads();
}

// By a CTA: rows [begin, end) of a tile of kRows rows become 0.
template <int kRows, int kColumns>
__device__ __forceinline__ void zero_rows(std::uint32_t tile_address, int begin, int end) {
#pragma unroll 1
  for (int i = ptx::thread_index(); i < (end - begin) * 8; i += FwdShortConfig::kThreads) {
#pragma unroll
    for (int box = 0; box < FwdConfig::boxes(kColumns); ++box) {
      ptx::store_shared(tile_address + (box * kRows + begin) * tile::kBoxRowBytes + i * 16, 0, 0, 0,
                        0);
    }
  }
  ptx::fence_proxy_async();
  __syncthreads();
}

struct FwdShortParams {
  FwdParams base;             // block_m is kBlockM
  std::uint32_t num_tiles;    // CTAs from there on clear rows that belong to no sequence
  cuda::Divisor heads;        // query heads
  cuda::Divisor of_sequence;  // tiles of a sequence
  bool few_rows;  // what a load by the copy engine brings: kFewRows rows, or all of a tile's
  // Nothing on the device says anything about the sequences: each has this band and the key blocks
  // of each of its tiles.
  bool all_equal;
  Band band;
  FwdBlocks blocks[FwdShortConfig::kMaxBlocks];
};

// By a warp: out = 0 and lse = -inf in a row of some heads.
__device__ __forceinline__ void clear_row(const FwdParams& p, std::int64_t batch, std::int64_t row,
                                          int first_head, int num_heads, int lane) {
  auto* const out = static_cast<std::uint16_t*>(p.out.data);
  const int width = p.out_vectors ? p.head_dim_v / 8 : p.head_dim_v;
#pragma unroll 1
  for (int i = lane; i < num_heads * width; i += 32) {
    std::uint16_t* const to = out + p.out.offset(batch, row, first_head + i / width);
    if (p.out_vectors) {
      reinterpret_cast<uint4*>(to)[i % width] = make_uint4(0, 0, 0, 0);
    } else {
      to[i % width] = 0;
    }
  }
#pragma unroll 1
  for (int i = lane; p.lse && i < num_heads; i += 32) {
    static_cast<float*>(p.lse.data)[p.lse.offset(batch, row, first_head + i)] = -CUDART_INF_F;
  }
}

// By warp number `warp` of `num_warps`: the rows of a packed batch before the first sequence and
// after the last.
__device__ __forceinline__ void clear_outside(const FwdParams& p, std::uint32_t warp,
                                              std::uint32_t num_warps, int lane) {
  const Sequences& s = p.sequences;
#pragma unroll 1
  for (std::int64_t span = 0; span <= s.batch + 1; span += s.batch + 1) {
    const Span rows = packed_span(s.cu_seqlens_q, s.batch, s.rows_q, span);
#pragma unroll 1
    for (std::int64_t row = rows.begin + warp; row < rows.end; row += num_warps) {
      clear_row(p, 0, row, 0, static_cast<int>(p.heads_q), lane);
    }
  }
}

// By a warp: describes the tile of this CTA, and clears the rows of it that are not used.
//
// CTAs go through the sequences; within one from the block that sees the most keys to the one that
// sees the fewest, and within a block through the heads, which lie side by side in memory.
template <int kBlockN>
__device__ __forceinline__ void find_tile(const FwdShortParams& params, FwdTile* tile, int lane) {
  const FwdParams& p = params.base;
  const std::uint32_t index = params.of_sequence.quotient(blockIdx.x);
  const std::uint32_t in_sequence = blockIdx.x - index * params.of_sequence.divisor;
  const std::uint32_t rank = params.heads.quotient(in_sequence);
  const auto head = static_cast<std::int32_t>(in_sequence - rank * params.heads.divisor);
  const auto m_block =
      static_cast<std::int32_t>(p.last_block_first ? p.num_m_blocks - 1 - rank : rank);
  const std::int32_t m_begin = FwdShortConfig::kBlockM * m_block;
  if (params.all_equal) {
    const std::int32_t end = static_cast<std::int32_t>(p.sequences.rows_q);
    tile->blocks = params.blocks[m_block];
    place_tile(p, {index, {0, end}, {0, p.sequences.rows_kv}, params.band},
               {m_begin, min(m_begin + FwdShortConfig::kBlockM, end)}, head, tile);
    return;
  }
  const SequenceSpan s = sequence_span(p.sequences, p.sequences.packed() ? index + 1 : index);
  const auto end = static_cast<std::int32_t>(
      min(static_cast<std::int64_t>(m_begin) + FwdShortConfig::kBlockM, s.q.end - s.q.begin));
  const std::int32_t used_end = min(end, static_cast<std::int32_t>(s.band.seqlen_q));
  tile->blocks = key_blocks<kBlockN>(s.band, m_begin, used_end);
  place_tile(p, s, {m_begin, used_end}, head, tile);
#pragma unroll 1
  for (std::int32_t row = max(m_begin, used_end); row < end; ++row) {
    clear_row(p, s.batch_index, s.q.begin + row, head, 1, lane);
  }
}

template <FwdShortVariant kVariant, bool kScoreFunction, class T>
__global__ void __launch_bounds__(FwdShortConfig::kThreads,
                                  fwd_short_config(kVariant).ctas(kScoreFunction))
    fwd_short(const __grid_constant__ FwdMaps maps, const __grid_constant__ FwdShortParams params) {
  static constexpr FwdShortConfig C = fwd_short_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  static_assert(C.valid(), "shared memory");
  static_assert(sizeof(FwdTile) <= FwdConfig::kTileBytes);
  const FwdParams& p = params.base;
  using QTile = tile::SwizzledTile<C.kBlockM>;
  using KvTile = tile::SwizzledTile<C.block_n>;
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t memory[];
  const std::uint32_t q_tile = ptx::shared_address(memory);
  const std::uint32_t k_tile = q_tile + C.k_offset();
  const std::uint32_t v_tile = q_tile + C.v_offset();
  const std::uint32_t q_full = q_tile + C.barrier_offset();
  const std::uint32_t k_full = q_full + 8;
  const std::uint32_t v_full = q_full + 16;
  auto* const all_row_keys = reinterpret_cast<int2*>(memory + C.row_keys_offset());
  auto* const shared_tile = reinterpret_cast<FwdTile*>(memory + C.tile_offset());
  const FwdTile& tile = *shared_tile;
  const int warp = ptx::thread_index() / 32;
  const int lane = ptx::thread_index() % 32;
  if (blockIdx.x >= params.num_tiles) {
    clear_outside(p, 4 * (blockIdx.x - params.num_tiles) + static_cast<std::uint32_t>(warp),
                  4 * (gridDim.x - params.num_tiles), lane);
    return;
  }
  // By warp 0.
  const auto copy_k = [&](int n) {
    copy_rows<C.block_n, W.head_dim, false>(
        k_tile, k_full, maps.k, params.few_rows, tile.kv_row + n * C.block_n, tile.head_kv,
        tile.batch, static_cast<int>(tile.band.seqlen_kv) - n * C.block_n, lane);
  };
  const auto copy_v = [&](int n) {
    copy_rows<C.block_n, W.head_dim_v, true>(
        v_tile, v_full, maps.v, params.few_rows, tile.kv_row + n * C.block_n, tile.head_kv,
        tile.batch, static_cast<int>(tile.band.seqlen_kv) - n * C.block_n, lane);
  };
  const bool q_mapped = (p.mapped & kFwdMapQ) != 0;
  const bool k_mapped = (p.mapped & kFwdMapK) != 0;
  const bool v_mapped = (p.mapped & kFwdMapV) != 0;
  if (warp == 0) {
    if (lane == 0) {
      ptx::mbarrier_init(q_full, 1);
      ptx::mbarrier_init(k_full, 1);
      ptx::mbarrier_init(v_full, 1);
      ptx::fence_mbarrier_init();
    }
    find_tile<C.block_n>(params, shared_tile, lane);
    __syncwarp();
    if (tile.num_rows > 0 && tile.blocks.begin < tile.blocks.end) {
      if (q_mapped) {
        copy_rows<C.kBlockM, W.head_dim, false>(q_tile, q_full, maps.q, params.few_rows, tile.q_row,
                                                tile.head, tile.batch, tile.num_rows, lane);
      }
      if (k_mapped) {
        copy_k(tile.blocks.end - 1);
      }
      if (v_mapped) {
        copy_v(tile.blocks.end - 1);
      }
    }
  }
  __syncthreads();
  const int num_rows = tile.num_rows;
  if (num_rows <= 0) {
    return;
  }
  const FwdBlocks blocks = tile.blocks;
  const auto num_keys = static_cast<int>(tile.band.seqlen_kv);
  const auto read_k = [&](int n) {
    read_rows<C.block_n, W.head_dim>(k_tile, p.k, tile.batch, tile.kv_row + n * C.block_n,
                                     tile.head_kv, num_keys - n * C.block_n, p.head_dim);
  };
  const auto read_v = [&](int n) {
    read_rows<C.block_n, W.head_dim_v>(v_tile, p.v, tile.batch, tile.kv_row + n * C.block_n,
                                       tile.head_kv, num_keys - n * C.block_n, p.head_dim_v);
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
    list_row_keys<16>(tile, 16 * warp, all_row_keys + 16 * warp, lane);
    __syncwarp();
    if (!q_mapped) {
      read_rows<C.kBlockM, W.head_dim>(q_tile, p.q, tile.batch, tile.q_row, tile.head, num_rows,
                                       p.head_dim);
    } else {
      ptx::mbarrier_wait(q_full, 0);
    }
    if (!k_mapped) {
      read_k(blocks.end - 1);
    }
    if (!v_mapped) {
      read_v(blocks.end - 1);
    }
    const int2* const row_keys = all_row_keys + 16 * warp + lane / 4;
    int n = blocks.end - 1;
    std::uint32_t parity = 0;
    do {
      float s[C.block_n / 2];
      std::uint32_t probabilities[C.block_n / 4];
      if (k_mapped) {
        ptx::mbarrier_wait(k_full, parity);
      }
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
        if (!k_mapped) {
          read_k(n - 1);
        } else if (warp == 0) {
          copy_k(n - 1);
        }
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
      if (v_mapped) {
        ptx::mbarrier_wait(v_full, parity);
        if (p.clear_values && num_keys - n * C.block_n < C.block_n) {
          zero_rows<C.block_n, W.head_dim_v>(v_tile, num_keys - n * C.block_n, C.block_n);
        }
      }
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
        if (!v_mapped) {
          read_v(n - 1);
        } else if (warp == 0) {
          copy_v(n - 1);
        }
      }
      parity ^= 1;
    } while (--n >= blocks.begin);
  }
  if (has_rows) {
    finish_rows<W.head_dim_v, kScoreFunction, T>(p, tile, rows, o, warp, NoCopy{});  // (5)
  }
}

}  // namespace flashgrad::sm90
