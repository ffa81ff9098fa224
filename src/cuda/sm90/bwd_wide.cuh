// SPDX-License-Identifier: Apache-2.0
// Backward, dk and dv for head dims above 128, and dS for bwd_wide_dq.cuh, which makes dq of it.
// The equations are those of bwd.cuh; one CTA holds 64 keys, and its warpgroups are specialised by
// product, since 64 keys of dk and of dv fill the registers of one warpgroup each:
//   0  "P":  (1) S^T = K Q^T, (2) P^T, (5) dV += P^T dO
//   1  "dS": (3) dP^T = V dO^T, (4) dS^T, (6) dK += dS^T Q, and dS^T to global memory
//   2  the first warp issues the loads, the second says which tile comes next
// P^T crosses from 0 to 1 as packed 16-bit through slots in shared memory, each thread reading what
// the same thread of the other warpgroup wrote; dS^T is written over it and copied from there by
// the copy engine, as the swizzled image that the dq kernel wants back. (2) and (4) feed (5) and
// (6) 16 queries at a time. The first columns of K and V stay in registers, which frees shared
// memory for stages and takes reads off it: the operands of wgmma and everything else that goes
// through shared memory need more of its cycles than the products take. Where registers allow
// (kAhead), (1) of the next step is issued before (2) of this one.
//
// A cluster of two CTAs, which hold neighbouring keys, shares the loads of Q and dO (multicast) and
// nothing else: the bits do not depend on it. Where there is room (kAhead) it makes several tiles
// (wide_rounds.cuh); steps count through all of them.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per):
//   q_full, do_full  32; loader's lanes -> both; step and piece of 128 columns. K and V come first,
//                    as if they were Q and dO of a step -1; their columns that are not resident go
//                    to places of their own, with the first piece
//   q_empty          256 (cluster: 512, of both CTAs); lanes of P after (1), of dS after (6) ->
//                    loader; step
//   do_empty         256 (512); lanes of dS after (3), of P after (5) (V: once it has come) ->
//                    loader; step
//   p_empty          128; dS's lanes, when the copy engine has read the slot -> P; step
//   landing          1; loader -> loader, for tiles with rows to clear
//   done             256; lanes of P and dS after their last products -> both; once, without kAhead
//   and, with kAhead, those of wide_rounds.cuh
// Named barriers: the epilogues of P and dS, and for each slot that P has filled it: P's threads
// arrive, dS's wait; step, slot = step mod kSlots.
#pragma once

#include "cuda/sm90/bwd_wide_load.cuh"
#include "cuda/sm90/bwd_wide_roles.cuh"

namespace flashgrad::sm90 {

template <int kD, int kDv, int kCluster, bool kSoftcap, class T>
__global__ __launch_bounds__(kWideThreads, 1) void bwd_wide(const __grid_constant__ BwdMaps maps,
                                                            const __grid_constant__ BwdParams p,
                                                            const __grid_constant__ WidePass pass) {
  using Shared = WideShared<kD, kDv, kCluster, kSoftcap>;
  // No byte is left to align the tiles by hand.
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t wide_shared[];
  const Shared shared{ptx::shared_address(wide_shared)};
  WideTile* const tiles = reinterpret_cast<WideTile*>(wide_shared + Shared::kInfoOffset);
  const WideRounds rounds = shared.rounds();
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  } else if (threadIdx.x == 128) {
    describe_wide_tile<kCluster>(p, pass, blockIdx.x, tiles[0]);
  }
  __syncthreads();
  if constexpr (kCluster == 2) {
    ptx::cluster_sync();
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  constexpr bool kSeveral = Shared::kAhead;
  const int lane = ptx::thread_index() % 32;
  // Of a consumer, after its part of a tile.
  const auto end_tile = [&](int round, int named_barrier) {
    if constexpr (kSeveral) {
      ptx::mbarrier_arrive(rounds.tile_empty(round));
      ptx::named_barrier_sync<128>(named_barrier);  // the staging is free again
    }
  };
  if (warpgroup == 2) {
    ptx::registers_decrease<Shared::kLoaderRegisters>();
    const int rank = kCluster == 2 ? static_cast<int>(blockIdx.x) % 2 : 0;
    const int warp = __shfl_sync(0xffffffffU, ptx::thread_index() / 32, 0);
    if (warp == 8) {
      WideLoader<Shared> loader(p, maps, shared, rank, lane);
      rounds.each<kSeveral>(tiles, [&](int round, const WideTile& tile) {
        loader.run(tile.keys);
        if constexpr (kSeveral) {
          ptx::mbarrier_arrive(rounds.tile_empty(round));
        }
      });
    } else if (kSeveral && warp == 9 && lane == 0) {
      rounds.schedule<kCluster>(p.ticket,
                                static_cast<std::uint32_t>(pass.num_units * pass.num_key_tiles),
                                rank, tiles, [&](std::int64_t cta, WideTile& tile) {
                                  describe_wide_tile<kCluster>(ptx::opaque(p), pass, cta, tile);
                                });
    }
  } else if (warpgroup == 0) {
    ptx::registers_increase<Shared::kPRegisters>();
    WideProgress<Shared> progress;
    rounds.each<kSeveral>(tiles, [&](int round, const WideTile& tile) {
      const int thread = ptx::thread_index() % 128;
      if (tile.keys.num_steps > 0) {  // or not, in both CTAs of a cluster
        wide_p_role<Shared, kSoftcap, T>(p, tile.keys, shared, thread, progress);
      } else if (tile.keys.num_steps == 0 && p.dv) {
        store_zeros(p.dv, tile.keys, static_cast<int>(p.head_dim_v), thread, 128);
      }
      end_tile(round, kPEpilogueBarrier);
    });
  } else {
    ptx::registers_increase<Shared::kDsRegisters>();
    WideProgress<Shared> progress;
    rounds.each<kSeveral>(tiles, [&](int round, const WideTile& tile) {
      const int thread = ptx::thread_index() % 128;
      if (tile.keys.num_steps > 0) {
        wide_ds_role<Shared, kSoftcap, T>(p, tile, pass.ds, shared, thread, progress);
      } else if (tile.keys.num_steps == 0 && p.dk) {
        store_zeros(p.dk, tile.keys, static_cast<int>(p.head_dim), thread, 128);
      }
      end_tile(round, kDsEpilogueBarrier);
    });
  }
  if constexpr (kCluster == 2) {
    __syncwarp();
    ptx::cluster_sync();  // neither CTA's memory goes while the other may still signal
  }
}

}  // namespace flashgrad::sm90
