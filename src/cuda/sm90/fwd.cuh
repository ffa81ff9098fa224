// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper, bf16 and f16.
//
// A CTA takes tiles from a work list until none is left. A tile is 64 query rows of one head per
// consumer warpgroup; its key blocks stream past from the last to the first:
//
//   (1) S = Q K^T
//   (2) m' = max(m, rowmax S), P = exp2(c S - c m')     with c = scale * log2(e)
//   (3) O = exp2(c m - c m') O, l likewise
//   (4) O += P V, l += rowsum P                         with P from registers, in the input dtype
//   (5) out = O / l, lse = ln(2) (c m + log2 l)         (fwd_store.cuh)
//
// (5) is code that a tile runs once, cold, while the tensor cores idle: its instructions are few.
//
// Only blocks at the edge of the band are masked. (3) is left out while no row's maximum has grown
// by much (fwd_softmax.cuh).
//
// Product (1) of a block is issued right before product (4) of the block ahead of it, and the
// consumers' softmaxes run under each other's products: with three consumers by themselves, with
// two by ping-pong, where one's products are issued only after the other's.
//
// | warps                 | role                                                         |
// | warpgroup 0, warp 0   | producer: loads Q, K, V (fwd_load.cuh)                       |
// | warpgroup 0, warp 1   | scheduler: takes tiles from the work list and describes them |
// | warpgroups 1, 2 (, 3) | consumers                                                    |
//
// Shared memory and its barriers: fwd_shared.cuh. Named barriers 1 to num_consumers hold the
// ping-pong's token; as many behind them each join the warps of one consumer.
//
// H200, 16k tokens, TFLOP/s cool: three consumers of 80 keys instead of two of 128 at d128, full
// 16k 686 -> 732, since a K or V that is loaded serves 192 rows instead of 128; sections of heads
// with none left over and the next tile taken late, together, causal 16k 640 -> 700.
#pragma once

#include <cstdint>

#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fwd_load.cuh"
#include "cuda/sm90/fwd_shared.cuh"
#include "cuda/sm90/fwd_softmax.cuh"
#include "cuda/sm90/fwd_store.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// The value of lane 0, which ptxas then knows to be the same in all lanes: what follows from it
// goes to uniform registers.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) {
  return __shfl_sync(0xffffffffU, x, 0);
}
__device__ __forceinline__ std::int32_t uniform(std::int32_t x) {
  return __shfl_sync(0xffffffffU, x, 0);
}
__device__ __forceinline__ FwdBlocks uniform(const FwdBlocks& x) {
  return {uniform(x.begin), uniform(x.full_begin), uniform(x.full_end), uniform(x.end)};
}

// Rows [begin, end) of a V tile become 0. By all threads of a warpgroup, for that warpgroup's
// products.
template <int kRows, int kBoxes>
__device__ __forceinline__ void clear_value_rows(std::uint32_t tile, int begin, int end,
                                                 int barrier) {
  for (int i = static_cast<int>(threadIdx.x) % 128; i < (end - begin) * 8; i += 128) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::store_shared(
          tile + box * kRows * tile::kBoxRowBytes + begin * tile::kBoxRowBytes + i * 16, 0, 0, 0,
          0);
    }
  }
  ptx::fence_proxy_async();
  ptx::named_barrier_sync<128>(barrier);
}

