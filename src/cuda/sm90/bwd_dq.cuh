// SPDX-License-Identifier: Apache-2.0
// The dq warpgroup of the backward's main kernel: its first warp issues the loads, all four make
// (7) dQ = dS K and add it to the accumulators in global memory; ordered variants in turns
// (bwd_order.cuh).
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/sm90/bwd_load.cuh"
#include "cuda/sm90/bwd_order.cuh"
#include "cuda/sm90/bwd_units.cuh"
#include "cuda/tile/fragment.hpp"
#include "cuda/tile/gemm.cuh"

namespace flashgrad::sm90 {

// Adds 64 rows, in fragment order, to the accumulators at `accumulator`.
template <int kCount>
__device__ __forceinline__ void add_dq(float* accumulator, const float (&dq)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    ptx::reduce_add(accumulator + i / 4 * 128, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
  }
}

template <int kCount>
__device__ __forceinline__ void set_dq(float* accumulator, const float (&dq)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    ptx::store_sum(accumulator + i / 4 * 128, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
  }
}

// Writes the columns from `column` on of 64 complete rows of dq, from row `row_begin` of the
// sequence on. The rows are aligned, 16 bits an element, and head_dim is a multiple of 8.
template <BwdConfig C, class T>
__device__ __forceinline__ void store_whole(const float (&dq)[C.dq_columns() / 2],
                                            const BwdParams& p, const KeyTile& tile, int row_begin,
                                            int head, int column) {
  // From the thread's index afresh: there are no registers to keep these in.
  const int thread = ptx::thread_index();
  const int q = thread % 4;
  const int row = row_begin + thread / 32 * 16 + thread % 32 / 4;
  // Where maps are ragged the loader has changed these two (Loader::place).
  const bool ragged = C.cluster == 1 && p.ragged_rows != 0;
  const int q_row = ragged ? tile.q_row - p.ragged_rows + tile.batch_index : tile.q_row;
  auto* out = static_cast<std::uint16_t*>(p.dq.data) +
              p.dq.offset(ragged ? 0 : tile.batch_index, q_row + row, head) + column + 8 * q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < C.dq_columns() / 32; ++k) {
      std::uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 4 * (4 * k + i) + 2 * half;
        x[i] = ptx::pack<T>(dq[j] * p.scale, dq[j + 1] * p.scale);
      }
      transpose_quad(x, q);
      if (row + 8 * half < tile.q_rows && column + 32 * k + 8 * q < p.head_dim) {
        __stcs(reinterpret_cast<uint4*>(out + 8 * half * p.dq.row_stride + 32 * k),
               make_uint4(x[0], x[1], x[2], x[3]));
      }
    }
  }
}

