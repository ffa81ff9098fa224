// SPDX-License-Identifier: Apache-2.0
// Backward, dq for head dims above 128 out of the images of dS that bwd_wide.cuh left:
//   (7) dQ += dS K by ascending key blocks, dq = scale * dQ after the last
// A tile is 128 queries of a head; which tiles a cluster makes, wide_rounds.cuh says. What the keys
// of one pass (wide_pass.hpp) give is carried to the next in f32, as the accumulators are: so
// cutting the keys into passes changes no bit.
//
// Warpgroup roles (384 threads): 0, 1 "consumers", 64 queries each; 2: the first warp issues the
// loads, the second says which tile comes next. A cluster of two CTAs, which hold neighbouring
// queries, shares the loads of K.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per):
//   full     1; loader -> consumers; step, stage = step mod kStages
//   empty    8 (cluster: 16, of both CTAs); consumer warps, after (7) -> loader; step
//   landing  1; loader -> loader, for tiles with rows to clear
//   and those of wide_rounds.cuh
// Named barriers: 3, 4 each consumer's epilogue.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/wide_config.hpp"
#include "cuda/sm90/wide_rounds.cuh"
#include "cuda/sm90/wide_tile.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashgrad::sm90 {

template <int kD, int kClusterSize>
struct WideDqShared {
  static constexpr int kCluster = kClusterSize;
  static constexpr WideDqConfig kConfig{kD, kClusterSize};
  static constexpr int kStages = kConfig.stages();
  static constexpr int kKBytes = kConfig.k_bytes();
  static constexpr int kStageBytes = kConfig.stage_bytes();
  static constexpr int kStagingOffset = kConfig.staging_offset();
  static constexpr int kBarrierOffset = kConfig.barrier_offset();
  static constexpr int kNumBarriers = kConfig.num_barriers();
  static constexpr int kInfoOffset = kConfig.info_offset();
  static constexpr int kBytes = kConfig.shared_bytes();
  static_assert(kBytes <= 227 * 1024, "stages must fit an SM");

  std::uint32_t base;

  __device__ std::uint32_t ds(int stage, int consumer) const {
    return base + stage * kStageBytes + consumer * kDsImageBytes;
  }
  __device__ std::uint32_t k(int stage) const {
    return base + stage * kStageBytes + 2 * kDsImageBytes;
  }
  __device__ std::uint32_t staging(int consumer) const {
    return base + kStagingOffset + consumer * kBlockM * kD * 2;
  }
  __device__ std::uint32_t barrier(int i) const { return base + kBarrierOffset + 8 * i; }
  __device__ std::uint32_t full(int stage) const { return barrier(stage); }
  __device__ std::uint32_t empty(int stage) const { return barrier(kStages + stage); }
  __device__ std::uint32_t landing() const { return barrier(2 * kStages); }
  __device__ WideRounds rounds() const {
    return {barrier(2 * kStages + 1), base + kConfig.number_offset()};
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), 8 * kCluster);
    }
    ptx::mbarrier_init(landing(), 1);
    rounds().init_barriers();
    ptx::fence_mbarrier_init();
  }
};

template <int kD, int kCluster>
__device__ __forceinline__ void wide_dq_loader_role(const BwdQueryParams& p, const BwdMaps& maps,
                                                    const WideDqTile& shared_tile,
                                                    const WideDqShared<kD, kCluster>& shared,
                                                    int rank, int lane,
                                                    Ring<WideDqShared<kD, kCluster>::kStages>& ring,
                                                    std::uint32_t& landing_parity) {
  using Shared = WideDqShared<kD, kCluster>;
  constexpr int kMapRows = kWideKeys / kCluster;
  constexpr std::uint32_t kBoxBytes = kWideKeys * tile::kBoxRowBytes;
  const WideDqTile& tile = shared_tile;
  const bool mapped = (p.mapped & kMapK) != 0;
  const int n_begin = tile.n_begin;
  const int n_end = tile.n_end;
  const int live_begin = tile.live_begin;
  const int live_end = tile.live_end;
  // Lets the scheduler look for the next tile when few steps are left to load.
  constexpr int kStepsBefore = 6;
  const int ask_at = max(n_end - kStepsBefore, n_begin);
  const auto ask = [&] {
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive(shared.rounds().tile_ends());
    }
    __syncwarp();
  };
  if (n_begin >= n_end) {
    ask();
  }
