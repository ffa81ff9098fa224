// SPDX-License-Identifier: Apache-2.0
// Which sequences of a call the forward's kernel for a few rows with many keys computes, and what
// workspace their parts take. Plain arithmetic on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/problem.hpp"
#include "cuda/sm90/fwd_split.hpp"

namespace flashgrad::sm90 {

enum class SplitUse : std::uint8_t {
  kNone,
  kAll,  // none has too many rows
  kCut,  // those whose keys are cut; others may have too many rows
};

// Sequences of so few keys may be fwd_short.cuh's.
inline constexpr std::int64_t kMostShortKeys = 512;

// A sequence may have fewer rows than the longest.
inline bool rows_vary(const Problem& p) { return p.packed || p.has_seqused_q; }

// By a kernel with blocks of `block_n` keys.
inline bool may_be_cut(const Problem& p, std::int32_t block_n) {
  const Band widest = Band::of({}, rows_vary(p) ? 1 : p.max_seqlen_q, p.max_seqlen_kv);
  return key_chunks(widest, block_n).count > 1;
}

inline SplitUse split_use(const Problem& p, std::int32_t block_n) {
  const bool is_cut = may_be_cut(p, block_n);
  if (p.max_seqlen_q > kSplitRows) {
    return is_cut ? SplitUse::kCut : SplitUse::kNone;
  }
  // A tile has several query heads of a group, for which fwd.cuh would load their keys anew.
  const bool shares_keys = p.group() > 1 && p.max_seqlen_kv > kMostShortKeys;
  return is_cut || shares_keys ? SplitUse::kAll : SplitUse::kNone;
}

inline SplitSlots split_slots(const Problem& p, std::int32_t block_n) {
  return SplitSlots::of(p.packed, p.batch, p.seqlen_kv, p.max_seqlen_q, block_n);
}

// f32 columns of a part.
inline std::int32_t part_columns(const Problem& p) {
  return static_cast<std::int32_t>((p.head_dim_v + 7) / 8 * 8);
}

// Rows that the merge looks at.
inline std::int64_t num_merged_rows(const Problem& p, const SplitSlots& slots) {
  return (p.packed ? p.batch + 2 : p.batch) * p.heads_q * slots.rows;
}

inline Status supports_split(const Problem& p, std::int32_t block_n) {
  const std::int64_t rows = num_merged_rows(p, split_slots(p, block_n));
  if (may_be_cut(p, block_n) && rows > INT32_MAX) {
    return unsupported("q: " + std::to_string(rows) + " rows of all heads that see " +
                       std::to_string(p.max_seqlen_kv) + " keys, want fewer than 2^31");
  }
  return {};
}

// Of the parts, a multiple of 16.
inline std::size_t split_workspace_bytes(const Problem& p, std::int32_t block_n) {
  if (!may_be_cut(p, block_n)) {
    return 0;
  }
  const SplitSlots slots = split_slots(p, block_n);
  const std::int64_t bytes_of_part = (part_columns(p) + 2) * std::int64_t{sizeof(float)};
  return static_cast<std::size_t>((slots.all * p.heads_q * slots.rows * bytes_of_part + 15) / 16 *
                                  16);
}

}  // namespace flashgrad::sm90
