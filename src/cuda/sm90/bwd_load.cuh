// SPDX-License-Identifier: Apache-2.0
// The loads of the backward's main kernel: K and V once, then Q with lse and dO with delta in every
// step.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

// All loads of a CTA, issued by one warp. What it must remember between steps is little, because
// the dq warpgroup, to which the warp belongs, has few registers.
// Shared is a BwdShared, kHeadsInside StepWalk's.
template <class Shared, bool kHeadsInside>
struct Loader {
  static constexpr int kBoxes = (Shared::kHeadDim + tile::kBoxColumns - 1) / tile::kBoxColumns;

  const BwdParams& p;
  const BwdMaps& maps;
  const KeyTile& tile;
  int (&landing_parity)[3];  // of the landing barriers, in shared memory
  Shared shared;
  int rank;  // of the CTA in its cluster
  int lane;
  StepWalk<kHeadsInside> walk;
  // Whether the walk's block, the next, ... have rows that are not to be read: loaded 32 at a time,
  // since a load that is waited for in every step costs the dq warpgroup its slack.
  std::uint32_t unreadable = 0;
  bool all_readable = false;  // known without looking

  __device__ Loader(const BwdParams& params, const BwdMaps& tensor_maps, const KeyTile& key_tile,
                    int (&parity_of_landing)[3], Shared memory, int cluster_rank, int lane_index)
      : p(params),
        maps(tensor_maps),
        tile(key_tile),
        landing_parity(parity_of_landing),
        shared(memory),
        rank(cluster_rank),
        lane(lane_index),
        walk(key_tile, static_cast<int>(params.group)) {}

  __device__ int slot() const { return walk.slot(p.rows, tile); }

  // Where a tile comes from and goes to.
  struct Job {
    const CUtensorMap* map;
    bool mapped;  // the copy engine can address the tensor
    const Tensor& tensor;
    int columns;  // of the tensor; the tile's own are padded with zeros
    int row;      // these two as the map's coordinates: place() has changed them where it is ragged
    int batch;
    int head;
    std::uint32_t destination;
    std::uint32_t full;      // gets one arrival once the tile is there
    std::uint32_t landing;   // the loader's own barrier,
    int landing_index;       // its parity,
    bool clear;              // and whether it is needed: some rows must become 0
    const float* statistic;  // 64 numbers that come along, or null
    std::uint32_t statistic_destination;
  };

  // first_box, kNumBoxes: which 64 columns, packed together. With kShared each CTA of the cluster
  // loads its box for both.
  template <int kRows, int kNumBoxes, bool kShared, class Keep>
  __device__ void load(const Job& job, int first_box, Keep&& keep) {
    constexpr std::uint32_t kBoxBytes = kRows * tile::kBoxRowBytes;
    constexpr std::uint32_t kStatisticBytes = kBlockM * 4;
    const std::uint32_t barrier = job.clear ? job.landing : job.full;
    if (ptx::elect_one()) {
      if (job.mapped || job.clear) {
        ptx::mbarrier_arrive_expect(barrier, (job.mapped ? kNumBoxes * kBoxBytes : 0U) +
                                                 (job.statistic != nullptr ? kStatisticBytes : 0U));
        if (job.statistic != nullptr) {
          ptx::bulk_load(job.statistic_destination, job.statistic, kStatisticBytes, barrier);
        }
      }
      if (job.mapped) {
        if constexpr (kShared) {
          static_assert(kNumBoxes == 2, "one box for each CTA");
          ptx::tensor_load_multicast(job.destination + static_cast<std::uint32_t>(rank) * kBoxBytes,
                                     job.map, barrier, 64 * rank, job.row, job.head,
                                     tile.batch_index, 3);
        } else {
#pragma unroll
          for (int box = 0; box < kNumBoxes; ++box) {
            if constexpr (Shared::kMayBeRagged) {
              ptx::tensor_load(job.destination + box * kBoxBytes, job.map, barrier,
                               64 * (first_box + box), job.row, job.head, job.batch, p.ragged_rows);
            } else {
              ptx::tensor_load(job.destination + box * kBoxBytes, job.map, barrier,
                               64 * (first_box + box), job.row, job.head, job.batch);
            }
          }
        }
      }
    }
    __syncwarp();
    if (!job.clear) {
      return;
    }
    ptx::mbarrier_wait(job.landing, static_cast<std::uint32_t>(landing_parity[job.landing_index]));
    __syncwarp();
    if (job.mapped) {
      clear_rows<kRows, 64 * kNumBoxes>(job.destination, lane, keep);
    } else {
      const bool ragged = Shared::kMayBeRagged && p.ragged_rows != 0;
      load_tile<kRows, 64 * kNumBoxes>(job.destination, job.tensor, ragged ? 0 : job.batch,
                                       ragged ? job.row - p.ragged_rows + job.batch : job.row,
                                       job.head, 64 * first_box, job.columns, lane, keep);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect_one()) {
      landing_parity[job.landing_index] ^= 1;
      ptx::mbarrier_arrive(job.full);
    }
    __syncwarp();
  }

  // Turns a row and its batch entry into the maps' coordinates; the sequence ends at row `end`.
  __device__ void place(int& row, int& batch, int end) const {
    if (p.ragged_rows != 0) {
      row += p.ragged_rows - end;
      batch = end;
    }
  }

