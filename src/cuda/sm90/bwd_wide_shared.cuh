// SPDX-License-Identifier: Apache-2.0
// What the roles of bwd_wide.cuh share: places in shared memory, barriers, and the tile.
#pragma once

#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/wide_tile.cuh"

namespace flashgrad::sm90 {

inline constexpr int kWideThreads = 384;
inline constexpr int kWideRegisters = 232;
inline constexpr int kWideLoaderRegisters = 40;

// Shared memory of one CTA, kD columns of K and Q, kDv of V and dO. A stage has pieces of 128
// columns, which arrive by themselves, so that products begin early. The resident columns of K and
// V, those that live in registers, come through the first stage of Q and of dO: step i takes stage
// i + 1 (mod the stages).
template <int kD, int kDv, int kClusterSize, bool kSoftcap>
struct WideShared {
  static constexpr int kHeadDim = kD;
  static constexpr int kHeadDimV = kDv;
  static constexpr int kCluster = kClusterSize;
  static constexpr int kBoxBytes = 64 * tile::kBoxRowBytes;
  // With v of 128 registers are left over: for more columns of K and V, for S of the next step and
  // for lse, loaded before S is there. H200, causal 16k: 622 -> 671 TFLOP/s.
  static constexpr bool kAhead = kD == 192 && kDv == 128 && !kSoftcap;
  static constexpr int kResidentK = kAhead ? 128 : 64;
  static constexpr int kResidentV = kAhead ? 128 : 64;
  static constexpr int kSlots = kAhead ? 4 : 2;  // a power of two
  static constexpr int kQStages = kD == 256 ? (kSoftcap ? 2 : 3) : kSoftcap && kDv > 128 ? 3 : 4;
  static constexpr int kDoStages = kD == 256 ? 2 : kAhead ? 4 : 3;
  static constexpr int kQPieces = (kD + 127) / 128;
  static constexpr int kDoPieces = (kDv + 127) / 128;
  static constexpr int kPieceBytes = 2 * kBoxBytes;
  static constexpr int kKBytes = (kD - kResidentK) / 64 * kBoxBytes;
  static constexpr int kVBytes = (kDv - kResidentV) / 64 * kBoxBytes;
  static constexpr int kQBytes = kD / 64 * kBoxBytes;
  static constexpr int kDoBytes = kDv / 64 * kBoxBytes;
  // P^T, over which dS^T is written; with softcap the factors of (4) follow.
  static constexpr int kSlotBytes = kDsImageBytes * (kSoftcap ? 2 : 1);
  // lse and delta are read after their stage of Q or dO has been released: one set more than
  // stages, rounded up to a power of two.
  static constexpr int kStatistics = kDoStages > 3 ? 8 : 4;
  static_assert(kQStages < kStatistics + 1 && kDoStages < kStatistics, "statistics would be lost");

  static constexpr int kVOffset = kKBytes;
  static constexpr int kQOffset = kVOffset + kVBytes;
  static constexpr int kDoOffset = kQOffset + kQStages * kQBytes;
  static constexpr int kSlotOffset = kDoOffset + kDoStages * kDoBytes;
  static constexpr int kLseOffset = kSlotOffset + kSlots * kSlotBytes;
  static constexpr int kDeltaOffset = kLseOffset + kStatistics * kBlockM * 4;
  static constexpr int kBarrierOffset = kDeltaOffset + kStatistics * kBlockM * 4;
  static constexpr int kQFull = 2;
  static constexpr int kQEmpty = kQFull + kQStages * kQPieces;
  static constexpr int kDoFull = kQEmpty + kQStages;
  static constexpr int kDoEmpty = kDoFull + kDoStages * kDoPieces;
  static constexpr int kPFull = kDoEmpty + kDoStages;
  static constexpr int kPEmpty = kPFull + kSlots;
  static constexpr int kNumBarriers = kPEmpty + kSlots;
  static constexpr int kInfoOffset = kBarrierOffset + 8 * kNumBarriers;
  static constexpr int kBytes = kInfoOffset + static_cast<int>(sizeof(WideTile));
  static_assert(kBytes <= 227 * 1024, "tiles, stages and slots must fit an SM");

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
  __device__ std::uint32_t p_full(int i) const { return barrier(kPFull + i); }
  __device__ std::uint32_t p_empty(int i) const { return barrier(kPEmpty + i); }

  __device__ void init_barriers() const {
    for (int i = 0; i < kNumBarriers; ++i) {
      const bool stage_empty = (i >= kQEmpty && i < kDoFull) || (i >= kDoEmpty && i < kPFull);
      ptx::mbarrier_init(barrier(i), stage_empty ? 8 * kCluster : i >= kPFull ? 4 : i == 1 ? 8 : 1);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flashgrad::sm90