#pragma unroll 1
  for (int n = n_begin; n < n_end; ++n) {
    if (n == ask_at) {
      ask();
    }
    const int stage = ring.stage();
    const int row = tile.kv_row + n * kWideKeys;
    const bool dead_keys =
        n * kWideKeys < live_begin || min((n + 1) * kWideKeys, tile.keys_existing) > live_end;
    const bool clear = dead_keys || !mapped;
    const bool wanted[2] = {n >= tile.own_begin[0] && n < tile.own_end[0],
                            n >= tile.own_begin[1] && n < tile.own_end[1]};
    ptx::mbarrier_wait(shared.empty(stage), ring.parity() ^ 1U);
    if (clear) {
      const auto live = [&](int r) {
        return n * kWideKeys + r >= live_begin && n * kWideKeys + r < live_end;
      };
      if (mapped) {
        if (ptx::elect_one()) {
          ptx::mbarrier_arrive_expect(shared.landing(), Shared::kKBytes);
#pragma unroll
          for (int box = 0; box < kD / 64; ++box) {
#pragma unroll
            for (int half = 0; half < kWideKeys; half += kMapRows) {
              ptx::tensor_load(shared.k(stage) + box * kBoxBytes +
                                   static_cast<std::uint32_t>(half) * tile::kBoxRowBytes,
                               &maps.k, shared.landing(), 64 * box, row + half, tile.head_kv,
                               tile.batch_index);
            }
          }
        }
        __syncwarp();
        ptx::mbarrier_wait(shared.landing(), landing_parity);
        __syncwarp();
        landing_parity ^= 1;
        clear_rows<kWideKeys, kD>(shared.k(stage), lane, live);
      } else {
        load_tile<kWideKeys, kD>(shared.k(stage), p.k, tile.batch_index, row, tile.head_kv, 0,
                                 static_cast<int>(p.head_dim), lane, live);
      }
      ptx::fence_proxy_async();
      __syncwarp();
    }
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect(
          shared.full(stage), (clear ? 0U : static_cast<std::uint32_t>(Shared::kKBytes)) +
                                  ((wanted[0] ? 1U : 0U) + (wanted[1] ? 1U : 0U)) * kDsImageBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (wanted[i]) {
          ptx::bulk_load(shared.ds(stage, i),
                         tile.ds[i] + static_cast<std::int64_t>(n) * kDsImageBytes, kDsImageBytes,
                         shared.full(stage));
        }
      }
      if (!clear) {
#pragma unroll
        for (int box = 0; box < kD / 64; ++box) {
          const std::uint32_t destination = shared.k(stage) + box * kBoxBytes;
          if constexpr (kCluster == 2) {
            const int half = rank * kMapRows;
            ptx::tensor_load_multicast(
                destination + static_cast<std::uint32_t>(half) * tile::kBoxRowBytes, &maps.k,
                shared.full(stage), 64 * box, row + half, tile.head_kv, tile.batch_index, 3);
          } else {
            ptx::tensor_load(destination, &maps.k, shared.full(stage), 64 * box, row, tile.head_kv,
                             tile.batch_index);
          }
        }
      }
    }
    __syncwarp();
    ring.advance();
  }
}

template <int kD, int kCluster, class T>
__device__ __forceinline__ void wide_dq_consumer_role(
    const BwdQueryParams& p, const WideDqTile& tile, const WideDqShared<kD, kCluster>& shared,
    int consumer, int thread, Ring<WideDqShared<kD, kCluster>::kStages>& ring) {
  using Shared = WideDqShared<kD, kCluster>;
  using Tile = tile::SwizzledTile<64>;
  const int lane = thread % 32;
  const auto release = [&](int stage) {
    if constexpr (kCluster == 2) {
      if (lane < 2) {
        ptx::mbarrier_arrive_cluster(shared.empty(stage), static_cast<std::uint32_t>(lane));
      }
    } else if (lane == 0) {
      ptx::mbarrier_arrive(shared.empty(stage));
    }
  };
  // Stages with keys that only the other rows of the cluster see.
  const auto skip = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      ptx::mbarrier_wait(shared.full(ring.stage()), ring.parity());
      release(ring.stage());
      ring.advance();
    }
  };
  // Loaded before the products: behind them the load would be waited for.
  const float* neg_lse = p.neg_lse_log2 + tile.statistics[consumer] + thread / 32 * 16 + lane / 4;
  const bool exists = tile.rows_to_write > 64 * consumer;
  const bool blind[2] = {!exists || neg_lse[0] == -INFINITY, !exists || neg_lse[8] == -INFINITY};
  float dq[kD / 2];
