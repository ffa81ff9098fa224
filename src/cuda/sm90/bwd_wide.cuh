// SPDX-License-Identifier: Apache-2.0
// Backward, dk and dv for head dims up to 256; dq comes from bwd_query.cuh. The equations are those
// of bwd.cuh; one CTA holds 64 keys, and its warpgroups are specialised by product, since 64 keys
// of dk and of dv fill the registers of one warpgroup each:
//   0  "P":  (1) S^T = K Q^T, (2) P^T, (5) dV += P^T dO
//   1  "dS": (3) dP^T = V dO^T, (4) dS^T, (6) dK += dS^T Q
//   2  the first warp issues the loads
// P^T crosses from 0 to 1 as packed 16-bit through slots in shared memory, each thread reading what
// the same thread of the other warpgroup wrote.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per):
//   k_full, v_full   1; loader -> P, dS; once
//   q_full, do_full  1; loader -> both; step, stage = step mod 2
//   q_empty          8; P after (2), dS after (6) -> loader; step
//   do_empty         8; dS after (4), P after (5) -> loader; step
//   p_full           4; P -> dS; step, slot = step mod 2
//   p_empty          4; dS -> P; step
//   landing          1; loader -> loader, for tiles with rows to clear
// Named barriers: 3, 4 the epilogue of P and dS.
#pragma once

#include "cuda/sm90/bwd_load.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashgrad::sm90 {

inline constexpr int kWideHeadDim = 256;
inline constexpr int kWideKeys = 64;
inline constexpr int kWideThreads = 384;
inline constexpr int kWideRegisters = 232;
inline constexpr int kWideLoaderRegisters = 40;

// Shared memory of one CTA. With softcap a slot also holds the factors of (4).
template <bool kSoftcap>
struct WideShared {
  static constexpr int kHeadDim = kWideHeadDim;
  static constexpr int kBlockN = kWideKeys;
  static constexpr int kCluster = 1;
  static constexpr int kQStages = 2;
  static constexpr int kDoStages = 2;
  static constexpr int kTileBytes = 64 * kWideHeadDim * 2;
  static constexpr int kPBytes = 128 * 64;
  static constexpr int kSlotBytes = kPBytes * (kSoftcap ? 2 : 1);
  static constexpr int kQOffset = 2 * kTileBytes;
  static constexpr int kDoOffset = kQOffset + kQStages * kTileBytes;
  static constexpr int kSlotOffset = kDoOffset + kDoStages * kTileBytes;
  static constexpr int kLseOffset = kSlotOffset + 2 * kSlotBytes;
  static constexpr int kDeltaOffset = kLseOffset + kQStages * kBlockM * 4;
  static constexpr int kBarrierOffset = kDeltaOffset + kDoStages * kBlockM * 4;
  static constexpr int kNumBarriers = 15;
  static constexpr int kInfoOffset = kBarrierOffset + 8 * kNumBarriers;
  static constexpr int kBytes = kInfoOffset + BwdConfig::kInfoBytes + tile::kTileAlignment;

  std::uint32_t base;

  __device__ std::uint32_t k() const { return base; }
  __device__ std::uint32_t v() const { return base + kTileBytes; }
  __device__ std::uint32_t q(int stage) const { return base + kQOffset + stage * kTileBytes; }
  __device__ std::uint32_t dout(int stage) const { return base + kDoOffset + stage * kTileBytes; }
  __device__ std::uint32_t lse(int stage) const { return base + kLseOffset + stage * kBlockM * 4; }
  __device__ std::uint32_t delta(int stage) const {
    return base + kDeltaOffset + stage * kBlockM * 4;
  }
  // 16-byte piece k of a thread's P (0 to 3) and factors (4 to 7).
  __device__ std::uint32_t slot(int slot_index, int k, int thread) const {
    return base + kSlotOffset + slot_index * kSlotBytes + (k * 128 + thread) * 16;
  }
  __device__ std::uint32_t barrier(int i) const { return base + kBarrierOffset + 8 * i; }
  __device__ std::uint32_t k_full() const { return barrier(0); }
  __device__ std::uint32_t v_full() const { return barrier(1); }
  __device__ std::uint32_t kv_landing() const { return barrier(2); }
  __device__ std::uint32_t q_landing() const { return barrier(2); }
  __device__ std::uint32_t do_landing() const { return barrier(2); }
  __device__ std::uint32_t q_full(int stage) const { return barrier(3 + stage); }
  __device__ std::uint32_t q_empty(int stage) const { return barrier(5 + stage); }
  __device__ std::uint32_t do_full(int stage) const { return barrier(7 + stage); }
  __device__ std::uint32_t do_empty(int stage) const { return barrier(9 + stage); }
  __device__ std::uint32_t p_full(int i) const { return barrier(11 + i); }
  __device__ std::uint32_t p_empty(int i) const { return barrier(13 + i); }

