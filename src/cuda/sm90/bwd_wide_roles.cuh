// SPDX-License-Identifier: Apache-2.0
// The two warpgroups of bwd_wide.cuh that make products, for one tile: P and dV, and dS and dK. The
// numbers of equations and the barriers are explained there.
#pragma once

#include <type_traits>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/sm90/bwd_wide_shared.cuh"

namespace flashgrad::sm90 {

// Waits for the products of both roles, if the epilogue goes through the stages.
template <class Shared>
__device__ __forceinline__ void wide_products_done(const Shared& shared) {
  if constexpr (!Shared::kAhead) {
    ptx::mbarrier_arrive(shared.done());
    ptx::mbarrier_wait(shared.done(), 0);
    __syncwarp();
  }
}

// What a role carries from tile to tile.
template <class Shared>
struct WideProgress {
  Ring<Shared::kQStages> q_ring;
  Ring<Shared::kDoStages> do_ring;
  int step = 0;
};

// The resident columns of K or V as A fragments: 16 columns in each four registers.
template <int kColumns>
__device__ __forceinline__ void load_resident(std::uint32_t (&a)[kColumns / 4], std::uint32_t box,
                                              int warp, int lane) {
  using Tile = tile::SwizzledTile<64>;
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    const auto at =
        static_cast<std::uint32_t>(Tile::offset(warp * 16 + lane % 16, 16 * k + lane / 16 * 8));
    ptx::load_matrix(box + at, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
  }
  ptx::fence_proxy_async();
  __syncwarp();
}

// D (64 x 64) = A B^T over pieces of 128 columns, each awaited by wait(piece): A's first kResident
// columns from registers, the others in shared memory like B.
template <int kColumns, int kResident, class T, class Wait>
__device__ __forceinline__ void gemm_resident(float (&d)[32],
                                              const std::uint32_t (&resident)[kResident / 4],
                                              std::uint64_t desc_a, std::uint64_t desc_b,
                                              Wait&& wait) {
  using Tile = tile::SwizzledTile<64>;
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    if (k % 8 == 0) {
      wait(k / 8);
      ptx::wgmma_fence();
    }
    const std::uint64_t b = desc_b + Tile::k_major_step(k);
    if (k == 0) {
      ptx::wgmma_rs<64, T, false, 0>(d, resident, b);
    } else if (k < kResident / 16) {
      ptx::wgmma_rs<64, T, true, 0>(d, resident + 4 * k, b);
    } else {
      ptx::wgmma_ss<64, T, true, 0, 0>(d, desc_a + Tile::k_major_step(k - kResident / 16), b);
    }
  }
}

// What a thread needs of lse or delta of a query block.
__device__ __forceinline__ void load_row_statistic(float2 (&rows)[8], std::uint32_t address) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    rows[j] = ptx::load_shared_float2(address + static_cast<std::uint32_t>(j * 32));
  }
}

