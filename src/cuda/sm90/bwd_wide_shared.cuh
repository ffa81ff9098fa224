// SPDX-License-Identifier: Apache-2.0
// What the roles of bwd_wide.cuh share: places in shared memory, barriers, and the tile.
#pragma once

#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/wide_config.hpp"
#include "cuda/sm90/wide_rounds.cuh"

namespace flashgrad::sm90 {

// Named barriers. P's slot i is full: slots() from the last of them on.
inline constexpr int kPEpilogueBarrier = 1;
inline constexpr int kDsEpilogueBarrier = 2;
inline constexpr int kPFullBarrier = 3;

// Shared memory of one CTA: addresses from the offsets in WideConfig.
template <int kD, int kDv, int kClusterSize, bool kSoftcap>
struct WideShared {
  static constexpr WideConfig kConfig{kD, kDv, kClusterSize, kSoftcap};
  static_assert(kConfig.valid(), "tiles, stages and slots must fit an SM");
  static constexpr int kHeadDim = kD;
  static constexpr int kHeadDimV = kDv;
  static constexpr int kCluster = kClusterSize;
  static constexpr int kBoxBytes = WideConfig::kBoxBytes;
  static constexpr bool kAhead = kConfig.ahead();
  static constexpr int kResidentK = kConfig.resident_k();
  static constexpr int kResidentV = kConfig.resident_v();
  static constexpr int kSlots = kConfig.slots();
  static constexpr int kQStages = kConfig.q_stages();
  static constexpr int kDoStages = kConfig.do_stages();
  static constexpr int kQPieces = kConfig.q_pieces();
  static constexpr int kDoPieces = kConfig.do_pieces();
  static constexpr int kQBytes = kConfig.q_bytes();
  static constexpr int kDoBytes = kConfig.do_bytes();
  static constexpr int kSlotBytes = kConfig.slot_bytes();
  static constexpr int kStatistics = kConfig.statistics();
  static constexpr int kVOffset = kConfig.v_offset();
  static constexpr int kQOffset = kConfig.q_offset();
  static constexpr int kDoOffset = kConfig.do_offset();
  static constexpr int kSlotOffset = kConfig.slot_offset();
  static constexpr int kLseOffset = kConfig.lse_offset();
  static constexpr int kDeltaOffset = kConfig.delta_offset();
  static constexpr int kBarrierOffset = kConfig.barrier_offset();
  static constexpr int kQFull = 2;
  static constexpr int kQEmpty = kQFull + kQStages * kQPieces;
  static constexpr int kDoFull = kQEmpty + kQStages;
  static constexpr int kDoEmpty = kDoFull + kDoStages * kDoPieces;
  static constexpr int kPEmpty = kDoEmpty + kDoStages;
  static constexpr int kRounds = kPEmpty + kSlots;
  static constexpr int kPRegisters = kConfig.p_registers();
  static constexpr int kDsRegisters = kConfig.ds_registers();
  static constexpr int kLoaderRegisters = kConfig.loader_registers();
  static constexpr int kNumBarriers = kRounds + kWideRoundBarriers;
  static_assert(kNumBarriers == kConfig.num_barriers());
  static constexpr int kInfoOffset = kConfig.info_offset();
  static constexpr int kBytes = kConfig.shared_bytes();

  std::uint32_t base;

  // Columns past the resident ones.
  __device__ std::uint32_t k() const { return base; }
  __device__ std::uint32_t v() const { return base + kVOffset; }
  __device__ std::uint32_t q(int stage) const { return base + kQOffset + stage * kQBytes; }
  __device__ std::uint32_t dout(int stage) const { return base + kDoOffset + stage * kDoBytes; }
  __device__ std::uint32_t slot(int i) const { return base + kSlotOffset + i * kSlotBytes; }
  // 16-byte piece k of what a thread hands over: P (0 to 3) and factors (4 to 7). A warp's pieces
  // are where its rows of dS go.
  __device__ std::uint32_t handover(int i, int k, int thread) const {
    return slot(i) + k / 4 * kDsImageBytes + thread / 32 * 2048 + k % 4 * 512 + thread % 32 * 16;
  }
  __device__ std::uint32_t lse(int step) const {
    return base + kLseOffset + step % kStatistics * (kBlockM * 4);
  }
  __device__ std::uint32_t delta(int step) const {
    return base + kDeltaOffset + step % kStatistics * (kBlockM * 4);
  }
  __device__ std::uint32_t barrier(int i) const { return base + kBarrierOffset + 8 * i; }
  __device__ std::uint32_t landing() const { return barrier(0); }
  __device__ std::uint32_t done() const { return barrier(1); }
  __device__ std::uint32_t q_full(int stage, int piece) const {
    return barrier(kQFull + stage * kQPieces + piece);
  }
  __device__ std::uint32_t q_empty(int stage) const { return barrier(kQEmpty + stage); }
  __device__ std::uint32_t do_full(int stage, int piece) const {
    return barrier(kDoFull + stage * kDoPieces + piece);
  }
  __device__ std::uint32_t do_empty(int stage) const { return barrier(kDoEmpty + stage); }
  __device__ WideRounds rounds() const {
    return {barrier(kRounds), base + kConfig.number_offset()};
  }
  // Where dv and dk go on their way out: with kAhead places of their own, else stages that no one
  // reads any more.
  __device__ std::uint32_t dv_staging() const {
    return kAhead ? base + kConfig.staging_offset() : dout(0);
  }
  __device__ std::uint32_t dk_staging() const {
    return kAhead ? base + kConfig.staging_offset() + kConfig.do_bytes() : q(0);
  }
  __device__ std::uint32_t p_empty(int i) const { return barrier(kPEmpty + i); }

  __device__ void init_barriers() const {
    for (int i = 0; i < kRounds; ++i) {
      const bool stage_empty = (i >= kQEmpty && i < kDoFull) || (i >= kDoEmpty && i < kPEmpty);
      ptx::mbarrier_init(barrier(i), stage_empty    ? 256 * kCluster
                                     : i >= kPEmpty ? 128
                                     : i == 0       ? 1
                                     : i == 1       ? 256
                                                    : 32);
    }
    rounds().init_barriers();
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flashgrad::sm90