  __device__ void init_barriers() const {
    for (int i = 0; i < 3; ++i) {
      ptx::mbarrier_init(barrier(i), 1);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), 8);
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(do_empty(i), 8);
      ptx::mbarrier_init(p_full(i), 4);
      ptx::mbarrier_init(p_empty(i), 4);
    }
    ptx::fence_mbarrier_init();
  }
};

template <bool kSoftcap, class T>
__device__ __forceinline__ void wide_p_role(const BwdParams& p, const KeyTile& tile,
                                            const WideShared<kSoftcap>& shared, int thread) {
  using Tile = tile::SwizzledTile<64>;
  constexpr std::uint32_t kOnes = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80U : 0x3c003c00U;
  constexpr std::uint64_t kStage = WideShared<kSoftcap>::kTileBytes / 16;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const auto arrive = [&](std::uint32_t barrier) {
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  float dv[kWideHeadDim / 2];
#pragma unroll
  for (float& x : dv) {
    x = 0;
  }
  const std::uint64_t desc_k = Tile::k_major_descriptor(shared.k());
  const std::uint64_t desc_q = Tile::k_major_descriptor(shared.q(0));
  const std::uint64_t desc_do = Tile::mn_major_descriptor(shared.dout(0));
  const int full_begin = tile.full_begin[0] - tile.m_begin;
  const int full_count = max(tile.full_end[0] - tile.full_begin[0], 0);
  const int blocks = tile.m_end - tile.m_begin;
  int left = blocks - 1;
  Ring<2> ring;
  ptx::mbarrier_wait(shared.k_full(), 0);
  int step = 0;
#pragma unroll 1
  do {
    const int stage = ring.stage();
    const std::uint64_t stage_offset = static_cast<std::uint64_t>(stage) * kStage;
    float s[32];
    ptx::mbarrier_wait(shared.q_full(stage), ring.parity());
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kWideHeadDim, T, tile::Start::kZero, Tile, Tile>(s, desc_k,
                                                                            desc_q + stage_offset);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (step > 0) {
      arrive(shared.do_empty(stage ^ 1));  // (5) of the step before
    }
    ptx::wgmma_wait<0>();
    ptx::pin(s);
#pragma unroll 1
    for (int r = static_cast<unsigned>(left - full_begin) >= static_cast<unsigned>(full_count);
         r > 0; --r) {
      mask_s(s, tile, warp * 16 + lane / 4, (left + tile.m_begin) * kBlockM + lane % 4 * 2,
             hidden_logit<kSoftcap>(p.scale_log2));
    }
    ptx::mbarrier_wait(shared.p_empty(stage), ring.parity() ^ 1U);
    std::uint32_t rp[16];
    std::uint32_t factor[4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 row = ptx::load_shared_float2(
          shared.lse(stage) + static_cast<std::uint32_t>(lane % 4 * 8 + i / 2 * 32));
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
      if (i % 4 == 3) {
        ptx::store_shared(shared.slot(stage, i / 4, thread), rp[i - 3], rp[i - 2], rp[i - 1],
                          rp[i]);
        if constexpr (kSoftcap) {
          ptx::store_shared(shared.slot(stage, 4 + i / 4, thread), factor[0], factor[1], factor[2],
                            factor[3]);
        }
      }
    }
    __syncwarp();
    arrive(shared.p_full(stage));
    arrive(shared.q_empty(stage));
    ptx::mbarrier_wait(shared.do_full(stage), ring.parity());
    ptx::wgmma_fence();
    tile::gemm_registers<kWideHeadDim, kBlockM, T, Tile>(dv, rp, desc_do + stage_offset);
    ptx::wgmma_commit();
    ring.advance();
    if (--left < 0) {
      left = blocks - 1;
    }
  } while (++step < tile.num_steps);
  ptx::wgmma_wait<0>();
  ptx::pin(dv);
  if (p.dv) {  // through K's memory, which no one else reads
    store_rows<kWideHeadDim, 64, T>(dv, 1.0F, gradient_rows(p.dv, tile, 0, p.head_dim_v),
                                    shared.k(), 0, 3, thread);
  }
}

template <bool kSoftcap, class T>
__device__ __forceinline__ void wide_ds_role(const BwdParams& p, const KeyTile& tile,
                                             const WideShared<kSoftcap>& shared, int thread) {
  using Tile = tile::SwizzledTile<64>;
  constexpr std::uint64_t kStage = WideShared<kSoftcap>::kTileBytes / 16;
  const int lane = thread % 32;
  const auto arrive = [&](std::uint32_t barrier) {
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  float dk[kWideHeadDim / 2];
#pragma unroll
  for (float& x : dk) {
    x = 0;
  }
  const std::uint64_t desc_v = Tile::k_major_descriptor(shared.v());
  const std::uint64_t desc_do = Tile::k_major_descriptor(shared.dout(0));
  const std::uint64_t desc_q = Tile::mn_major_descriptor(shared.q(0));
  Ring<2> ring;
  ptx::mbarrier_wait(shared.v_full(), 0);
  int step = 0;
#pragma unroll 1
  do {
    const int stage = ring.stage();
    const std::uint64_t stage_offset = static_cast<std::uint64_t>(stage) * kStage;
    float dp[32];
    ptx::mbarrier_wait(shared.do_full(stage), ring.parity());
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kWideHeadDim, T, tile::Start::kZero, Tile, Tile>(dp, desc_v,
                                                                            desc_do + stage_offset);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (step > 0) {
      arrive(shared.q_empty(stage ^ 1));  // (6) of the step before
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    ptx::mbarrier_wait(shared.p_full(stage), ring.parity());
    std::uint32_t rds[16];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 packed = ptx::load_shared_uint4(shared.slot(stage, k, thread));
      const std::uint32_t rp[4] = {packed.x, packed.y, packed.z, packed.w};
      std::uint32_t factors[4] = {};
      if constexpr (kSoftcap) {
        const uint4 f = ptx::load_shared_uint4(shared.slot(stage, 4 + k, thread));
        factors[0] = f.x;
        factors[1] = f.y;
        factors[2] = f.z;
        factors[3] = f.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * k + i;
        const float2 row = ptx::load_shared_float2(
            shared.delta(stage) + static_cast<std::uint32_t>(lane % 4 * 8 + at / 2 * 32));
        const float2 p01 = ptx::unpack<T>(rp[i]);
        float ds0 = p01.x * (dp[2 * at] + row.x);
        float ds1 = p01.y * (dp[2 * at + 1] + row.y);
        if constexpr (kSoftcap) {
          const float2 f = ptx::unpack<T>(factors[i]);
          ds0 *= f.x;
          ds1 *= f.y;
        }
        rds[at] = ptx::pack<T>(ds0, ds1);
      }
    }
    __syncwarp();
    arrive(shared.p_empty(stage));
    arrive(shared.do_empty(stage));
    ptx::mbarrier_wait(shared.q_full(stage), ring.parity());
    ptx::wgmma_fence();
    tile::gemm_registers<kWideHeadDim, kBlockM, T, Tile>(dk, rds, desc_q + stage_offset);
    ptx::wgmma_commit();
    ring.advance();
  } while (++step < tile.num_steps);
  ptx::wgmma_wait<0>();
  ptx::pin(dk);
  if (p.dk) {  // through V's memory, which no one else reads
    store_rows<kWideHeadDim, 64, T>(dk, p.scale, gradient_rows(p.dk, tile, 0, p.head_dim),
                                    shared.v(), 0, 4, thread);
  }
}

template <bool kSoftcap, class T>
__global__ __launch_bounds__(kWideThreads, 1) void bwd_wide(const __grid_constant__ BwdMaps maps,
                                                            const __grid_constant__ BwdParams p) {
  using Shared = WideShared<kSoftcap>;
  static_assert(Shared::kBytes <= 227 * 1024, "tiles and slots must fit an SM");
  extern __shared__ std::uint8_t dynamic_shared[];
  const std::uint32_t start = ptx::shared_address(dynamic_shared);
  const std::uint32_t base =
      (start + tile::kTileAlignment - 1) / tile::kTileAlignment * tile::kTileAlignment;
  const Shared shared{base};
  KeyTile& tile =
      *reinterpret_cast<KeyTile*>(dynamic_shared + (base - start) + Shared::kInfoOffset);
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  } else if (threadIdx.x == 128) {
    tile = key_tile<kWideKeys, 1>(p, blockIdx.x);
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  if (tile.num_steps == 0) {
    if (p.dk) {
      store_zeros(p.dk, tile, static_cast<int>(p.head_dim));
    }
    if (p.dv) {
      store_zeros(p.dv, tile, static_cast<int>(p.head_dim_v));
    }
    return;
  }
  if (warpgroup == 2) {
    ptx::registers_decrease<kWideLoaderRegisters>();
    if (__shfl_sync(0xffffffffU, ptx::thread_index() / 32, 0) == 8) {
      const KeyTile local = tile;
      Loader<Shared> loader(p, maps, local, tile.landing_parity, shared, 0,
                            ptx::thread_index() % 32);
      loader.load_k();
#pragma unroll 1
      for (int step = 0; step < local.num_steps; ++step) {
        loader.load_step(step);
      }
    }
  } else if (warpgroup == 0) {
    ptx::registers_increase<kWideRegisters>();
    wide_p_role<kSoftcap, T>(p, tile, shared, ptx::thread_index() % 128);
  } else {
    ptx::registers_increase<kWideRegisters>();
    wide_ds_role<kSoftcap, T>(p, tile, shared, ptx::thread_index() % 128);
  }
}

}  // namespace flashgrad::sm90
