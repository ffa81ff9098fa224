// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of the backward's main kernel: (1) to (6) of bwd.cuh for their own keys,
// and the epilogue that writes dk and dv.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/tile/gemm.cuh"

namespace flashgrad::sm90 {

template <BwdConfig C, class T>
__device__ __forceinline__ void bwd_consumer_role(const BwdParams& p, const KeyTile& tile,
                                                  const BwdShared<C>& shared, int consumer) {
  constexpr int kD = C.head_dim;
  constexpr int kBlocks = C.key_blocks;
  // Whether lse, delta and dS go ahead of the products that are issued next to them: reads of
  // shared memory, and fences for what was written there, wait behind the operands of wgmma.
  constexpr bool kEarly = kBlocks == 2;
  // Loading delta before dP is there needs registers that softcap takes or, at head dim 128, f16's
  // conversions.
  constexpr bool kDeltaAhead = !C.softcap && (std::is_same_v<T, __nv_bfloat16> || kD < 128);
  constexpr std::uint32_t kOnes = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80U : 0x3c003c00U;
  using QTile = tile::SwizzledTile<kBlockM>;
  using KTile = tile::SwizzledTile<C.block_n()>;
  using DsTile = tile::SwizzledTile<BwdConfig::kKeysPerDs>;
  const int lane = ptx::thread_index() % 32;
  const int warp = __shfl_sync(0xffffffffU, ptx::thread_index() / 32 % 4, 0);
  const int thread = warp * 32 + lane;

  // Key block x of this consumer begins at key 128 * x + 64 * consumer of the tile.
  const std::uint32_t own_rows = static_cast<std::uint32_t>(consumer * 64 * tile::kBoxRowBytes);
  const std::uint64_t desc_k = KTile::k_major_descriptor(shared.k() + own_rows);
  const std::uint64_t desc_v = KTile::k_major_descriptor(shared.v() + own_rows);
  const std::uint64_t desc_q = QTile::k_major_descriptor(shared.q(0));
  const std::uint64_t desc_do = QTile::k_major_descriptor(shared.dout(0));
  const std::uint64_t desc_q_mn = QTile::mn_major_descriptor(shared.q(0));
  const std::uint64_t desc_do_mn = QTile::mn_major_descriptor(shared.dout(0));
  constexpr std::uint64_t kStage = C.q_bytes() / 16;
  constexpr std::uint64_t kBlock = 128 * tile::kBoxRowBytes / 16;
  const std::uint32_t lse = shared.lse(0) + static_cast<std::uint32_t>(lane % 4 * 8);
  constexpr std::uint32_t kDelta = C.delta_offset() - C.lse_offset();
  const std::uint32_t ds_row =
      shared.ds(0) + static_cast<std::uint32_t>(
                         DsTile::offset(consumer * 64 + warp * 16 + lane % 16, lane / 16 * 8));

  float dk[kBlocks][kD / 2];
  float dv[kBlocks][kD / 2];
#pragma unroll
  for (int x = 0; x < kBlocks; ++x) {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) {
      dk[x][i] = 0;
      dv[x][i] = 0;
    }
  }
  const float scale_log2 = p.scale_log2;

  const auto token_wait = [&] {
    if constexpr (C.ping_pong) {
      ptx::named_barrier_sync<256>(1 + consumer);
    }
  };
  const auto token_pass = [&] {
    if constexpr (C.ping_pong) {
      ptx::named_barrier_arrive<256>(2 - consumer);
    }
  };
  // Not "lane 0": ptxas would work the lane out again in the loop, which waits for the operands of
  // wgmma.
  const auto arrive = [&](std::uint32_t barrier) {
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  // A stage is filled again once the consumers of both CTAs have let go of it.
  const auto release = [&](std::uint32_t barrier) { arrive_in_cluster<C.cluster>(barrier); };
  const auto load_row_statistic = [&](float2(&rows)[8], std::uint32_t address) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      rows[j] = ptx::load_shared_float2(address + j * 32);
    }
  };

  Ring<C.q_stages> ring;
  Ring<C.do_stages> own_do_ring;  // unused if it would go with ring
  Ring<C.ds_stages> ds_ring;
  constexpr bool kOneRing = C.do_stages == C.q_stages;
  float s[32];
  float2 rows[8];
  std::uint32_t rp[16];
  std::uint32_t rds[16];
  if (consumer == 1) {
    token_pass();
  }
  // What the steady loop needs of the tile, in registers: loads from shared memory wait long behind
  // the operands of wgmma. `left` counts the query blocks of a head down, or in ordered kernels,
  // which go through the heads inside of a block, all steps; those from full_begin on, full_count
  // of them, need no mask. Where an ordered walk rotates, the mask hides no rows, so that only the
  // number of its steps matters.
  int full_begin = 0;
  int full_end = tile.m_end;
