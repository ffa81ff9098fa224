// SPDX-License-Identifier: Apache-2.0
// The loads of bwd_wide.cuh, issued by one warp: K and V once, then Q with lse and dO with delta in
// every step.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/bwd_wide_shared.cuh"
#include "cuda/sm90/load.cuh"

namespace flashgrad::sm90 {

// With a cluster each CTA loads half the rows of every box of Q and dO for both. Tiles with rows to
// clear, and tensors that the copy engine can't address, each CTA loads for itself.
template <class Shared>
struct WideLoader {
  static constexpr int kMapRows = kBlockM / Shared::kCluster;  // of a box of the maps of q and dout

  const BwdParams& p;
  const BwdMaps& maps;
  Shared shared;
  int rank;  // of the CTA in its cluster
  int lane;
  KeyTile tile{};
  StepWalk<false> walk{tile, 1};
  int step = 0;  // counts through the tiles, as in all roles
  Ring<Shared::kQStages> q_ring;
  Ring<Shared::kDoStages> do_ring;
  std::uint32_t unreadable = 0;  // of the walk's next 32 blocks, which have rows not to be read
  std::uint32_t landing_parity = 0;

  __device__ WideLoader(const BwdParams& params, const BwdMaps& tensor_maps, Shared memory,
                        int cluster_rank, int lane_index)
      : p(params), maps(tensor_maps), shared(memory), rank(cluster_rank), lane(lane_index) {}

  __device__ void wait_for_landing() {
    ptx::mbarrier_wait(shared.landing(), landing_parity);
    __syncwarp();
    landing_parity ^= 1;
  }