template <class Shared, bool kSoftcap, class T>
__device__ __forceinline__ void wide_p_role(const BwdParams& p, const KeyTile& tile,
                                            const Shared& shared, int thread,
                                            WideProgress<Shared>& progress) {
  using Tile = tile::SwizzledTile<64>;
  constexpr int kDv = Shared::kHeadDimV;
  constexpr int kResident = Shared::kResidentK;
  constexpr bool kAhead = Shared::kAhead;
  constexpr std::uint32_t kOnes = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80U : 0x3c003c00U;
  const int lane = ptx::thread_index() % 32;
  const int warp = __shfl_sync(0xffffffffU, thread / 32, 0);
  float dv[kDv / 2];
#pragma unroll
  for (float& x : dv) {
    x = 0;
  }
  std::uint32_t resident[kResident / 4];
  Ring<Shared::kQStages>& q_ring = progress.q_ring;
  Ring<Shared::kDoStages>& do_ring = progress.do_ring;
#pragma unroll
  for (int piece = 0; piece < Shared::kQPieces; ++piece) {
    ptx::mbarrier_wait(shared.q_full(q_ring.stage(), piece), q_ring.parity());
  }
  load_resident<kResident>(resident, shared.q(q_ring.stage()), warp, lane);
  arrive_in_cluster<Shared::kCluster>(shared.q_empty(q_ring.stage()));
  q_ring.advance();
  // V is the other's, but no phase may be passed over: while V has not come, the dO that follows it
  // in its stage would seem to have.
  const int v_stage = do_ring.stage();
  const std::uint32_t v_parity = do_ring.parity();
  do_ring.advance();
  const std::uint64_t desc_k = Tile::k_major_descriptor(shared.k());
  const std::uint64_t desc_q = Tile::k_major_descriptor(shared.q(0));
  const std::uint64_t desc_do = Tile::mn_major_descriptor(shared.dout(0));
  const int full_begin = tile.full_begin[0] - tile.m_begin;
  const int full_count = max(tile.full_end[0] - tile.full_begin[0], 0);
  const int blocks = tile.m_end - tile.m_begin;
  int left = blocks - 1;
  int previous_do = v_stage;
  int& step = progress.step;
  const int first_step = step;
  const int end_step = step + tile.num_steps;
  const auto release_do = [&] {
#pragma unroll 1
    for (int piece = step == first_step ? 0 : Shared::kDoPieces; piece < Shared::kDoPieces;
         ++piece) {
      ptx::mbarrier_wait(shared.do_full(v_stage, piece), v_parity);
    }
    arrive_in_cluster<Shared::kCluster>(shared.do_empty(previous_do));
  };
  const auto issue_s = [&](float(&s)[32], int stage, std::uint32_t parity) {  // (1)
    gemm_resident<Shared::kHeadDim, kResident, T>(
        s, resident, desc_k, desc_q + static_cast<std::uint64_t>(stage) * (Shared::kQBytes / 16),
        [&](int piece) { ptx::mbarrier_wait(shared.q_full(stage, piece), parity); });
    ptx::wgmma_commit();
  };
  // S of this step is in flight, with kAhead before (5) of the step before, else behind it.
  const auto rest_of_step = [&](float(&s)[32], float(&next)[32]) {
    const std::uint32_t lse = shared.lse(step) + static_cast<std::uint32_t>(lane % 4 * 8);
    float2 rows[8];
    if constexpr (kAhead) {
      load_row_statistic(rows, lse);
    }
    const int q_stage = q_ring.stage();
    const std::uint32_t q_parity = q_ring.parity();
    q_ring.advance();
    if constexpr (!kAhead) {
      ptx::wgmma_wait<1>();
      release_do();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      arrive_in_cluster<Shared::kCluster>(shared.q_empty(q_stage));
    } else {
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      release_do();
    }
#pragma unroll 1
    for (int r = static_cast<unsigned>(left - full_begin) >= static_cast<unsigned>(full_count);
         r > 0; --r) {
      mask_s(s, tile, warp * 16 + lane / 4, (left + tile.m_begin) * kBlockM + lane % 4 * 2,
             hidden_logit<kSoftcap>(p.scale_log2));
    }
    if constexpr (kAhead) {
      // In the last step this step's again, unused: ptxas wants no way around a product.
      const bool more = step + 1 < end_step;
      issue_s(next, more ? q_ring.stage() : q_stage, more ? q_ring.parity() : q_parity);
      arrive_in_cluster<Shared::kCluster>(shared.q_empty(q_stage));
    }
    const int slot = step % Shared::kSlots;
    const int do_stage = do_ring.stage();
    ptx::mbarrier_wait(shared.p_empty(slot),
                       (static_cast<std::uint32_t>(step / Shared::kSlots) & 1U) ^ 1U);
#pragma unroll
    for (int piece = 0; piece < Shared::kDoPieces; ++piece) {
      ptx::mbarrier_wait(shared.do_full(do_stage, piece), do_ring.parity());
    }
    // (2) and (5), 16 queries at a time
    const std::uint64_t desc_b =
        desc_do + static_cast<std::uint64_t>(do_stage) * (Shared::kDoBytes / 16);
    std::uint32_t rp[16];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t factor[4];
      if constexpr (!kAhead) {
        rows[2 * k] = ptx::load_shared_float2(lse + 2 * k * 32);
        rows[2 * k + 1] = ptx::load_shared_float2(lse + (2 * k + 1) * 32);
      }
#pragma unroll
      for (int i = 4 * k; i < 4 * k + 4; ++i) {
        const float2 row = rows[i / 2];
        float factor0;
        float factor1;
        const float p0 =
            exponentiate<kSoftcap>(s[2 * i], row.x, p.scale_log2, p.scale_softcap, &factor0);
        const float p1 =
            exponentiate<kSoftcap>(s[2 * i + 1], row.y, p.scale_log2, p.scale_softcap, &factor1);
        // Rounding may lift huge logits above their lse.
        rp[i] = ptx::min_packed<T>(ptx::pack<T>(p0, p1), kOnes);
        if constexpr (kSoftcap) {
          factor[i % 4] = ptx::pack<T>(factor0, factor1);
        }
      }
      ptx::store_shared(shared.handover(slot, k, thread), rp[4 * k], rp[4 * k + 1], rp[4 * k + 2],
                        rp[4 * k + 3]);
      if constexpr (kSoftcap) {
        ptx::store_shared(shared.handover(slot, 4 + k, thread), factor[0], factor[1], factor[2],
                          factor[3]);
      }
      ptx::wgmma_fence();
      ptx::wgmma_rs<kDv, T, true, 1>(dv, rp + 4 * k, desc_b + Tile::mn_major_step(k));
    }
    ptx::named_barrier_arrive<256>(kPFullBarrier + slot);
    ptx::wgmma_commit();
    previous_do = do_stage;
    do_ring.advance();
    if (--left < 0) {
      left = blocks - 1;
    }
    ++step;
  };
  if constexpr (kAhead) {
    float s[2][32];
    ptx::pin(dv);
    issue_s(s[0], q_ring.stage(), q_ring.parity());
#pragma unroll 1
    do {
      rest_of_step(s[0], s[1]);
      if (step == end_step) {
        break;
      }
      rest_of_step(s[1], s[0]);
    } while (step < end_step);
  } else {
#pragma unroll 1
    do {
      float s[32];
      issue_s(s, q_ring.stage(), q_ring.parity());
      rest_of_step(s, s);
    } while (step < end_step);
  }
  ptx::wgmma_wait<0>();
  ptx::pin(dv);
  arrive_in_cluster<Shared::kCluster>(shared.do_empty(previous_do));
  wide_products_done(shared);
  if (p.dv) {
    store_rows<kDv, 64, T>(dv, 1.0F, gradient_rows(p.dv, tile, 0, p.head_dim_v),
                           shared.dv_staging(), 0, kPEpilogueBarrier, thread);
  }
}

