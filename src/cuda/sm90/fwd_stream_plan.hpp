// SPDX-License-Identifier: Apache-2.0
// Which forwards keep all keys in shared memory (fwd_stream.cuh), and how they divide their work.
// Plain arithmetic on the host; no row's bits depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "core/problem.hpp"
#include "cuda/sm90/fwd_stream_config.hpp"

namespace flashgrad::sm90 {

// The kernel that keeps all keys where it is faster than that of fwd.cuh with this arithmetic,
// whose bits it has, and than that of fwd_short.cuh; else none.
//
// H200, us of fwd.cuh or fwd_short.cuh / here, 16k tokens, 16 heads: head_dim 128, full, sequences
// of 64 73 / 75, of 100 97 / 81, of 160 83 / 83, of 256 123 / 98, of 320 116 / 121; causal, of 256
// 105 / 85; head_dim 96, full, of 64 65 / 60; head_dim 64, of 128 full 51 / 50, causal 52 / 52.
// 4 x 4096 rows and 256 keys, head_dim 128 94 / 88, head_dim 64 67 / 61. A tile of fwd.cuh has 192
// rows: 129 to 192 are one.
inline std::optional<FwdStreamVariant> stream_forward_variant(const Problem& p,
                                                              FwdVariant arithmetic) {
  const auto* const config =
      std::find_if(std::begin(kFwdStreamConfigs), std::end(kFwdStreamConfigs),
                   [&](const FwdStreamConfig& c) { return c.arithmetic == arithmetic; });
  if (config == std::end(kFwdStreamConfigs) || p.packed || p.has_seqused_q || p.has_seqused_kv ||
      p.has_q_offset || p.unaligned_q || p.unaligned_k || p.unaligned_v) {
    return std::nullopt;
  }
  const int width = config->widths().head_dim;
  const std::int64_t rows = p.seqlen_q;
  const std::int64_t keys = p.seqlen_kv;
  const bool hides_keys = p.mask.right < kUnboundedFrom;
  bool is_faster = false;
  constexpr std::int64_t kMaxRows = std::int64_t{1} << 29;  // sums of rows and keys have 32 bits
  if (keys < 1 || keys > 256 || rows > kMaxRows) {
  } else if (rows > 256) {
    is_faster = width <= 64 || keys <= config->block_n() || (width == 128 && !hides_keys);
  } else if (std::max(rows, keys) <= 64) {
    is_faster = width == 96;
  } else if (width <= 64) {
    is_faster = !hides_keys;
  } else {
    is_faster = hides_keys || rows <= 128 || rows > 192;
  }
  return is_faster ? std::optional(static_cast<FwdStreamVariant>(config - kFwdStreamConfigs))
                   : std::nullopt;
}

// Chunks of a call: `tiles` of 64 rows each, of those of a key head.
struct StreamChunks {
  std::int64_t num_tiles;  // of a key head of a sequence
  std::int64_t tiles;
  std::int64_t of_head;  // chunks
  std::int64_t count;    // of all
};

// Few enough tiles for `slots` CTAs to have about the same, and many enough that the keys, which
// each chunk loads, are a small part of what it loads.
inline StreamChunks stream_chunks(const Problem& p, std::int64_t slots) {
  const std::int64_t units = p.batch * p.heads_kv;
  const std::int64_t tiles = p.group() * ((p.seqlen_q + 63) / 64);
  StreamChunks best{};
  std::int64_t least = INT64_MAX;
  for (std::int64_t of_chunk = 1; of_chunk <= std::min<std::int64_t>(tiles, 32); ++of_chunk) {
    const std::int64_t of_head = (tiles + of_chunk - 1) / of_chunk;
    const std::int64_t rounds = (units * of_head + slots - 1) / slots;
    const std::int64_t cost = rounds * (of_chunk + 1);
    if (cost <= least) {
      least = cost;
      best = {tiles, of_chunk, of_head, units * of_head};
    }
  }
  return best;
}

// More slots gain nothing, and at head_dim 64 they cost (H200, 16k tokens, of 128: four 50 us,
// sixteen 54).
inline constexpr int kUsefulSlots = 4;

// Three slots and the pairs of a head, which a head's tiles need at once; then, as far as there is
// room, what the next head needs first: its first pair or two, a slot, and more pairs.
inline FwdStreamLayout stream_layout(const FwdStreamConfig& config, const FwdBlocks& blocks,
                                     int num_keys) {
  FwdStreamLayout layout{3, blocks.end - blocks.begin, 0, 0};
  if (layout.pairs > 0) {
    const int left = num_keys - (blocks.end - 1) * config.block_n();
    const int last = config.last_keys(left);
    if (last < config.block_n()) {
      --layout.pairs;
      layout.last_pairs = 1;
      layout.last_keys = last;
    }
  }
  const int pair_bytes = 2 * config.kv_bytes(config.block_n());
  const int last_bytes = 2 * config.kv_bytes(layout.last_keys);
  int left = FwdStreamConfig::kTileBytes - layout.q_slots * config.q_bytes() -
             layout.pairs * pair_bytes - layout.last_pairs * last_bytes;
  const auto add = [&](int bytes, std::int32_t* count, int most) {
    const bool fits = bytes <= left && *count < most;
    if (fits) {
      left -= bytes;
      ++*count;
    }
    return fits;
  };
  const int pairs = layout.pairs;
  if (layout.last_pairs > 0) {
    add(last_bytes, &layout.last_pairs, FwdStreamConfig::kMaxPairs);
  }
  if (pairs > 0) {
    add(pair_bytes, &layout.pairs, FwdStreamConfig::kMaxPairs);
  }
  add(config.q_bytes(), &layout.q_slots, kUsefulSlots);
  // Two heads more, of heads that are one block.
  const int more = pairs == 1 && layout.last_pairs == 0 ? 1 : pairs - 1;
  for (int i = 0; i < more; ++i) {
    add(pair_bytes, &layout.pairs, FwdStreamConfig::kMaxPairs);
  }
  return layout;
}

}  // namespace flashgrad::sm90
