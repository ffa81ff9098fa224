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
  int few_keys;           // computed of a sequence's last block where it has no more
  int pairs;              // blocks of K and V that shared memory holds
  int q_slots;            // tiles of 64 rows, likewise

  static constexpr int kThreads = 512;
  static constexpr int kMaxTables = 4;  // tiles of a sequence that are described on the host

  constexpr const FwdConfig& widths() const { return fwd_config(arithmetic); }
  constexpr int block_n() const { return widths().block_n; }
  constexpr int q_bytes() const { return FwdConfig::bytes(64, widths().head_dim); }
  constexpr int kv_bytes() const { return FwdConfig::bytes(block_n(), widths().head_dim); }
  constexpr int k_offset() const { return q_slots * q_bytes(); }
  constexpr int row_keys_offset() const { return k_offset() + 2 * pairs * kv_bytes(); }
  constexpr int barrier_offset() const {
    return row_keys_offset() + 3 * 64 * FwdConfig::kRowKeysBytes;
  }
  constexpr int num_barriers() const { return 3 * pairs + 2 * q_slots; }
  constexpr int shared_bytes() const { return barrier_offset() + 8 * num_barriers(); }
  constexpr bool valid() const {
    return shared_bytes() <= FwdConfig::kSharedBytes && widths().num_consumers == 3 &&
           widths().head_dim == widths().head_dim_v;
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

struct FwdStreamParams {
  FwdParams base;  // block_m is 64
  cuda::Divisor group;
  cuda::Divisor heads_kv;
  cuda::Divisor of_sequence;  // chunks of a sequence
  std::uint32_t num_chunks;
  std::uint32_t num_tiles;  // of a key head: row blocks times query heads
  std::uint32_t tiles_per_chunk;
  Band band;                 // of every sequence
  FwdBlocks blocks;          // that any row sees
  std::uint32_t num_tables;  // of the row blocks' key blocks: of all, or 0
  FwdBlocks tables[FwdStreamConfig::kMaxTables];
};

}  // namespace flashgrad::sm90
