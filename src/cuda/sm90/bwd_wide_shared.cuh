// SPDX-License-Identifier: Apache-2.0
// What the roles of bwd_wide.cuh share: places in shared memory, barriers, and the tile.
#pragma once

#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/wide_tile.cuh"

namespace flashgrad::sm90 {

inline constexpr int kWideThreads = 384;
inline constexpr int kWideRegisters = 232;
inline constexpr int kWideLoaderRegisters = 40;
// Of K and of V so many columns live in registers.
inline constexpr int kResidentColumns = 64;

// Shared memory of one CTA, kD columns of K and Q, kDv of V and dO. A stage has pieces of 128
// columns, which arrive by themselves, so that products begin early. The resident columns of K and
// V come through the last stage of Q, which is free until step kQStages - 1.
template <int kD, int kDv, int kClusterSize, bool kSoftcap>
struct WideShared {
  static constexpr int kHeadDim = kD;
  static constexpr int kHeadDimV = kDv;
  static constexpr int kCluster = kClusterSize;
  static constexpr int kBoxBytes = 64 * tile::kBoxRowBytes;
  static constexpr int kQStages = kD == 256 ? (kSoftcap ? 2 : 3) : kSoftcap && kDv > 128 ? 3 : 4;
  static constexpr int kDoStages = kD == 256 ? 2 : 3;
  static constexpr int kQPieces = (kD + 127) / 128;
  static constexpr int kDoPieces = (kDv + 127) / 128;
  static constexpr int kPieceBytes = 2 * kBoxBytes;
  static constexpr int kKBytes = (kD - kResidentColumns) / 64 * kBoxBytes;
  static constexpr int kVBytes = (kDv - kResidentColumns) / 64 * kBoxBytes;
  static constexpr int kQBytes = kD / 64 * kBoxBytes;
  static constexpr int kDoBytes = kDv / 64 * kBoxBytes;
  // P^T, over which dS^T is written; with softcap the factors of (4) follow.
  static constexpr int kSlotBytes = kDsImageBytes * (kSoftcap ? 2 : 1);
  // lse and delta are read after their stage of Q or dO has been released: one set more than
  // stages, rounded up to a power of two.
  static constexpr int kStatistics = 4;
  static_assert(kQStages < kStatistics + 1 && kDoStages < kStatistics, "statistics would be lost");

  static constexpr int kVOffset = kKBytes;
  static constexpr int kQOffset = kVOffset + kVBytes;
  static constexpr int kDoOffset = kQOffset + kQStages * kQBytes;
  static constexpr int kSlotOffset = kDoOffset + kDoStages * kDoBytes;
  static constexpr int kLseOffset = kSlotOffset + 2 * kSlotBytes;
  static constexpr int kDeltaOffset = kLseOffset + kStatistics * kBlockM * 4;
  static constexpr int kBarrierOffset = kDeltaOffset + kStatistics * kBlockM * 4;
  static constexpr int kQFull = 3;
  static constexpr int kQEmpty = kQFull + kQStages * kQPieces;
  static constexpr int kDoFull = kQEmpty + kQStages;
  static constexpr int kDoEmpty = kDoFull + kDoStages * kDoPieces;
  static constexpr int kPFull = kDoEmpty + kDoStages;
  static constexpr int kPEmpty = kPFull + 2;
  static constexpr int kNumBarriers = kPEmpty + 2;
  static constexpr int kInfoOffset = kBarrierOffset + 8 * kNumBarriers;
  static constexpr int kBytes = kInfoOffset + static_cast<int>(sizeof(WideTile));
  static_assert(kBytes <= 227 * 1024, "tiles, stages and slots must fit an SM");

  std::uint32_t base;

  __device__ std::uint32_t k() const { return base; }  // columns past the resident ones
  __device__ std::uint32_t v() const { return base + kVOffset; }
  __device__ std::uint32_t q(int stage) const { return base + kQOffset + stage * kQBytes; }
  __device__ std::uint32_t dout(int stage) const { return base + kDoOffset + stage * kDoBytes; }
  __device__ std::uint32_t resident_k() const { return q(kQStages - 1); }
  __device__ std::uint32_t resident_v() const { return q(kQStages - 1) + kBoxBytes; }
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
  __device__ std::uint32_t k_full() const { return barrier(0); }
  __device__ std::uint32_t v_full() const { return barrier(1); }
  __device__ std::uint32_t landing() const { return barrier(2); }
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
      ptx::mbarrier_init(barrier(i), stage_empty ? 8 * kCluster : i >= kPFull ? 4 : 1);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flashgrad::sm90