  // One arrival on k_full for K and, with a cluster, another for the peer's K: its keys, the
  // columns of dq that this CTA makes. V, which the consumers need last, comes behind the first dO.
  __device__ void load_k() {
    int row = tile.kv_row;
    int batch = tile.batch_index;
    if constexpr (Shared::kMayBeRagged) {
      place(row, batch, row + tile.rows_to_write);
    }
    const bool mapped = (p.mapped & kMapK) != 0;
    load<Shared::kBlockN, kBoxes, false>(
        {&maps.k, mapped, p.k, static_cast<int>(p.head_dim), row, batch, tile.head_loaded,
         shared.k(), shared.k_full(), shared.kv_landing(), 0, tile.has_dead_keys != 0 || !mapped,
         nullptr, 0},
        0, [this](int r) { return r >= tile.live_begin && r < tile.live_end; });
    if constexpr (Shared::kCluster == 2) {
      const int shift = rank == 0 ? Shared::kBlockN : -Shared::kBlockN;
      load<Shared::kBlockN, 1, false>(
          {&maps.k, mapped, p.k, static_cast<int>(p.head_dim), tile.kv_row + shift,
           tile.batch_index, tile.head_loaded, shared.peer_k(), shared.k_full(),
           shared.kv_landing(), 0, tile.has_dead_keys != 0 || !mapped, nullptr, 0},
          rank, [this](int r) { return r >= tile.peer_live_begin && r < tile.peer_live_end; });
    }
  }
  __device__ void load_v() {
    int row = tile.kv_row;
    int batch = tile.batch_index;
    if constexpr (Shared::kMayBeRagged) {
      place(row, batch, row + tile.rows_to_write);
    }
    const bool mapped = (p.mapped & kMapV) != 0;
    load<Shared::kBlockN, kBoxes, false>(
        {&maps.v, mapped, p.v, static_cast<int>(p.head_dim_v), row, batch, tile.head_loaded,
         shared.v(), shared.v_full(), shared.kv_landing(), 0, tile.has_dead_keys != 0 || !mapped,
         nullptr, 0},
        0, [this](int r) { return r >= tile.live_begin && r < tile.live_end; });
  }

  // Half of step `step`: its query block of q with lse, or of dout with delta, in this order. The
  // step past the last lets the consumers prefetch S once more, from whatever the stage holds.
  __device__ void load_half_step(int step, bool is_q) {
    const int stages = is_q ? Shared::kQStages : Shared::kDoStages;
    const int stage = step % stages;
    const std::uint32_t parity = (static_cast<std::uint32_t>(step / stages) & 1U) ^ 1U;
    if (step == tile.num_steps) {
      if (is_q) {
        ptx::mbarrier_wait(shared.q_empty(stage), parity);
        if (ptx::elect_one()) {
          ptx::mbarrier_arrive(shared.q_full(stage));
        }
        __syncwarp();
      }
      return;
    }
    ptx::mbarrier_wait(is_q ? shared.q_empty(stage) : shared.do_empty(stage), parity);
    if constexpr (kHeadsInside) {
      if (is_q && !all_readable && step % 32 == 0) {
        // No division: it would take registers that the role does not have.
        int head = walk.head + lane;
        int m = walk.m;
#pragma unroll 1
        while (head >= walk.head_end) {
          head -= walk.group;
          m = m > walk.m_begin ? m - 1 : walk.m_last;
        }
        const int at = head * static_cast<int>(p.rows.num_blocks) + tile.q_block + m;
        unreadable =
            __ballot_sync(0xffffffffU, step + lane < tile.num_steps && p.rows.unreadable[at] != 0);
      }
    } else if (is_q && !all_readable && (walk.m_last - walk.m) % 32 == 0) {
      const bool exists = walk.m - lane >= walk.m_begin;
      unreadable = __ballot_sync(0xffffffffU, exists && p.rows.unreadable[slot() - lane] != 0);
    }
    const float* lse = p.rows.neg_lse_log2 + static_cast<std::int64_t>(slot()) * kBlockM;
    const bool mapped = (p.mapped & (is_q ? kMapQ : kMapDout)) != 0;
    const bool one_landing = Shared::kCluster == 1;
    load<kBlockM, kBoxes, Shared::kCluster == 2>(
        {is_q ? &maps.q : &maps.dout, mapped, is_q ? p.q : p.dout,
         static_cast<int>(is_q ? p.head_dim : p.head_dim_v), tile.q_row + walk.m * kBlockM,
         tile.batch_index, walk.head, is_q ? shared.q(stage) : shared.dout(stage),
         is_q ? shared.q_full(stage) : shared.do_full(stage),
         one_landing ? shared.kv_landing()
         : is_q      ? shared.q_landing()
                     : shared.do_landing(),
         one_landing ? 0
         : is_q      ? 1
                     : 2,
         (unreadable & 1U) != 0 || !mapped,
         is_q ? lse : p.rows.neg_delta + static_cast<std::int64_t>(slot()) * kBlockM,
         is_q ? shared.lse(stage) : shared.delta(stage)},
        0, [lse](int r) { return lse[r] != -INFINITY; });
    if (!is_q) {
      walk.advance();
      unreadable >>= 1;
    }
  }
  __device__ void load_step(int step) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      load_half_step(step, half == 0);
    }
  }
};

}  // namespace flashgrad::sm90