template <class Shared, bool kSoftcap, class T>
__device__ __forceinline__ void wide_ds_role(const BwdParams& p, const WideTile& wide_tile,
                                             std::uint8_t* ds, const Shared& shared, int thread,
                                             WideProgress<Shared>& progress) {
  using Tile = tile::SwizzledTile<64>;
  constexpr int kD = Shared::kHeadDim;
  constexpr int kResident = Shared::kResidentV;
  const KeyTile& tile = wide_tile.keys;
  const int lane = ptx::thread_index() % 32;
  const int warp = __shfl_sync(0xffffffffU, thread / 32, 0);
  float dk[kD / 2];
#pragma unroll
  for (float& x : dk) {
    x = 0;
  }
  std::uint32_t resident[kResident / 4];
  Ring<Shared::kQStages>& q_ring = progress.q_ring;
  Ring<Shared::kDoStages>& do_ring = progress.do_ring;
  // K is the other's. It has come before any Q of its stage is waited for: P, which K is needed
  // for, is waited for first.
  arrive_in_cluster<Shared::kCluster>(shared.q_empty(q_ring.stage()));
  q_ring.advance();
#pragma unroll
  for (int piece = 0; piece < Shared::kDoPieces; ++piece) {
    ptx::mbarrier_wait(shared.do_full(do_ring.stage(), piece), do_ring.parity());
  }
  load_resident<kResident>(resident, shared.dout(do_ring.stage()), warp, lane);
  arrive_in_cluster<Shared::kCluster>(shared.do_empty(do_ring.stage()));
  do_ring.advance();
  const std::uint64_t desc_v = Tile::k_major_descriptor(shared.v());
  const std::uint64_t desc_do = Tile::k_major_descriptor(shared.dout(0));
  const std::uint64_t desc_q = Tile::mn_major_descriptor(shared.q(0));
  const auto ds_row =
      static_cast<std::uint32_t>(Tile::offset(warp * 16 + lane % 16, lane / 16 * 8));
  const int blocks = tile.m_end - tile.m_begin;
  int image = wide_tile.image;
  const int to_block_below = wide_tile.to_block_below;
  const int to_next_head = wide_tile.to_next_head;
  int left = blocks - 1;
  int previous_q = 0;
  int& step = progress.step;
  const int first_step = step;
  const int end_step = step + tile.num_steps;
#pragma unroll 1
  do {
    // (3)
    const int do_stage = do_ring.stage();
    float dp[32];
    gemm_resident<Shared::kHeadDimV, kResident, T>(
        dp, resident, desc_v,
        desc_do + static_cast<std::uint64_t>(do_stage) * (Shared::kDoBytes / 16),
        [&](int piece) { ptx::mbarrier_wait(shared.do_full(do_stage, piece), do_ring.parity()); });
    ptx::wgmma_commit();
    float2 rows[8];
    load_row_statistic(rows, shared.delta(step) + static_cast<std::uint32_t>(lane % 4 * 8));
    const int slot = step % Shared::kSlots;
    if (step > first_step) {
      ptx::bulk_wait_read<0>();  // for lane 0, which made the copies
      ptx::mbarrier_arrive(shared.p_empty((step - 1) % Shared::kSlots));
    }
    ptx::wgmma_wait<1>();
    if (step > first_step) {
      arrive_in_cluster<Shared::kCluster>(shared.q_empty(previous_q));  // (6) of the step before
    }
    std::uint32_t rds[16];  // P, then dS
    // While (3) still runs.
    ptx::named_barrier_sync<256>(kPFullBarrier + slot);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 packed = ptx::load_shared_uint4(shared.handover(slot, k, thread));
      rds[4 * k] = packed.x;
      rds[4 * k + 1] = packed.y;
      rds[4 * k + 2] = packed.z;
      rds[4 * k + 3] = packed.w;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    arrive_in_cluster<Shared::kCluster>(shared.do_empty(do_stage));
    const int q_stage = q_ring.stage();
#pragma unroll
    for (int piece = 0; piece < Shared::kQPieces; ++piece) {
      ptx::mbarrier_wait(shared.q_full(q_stage, piece), q_ring.parity());
    }
    ptx::pin(rds);
    __syncwarp();  // other lanes' P is overwritten from here on
    // (4) and (6), 16 queries at a time
    const std::uint64_t desc_b =
        desc_q + static_cast<std::uint64_t>(q_stage) * (Shared::kQBytes / 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint4 factors;
      if constexpr (kSoftcap) {
        factors = ptx::load_shared_uint4(shared.handover(slot, 4 + k, thread));
      }
#pragma unroll
      for (int i = 4 * k; i < 4 * k + 4; ++i) {
        const float2 row = rows[i / 2];
        const float2 p01 = ptx::unpack<T>(rds[i]);
        float ds0 = p01.x * (dp[2 * i] + row.x);
        float ds1 = p01.y * (dp[2 * i + 1] + row.y);
        if constexpr (kSoftcap) {
          const float2 f = ptx::unpack<T>(i % 4 == 0   ? factors.x
                                          : i % 4 == 1 ? factors.y
                                          : i % 4 == 2 ? factors.z
                                                       : factors.w);
          ds0 *= f.x;
          ds1 *= f.y;
        }
        rds[i] = ptx::pack<T>(ds0, ds1);
      }
      ptx::store_matrix((shared.slot(slot) + ds_row) ^ static_cast<std::uint32_t>(k * 32),
                        rds[4 * k], rds[4 * k + 1], rds[4 * k + 2], rds[4 * k + 3]);
      ptx::wgmma_fence();
      ptx::wgmma_rs<kD, T, true, 1>(dk, rds + 4 * k, desc_b + Tile::mn_major_step(k));
    }
    ptx::wgmma_commit();
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0 && ds != nullptr) {
      const auto rows_begin = static_cast<std::uint32_t>(warp) * (kDsImageBytes / 4);
      ptx::bulk_store(ds + static_cast<std::int64_t>(image) * kDsImageBytes + rows_begin,
                      shared.slot(slot) + rows_begin, kDsImageBytes / 4);
      ptx::bulk_commit();
    }
    image += left > 0 ? to_block_below : to_next_head;
    previous_q = q_stage;
    q_ring.advance();
    do_ring.advance();
    if (--left < 0) {
      left = blocks - 1;
    }
  } while (++step < end_step);
  ptx::wgmma_wait<0>();
  ptx::pin(dk);
  arrive_in_cluster<Shared::kCluster>(shared.q_empty(previous_q));
  ptx::bulk_wait_read<0>();
  ptx::mbarrier_arrive(shared.p_empty((step - 1) % Shared::kSlots));
  wide_products_done(shared);
  if (p.dk) {
    store_rows<kD, 64, T>(dk, p.scale, gradient_rows(p.dk, tile, 0, p.head_dim),
                          shared.dk_staging(), 0, kDsEpilogueBarrier, thread);
  }
}

}  // namespace flashgrad::sm90