  // Every lane, for what it has written itself (arrive_in_cluster() says why); the copies' bytes
  // have been announced.
  template <int kPieces, class Full>
  __device__ static void arrive_at_all(Full&& full) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      ptx::mbarrier_arrive(full(piece));
    }
  }

  // K or V: the first kResident columns through a stage of Q or dO, the others to `rest`.
  template <int kColumns, int kResident>
  __device__ void load_keys(bool is_k, std::uint32_t rest) {
    const int stage = is_k ? q_ring.stage() : do_ring.stage();
    const std::uint32_t parity = is_k ? q_ring.parity() : do_ring.parity();
    const std::uint32_t resident = is_k ? shared.q(stage) : shared.dout(stage);
    ptx::mbarrier_wait(is_k ? shared.q_empty(stage) : shared.do_empty(stage), parity ^ 1U);
    if (is_k) {
      q_ring.advance();
    } else {
      do_ring.advance();
    }
    constexpr int kResidentBoxes = kResident / 64;
    const bool mapped = (p.mapped & (is_k ? kMapK : kMapV)) != 0;
    const bool clear = !mapped || tile.has_dead_keys != 0;
    const CUtensorMap* map = is_k ? &maps.k : &maps.v;
    constexpr int kPieces = (kColumns + 127) / 128;
    const auto full = [&](int piece) {
      return is_k ? shared.q_full(stage, piece) : shared.do_full(stage, piece);
    };
    const std::uint32_t barrier = clear ? shared.landing() : full(0);
    if (mapped && ptx::elect_one()) {
      constexpr std::uint32_t kBytes = kColumns / 64 * Shared::kBoxBytes;
      if (clear) {
        ptx::mbarrier_arrive_expect(barrier, kBytes);
      } else {
        ptx::mbarrier_expect(barrier, kBytes);
      }
#pragma unroll
      for (int box = 0; box < kColumns / 64; ++box) {
        ptx::tensor_load(box < kResidentBoxes ? resident + box * Shared::kBoxBytes
                                              : rest + (box - kResidentBoxes) * Shared::kBoxBytes,
                         map, barrier, 64 * box, tile.kv_row, tile.head_kv, tile.batch_index);
      }
    }
    __syncwarp();
    if (clear) {
      clear_keys<kColumns, kResident>(is_k, resident, rest);
    }
    arrive_at_all<kPieces>(full);
  }

  // The rows of K or V that are not to be read, or all rows of a tensor that the copy engine can't
  // address.
  template <int kColumns, int kResident>
  __device__ void clear_keys(bool is_k, std::uint32_t resident, std::uint32_t rest) {
    const bool mapped = (p.mapped & (is_k ? kMapK : kMapV)) != 0;
    const auto live = [this](int r) { return r >= tile.live_begin && r < tile.live_end; };
    const Tensor& tensor = is_k ? p.k : p.v;
    const int columns = static_cast<int>(is_k ? p.head_dim : p.head_dim_v);
    if (mapped) {
      wait_for_landing();
      clear_rows<kWideKeys, kResident>(resident, lane, live);
    } else {
      load_tile<kWideKeys, kResident>(resident, tensor, tile.batch_index, tile.kv_row, tile.head_kv,
                                      0, columns, lane, live);
    }
    if constexpr (kColumns > kResident) {
      if (mapped) {
        clear_rows<kWideKeys, kColumns - kResident>(rest, lane, live);
      } else {
        load_tile<kWideKeys, kColumns - kResident>(rest, tensor, tile.batch_index, tile.kv_row,
                                                   tile.head_kv, kResident, columns, lane, live);
      }
    }
    ptx::fence_proxy_async();
  }

  // Boxes [first, first + count) of a query block into a stage, for both CTAs or for this one.
  __device__ void issue_boxes(const CUtensorMap* map, std::uint32_t stage, std::uint32_t barrier,
                              int first, int count, bool for_both) {
    const int row = tile.q_row + walk.m * kBlockM;
#pragma unroll 1
    for (int box = first; box < first + count; ++box) {
      const std::uint32_t destination = stage + static_cast<std::uint32_t>(box) * Shared::kBoxBytes;
      if (for_both) {
        const int half = rank * kMapRows;
        ptx::tensor_load_multicast(
            destination + static_cast<std::uint32_t>(half) * tile::kBoxRowBytes, map, barrier,
            64 * box, row + half, walk.head, tile.batch_index, 3);
      } else {
#pragma unroll
        for (int half = 0; half < kBlockM; half += kMapRows) {
          ptx::tensor_load(destination + static_cast<std::uint32_t>(half) * tile::kBoxRowBytes, map,
                           barrier, 64 * box, row + half, walk.head, tile.batch_index);
        }
      }
    }
  }

  // The query block of q with lse, or of dout with delta.
  template <bool kIsQ>
  __device__ void load_rows() {
    constexpr int kColumns = kIsQ ? Shared::kHeadDim : Shared::kHeadDimV;
    constexpr int kPieces = kIsQ ? Shared::kQPieces : Shared::kDoPieces;
    constexpr int kBoxes = kColumns / 64;
    constexpr std::uint32_t kStatisticBytes = kBlockM * 4;
    const int stage = kIsQ ? q_ring.stage() : do_ring.stage();
    const std::uint32_t parity = kIsQ ? q_ring.parity() : do_ring.parity();
    ptx::mbarrier_wait(kIsQ ? shared.q_empty(stage) : shared.do_empty(stage), parity ^ 1U);
    if constexpr (kIsQ) {
      q_ring.advance();
    } else {
      do_ring.advance();
    }
    const int slot = walk.slot(p.rows, tile);
    if (kIsQ && (walk.m_last - walk.m) % 32 == 0) {
      const bool exists = walk.m - lane >= walk.m_begin;
      unreadable = __ballot_sync(0xffffffffU, exists && p.rows.unreadable[slot - lane] != 0);
    }
    const float* lse = p.rows.neg_lse_log2 + static_cast<std::int64_t>(slot) * kBlockM;
    const float* statistic =
        kIsQ ? lse : p.rows.neg_delta + static_cast<std::int64_t>(slot) * kBlockM;
    const bool mapped = (p.mapped & (kIsQ ? kMapQ : kMapDout)) != 0;
    const bool clear = !mapped || (unreadable & 1U) != 0;
    const CUtensorMap* map = kIsQ ? &maps.q : &maps.dout;
    const std::uint32_t destination = kIsQ ? shared.q(stage) : shared.dout(stage);
    const std::uint32_t statistic_destination = kIsQ ? shared.lse(step) : shared.delta(step);
    const auto full = [&](int piece) {
      return kIsQ ? shared.q_full(stage, piece) : shared.do_full(stage, piece);
    };
    if (!clear) {
      if (ptx::elect_one()) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int boxes = kBoxes - 2 * piece < 2 ? kBoxes - 2 * piece : 2;
          ptx::mbarrier_expect(full(piece), static_cast<std::uint32_t>(boxes) * Shared::kBoxBytes +
                                                (piece == 0 ? kStatisticBytes : 0U));
          if (piece == 0) {
            ptx::bulk_load(statistic_destination, statistic, kStatisticBytes, full(0));
          }
          issue_boxes(map, destination, full(piece), 2 * piece, boxes, Shared::kCluster == 2);
        }
      }
      __syncwarp();
      arrive_at_all<kPieces>(full);
      return;
    }
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect(shared.landing(),
                                  (mapped ? kBoxes * Shared::kBoxBytes : 0U) + kStatisticBytes);
      ptx::bulk_load(statistic_destination, statistic, kStatisticBytes, shared.landing());
      if (mapped) {
        issue_boxes(map, destination, shared.landing(), 0, kBoxes, false);
      }
    }
    __syncwarp();
    const auto readable = [lse](int r) { return lse[r] != -INFINITY; };
    wait_for_landing();
    if (mapped) {
      clear_rows<kBlockM, kColumns>(destination, lane, readable);
    } else {
      load_tile<kBlockM, kColumns>(
          destination, kIsQ ? p.q : p.dout, tile.batch_index, tile.q_row + walk.m * kBlockM,
          walk.head, 0, static_cast<int>(kIsQ ? p.head_dim : p.head_dim_v), lane, readable);
    }
    ptx::fence_proxy_async();
    arrive_at_all<kPieces>(full);
  }

  // Lets the scheduler look for the next tile when few steps are left to load.
  __device__ void ask(int left) {
    constexpr int kStepsBefore = 4;
    if constexpr (Shared::kAhead) {
      if (left == kStepsBefore || (left == tile.num_steps && left < kStepsBefore)) {
        if (ptx::elect_one()) {
          ptx::mbarrier_arrive(shared.rounds().tile_ends());
        }
        __syncwarp();
      }
    }
  }

  __device__ void run(const KeyTile& next_tile) {
    tile = next_tile;
    if (tile.num_steps <= 0) {
      tile.num_steps = 0;
      ask(0);
      return;
    }
    walk = StepWalk<false>(tile, static_cast<int>(p.group));
    load_keys<Shared::kHeadDim, Shared::kResidentK>(true, shared.k());
#pragma unroll 1
    for (int left = tile.num_steps; left > 0; --left) {
      ask(left);
      load_rows<true>();
      if (left == tile.num_steps) {
        load_keys<Shared::kHeadDimV, Shared::kResidentV>(false, shared.v());
      }
      load_rows<false>();
      ++step;
      walk.advance();
      unreadable >>= 1;
    }
  }
};

}  // namespace flashgrad::sm90