#pragma unroll
  for (float& x : dq) {
    x = 0;
  }
  float4* const partial = reinterpret_cast<float4*>(tile.partial[consumer]) + thread;
  if (tile.continues[consumer] != 0) {
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      const float4 x = partial[i * 128];
      dq[4 * i] = x.x;
      dq[4 * i + 1] = x.y;
      dq[4 * i + 2] = x.z;
      dq[4 * i + 3] = x.w;
    }
  }
  const int own = tile.own_end[consumer] - tile.own_begin[consumer];
  const int before = own > 0 ? tile.own_begin[consumer] - tile.n_begin : 0;
  const int after = tile.n_end - tile.n_begin - own - before;
  skip(before);
  if (own > 0) {
    const std::uint64_t desc_ds = Tile::mn_major_descriptor(shared.ds(0, consumer));
    const std::uint64_t desc_k = Tile::mn_major_descriptor(shared.k(0));
    int left = own;
    int previous = -1;
#pragma unroll 1
    do {
      const std::uint64_t stage =
          static_cast<std::uint64_t>(ring.stage()) * (Shared::kStageBytes / 16);
      ptx::mbarrier_wait(shared.full(ring.stage()), ring.parity());
      ptx::wgmma_fence();
      tile::gemm_mn_major<kD, kWideKeys, T, tile::Start::kAccumulate, Tile, Tile>(
          dq, desc_ds + stage, desc_k + stage);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (previous >= 0) {
        release(previous);
      }
      previous = ring.stage();
      ring.advance();
    } while (--left > 0);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    release(previous);
  }
  skip(after);
  if (tile.goes_on[consumer] != 0) {
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      partial[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
  }
  if (tile.finishes[consumer] != 0) {
    // A row that sees nothing is 0, whatever stands in the keys that its neighbours see.
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) {
      dq[i] = blind[i / 2 % 2] ? 0.0F : dq[i];
    }
    store_rows<kD, 64, T>(dq, p.scale,
                          {p.dq, tile.batch_index, tile.q_row + 64 * consumer, tile.head,
                           tile.rows_to_write - 64 * consumer, static_cast<int>(p.head_dim)},
                          shared.staging(consumer), 0, 3 + consumer, thread);
  }
}

template <int kD, int kCluster, class T>
__global__ __launch_bounds__(kWideDqThreads,
                             1) void bwd_wide_dq(const __grid_constant__ BwdMaps maps,
                                                 const __grid_constant__ BwdQueryParams p,
                                                 const __grid_constant__ WidePass pass) {
  using Shared = WideDqShared<kD, kCluster>;
  extern __shared__ std::uint8_t dynamic_shared[];
  const std::uint32_t start = ptx::shared_address(dynamic_shared);
  const std::uint32_t base =
      (start + tile::kTileAlignment - 1) / tile::kTileAlignment * tile::kTileAlignment;
  const Shared shared{base};
  WideDqTile* const tiles =
      reinterpret_cast<WideDqTile*>(dynamic_shared + (base - start) + Shared::kInfoOffset);
  const WideRounds rounds = shared.rounds();
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  } else if (threadIdx.x == 128) {
    tiles[0] = wide_dq_tile<kD, kCluster>(p, pass, blockIdx.x);
  }
  __syncthreads();
  if constexpr (kCluster == 2) {
    ptx::cluster_sync();
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int rank = kCluster == 2 ? static_cast<int>(blockIdx.x) % 2 : 0;
  const int lane = ptx::thread_index() % 32;
  if (warpgroup == 2) {
    ptx::registers_decrease<kWideDqLoaderRegisters>();
    const int warp = __shfl_sync(0xffffffffU, ptx::thread_index() / 32, 0);
    if (warp == 8) {
      Ring<Shared::kStages> ring;
      std::uint32_t landing_parity = 0;
      rounds.each<true>(tiles, [&](int round, const WideDqTile& tile) {
        wide_dq_loader_role<kD, kCluster>(p, maps, tile, shared, rank, lane, ring, landing_parity);
        ptx::mbarrier_arrive(rounds.tile_empty(round));
      });
    } else if (warp == 9 && lane == 0) {
      rounds.schedule<kCluster>(
          p.ticket, static_cast<std::uint32_t>(pass.num_units * p.group * p.num_q_tiles), rank,
          tiles, [&](std::int64_t cta, WideDqTile& tile) {
            tile = wide_dq_tile<kD, kCluster>(p, pass, cta);
          });
    }
  } else {
    ptx::registers_increase<kWideDqRegisters>();
    const int consumer = __shfl_sync(0xffffffffU, ptx::thread_index() / 128, 0);
    Ring<Shared::kStages> ring;
    rounds.each<true>(tiles, [&](int round, const WideDqTile& tile) {
      wide_dq_consumer_role<kD, kCluster, T>(p, tile, shared, consumer, ptx::thread_index() % 128,
                                             ring);
      ptx::mbarrier_arrive(rounds.tile_empty(round));
      ptx::named_barrier_sync<128>(3 + consumer);  // the staging is free again
    });
  }
  if constexpr (kCluster == 2) {
    __syncwarp();
    ptx::cluster_sync();  // neither CTA's memory goes while the other may still signal
  }
}

}  // namespace flashgrad::sm90