template <BwdConfig C, class T>
__device__ __forceinline__ void bwd_dq_role(const BwdParams& p, const BwdMaps& maps,
                                            KeyTile& shared_tile, const BwdShared<C>& shared,
                                            int rank) {
  using KTile = tile::SwizzledTile<C.block_n()>;
  using DsTile = tile::SwizzledTile<BwdConfig::kKeysPerDs>;
  using tile::Start;
  constexpr int kKeys = BwdConfig::kKeysPerDs;
  constexpr int kAhead = C.q_stages - 1;
  constexpr int kColumns = C.dq_columns();
  constexpr int kPieces = C.dq_pieces();
  // From the thread's index afresh: a value that the kernel shares among roles may be spilled, and
  // a reload in the loop waits behind the additions to global memory (H200: 5 % of the time).
  const int warp = __shfl_sync(0xffffffffU, ptx::thread_index() / 32, 0);
  const int lane = ptx::thread_index() % 32;
  const bool loads = warp == 0;
  // A copy in registers: loads from shared memory wait long behind the operands of wgmma.
  KeyTile tile = shared_tile;
  Loader<BwdShared<C>, C.heads_inside()> loader(p, maps, tile, shared_tile.landing_parity, shared,
                                                rank, lane);
  const std::uint64_t desc_k = KTile::mn_major_descriptor(shared.k());
  const std::uint64_t desc_ds = DsTile::mn_major_descriptor(shared.ds(0));
  if constexpr (C.cluster == 1 && C.whole) {  // once, for all steps, and for store_whole
    loader.place(tile.q_row, tile.batch_index, tile.q_row + tile.q_rows);
  }
  if (loads) {
    loader.load_k();
    if constexpr (C.cluster == 1 && !C.whole) {
      loader.place(tile.q_row, tile.batch_index, tile.q_row + tile.q_rows);
    }
    if constexpr (C.serves_units()) {
      loader.all_readable = wait_for_rows<C>(p, tile);
    }
#pragma unroll 1
    for (int step = 0; step < kAhead && step <= tile.num_steps; ++step) {
      loader.load_step(step);
      if (step == 0) {
        loader.load_v();
      }
    }
  }
  __syncwarp();
  int unit_offset = 0;  // of the accumulators' blocks
  if constexpr (!C.ordered && !C.whole) {
    const int unit = unit_of(p, tile);
    unit_offset = (unit % p.pipeline.slots - tile.head_kv) *
                      (static_cast<int>(p.group) * p.pipeline.head_blocks) +
                  (p.sequences.packed() ? tile.q_block : 0);
    if constexpr (C.serves_units()) {
      if (p.pipeline.lag > 0) {
        wait_for_slot<C>(p, unit);
      }
    }
  }
  ptx::mbarrier_wait(shared.k_full(), 0);
  StepWalk<C.heads_inside()> walk(tile, static_cast<int>(p.group));
  Turn turn(tile);
  const bool adds = C.whole ? static_cast<bool>(p.dq) : p.dq_accumulator != nullptr;
  // The step before, whose turn is passed on only under the last product of this one: by then its
  // additions have arrived, and the fence that waits for them delays nothing. H200, d128, 16k,
  // full, cool, TFLOP/s: at once 593, under the first product 650, under the last 669.
  int slot_before = -1;
  int turn_before = 0;
  // Two warps wait for that fence in alternate steps, not the one that loads; with a cluster there
  // is no register for that.
  const auto pass_turn = [&](int step) {
    if (C.ordered && adds && slot_before >= 0) {
      ptx::named_barrier_sync<128>(5);
      if (warp == (C.cluster == 1 ? 2 + step % 2 : 3) && lane == 0) {
        ptx::store_release(p.order.counters + 2 * slot_before + rank,
                           static_cast<std::uint32_t>(turn_before + 1));
      }
      __syncwarp();
    }
  };
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step) {
    // Worked out where it is used: no registers to keep it through the products.
    const auto accumulator = [&] {
      const int block = C.ordered ? walk.slot(p.rows, tile)
                                  : unit_offset + walk.head * p.pipeline.head_blocks + walk.m;
      return p.dq_accumulator + static_cast<std::int64_t>(block) * (kBlockM * C.head_dim) +
             tile::fragment_order<C.head_dim>(warp * 32 + lane, 0);
    };
    const auto counter = [&] { return p.order.counters + 2 * walk.slot(p.rows, tile) + rank; };
    std::uint32_t seen = 0;
    bool nothing_yet = false;
    // As late as the answer allows: what the turn was earlier may be passed meanwhile, and a second
    // look is waited for. H200, d128 with a cluster, at the step's begin and behind its first
    // product, cool: causal 1k 301 and 305, 4k 533 and 542, 16k 648 and 654. Head dim 64, also
    // before the last product and behind the first: causal 4k 480, 487 and 471.
    const auto look_at_turn = [&] {
      if (C.ordered && adds) {
        seen = ptx::load_relaxed(counter());
      }
    };
    const auto add = [&](int piece, bool first, const float(&dq)[kColumns / 2]) {
      if constexpr (C.whole) {
        store_whole<C, T>(dq, p, tile, walk.m * kBlockM, walk.head, piece * kColumns);
        return;
      }
      float* const at = accumulator() + piece * (16 * kColumns);
      if constexpr (C.ordered) {
        if (first) {
          nothing_yet = wait_for_turn(counter(), turn.value, seen);
        }
        if (nothing_yet) {
          set_dq(at, dq);
          return;
        }
      }
      add_dq(at, dq);
    };
    const bool loads_now = loads && step + kAhead <= tile.num_steps;
    if constexpr (C.cluster == 2) {
      // 64 columns over the 256 keys of the cluster: first this CTA's dS, then the peer's.
      const int stage = step % C.ds_stages;
      const auto parity = static_cast<std::uint32_t>(step / C.ds_stages) & 1U;
      const std::uint64_t ds_stage = static_cast<std::uint64_t>(stage * (C.ds_bytes() / 16));
      const auto other = static_cast<std::uint32_t>(rank ^ 1);
      float dq[32];
      if (loads_now) {
        loader.load_half_step(step + kAhead, true);
      }
      __syncwarp();
      ptx::mbarrier_wait(shared.ds_full(stage), parity);
      if (!C.consumers_send() && loads) {
        ptx::mbarrier_wait(shared.peer_ds_empty(stage), parity ^ 1U);
        if (ptx::elect_one()) {
          ptx::bulk_copy_to_cta(shared.peer_ds(stage), shared.ds(stage), C.ds_bytes(),
                                shared.peer_ds_full(stage), other);
        }
      }
      __syncwarp();
      ptx::wgmma_fence();
      tile::gemm_mn_major<64, kKeys, T, Start::kZero, DsTile, KTile>(
          dq, desc_ds + ds_stage,
          desc_k + static_cast<std::uint64_t>(rank * (KTile::kBoxBytes / 16)));
      ptx::wgmma_commit();
      if (loads_now) {
        loader.load_half_step(step + kAhead, false);
      }
      __syncwarp();
      if (loads && ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(shared.peer_ds_full(stage), C.ds_bytes());
      }
      __syncwarp();
      look_at_turn();
      ptx::mbarrier_wait(shared.peer_ds_full(stage), parity);
      if (warp == 1 && lane == 0) {
        ptx::mbarrier_arrive_cluster(shared.ds_empty(stage), other);  // its copy has left
      }
      __syncwarp();
      ptx::wgmma_fence();
      tile::gemm_mn_major<64, kKeys, T, Start::kAccumulate, DsTile, KTile>(
          dq, DsTile::mn_major_descriptor(shared.peer_ds(0)) + ds_stage,
          KTile::mn_major_descriptor(shared.peer_k()));
      ptx::wgmma_commit();
      pass_turn(step);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      if (lane == 0) {
        ptx::mbarrier_arrive(shared.ds_empty(stage));
        ptx::mbarrier_arrive_cluster(shared.peer_ds_empty(stage), other);
      }
      if (adds) {
        add(rank, true, dq);
      }
    } else {
      // All keys of the CTA.
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        float dq[kColumns / 2];
#pragma unroll
        for (int x = 0; x < C.key_blocks; ++x) {
          const int count = step * C.key_blocks + x;
          const int stage = count % C.ds_stages;
          if (piece == 0) {
            ptx::mbarrier_wait(shared.ds_full(stage),
                               static_cast<std::uint32_t>(count / C.ds_stages) & 1U);
            if (x == C.key_blocks - 1) {
              look_at_turn();
            }
          }
          const std::uint64_t a = desc_ds + static_cast<std::uint64_t>(stage * (C.ds_bytes() / 16));
          const std::uint64_t b =
              desc_k + static_cast<std::uint64_t>(piece * (KTile::kBoxBytes / 16) + x * 1024);
          ptx::wgmma_fence();
          if (x == 0) {
            tile::gemm_mn_major<kColumns, kKeys, T, Start::kZero, DsTile, KTile>(dq, a, b);
          } else {
            tile::gemm_mn_major<kColumns, kKeys, T, Start::kAccumulate, DsTile, KTile>(dq, a, b);
          }
          ptx::wgmma_commit();
          if (piece == 0 && x == 0) {
            if (loads_now) {
              loader.load_step(step + kAhead);
            }
            __syncwarp();
          }
          if (piece == 0 && x == C.key_blocks - 1) {
            pass_turn(step);
          }
          ptx::wgmma_wait<0>();
          ptx::pin(dq);
          if (piece == kPieces - 1 && lane == 0) {
            ptx::mbarrier_arrive(shared.ds_empty(stage));
          }
        }
        if (adds) {
          add(piece, piece == 0, dq);
        }
      }
    }
    if constexpr (C.ordered) {
      slot_before = walk.slot(p.rows, tile);
      turn_before = turn.value;
    }
    [[maybe_unused]] const bool another_block = walk.advance();
    if constexpr (C.ordered) {
      if (another_block) {
        turn.advance(walk, tile);
      }
    }
  }
  if (lane == 0) {
    ptx::mbarrier_arrive(shared.done());
  }
  if constexpr (C.ordered) {
    if (!finishes_dq(shared_tile)) {
      pass_turn(tile.num_steps);
    } else if (adds) {
      // Its last block is among them, so that nobody waits for a turn there.
      finish_dq<C, T>(p, shared_tile, shared, rank, warp, lane);
    }
  }
  if constexpr (C.serves_units()) {
    if (p.pipeline.lag > 0) {
      count_warp(unit_counter(p, unit_of(p, shared_tile), UnitPipeline::kAdded), lane);
    }
  }
  if constexpr (C.cluster == 2) {
    // This CTA's memory must not go while the peer may still signal to its barriers or copy from
    // it. A barrier of the cluster would also wait for all stores to global memory.
    if (warp == 0) {
      const int num_steps = shared_tile.num_steps;
      wait_for_last(shared.q_empty(0), C.q_stages, num_steps);
      wait_for_last(shared.do_empty(0), C.do_stages, num_steps);
      wait_for_last(shared.ds_empty(0), C.ds_stages, num_steps);
      wait_for_last(shared.peer_ds_empty(0), C.ds_stages, num_steps);
    }
  }
}

}  // namespace flashgrad::sm90
