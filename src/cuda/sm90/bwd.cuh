// SPDX-License-Identifier: Apache-2.0
// Backward, pass 2 of 3, head dims up to 128. Key blocks outside, query blocks inside: one CTA
// holds block_n keys, and for every query head of the group and every query block m that sees them
//   (1) S^T  = K Q^T
//   (2) P^T  = exp2(scale_log2 * S^T - lse_log2), 0 where masked
//   (3) dP^T = V dO^T
//   (4) dS^T = P^T * (dP^T - delta + dlse)
//   (5) dV  += P^T dO
//   (6) dK  += dS^T Q
//   (7) dQ   = dS K, added to f32 accumulators in global memory
// With softcap, S is capped before (2) and dS^T takes the factor 1 - (s / softcap)^2.
//
// Warpgroup roles (384 threads):
//   0     "dq" (bwd_dq.cuh): its first warp issues the loads; all four make (7)
//   1, 2  "consumers" (bwd_consumer.cuh): (1) to (6) for 64 keys each (d64: two blocks of 64 keys
//         in turn); P and dS go from registers into (5) and (6), dS also through shared memory to
//         warpgroup 0
// A consumer issues [dP, dV] and [dK, S of the next step] as two batches. With ping_pong a token
// lets one consumer issue a batch only after the other has, so that one's softmax runs under the
// other's products.
//
// With a cluster of two CTAs, which hold neighbouring keys, each loads half of every Q and dO block
// for both (multicast), and sends its dS to the other; each makes half the columns of dQ over the
// keys of both, which halves loads from the L2 and additions to it.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per):
//   k_full        1 (cluster: 2, with the peer's K); loader -> all; once
//   v_full        1; loader -> consumers; once
//   q_full        1; loader -> consumers; step, stage = step mod q_stages
//   q_empty       256 (512: of both CTAs); consumers' lanes, after (6) -> loader, and dq warps that
//                 finish dq; step
//   do_full       1; loader -> consumers; step, stage = step mod do_stages
//   do_empty      256 (512); consumers' lanes, after (5) -> the same; step
//   ds_full       8; consumer warps -> dq; (step, key block), stage mod ds_stages
//   ds_empty      4 (5: the peer has its copy); dq warps, after (7) -> consumers; the same
//   peer_ds_full  1; loader, with the peer's copy -> dq; step
//   peer_ds_empty 4; dq warps of the peer, after (7) -> who sends dS: loader or consumers; step
//   *_landing     1; loader -> loader, for tiles with rows to clear; each such tile
//   number_full   1, with the number; CTA 0 of an ordered cluster -> CTA 1; once
//   done          4; dq warps, after the last (7) -> consumers that then store dk through K's
//                 memory; once
// Named barriers: 1, 2 the token of each consumer; 3, 4 each consumer's epilogue; 5 the dq warps'.
#pragma once

#include "cuda/sm90/bwd_consumer.cuh"
#include "cuda/sm90/bwd_dq.cuh"

namespace flashgrad::sm90 {

// The copy engine would fetch each map at its first use, when a tile is waited for.
__device__ __forceinline__ void prefetch(const BwdMaps& maps, std::uint32_t mapped) {
  const CUtensorMap* all[4] = {&maps.q, &maps.k, &maps.v, &maps.dout};  // as kMapQ...
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((mapped >> i & 1U) != 0) {
      ptx::prefetch_tensor_map(all[i]);
    }
  }
}

// The number of a cluster, or of a CTA without one, among those of an ordered kernel: the first CTA
// has `taken` it in lane 0 and sends it to the other. One warp of each.
template <BwdConfig C>
__device__ __forceinline__ std::uint32_t share_number(std::uint32_t taken,
                                                      const BwdShared<C>& shared, unsigned rank) {
  if constexpr (C.cluster == 2) {
    if (rank == 1) {
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(shared.number_full(), 4);
      }
      __syncwarp();
      ptx::mbarrier_wait(shared.number_full(), 0);
      return ptx::load_shared_uint(shared.number());
    }
    if (threadIdx.x % 32 == 0) {
      ptx::store_to_cta(shared.number(), taken, shared.number_full(), 1);
    }
  }
  return __shfl_sync(0xffffffffU, taken, 0);
}

