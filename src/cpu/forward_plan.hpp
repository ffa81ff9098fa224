// SPDX-License-Identifier: Apache-2.0
// How a forward call is cut into work: key blocks, items of query rows, and where each buffer lies
// in the workspace. Nothing here depends on the instruction set but the unit, and nothing here may
// change a result: what reaches the order of additions is a constant, so the bits of a row depend
// only on its own sequence, never on threads, batch or workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/backend.hpp"
#include "core/problem.hpp"
#include "cpu/micro_kernel.hpp"

namespace flashgrad::cpu {

// Keys are taken in blocks that start at multiples of this. Part of the order of additions.
inline constexpr std::int64_t kForwardKeyBlock = 256;
// The most query rows of short sequences that share an item; a panel of the widest instruction set.
inline constexpr std::int64_t kForwardMergedItem = 64;
// An item takes at most this many query rows, fewer where the call would not fill its threads
// otherwise.
inline constexpr std::int64_t kForwardQueryBlock = 256;
inline constexpr std::int64_t kForwardMinQueryBlock = 64;
// Sequences of at most this many rows share an item among the heads of a group, which so read the
// keys once.
inline constexpr std::int64_t kForwardMergedRows = 32;

// How one sequence's rows of one kv head's group become items.
struct ForwardItemGrid {
  std::int64_t heads_per_item = 1;
  std::int64_t head_items = 0;
  std::int64_t query_blocks = 0;

  [[nodiscard]] std::int64_t count() const { return head_items * query_blocks; }

  static ForwardItemGrid of(std::int64_t seqlen_q, std::int64_t group, std::int64_t query_block) {
    ForwardItemGrid grid;
    if (seqlen_q > 0 && seqlen_q <= kForwardMergedRows) {
      grid.heads_per_item = std::min(group, kForwardMergedItem / seqlen_q);
    }
    grid.head_items = ceil_div(group, grid.heads_per_item);
    grid.query_blocks = ceil_div(seqlen_q, query_block);
    return grid;
  }
};

// Query rows that one thread takes through all their keys: `rows` of each of the heads, head after
// head.
struct ForwardItem {
  std::int64_t batch = 0;
  std::int64_t head_kv = 0;
  std::int64_t first_head = 0;
  std::int64_t num_heads = 0;
  Range rows;
  // The packed key blocks of the kv head, from its block number first_block on. Null: the item
  // packs them for itself.
  const std::byte* blocks = nullptr;
  std::int64_t first_block = 0;

  [[nodiscard]] std::int64_t num_rows() const { return num_heads * rows.size(); }
};

// Sizes of buffers, in 32-bit words: a float, or two bf16 that are neighbours along a reduction
// (unit 2).
struct ForwardSizes {
  std::int64_t unit = 1;
  std::int64_t head_words = 0;         // a row of Q or K
  std::int64_t padded_head_words = 0;  // the same in whole vectors
  std::int64_t columns = 0;            // a row of V or O in whole vectors
  std::int64_t keys = 0;  // room in a block: kForwardKeyBlock, less if no sequence has as many
  std::int64_t rows = 0;  // room for query rows in an item, in whole tiles
  std::int64_t staging_words = 0;  // rows of Q that become columns of a panel together

  // A packed key block: a header, K (keys, padded_head_words), V in panels of (keys / unit, panel).
  static constexpr std::int64_t kHeaderWords = 32;
  std::int64_t v_begin = 0;
  std::int64_t block_words = 0;

  static ForwardSizes of(const Problem& p, std::int64_t unit, std::int64_t lanes,
                         std::int64_t query_block) {
    ForwardSizes sizes;
    sizes.unit = unit;
    sizes.head_words = ceil_div(p.head_dim, unit);
    sizes.padded_head_words = round_up(sizes.head_words, lanes);
    sizes.columns = round_up(p.head_dim_v, lanes);
    sizes.staging_words = lanes * sizes.padded_head_words;
    sizes.keys =
        std::min(kForwardKeyBlock, round_up(std::max<std::int64_t>(p.max_seqlen_kv, 1), 16));
    const std::int64_t merged = std::min(kForwardMergedRows, p.max_seqlen_q) * p.group();
    const std::int64_t alone = std::min(query_block, p.max_seqlen_q);
    sizes.rows = round_up(std::max<std::int64_t>({1, alone, std::min(kForwardMergedItem, merged)}),
                          std::max<std::int64_t>(lanes, 8));
    sizes.v_begin = kHeaderWords + round_up(sizes.keys * sizes.padded_head_words, 32);
    sizes.block_words = sizes.v_begin + round_up(sizes.keys / unit * sizes.columns, 32);
    return sizes;
  }

  [[nodiscard]] std::int64_t block_bytes() const { return 4 * block_words; }
};

}  // namespace flashgrad::cpu
