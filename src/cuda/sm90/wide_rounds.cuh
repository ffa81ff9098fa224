// SPDX-License-Identifier: Apache-2.0
// How the clusters of the kernels for head dims above 128 come to their tiles: each makes the tile
// of its own number first and then, round by round, the next one that nobody has taken. One lane of
// each CTA, the scheduler, asks for it shortly before the loads of the tile before are all issued:
// earlier, and tiles that get shorter would be dealt out unevenly; later, and loads would wait. The
// tiles of two rounds have places.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per round):
//   tile_full      1; scheduler -> all; place = round mod 2
//   tile_empty     288; lanes of consumers and loader, done with the tile -> scheduler; place
//   tile_ends      1; loader -> scheduler
//   number_wanted  1; scheduler of the cluster's second CTA -> that of the first
//   number_full    1, with the number; the other way
// Round 0 needs none of them to begin.
#pragma once

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/wide_config.hpp"

namespace flashgrad::sm90 {

// The barriers from `barriers` on, and the word in which the number arrives.
struct WideRounds {
  std::uint32_t barriers;
  std::uint32_t number;

  __device__ std::uint32_t tile_full(int round) const { return barriers + 8 * (round % 2); }
  __device__ std::uint32_t tile_empty(int round) const { return barriers + 8 * (2 + round % 2); }
  __device__ std::uint32_t tile_ends() const { return barriers + 32; }
  __device__ std::uint32_t number_wanted() const { return barriers + 40; }
  __device__ std::uint32_t number_full() const { return barriers + 48; }

  __device__ void init_barriers() const {
    for (int i = 0; i < kWideRoundBarriers; ++i) {
      ptx::mbarrier_init(barriers + 8 * i, i == 2 || i == 3 ? 288 : 1);
    }
  }

  // A role: body(round, tile) for each tile, until there is none. Without kSeveral there is one.
  template <bool kSeveral, class Tile, class Body>
  __device__ __forceinline__ void each(const Tile* tiles, Body&& body) const {
    if constexpr (!kSeveral) {
      body(0, tiles[0]);
    } else {
#pragma unroll 1
      for (int round = 0;; ++round) {
        if (round > 0) {
          ptx::mbarrier_wait(tile_full(round), static_cast<std::uint32_t>((round - 1) / 2) & 1U);
        }
        if (tiles[round % 2].exists == 0) {
          return;
        }
        body(round, tiles[round % 2]);
      }
    }
  }

  // The scheduler, from round 1 on; describe(cta, tile) fills in what a CTA makes. `ticket` counts
  // what clusters take beyond their first tile; with the one that finds nothing they take num_tiles
  // in all, after which it is 0 again.
  template <int kCluster, class Tile, class Describe>
  __device__ __forceinline__ void schedule(std::uint32_t* ticket, std::uint32_t num_tiles, int rank,
                                           Tile* tiles, Describe&& describe) const {
#pragma unroll 1
    for (int round = 1;; ++round) {
      const std::uint32_t parity = static_cast<std::uint32_t>(round - 1) & 1U;
      ptx::mbarrier_wait(tile_ends(), parity);
      std::uint32_t taken;
      if (rank == 0) {
        taken = gridDim.x / kCluster + atomicInc(ticket, num_tiles - 1);
        if constexpr (kCluster == 2) {
          ptx::mbarrier_wait(number_wanted(), parity);
          ptx::store_to_cta(number, taken, number_full(), 1);
        }
      } else {
        ptx::mbarrier_arrive_expect(number_full(), 4);
        ptx::mbarrier_arrive_cluster(number_wanted(), 0);
        ptx::mbarrier_wait(number_full(), parity);
        taken = ptx::load_shared_uint(number);
      }
      if (round > 1) {
        ptx::mbarrier_wait(tile_empty(round), static_cast<std::uint32_t>(round / 2 - 1) & 1U);
      }
      if (taken < num_tiles) {
        describe(std::int64_t{taken} * kCluster + rank, tiles[round % 2]);
      } else {
        tiles[round % 2].exists = 0;
      }
      ptx::mbarrier_arrive(tile_full(round));
      if (taken >= num_tiles) {
        return;
      }
    }
  }
};

}  // namespace flashgrad::sm90
