// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper where a few rows see many keys. A tile is one chunk (fwd_split.hpp)
// of the keys of one key head, and up to 16 rows of each of up to four query heads of its group: a
// warp's 16 rows are those of one head, as in fwd.cuh, and the walk over the chunk's blocks is that
// of fwd.cuh too: the same blocks from the last to the first, the same products, the same softmax.
// So a sequence that is not cut has the same bits here, there and in fwd_short.cuh.
//
// What binds is the memory. So CTAs, one or two on a multiprocessor, take tile after tile, and
// the loads of the next one run under the products of this one.
//
// | warps               | role                                      |
// | warpgroup 0, warp 0 | producer: describes tiles, loads Q, K, V  |
// | warpgroup 1         | consumer                                  |
//
// Shared memory, its barriers and the producer: fwd_split_load.cuh.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fwd.cuh"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_softmax.cuh"
#include "cuda/sm90/fwd_split_load.cuh"
#include "cuda/sm90/fwd_store.cuh"
#include "cuda/sm90/fwd_tile.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// By a warp: the parts of a chunk of its rows, of which `num_rows` exist; that of the first is
// number `first`.
template <int kColumns>
__device__ __forceinline__ void store_parts(const FwdParts& parts, std::int64_t first, int num_rows,
                                            const SoftmaxRows& rows, const float (&o)[kColumns / 2],
                                            int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    const int row = lane / 4 + 8 * r;
    if (row >= num_rows) {
      continue;
    }
    if (lane % 4 == 0) {
      parts.statistics[first + row] = make_float2(rows.maximum[r], sum);
    }
    float* const to = parts.o + (first + row) * parts.columns + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (8 * j < parts.columns) {
        *reinterpret_cast<float2*>(to + 8 * j) =
            make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
    }
  }
}