// A tile as prepare has described it, by a warp. Where units are served, rows_ready may have
// changed since; if it is set, the rows are seen.
template <bool kServesUnits>
__device__ __forceinline__ void load_tile(KeyTile* tile, const KeyTile* from) {
  const unsigned lane = threadIdx.x % 32;
  if (lane < sizeof(KeyTile) / 16) {
    reinterpret_cast<uint4*>(tile)[lane] = reinterpret_cast<const uint4*>(from)[lane];
  }
  if constexpr (kServesUnits) {
    __syncwarp();
    if (lane == 0) {
      tile->rows_ready = ptx::load_acquire(&from->rows_ready);
    }
  }
}

template <BwdVariant kVariant, class T>
__global__ __launch_bounds__(BwdConfig::kThreads,
                             1) void bwd_main(const __grid_constant__ BwdMaps maps,
                                              const __grid_constant__ BwdParams p) {
  constexpr BwdConfig C = kBwdConfigs[static_cast<int>(kVariant)];
  static_assert(C.valid(), "tiles, stages and registers must fit an SM");
  static_assert(sizeof(KeyTile) <= BwdConfig::kInfoBytes - 4, "KeyTile outgrew its place");
  extern __shared__ std::uint8_t dynamic_shared[];
  const std::uint32_t start = ptx::shared_address(dynamic_shared);
  const std::uint32_t base =
      (start + tile::kTileAlignment - 1) / tile::kTileAlignment * tile::kTileAlignment;
  const BwdShared<C> shared{base};
  KeyTile& tile = *reinterpret_cast<KeyTile*>(dynamic_shared + (base - start) + C.info_offset());
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  const unsigned rank = C.cluster == 2 ? blockIdx.x % 2 : 0;
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  if constexpr (C.cluster == 2) {
    // The peer's barriers, which init_barriers has fenced, are waited for behind the tile.
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  std::uint32_t taken = 0;
  if (threadIdx.x == 32) {
    prefetch(maps, p.mapped);
  } else if (threadIdx.x / 32 == 4) {
    ptx::grid_dependency_wait();
    if constexpr (!C.ordered) {
      load_tile<C.serves_units()>(&tile, p.tiles + blockIdx.x);
    } else if (threadIdx.x == 128 && rank == 0) {
      taken = atomicAdd(p.order.ticket, 1U);
    }
  }
  __syncthreads();
  if constexpr (C.cluster == 2) {
    ptx::cluster_wait();
  }
  if constexpr (C.ordered) {
    if (threadIdx.x / 32 == 4) {
      load_tile<false>(&tile, p.tiles + (share_number<C>(taken, shared, rank) * C.cluster + rank));
    }
    __syncthreads();
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if constexpr (C.serves_units()) {
    if (tile.num_steps == kServesUnit) {
      serve_units<C, T>(p, unit_of(p, tile), tile.turn, static_cast<int>(rank));
      return;
    }
  }
  if (tile.num_steps == 0) {
    if (p.dk) {
      store_zeros(p.dk, tile, static_cast<int>(p.head_dim), static_cast<int>(threadIdx.x),
                  C.kThreads);
    }
    if (p.dv) {
      store_zeros(p.dv, tile, static_cast<int>(p.head_dim_v), static_cast<int>(threadIdx.x),
                  C.kThreads);
    }
    if constexpr (C.serves_units()) {
      if (warpgroup == 0 && p.pipeline.lag > 0) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        count_warp(unit_counter(p, unit_of(p, tile), UnitPipeline::kAdded), lane);
      }
    }
    return;
  }
  if (warpgroup == 0) {
    ptx::registers_decrease<C.dq_registers>();
    bwd_dq_role<C, T>(p, maps, tile, shared, static_cast<int>(rank));
  } else {
    ptx::registers_increase<C.consumer_registers>();
    const int consumer = __shfl_sync(0xffffffffU, warpgroup - 1, 0);
    bwd_consumer_role<C, T>(p, tile, shared, consumer);
  }
}

}  // namespace flashgrad::sm90
