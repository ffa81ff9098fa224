// SPDX-License-Identifier: Apache-2.0
// The forward's shared memory: tiles, barriers and how their uses are counted.
//
// | barrier          | arrives                           | waits               | count         |
// | tile_full[T]     | scheduler, all lanes              | producer, consumers | 32            |
// | keys_full[T]     | scheduler, all lanes              | consumers           | 32            |
// | tile_empty[T]    | all lanes of their warps          | scheduler           | 128 * C + 32  |
// | tile_wanted      | producer, when few loads are left | scheduler           | 1             |
// | q_full           | producer and the copy engine      | consumers           | 1             |
// | q_empty          | a lane of each consumer warp      | producer            | 4 * C         |
// | k_full, v_full   | producer and the copy engine      | consumers           | 1             |
// | k_empty, v_empty | a lane of each consumer warp      | producer            | 4 * C         |
//
// C is the number of consumers, T of tiles described at a time. What describes a tile is written
// and read by all lanes, each of which arrives for itself: a __syncwarp() before one lane's arrival
// would do, but compute-sanitizer's racecheck does not see through it, and a tile is passed on
// seldom. The n-th use of a full barrier completes its phase n. An empty one is waited for with the
// phase before, so the first wait passes at once.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/fwd_tile.cuh"

namespace flashgrad::sm90 {

// A position in a ring of stages, as the number of uses before it.
template <int kStages>
struct RingPosition {
  static_assert((kStages & (kStages - 1)) == 0);
  std::uint32_t uses = 0;
  __device__ __forceinline__ int stage() const { return static_cast<int>(uses % kStages); }
  __device__ __forceinline__ std::uint32_t phase() const { return uses / kStages % 2; }
  __device__ __forceinline__ void advance() { ++uses; }
  __device__ __forceinline__ RingPosition previous() const { return {uses - 1}; }
};

template <FwdVariant kVariant>
struct FwdShared {
  static constexpr FwdConfig C = fwd_config(kVariant);
  std::uint8_t* base;
  std::uint32_t address;

  __device__ explicit FwdShared(std::uint8_t* memory)
      : base(memory), address(ptx::shared_address(memory)) {}

  // Tiles, swizzled (tile/swizzle.hpp): (block_m, head_dim), (block_n, head_dim), (block_n,
  // head_dim_v).
  __device__ std::uint32_t q() const { return address + C.q_offset(); }
  __device__ std::uint32_t k(int stage) const {
    return address + C.k_offset() + stage * C.k_bytes();
  }
  __device__ std::uint32_t v(int stage) const {
    return address + C.v_offset() + stage * C.v_bytes();
  }
  // A warp's 16 rows of out; a tile of (16, head_dim_v).
  __device__ std::uint32_t out(int warp) const {
    return address + C.out_offset() + warp * C.bytes(16, C.head_dim_v);
  }
  // Tiles in work and to come; for each of its rows, the first key it sees and the one behind
  // the last.
  __device__ FwdTile* tile(int slot) const {
    return reinterpret_cast<FwdTile*>(base + C.tiles_offset() + slot * C.kTileBytes);
  }
  __device__ int2* row_keys(int slot) const {
    return reinterpret_cast<int2*>(base + C.row_keys_offset()) + slot * C.block_m();
  }
  static_assert(sizeof(FwdTile) <= C.kTileBytes && C.tiles_offset() % 16 == 0);

  __device__ std::uint32_t barrier(int i) const { return address + C.barrier_offset() + 8 * i; }
  __device__ std::uint32_t tile_full(int slot) const { return barrier(slot); }
  __device__ std::uint32_t tile_empty(int slot) const { return barrier(C.tiles() + slot); }
  __device__ std::uint32_t keys_full(int slot) const { return barrier(2 * C.tiles() + slot); }
  __device__ std::uint32_t tile_wanted() const { return barrier(3 * C.tiles()); }
  __device__ std::uint32_t q_full() const { return barrier(3 * C.tiles() + 1); }
  __device__ std::uint32_t q_empty() const { return barrier(3 * C.tiles() + 2); }
  __device__ std::uint32_t k_full(int stage) const { return barrier(3 * C.tiles() + 3 + stage); }
  __device__ std::uint32_t k_empty(int stage) const { return k_full(C.kStages + stage); }
  __device__ std::uint32_t v_full(int stage) const { return k_full(2 * C.kStages + stage); }
  __device__ std::uint32_t v_empty(int stage) const { return v_full(C.kStages + stage); }

  // One thread.
  __device__ void init_barriers() const {
    constexpr int kConsumerWarps = 4 * C.num_consumers;
    for (int i = 0; i < C.tiles(); ++i) {
      ptx::mbarrier_init(tile_full(i), 32);
      ptx::mbarrier_init(keys_full(i), 32);
      ptx::mbarrier_init(tile_empty(i), 32 * (kConsumerWarps + 1));
    }
    ptx::mbarrier_init(tile_wanted(), 1);
    ptx::mbarrier_init(q_full(), 1);
    ptx::mbarrier_init(q_empty(), kConsumerWarps);
    for (int i = 0; i < C.kStages; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), kConsumerWarps);
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flashgrad::sm90
