// SPDX-License-Identifier: Apache-2.0
// The shapes of the forward's kernels as values: tiles, stages, registers, and what follows from
// them.
#pragma once

#include <iterator>

#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

struct FwdConfig {
  int head_dim;       // of q and k; what is narrower is padded with zeros by the copy engine
  int head_dim_v;     // of v and out
  int num_consumers;  // warpgroups with 64 query rows each
  int block_n;        // keys of a step
  bool ping_pong;     // a consumer issues its products only after the one before it has
  bool late_wait;     // O is waited for after the exponentials, not before them

  static constexpr int kStages = 2;  // of K and of V

  constexpr int block_m() const { return 64 * num_consumers; }
  // A warpgroup for the loads and the schedule comes first.
  constexpr int threads() const { return 128 * (num_consumers + 1); }
  // 64 K registers are 504 per slot of three warpgroups and 512 per slot of four.
  constexpr int consumer_registers() const { return num_consumers == 2 ? 232 : 160; }
  constexpr int producer_registers() const { return num_consumers == 2 ? 40 : 32; }

  static constexpr int boxes(int columns) {
    return (columns + tile::kBoxColumns - 1) / tile::kBoxColumns;
  }
  static constexpr int bytes(int rows, int columns) {
    return boxes(columns) * rows * tile::kBoxRowBytes;
  }
  constexpr int q_bytes() const { return bytes(block_m(), head_dim); }
  constexpr int k_bytes() const { return bytes(block_n, head_dim); }
  constexpr int v_bytes() const { return bytes(block_n, head_dim_v); }

  constexpr int out_bytes() const { return bytes(block_m(), head_dim_v); }

  // Offsets in shared memory, which starts at a multiple of tile::kTileAlignment.
  constexpr int q_offset() const { return 0; }
  constexpr int k_offset() const { return q_offset() + q_bytes(); }
  constexpr int v_offset() const { return k_offset() + kStages * k_bytes(); }
  constexpr int out_offset() const { return v_offset() + kStages * v_bytes(); }
  constexpr int row_keys_offset() const { return out_offset() + (stages_out() ? out_bytes() : 0); }
  constexpr int tiles_offset() const {
    return row_keys_offset() + tiles() * kRowKeysBytes * block_m();
  }
  constexpr int barrier_offset() const { return tiles_offset() + tiles() * kTileBytes; }
  constexpr int shared_bytes() const { return shared_bytes(stages_out(), tiles()); }
  static constexpr int kRowKeysBytes = 8;
  static constexpr int kTileBytes = 208;
  static constexpr int kSharedBytes = 227 * 1024;  // what a CTA can have
  // Whether out goes through shared memory and the copy engine: where there is room.
  constexpr bool stages_out() const { return shared_bytes(true, 2) <= kSharedBytes; }
  // Tiles described at a time, a power of 2: with four, short ones are known before the loads
  // come to them.
  constexpr int tiles() const { return shared_bytes(stages_out(), 4) <= kSharedBytes ? 4 : 2; }
  constexpr int num_barriers(int tiles) const { return 3 * tiles + 3 + 4 * kStages; }
  constexpr int shared_bytes(bool with_out, int tiles) const {
    return out_offset() + (with_out ? out_bytes() : 0) +
           tiles * (kRowKeysBytes * block_m() + kTileBytes) + 8 * num_barriers(tiles);
  }

  // S, P as operands and O of a consumer thread, and what wgmma itself takes (registers begin at
  // 24, two more are reserved).
  constexpr int live_registers() const {
    return 24 + block_n / 2 + block_n / 4 + head_dim_v / 2 + 2;
  }
  constexpr bool valid() const {
    return shared_bytes() <= kSharedBytes && live_registers() <= consumer_registers() &&
           block_n % 16 == 0 && block_n <= 128 && head_dim % 16 == 0 && head_dim_v % 32 == 0 &&
           num_consumers <= 3;
  }
};

// The variants by number, since nvcc's host stubs can't spell a class-type template argument.
enum class FwdVariant : int {
#define FG_FWD_VARIANT(name, ...) name,
#include "cuda/sm90/fwd_variants.def"
#undef FG_FWD_VARIANT
};

inline constexpr FwdConfig kFwdConfigs[] = {
#define FG_FWD_VARIANT(name, ...) FwdConfig{__VA_ARGS__},
#include "cuda/sm90/fwd_variants.def"
#undef FG_FWD_VARIANT
};

constexpr const FwdConfig& fwd_config(FwdVariant variant) {
  return kFwdConfigs[static_cast<int>(variant)];
}

}  // namespace flashgrad::sm90
