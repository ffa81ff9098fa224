// SPDX-License-Identifier: Apache-2.0
// The shapes of the forward's kernels for short sequences (fwd_short.cuh) as values.
#pragma once

#include <iterator>

#include "cuda/sm90/fwd_config.hpp"

namespace flashgrad::sm90 {

struct FwdShortConfig {
  FwdVariant arithmetic;  // the kernel of fwd.cuh whose bits these are
  int block_n;            // keys of a step: that kernel's, or fewer if no sequence has more
  int plain_ctas;         // that run on a multiprocessor together
  int score_ctas;         // the same with a score function, which takes more registers

  static constexpr int kBlockM = 64;
  static constexpr int kThreads = 128;
  static constexpr int kFewRows = 16;
  static constexpr int kMaxBlocks = 4;  // tiles of a sequence that are described on the host

  constexpr int ctas(bool score_function) const { return score_function ? score_ctas : plain_ctas; }
  constexpr const FwdConfig& widths() const { return fwd_config(arithmetic); }
  // Offsets in shared memory, which starts at a multiple of tile::kTileAlignment.
  constexpr int k_offset() const { return FwdConfig::bytes(kBlockM, widths().head_dim); }
  constexpr int v_offset() const {
    return k_offset() + FwdConfig::bytes(block_n, widths().head_dim);
  }
  constexpr int row_keys_offset() const {
    return v_offset() + FwdConfig::bytes(block_n, widths().head_dim_v);
  }
  constexpr int tile_offset() const {
    return row_keys_offset() + FwdConfig::kRowKeysBytes * kBlockM;
  }
  constexpr int barrier_offset() const { return tile_offset() + FwdConfig::kTileBytes; }
  constexpr int shared_bytes() const { return barrier_offset() + 3 * 8; }
  // The system takes 1 KB of each CTA's.
  constexpr bool valid() const {
    return ctas(false) * (shared_bytes() + 1024) <= 228 * 1024 && ctas(true) <= ctas(false);
  }
};

enum class FwdShortVariant : int {
#define FG_FWD_SHORT_VARIANT(name, ...) name,
#include "cuda/sm90/fwd_short_variants.def"
#undef FG_FWD_SHORT_VARIANT
};

inline constexpr FwdShortConfig kFwdShortConfigs[] = {
#define FG_FWD_SHORT_VARIANT(name, ...) FwdShortConfig{__VA_ARGS__},
#include "cuda/sm90/fwd_short_variants.def"
#undef FG_FWD_SHORT_VARIANT
};

constexpr const FwdShortConfig& fwd_short_config(FwdShortVariant variant) {
  return kFwdShortConfigs[static_cast<int>(variant)];
}

}  // namespace flashgrad::sm90
