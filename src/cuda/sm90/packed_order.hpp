// SPDX-License-Identifier: Apache-2.0
// In what order the tiles of a packed batch run. Only the device knows the lengths, so the order is
// made there, by the pass's prepare kernel (packed_order.cuh). Plain arithmetic, for the device,
// for tests and for `flashgrad plan`.
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

// What the order of a pass follows from.
struct PackedPass {
  bool of_keys;                // tiles are blocks of keys (backward), else of queries
  bool last_block_first;       // the last block meets the most
  std::int32_t tile_rows;      // keys or queries of a tile
  std::int32_t heads;          // a unit is a head of a sequence
  std::int32_t heads_per_key;  // of them that share the tensors below: in one section
  std::int32_t slots;          // tiles that run at a time
  std::int64_t bytes_per_row;  // that the tiles of a unit share, for each query (of_keys) or key
  std::int64_t l2_bytes;       // that a section may fill
  std::int64_t max_round;      // as in BwdParams
  std::int64_t max_rows;       // at least the queries (of_keys) or keys of any sequence
};

// The tiles of one span.
struct PackedSpan {
  SectionOrder order;
  bool last_block_first;
  std::int64_t longest;  // queries (of_keys) or keys that one tile meets, at most

  [[nodiscard]] FG_HOST_DEVICE constexpr std::int64_t num_tiles() const {
    return std::int64_t{order.units} * order.blocks;
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
  // Keys that are not in use get a gradient of 0; queries that are not, from prepare.
  const std::int64_t rows = pass.of_keys ? sequence.kv.end - sequence.kv.begin : band.seqlen_q;
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t blocks = ceil_div(rows, pass.tile_rows);
  const std::int64_t met = pass.of_keys ? band.seqlen_q : band.seqlen_kv;
  const std::int64_t reach = band.hi - band.lo + pass.tile_rows;
  const std::int64_t round =
      pass.max_round > 0 ? rotation(ceil_div(band.seqlen_q, kBlockM),
                                    ceil_div(band.seqlen_kv, pass.tile_rows), pass.max_round)
                               .round
                         : 1;
  const std::int64_t section =
      pass.heads_per_key *
      units_together(pass.heads / pass.heads_per_key, met * pass.bytes_per_row,
                     units_that_fill(pass.slots, (round > 1 ? round : blocks) * pass.heads_per_key),
                     pass.l2_bytes);
  return {{static_cast<std::uint32_t>(pass.heads), static_cast<std::uint32_t>(section),
           static_cast<std::uint32_t>(blocks), static_cast<std::uint32_t>(round)},
          pass.last_block_first,
          reach < 0     ? 0
          : reach < met ? reach
                        : met};
}

// Spans are sorted by their longest tile, in so many classes.
inline constexpr int kPackedClasses = 1024;
FG_HOST_DEVICE inline int packed_class(const PackedPass& pass, std::int64_t longest) {
  const std::int64_t at = longest * kPackedClasses / (pass.max_rows + 1);
  return static_cast<int>(at < kPackedClasses ? kPackedClasses - 1 - at : 0);
}

// The order, on the host. That of the device has ties in any order: it decides when a tile runs,
// not what it computes.
inline std::vector<PackedTile> packed_order(const PackedPass& pass, const Sequences& sequences) {
  std::vector<std::vector<PackedTile>> classes(kPackedClasses);
  for (std::int64_t span = 0; span < sequences.batch + 2; ++span) {
    const PackedSpan s = packed_span_tiles(pass, sequences, span);
    std::vector<PackedTile>& tiles =
        classes[static_cast<std::size_t>(packed_class(pass, s.longest))];
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