template <FwdVariant kVariant, bool kScoreFunction, class T>
__device__ __forceinline__ void split_consumer(const FwdSplitShared<kVariant>& shared,
                                               const FwdSplitParams& params) {
  static constexpr FwdConfig W = fwd_config(kVariant);
  using QTile = tile::SwizzledTile<FwdSplitConfig::kBlockM>;
  using KvTile = tile::SwizzledTile<W.block_n>;
  const FwdParams& p = params.base;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  RingPosition<FwdSplitConfig::kStages> ring;  // of K; a block's V is the same use of its own ring
  RingPosition<1> q_ring;
  RingPosition<FwdSplitConfig::kTiles> slot;
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  while (true) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdSplitTile& tile = *shared.tile(slot.stage());
    const int num_rows = uniform(tile.of_head.num_rows);
    if (num_rows < 0) {
      return;
    }
    const FwdBlocks blocks = uniform(tile.of_head.blocks);
    const bool has_rows = warp < uniform(tile.num_heads);
    float o[W.head_dim_v / 2];
#pragma unroll
    for (float& x : o) {
      x = 0.0F;
    }
    SoftmaxRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows that do not exist must not decide when the warp rescales: their +inf never grows.
      rows.maximum[r] = has_rows && lane / 4 + 8 * r < num_rows ? -CUDART_INF_F : CUDART_INF_F;
      rows.sum[r] = 0.0F;
    }
    if (blocks.begin < blocks.end) {
      float s[W.block_n / 2];
      std::uint32_t probabilities[W.block_n / 4];
      float rescale[2];
      const int key_in_block = 2 * (lane % 4);
      const int2* const row_keys = tile.row_keys + lane / 4;
      const auto issue_scores = [&] {  // (1)
        const std::uint64_t q_descriptor = QTile::k_major_descriptor(shared.q());
        const std::uint64_t k_descriptor =
            KvTile::k_major_descriptor(uniform(shared.k(ring.stage())));
        ptx::wgmma_ss<W.block_n, T, false, 0, 0>(s, q_descriptor, k_descriptor);
#pragma unroll
        for (int k = 1; k < W.head_dim / 16; ++k) {
          ptx::wgmma_ss<W.block_n, T, true, 0, 0>(s, q_descriptor + QTile::k_major_step(k),
                                                  k_descriptor + KvTile::k_major_step(k));
        }
        ptx::wgmma_commit();
      };
      const auto issue_out = [&](int stage) {  // (4)
        const std::uint64_t v_descriptor = KvTile::mn_major_descriptor(uniform(shared.v(stage)));
#pragma unroll
        for (int k = 0; k < W.block_n / 16; ++k) {
          ptx::wgmma_rs<W.head_dim_v, T, true, 1>(o, probabilities + 4 * k,
                                                  v_descriptor + KvTile::mn_major_step(k));
        }
        ptx::wgmma_commit();
      };
      const auto pack_probabilities = [&] {
#pragma unroll
        for (int i = 0; i < W.block_n / 4; ++i) {
          probabilities[i] = ptx::pack<T>(s[2 * i], s[2 * i + 1]);
        }
      };
      // Scores of block n, and out of the block before it, n + 1.
      const auto step = [&]<bool kMasked>(int n) {
        const RingPosition<FwdSplitConfig::kStages> before = ring.previous();
        ptx::mbarrier_wait(shared.k_full(ring.stage()), ring.phase());
        ptx::mbarrier_wait(shared.v_full(before.stage()), before.phase());
        ptx::wgmma_fence();
        issue_scores();
        issue_out(before.stage());
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release(shared.k_empty(ring.stage()));
        const bool grown = softmax_block<W.block_n, kScoreFunction, kMasked>(
            s, &rows, rescale, row_keys, n * W.block_n + key_in_block, p);  // (2)
        ptx::pin(s);
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(shared.v_empty(before.stage()));
        if (grown) {  // (3)
#pragma unroll
          for (int i = 0; i < W.head_dim_v / 2; ++i) {
            o[i] *= rescale[i / 2 % 2];
          }
        }
        ptx::pin(s);
        ring.advance();
        pack_probabilities();
      };

      int n = blocks.end - 1;
      ptx::mbarrier_wait(shared.q_full(), q_ring.phase());
      q_ring.advance();
      ptx::mbarrier_wait(shared.k_full(ring.stage()), ring.phase());
      ptx::wgmma_fence();
      issue_scores();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      release(shared.k_empty(ring.stage()));
      ring.advance();
      softmax_block<W.block_n, kScoreFunction, true>(s, &rows, rescale, row_keys,
                                                     n * W.block_n + key_in_block, p);
      pack_probabilities();
      if (const int keys = static_cast<int>(tile.of_head.band.seqlen_kv) - n * W.block_n;
          p.clear_values && keys < W.block_n) {
        const RingPosition<FwdSplitConfig::kStages> last = ring.previous();
        ptx::mbarrier_wait(shared.v_full(last.stage()), last.phase());
        clear_value_rows<W.block_n, FwdConfig::boxes(W.head_dim_v)>(shared.v(last.stage()), keys,
                                                                    W.block_n, 1);
      }
      --n;
#pragma unroll 1
      for (; n >= blocks.full_end; --n) {
        step.template operator()<true>(n);
      }
#pragma unroll 1
      for (; n >= blocks.full_begin; --n) {
        step.template operator()<false>(n);
      }
#pragma unroll 1
      for (; n >= blocks.begin; --n) {
        step.template operator()<true>(n);
      }
      release(shared.q_empty());
      const RingPosition<FwdSplitConfig::kStages> last = ring.previous();
      ptx::mbarrier_wait(shared.v_full(last.stage()), last.phase());
      ptx::wgmma_fence();
      issue_out(last.stage());
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release(shared.v_empty(last.stage()));
    }
    if (has_rows) {
      if (tile.part >= 0) {
        store_parts<W.head_dim_v>(params.parts, tile.part + warp * params.parts.slots.rows,
                                  num_rows, rows, o, lane);
      } else {
        FwdTile own = tile.of_head;
        own.head += warp;
        own.out_offset += warp * p.out.head_stride;
        own.lse_offset += warp * p.lse.head_stride;
        finish_rows<W.head_dim_v, kScoreFunction, T>(p, own, rows, o, 0, NoCopy{});  // (5)
      }
    }
    ptx::mbarrier_arrive(shared.tile_empty(slot.stage()));
    slot.advance();
  }
}

template <FwdVariant kVariant, bool kScoreFunction, class T>
__global__ void __launch_bounds__(FwdSplitConfig::kThreads,
                                  FwdSplitConfig{fwd_config(kVariant)}.ctas())
    fwd_split(const __grid_constant__ FwdMaps maps, const __grid_constant__ FwdSplitParams params) {
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t memory[];
  const FwdSplitShared<kVariant> shared(memory);
  ptx::grid_dependency_launch();
  if (threadIdx.x == 0) {
    shared.init_barriers();
  } else if (threadIdx.x == 32) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
  }
  // Of the kernel before the last: main waits for it too.
  const bool is_empty = params.any_cut != nullptr && ptx::load_relaxed(params.any_cut) == 0;
  ptx::grid_dependency_wait();
  if (is_empty) {
    return;
  }
  __syncthreads();
  constexpr bool kShares = FwdSplitConfig{fwd_config(kVariant)}.ctas() > 1;
  const int warp = uniform(static_cast<std::int32_t>(threadIdx.x) / 32);
  if (warp < 4) {
    if constexpr (kShares) {
      ptx::registers_decrease<FwdSplitConfig::kProducerRegisters>();
    }
    if (warp == 0) {
      split_producer<kVariant>(shared, maps, params);
    }
  } else {
    if constexpr (kShares) {
      ptx::registers_increase<FwdSplitConfig::kConsumerRegisters>();
    }
    split_consumer<kVariant, kScoreFunction, T>(shared, params);
  }
}

}  // namespace flashgrad::sm90
