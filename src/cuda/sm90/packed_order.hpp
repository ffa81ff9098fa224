// SPDX-License-Identifier: Apache-2.0
// In what order the tiles of a packed batch run. Only the device knows the lengths, so the order is
// made there, by the forward's prepare kernel and by one before the backward's (packed_order.cuh).
// Plain arithmetic, for the device, for tests and for `flashgrad plan`.
//
// Sequences with the longest tiles come first, so that the short ones fill the end; the heads of a
// sequence run in sections (section_order.hpp), as those of a batch of fixed length do.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/sm90/config.hpp"
#include "cuda/sm90/section_order.hpp"
#include "cuda/sm90/sequences.cuh"

namespace flashgrad::sm90 {

// A tile of a packed batch.
struct PackedTile {
  std::int32_t span;   // sequences.cuh
  std::int32_t block;  // of the span
  std::int32_t head;
};

// Spans are sorted by their longest tile, in so many classes.
inline constexpr std::uint32_t kPackedClasses = 1024;

// What the order of a pass follows from. 32 bits: there are fewer than 2^30 rows.
struct PackedPass {
  bool of_keys;                 // tiles are blocks of keys (backward), else of queries
  bool last_block_first;        // the last block meets the most
  std::uint32_t tile_rows;      // keys or queries of a tile
  std::uint32_t heads;          // a unit is a head of a sequence
  std::uint32_t heads_per_key;  // of them that share what is in the L2: in one section
  std::uint32_t slots;          // tiles that run at a time
  std::uint32_t l2_rows;  // queries (of_keys) or keys whose rows of one unit fill a section's share
  std::uint32_t class_shift;  // work >> class_shift is less than kPackedClasses
  std::int32_t max_round;     // as in BwdParams
};

// The share of the L2 in rows, and class_shift for sequences of at most `max_rows` of them.
constexpr std::uint32_t rows_in_l2(std::int64_t l2_bytes, std::int64_t bytes_per_row) {
  return static_cast<std::uint32_t>(l2_bytes / (bytes_per_row > 0 ? bytes_per_row : 1));
}
constexpr std::uint32_t class_shift(std::int64_t max_rows) {
  std::uint32_t shift = 0;
  while (max_rows >> shift >= std::int64_t{kPackedClasses}) {
    ++shift;
  }
  return shift;
}

// The tiles of one span.
struct PackedSpan {
  SectionOrder order;
  bool last_block_first;
  std::uint32_t work_class;  // 0 has the longest tiles

  [[nodiscard]] FG_HOST_DEVICE constexpr std::uint32_t num_tiles() const {
    return order.units * order.blocks;
  }
  [[nodiscard]] FG_HOST_DEVICE constexpr PackedTile tile(std::int64_t span,
                                                         std::uint32_t index) const {
    const SectionTile at = section_tile(order, index);
    return {static_cast<std::int32_t>(span),
            static_cast<std::int32_t>(last_block_first ? order.blocks - 1 - at.block : at.block),
            static_cast<std::int32_t>(at.unit)};
  }
};

FG_HOST_DEVICE inline PackedSpan packed_span_tiles(const PackedPass& pass, const Sequences& s,
                                                   std::int64_t span) {
  const SequenceSpan sequence = sequence_span(s, span);
  const Band& band = sequence.band;
  const auto blocks_of = [](std::int64_t rows, std::uint32_t block) {
    return (static_cast<std::uint32_t>(rows) + block - 1) / block;
  };
  // Keys that are not in use get a gradient of 0; queries that are not, from prepare.
  const std::uint32_t blocks =
      blocks_of(pass.of_keys ? sequence.kv.end - sequence.kv.begin : band.seqlen_q, pass.tile_rows);
  const std::int64_t met = pass.of_keys ? band.seqlen_q : band.seqlen_kv;
  std::uint32_t round = 1;
  if (pass.max_round > 0) {
    round = static_cast<std::uint32_t>(rotation(blocks_of(band.seqlen_q, kBlockM),
                                                blocks_of(band.seqlen_kv, pass.tile_rows),
                                                pass.max_round)
                                           .round);
  }
  const std::uint32_t in_use = pass.of_keys ? (met > 0 ? static_cast<std::uint32_t>(met) : 1)
                                            : keys_in_use(band, met, pass.tile_rows);
  const std::uint32_t in_l2 = pass.l2_rows / in_use;
  const std::uint32_t section =
      pass.heads_per_key * units_together(pass.heads / pass.heads_per_key, in_l2,
                                          units_that_fill(pass.slots, (round > 1 ? round : blocks) *
                                                                          pass.heads_per_key));
  // What the longest tile meets, at most.
  const std::int64_t reach = band.hi - band.lo + pass.tile_rows;
  const std::int64_t longest = reach < 0 ? 0 : reach < met ? reach : met;
  // Lengths over their bound are the caller's fault, but no reason to write elsewhere.
  const std::uint32_t at = static_cast<std::uint32_t>(longest) >> pass.class_shift;
  return {{pass.heads, section, blocks, round},
          pass.last_block_first,
          at < kPackedClasses ? kPackedClasses - 1 - at : 0};
}

// The order, on the host. That of the device has ties in any order: it decides when a tile runs,
// not what it computes.
inline std::vector<PackedTile> packed_order(const PackedPass& pass, const Sequences& sequences) {
  std::vector<std::vector<PackedTile>> classes(kPackedClasses);
  for (std::int64_t span = 0; span < sequences.batch + 2; ++span) {
    const PackedSpan s = packed_span_tiles(pass, sequences, span);
    std::vector<PackedTile>& tiles = classes[s.work_class];
    for (std::uint32_t i = 0; i < s.num_tiles(); ++i) {
      tiles.push_back(s.tile(span, i));
    }
  }
  std::vector<PackedTile> all;
  for (const std::vector<PackedTile>& tiles : classes) {
    all.insert(all.end(), tiles.begin(), tiles.end());
  }
  return all;
}

}  // namespace flashgrad::sm90