#pragma unroll
  for (int x = 0; x < kBlocks; ++x) {
    full_begin = max(full_begin, tile.full_begin[2 * x + consumer]);
    full_end = min(full_end, tile.full_end[2 * x + consumer]);
  }
  const int steps_per_block = C.heads_inside() ? static_cast<int>(p.group) : 1;
  const int full_count = max(full_end - full_begin, 0) * steps_per_block;
  full_begin = (full_begin - tile.m_begin) * steps_per_block;
  const int top = (tile.m_end - tile.m_begin) * steps_per_block - 1;
  // Broadcasts, since what is the same in all lanes can stay in uniform registers.
  full_begin = __shfl_sync(0xffffffffU, full_begin, 0);
  int left = top;
  int remaining = __shfl_sync(0xffffffffU, tile.num_steps, 0);
  int seen_begin = 0;
  int seen_count = 0;
  if constexpr (C.skips_hidden()) {
    seen_begin =
        __shfl_sync(0xffffffffU, (tile.seen_begin[consumer] - tile.m_begin) * steps_per_block, 0);
    seen_count = __shfl_sync(
        0xffffffffU, (tile.seen_end[consumer] - tile.seen_begin[consumer]) * steps_per_block, 0);
  }
  // Whether some of the consumer's keys are seen where `left` is `at`.
  const auto is_seen = [&](int at) {
    return static_cast<unsigned>(at - seen_begin) < static_cast<unsigned>(seen_count);
  };
  const auto left_after = [&] { return left == 0 ? top : left - 1; };
  const auto announce_ds = [&](std::uint32_t ds_address) {
    ptx::fence_proxy_async();
    __syncwarp();
    if constexpr (C.consumers_send()) {
      ptx::mbarrier_wait(shared.peer_ds_empty(ds_ring.stage()), ds_ring.parity() ^ 1U);
      if (lane == 0) {  // whose ds_address is that of the warp's 16 rows
        ptx::bulk_copy_to_cta(ds_address + (C.peer_ds_offset() - C.ds_offset()), ds_address,
                              16 * tile::kBoxRowBytes, shared.peer_ds_full(ds_ring.stage()),
                              ptx::cluster_rank() ^ 1U);
      }
      __syncwarp();
    }
    arrive(shared.ds_full(ds_ring.stage()));
    ds_ring.advance();
  };
  // Where no S is made: else ptxas would keep the registers of the old one, beside dP, and spill.
  const auto forget_s = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[i] = make_float2(0, 0);
    }
  };
  const auto block = [&]<int x>() {
  // A loop of at most one round, so that ptxas keeps the mask out of the unmasked blocks.
#pragma unroll 1
    for (int r = static_cast<unsigned>(left - full_begin) >= static_cast<unsigned>(full_count);
         r > 0; --r) {
      // From the index afresh: there is no register to keep it in.
      const int t = ptx::thread_index() - 128;  // of the consumers' 256
      mask_s(s, tile, 128 * x + t / 32 * 16 + t % 32 / 4,
             (left / steps_per_block + tile.m_begin) * kBlockM + t % 4 * 2,
             hidden_logit<C.softcap>(p.scale_log2));
    }
    // (2). kEarly: the exponents first, since delta goes to the registers of lse.
    const auto exponentials = [&](int i, float exponent0, float exponent1) {
      rp[i] = ptx::pack<T>(ptx::exp2_approx(exponent0), ptx::exp2_approx(exponent1));
      // Rounding may lift huge logits above their lse.
      rp[i] = ptx::min_packed<T>(rp[i], kOnes);
    };
    std::uint32_t factor[4];  // of (4), with softcap
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 row = rows[i / 2];
      float factor0;
      float factor1;
      const float exponent0 =
          exponent<C.softcap>(s[2 * i], row.x, scale_log2, p.scale_softcap, &factor0);
      const float exponent1 =
          exponent<C.softcap>(s[2 * i + 1], row.y, scale_log2, p.scale_softcap, &factor1);
      if constexpr (C.softcap) {
        factor[i % 4] = ptx::pack<T>(factor0, factor1);
        if (i % 4 == 3) {
          ptx::store_shared(shared.factor(consumer, thread, i / 4), factor[0], factor[1], factor[2],
                            factor[3]);
        }
      }
      if constexpr (kEarly) {
        s[2 * i] = exponent0;
        s[2 * i + 1] = exponent1;
      } else {
        exponentials(i, exponent0, exponent1);
      }
    }
    if constexpr (kEarly) {
      ptx::pin(s);
    }
    const int do_stage = kOneRing ? ring.stage() : own_do_ring.stage();
    const std::uint32_t delta = lse + kDelta + static_cast<std::uint32_t>(do_stage) * (kBlockM * 4);
    if constexpr (x == 0) {
      ptx::mbarrier_wait(shared.do_full(do_stage), kOneRing ? ring.parity() : own_do_ring.parity());
    }
    if constexpr (kEarly) {
      load_row_statistic(rows, delta);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        exponentials(i, s[2 * i], s[2 * i + 1]);
      }
    }
    ptx::pin(rp);

    // (3), (5)
    float dp[32];
    const std::uint64_t stage = static_cast<std::uint64_t>(ring.stage()) * kStage;
    const std::uint64_t do_offset = static_cast<std::uint64_t>(do_stage) * kStage;
    token_wait();
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(dp, desc_v + x * kBlock,
                                                                    desc_do + do_offset);
    ptx::wgmma_commit();
    ptx::wgmma_fence();
    tile::gemm_registers<kD, kBlockM, T, QTile>(dv[x], rp, desc_do_mn + do_offset);
    ptx::wgmma_commit();
    token_pass();
    if constexpr (kDeltaAhead && !kEarly) {
      load_row_statistic(rows, delta);
    }
    Ring<C.q_stages> next = ring;
    if constexpr (x == kBlocks - 1) {
      next.advance();
      if constexpr (kEarly) {
        ptx::mbarrier_wait(shared.q_full(next.stage()), next.parity());
      }
    }
    ptx::wgmma_wait<1>();
    ptx::pin(dp);

    // (4)
    uint4 factors;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (!kDeltaAhead) {
        if (i % 2 == 0) {
          rows[i / 2] = ptx::load_shared_float2(delta + i / 2 * 32);
        }
      }
      const float2 row = rows[i / 2];
      const float2 p01 = ptx::unpack<T>(rp[i]);
      float ds0 = p01.x * (dp[2 * i] + row.x);
      float ds1 = p01.y * (dp[2 * i + 1] + row.y);
      if constexpr (C.softcap) {
        if (i % 4 == 0) {
          factors = ptx::load_shared_uint4(shared.factor(consumer, thread, i / 4));
        }
        const float2 f = ptx::unpack<T>(i % 4 == 0   ? factors.x
                                        : i % 4 == 1 ? factors.y
                                        : i % 4 == 2 ? factors.z
                                                     : factors.w);
        ds0 *= f.x;
        ds1 *= f.y;
      }
      rds[i] = ptx::pack<T>(ds0, ds1);
    }
    ptx::mbarrier_wait(shared.ds_empty(ds_ring.stage()), ds_ring.parity() ^ 1U);
    const std::uint32_t ds_address =
        ds_row + static_cast<std::uint32_t>(ds_ring.stage() * C.ds_bytes());
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::store_matrix(ds_address ^ static_cast<std::uint32_t>(k * 32), rds[4 * k], rds[4 * k + 1],
                        rds[4 * k + 2], rds[4 * k + 3]);
    }
    const auto load_next_lse = [&] {
      load_row_statistic(rows, lse + static_cast<std::uint32_t>(next.stage()) * (kBlockM * 4));
    };
    if constexpr (x == kBlocks - 1 && !kEarly) {
      ptx::mbarrier_wait(shared.q_full(next.stage()), next.parity());
    }
    if constexpr (kEarly) {
      announce_ds(ds_address);
      load_next_lse();
    }

    // (6), and (1) of the next block, unless it is hidden; without skips_hidden() after the last
    // step on a stale stage, unused.
    token_wait();
    ptx::wgmma_fence();
    tile::gemm_registers<kD, kBlockM, T, QTile>(dk[x], rds, desc_q_mn + stage);
    ptx::wgmma_commit();
    if constexpr (!kEarly) {
      announce_ds(ds_address);
    }
    ptx::wgmma_wait<1>();
    ptx::pin(rp);
    ptx::pin(dv[x]);
    if constexpr (x == kBlocks - 1) {
      release(shared.do_empty(do_stage));
    }
    if (!C.skips_hidden() || (remaining > 1 && is_seen(left_after()))) {
      ptx::wgmma_fence();
      tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(
          s, desc_k + (x + 1) % kBlocks * kBlock,
          desc_q + static_cast<std::uint64_t>(next.stage()) * kStage);
      ptx::wgmma_commit();
      token_pass();
      if constexpr (!kEarly) {
        load_next_lse();
      }
      ptx::wgmma_wait<1>();
      ptx::pin(rds);
      ptx::pin(dk[x]);
      if constexpr (x == kBlocks - 1) {
        release(shared.q_empty(ring.stage()));
      }
      ptx::wgmma_wait<0>();
      ptx::pin(s);
    } else {
      token_pass();
      ptx::wgmma_wait<0>();
      ptx::pin(rds);
      ptx::pin(dk[x]);
      release(shared.q_empty(ring.stage()));
      forget_s();
    }
    ring = next;
    if constexpr (x == kBlocks - 1 && !kOneRing) {
      own_do_ring.advance();
    }
  };
  // A step in which none of the consumer's keys are seen: its dS is 0, and it only takes its turns.
  [[maybe_unused]] const auto hidden_block = [&] {
    const int do_stage = kOneRing ? ring.stage() : own_do_ring.stage();
    token_wait();
    token_pass();
    ptx::mbarrier_wait(shared.do_full(do_stage), kOneRing ? ring.parity() : own_do_ring.parity());
    ptx::mbarrier_wait(shared.ds_empty(ds_ring.stage()), ds_ring.parity() ^ 1U);
    const std::uint32_t ds_address =
        ds_row + static_cast<std::uint32_t>(ds_ring.stage() * C.ds_bytes());
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::store_matrix(ds_address ^ static_cast<std::uint32_t>(k * 32), 0, 0, 0, 0);
    }
    announce_ds(ds_address);
    Ring<C.q_stages> next = ring;
    next.advance();
    ptx::mbarrier_wait(shared.q_full(next.stage()), next.parity());
    token_wait();
    if (remaining > 1 && is_seen(left_after())) {
      ptx::wgmma_fence();
      tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(
          s, desc_k, desc_q + static_cast<std::uint64_t>(next.stage()) * kStage);
      ptx::wgmma_commit();
      token_pass();
      load_row_statistic(rows, lse + static_cast<std::uint32_t>(next.stage()) * (kBlockM * 4));
      ptx::wgmma_wait<0>();
      ptx::pin(s);
    } else {
      token_pass();
      forget_s();
    }
    release(shared.do_empty(do_stage));
    release(shared.q_empty(ring.stage()));
    ring = next;
    if constexpr (!kOneRing) {
      own_do_ring.advance();
    }
  };
  if (remaining > 0) {  // Always true; without it ptxas serialises the products of head dim 64.
    ptx::mbarrier_wait(shared.k_full(), 0);
    ptx::mbarrier_wait(shared.q_full(0), 0);
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(s, desc_k, desc_q);
    ptx::wgmma_commit();
    load_row_statistic(rows, lse);
    ptx::mbarrier_wait(shared.v_full(), 0);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
#pragma unroll 1
    do {
      if (!C.skips_hidden() || is_seen(left)) {
        block.template operator()<0>();
        if constexpr (kBlocks == 2) {
          block.template operator()<1>();
        }
      } else if constexpr (C.skips_hidden()) {
        hidden_block();
      }
      --left;
      if (!C.heads_inside() && left < 0) {
        left = top;
      }
    } while (--remaining > 0);
  }
  if (consumer == 0) {
    token_wait();  // consumer 1 passed once more than it waited
  }

  // Both afresh, so that the loop needs no registers for them.
  const int end_thread = ptx::thread_index() % 128;
  const int end_consumer = __shfl_sync(0xffffffffU, ptx::thread_index() / 128, 0) - 1;
  if constexpr (C.skips_hidden()) {
    const int key = 64 * end_consumer;
    if (p.dv) {
      store_registers<kD, T>(dv[0], 1.0F, gradient_rows(p.dv, tile, key, p.head_dim_v), end_thread);
    }
    if (p.dk) {
      store_registers<kD, T>(dk[0], p.scale, gradient_rows(p.dk, tile, key, p.head_dim),
                             end_thread);
    }
  } else {
    // dv goes through this consumer's own rows of V; K is still read by the dq warpgroup.
#pragma unroll
    for (int x = 0; x < kBlocks; ++x) {
      const int key = 128 * x + 64 * end_consumer;
      if (p.dv) {
        store_rows<kD, C.block_n(), T>(dv[x], 1.0F, gradient_rows(p.dv, tile, key, p.head_dim_v),
                                       shared.v(), key, 3 + end_consumer, end_thread);
      }
    }
    ptx::mbarrier_wait(shared.done(), 0);
#pragma unroll
    for (int x = 0; x < kBlocks; ++x) {
      const int key = 128 * x + 64 * end_consumer;
      if (p.dk) {
        store_rows<kD, C.block_n(), T>(dk[x], p.scale, gradient_rows(p.dk, tile, key, p.head_dim),
                                       shared.k(), key, 3 + end_consumer, end_thread);
      }
    }
  }
}

}  // namespace flashgrad::sm90