template <FwdVariant kVariant, bool kScoreFunction, class T>
__device__ __forceinline__ void fwd_consumer(const FwdShared<kVariant>& shared, const FwdMaps& maps,
                                             const FwdParams& p, int consumer) {
  static constexpr FwdConfig C = fwd_config(kVariant);
  using QTile = tile::SwizzledTile<C.block_m()>;
  using KvTile = tile::SwizzledTile<C.block_n>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = 64 * consumer + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  RingPosition<C.kStages> ring;  // of K; a block's V is the same use of its own ring
  RingPosition<1> q_ring;
  RingPosition<C.tiles()> slot;
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  const auto take_token = [&] {
    if constexpr (C.ping_pong) {
      ptx::named_barrier_sync<256>(1 + consumer);
    }
  };
  const auto pass_token = [&] {
    if constexpr (C.ping_pong) {
      ptx::named_barrier_arrive<256>(consumer == C.num_consumers - 1 ? 1 : 2 + consumer);
    }
  };
  if (consumer == C.num_consumers - 1) {
    pass_token();
  }

  while (true) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdTile& tile = *shared.tile(slot.stage());
    const int num_rows = uniform(tile.num_rows);
    if (num_rows < 0) {
      if (lane == 0) {
        ptx::bulk_wait_read<0>();  // shared memory lives until the last copy of out has read it
      }
      return;
    }
    float o[C.head_dim_v / 2];
#pragma unroll
    for (float& x : o) {
      x = 0.0F;
    }
    SoftmaxRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows that do not exist must not decide when the warp rescales: their +inf never grows.
      rows.maximum[r] = warp_row + lane / 4 + 8 * r < num_rows ? -CUDART_INF_F : CUDART_INF_F;
      rows.sum[r] = 0.0F;
    }
    const FwdBlocks loaded = uniform(tile.blocks);
    // The 64 rows of this warpgroup see fewer blocks than the tile, and need the mask in fewer of
    // them.
    const FwdBlocks blocks = uniform(tile.part_blocks[consumer]);

    // A block that only other warpgroups use.
    const auto skip_k = [&](RingPosition<C.kStages> at) {
      ptx::mbarrier_wait(shared.k_full(at.stage()), at.phase());
      release(shared.k_empty(at.stage()));
      take_token();
      pass_token();
    };
    const auto skip_v = [&](RingPosition<C.kStages> at) {
      ptx::mbarrier_wait(shared.v_full(at.stage()), at.phase());
      release(shared.v_empty(at.stage()));
    };
    const auto skip = [&](int count) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        skip_k(ring);
        skip_v({ring.uses});
        ring.advance();
      }
    };

    if (loaded.begin < loaded.end) {
      ptx::mbarrier_wait(shared.q_full(), q_ring.phase());
      q_ring.advance();
    }
    if (blocks.begin < blocks.end) {
      float s[C.block_n / 2];
      std::uint32_t probabilities[C.block_n / 4];
      float rescale[2];
      const int key_in_block = 2 * (lane % 4);
      const int2* const row_keys = shared.row_keys(slot.stage()) + warp_row + lane / 4;
      const std::uint32_t q_address = uniform(shared.q() + 64 * tile::kBoxRowBytes * consumer);

      // V of the block whose scores were made last.
      const auto before = [&] { return RingPosition<C.kStages>{ring.uses - 1}; };
      const auto describe_k = [&] {
        return KvTile::k_major_descriptor(uniform(shared.k(ring.stage())));
      };
      const auto describe_v = [&] {
        return KvTile::mn_major_descriptor(uniform(shared.v(before().stage())));
      };
      const auto issue_scores = [&](std::uint64_t k_descriptor) {  // (1)
        const std::uint64_t q_descriptor = QTile::k_major_descriptor(q_address);
        ptx::wgmma_ss<C.block_n, T, false, 0, 0>(s, q_descriptor, k_descriptor);
#pragma unroll
        for (int k = 1; k < C.head_dim / 16; ++k) {
          ptx::wgmma_ss<C.block_n, T, true, 0, 0>(s, q_descriptor + QTile::k_major_step(k),
                                                  k_descriptor + KvTile::k_major_step(k));
        }
        ptx::wgmma_commit();
      };
      const auto issue_out = [&](std::uint64_t v_descriptor) {  // (4)
#pragma unroll
        for (int k = 0; k < C.block_n / 16; ++k) {
          ptx::wgmma_rs<C.head_dim_v, T, true, 1>(o, probabilities + 4 * k,
                                                  v_descriptor + KvTile::mn_major_step(k));
        }
        ptx::wgmma_commit();
      };
      const auto pack_probabilities = [&] {
#pragma unroll
        for (int i = 0; i < C.block_n / 4; ++i) {
          probabilities[i] = ptx::pack<T>(s[2 * i], s[2 * i + 1]);
        }
      };
      const auto rescale_out = [&] {  // (3)
#pragma unroll
        for (int i = 0; i < C.head_dim_v / 2; ++i) {
          o[i] *= rescale[i / 2 % 2];
        }
      };
      // Scores of block n, and out of the block before it, n + 1.
      const auto step = [&]<bool kMasked>(int n) {
        const RingPosition<C.kStages> v_at = before();
        const std::uint64_t k_descriptor = describe_k();
        const std::uint64_t v_descriptor = describe_v();
        ptx::mbarrier_wait(shared.k_full(ring.stage()), ring.phase());
        ptx::mbarrier_wait(shared.v_full(v_at.stage()), v_at.phase());
        take_token();
        ptx::wgmma_fence();
        issue_scores(k_descriptor);
        issue_out(v_descriptor);
        pass_token();
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release(shared.k_empty(ring.stage()));
        const bool grown = softmax_block<C.block_n, kScoreFunction, kMasked>(
            s, &rows, rescale, row_keys, n * C.block_n + key_in_block, p);  // (2)
        ptx::pin(s);
        if constexpr (C.late_wait) {
          // Once: in straight code ptxas moves the wait ahead of the exponentials.
          do {
            ptx::wgmma_wait<0>();
          } while (n < 0);
        } else {
          // ptxas moves this wait and the release up to the maxima. V is free early then, and other
          // consumers' products cover the rest.
          ptx::wgmma_wait<0>();
        }
        ptx::pin(o);
        release(shared.v_empty(v_at.stage()));
        if (grown) {
          rescale_out();
        }
        ptx::pin(s);
        ring.advance();
        pack_probabilities();
      };

      const RingPosition<C.kStages> first = ring;
      const int skipped = loaded.end - blocks.end;
#pragma unroll 1
      for (int i = 0; i < skipped; ++i) {
        skip_k(ring);
        ring.advance();
      }
      int n = blocks.end - 1;
      ptx::mbarrier_wait(shared.k_full(ring.stage()), ring.phase());
      take_token();
      ptx::wgmma_fence();
      issue_scores(describe_k());
      pass_token();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      release(shared.k_empty(ring.stage()));
      ring.advance();
      ptx::mbarrier_wait(shared.keys_full(slot.stage()), slot.phase());
      softmax_block<C.block_n, kScoreFunction, true>(s, &rows, rescale, row_keys,
                                                     n * C.block_n + key_in_block, p);
      pack_probabilities();
#pragma unroll 1
      for (int i = 0; i < skipped; ++i) {
        skip_v({first.uses + static_cast<std::uint32_t>(i)});
      }
      if (const int keys = static_cast<int>(tile.band.seqlen_kv) - n * C.block_n;
          p.clear_values && keys < C.block_n) {
        const RingPosition<C.kStages> last = before();
        ptx::mbarrier_wait(shared.v_full(last.stage()), last.phase());
        clear_value_rows<C.block_n, C.boxes(C.head_dim_v)>(shared.v(last.stage()), keys, C.block_n,
                                                           1 + C.num_consumers + consumer);
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
      const RingPosition<C.kStages> last = before();
      ptx::mbarrier_wait(shared.v_full(last.stage()), last.phase());
      take_token();
      ptx::wgmma_fence();
      issue_out(describe_v());
      pass_token();
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release(shared.v_empty(last.stage()));
      skip(blocks.begin - loaded.begin);
    } else if (loaded.begin < loaded.end) {
      take_token();
      pass_token();
      skip(loaded.end - loaded.begin);
      release(shared.q_empty());
    }
    finish_rows<C.head_dim_v, kScoreFunction, T>(p, tile, rows, o, warp_row / 16,
                                                 CopyOfRows<kVariant>{shared, maps});  // (5)
    ptx::mbarrier_arrive(shared.tile_empty(slot.stage()));
    slot.advance();
  }
}

template <FwdVariant kVariant, bool kScoreFunction, class T>
__global__ void __launch_bounds__(fwd_config(kVariant).threads(), 1)
    fwd_main(const __grid_constant__ FwdMaps maps, const __grid_constant__ FwdParams p) {
  static constexpr FwdConfig C = fwd_config(kVariant);
  static_assert(C.valid(), "shared memory, registers, or multiples of a tile's sides");
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t memory[];
  const FwdShared<kVariant> shared(memory);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  const int warp = uniform(static_cast<std::int32_t>(threadIdx.x) / 32);
  if (warp < 4) {
    ptx::registers_decrease<C.producer_registers()>();
    if (warp == 0) {
      fwd_producer<kVariant>(shared, maps, p);
    } else if (warp == 1) {
      fwd_scheduler<kVariant>(shared, p);
    }
  } else {
    ptx::registers_increase<C.consumer_registers()>();
    fwd_consumer<kVariant, kScoreFunction, T>(shared, maps, p, warp / 4 - 1);
  }
}

}  // namespace flashgrad::sm90
