// SPDX-License-Identifier: Apache-2.0
// The shapes of the forward's kernels that keep all keys of a sequence (fwd_stream.cuh) as values,
// and what they are told.
#pragma once

#include <iterator>

#include "cuda/common/divisor.hpp"
#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_schedule.hpp"

namespace flashgrad::sm90 {

struct FwdStreamConfig {
  FwdVariant arithmetic;  // the kernel of fwd.cuh whose bits these are
  // Of a sequence's last block so many keys are computed, the first number that suffices, and where
  // none does, block_n.
  int fewest_keys, few_keys;

  static constexpr int kThreads = 512;
  static constexpr int kMaxTables = 4;  // tiles of a sequence that are described on the host
  static constexpr int kMaxQSlots = 16;
  static constexpr int kMaxPairs = 8;  // of whole blocks, and of last ones

  constexpr const FwdConfig& widths() const { return fwd_config(arithmetic); }
  constexpr int block_n() const { return widths().block_n; }
  constexpr int q_bytes() const { return FwdConfig::bytes(64, widths().head_dim); }
  // Of K, or V.
  constexpr int kv_bytes(int keys) const { return FwdConfig::bytes(keys, widths().head_dim); }
  // The keys of a last block as they are loaded and computed, if it has `keys`.
  constexpr int last_keys(int keys) const {
    return keys <= fewest_keys ? fewest_keys : keys <= few_keys ? few_keys : block_n();
  }
  // Barriers stand at the end: Q's arrivals, a multiple of the consumers and no fewer than the
  // slots; empty of each slot; full of K, of V, and empty of each pair.
  static constexpr int kNumArrivals = (kMaxQSlots + 2) / 3 * 3;
  static constexpr int kNumBarriers = kNumArrivals + kMaxQSlots + 3 * 2 * kMaxPairs;
  static constexpr int kBarrierOffset = FwdConfig::kSharedBytes - 8 * kNumBarriers;
  static constexpr int kTileBytes = kBarrierOffset / tile::kTileAlignment * tile::kTileAlignment;
  constexpr bool valid() const {
    return widths().num_consumers == 3 && widths().head_dim == widths().head_dim_v &&
           fewest_keys % 16 == 0 && few_keys % 16 == 0 && fewest_keys < few_keys &&
           few_keys < block_n();
  }
};

enum class FwdStreamVariant : int {
#define FG_FWD_STREAM_VARIANT(name, ...) name,
#include "cuda/sm90/fwd_stream_variants.def"
#undef FG_FWD_STREAM_VARIANT
};

inline constexpr FwdStreamConfig kFwdStreamConfigs[] = {
#define FG_FWD_STREAM_VARIANT(name, ...) FwdStreamConfig{__VA_ARGS__},
#include "cuda/sm90/fwd_stream_variants.def"
#undef FG_FWD_STREAM_VARIANT
};

constexpr const FwdStreamConfig& fwd_stream_config(FwdStreamVariant variant) {
  return kFwdStreamConfigs[static_cast<int>(variant)];
}

// What shared memory holds: from its start on slots of Q, pairs of whole blocks, pairs of last
// blocks.
struct FwdStreamLayout {
  std::int32_t q_slots;
  std::int32_t pairs;
  std::int32_t last_pairs;  // 0: last blocks are whole
  std::int32_t last_keys;   // of a last block's place
};

struct FwdStreamParams {
  FwdParams base;  // block_m is 64
  cuda::Divisor group;
  cuda::Divisor heads_kv;
  cuda::Divisor of_sequence;  // chunks of a sequence
  std::uint32_t num_chunks;
  std::uint32_t num_tiles;  // of a key head: row blocks times query heads
  std::uint32_t tiles_per_chunk;
  Band band;              // of every sequence
  FwdBlocks blocks;       // that any row sees
  std::int32_t lo, hi;    // the band's, or as far beyond all rows and keys
  std::int32_t num_keys;  // of every sequence
  FwdStreamLayout layout;
  std::uint32_t num_tables;  // of the row blocks' key blocks: of all, 1 if they are alike, or 0
  FwdBlocks tables[FwdStreamConfig::kMaxTables];
};

struct FwdStreamMaps {
  FwdMaps whole;
  CUtensorMap last_k, last_v;  // of last_keys
};

}  // namespace flashgrad::sm90
