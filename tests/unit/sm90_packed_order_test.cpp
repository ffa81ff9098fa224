// SPDX-License-Identifier: Apache-2.0
// The order of a packed batch's tiles (cuda/sm90/packed_order.hpp), on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/sm90/packed_order.hpp"

namespace flashgrad::sm90 {
namespace {

const BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};

// Sequences at `offsets` of queries and keys alike.
struct Batch {
  std::vector<std::int32_t> offsets;
  Sequences sequences{};

  Batch(std::vector<std::int32_t> cu_seqlens, std::int64_t rows, const BandMask& mask)
      : offsets(std::move(cu_seqlens)) {
    sequences.batch = static_cast<std::int64_t>(offsets.size()) - 1;
    sequences.rows_q = rows;
    sequences.rows_kv = rows;
    sequences.mask = mask;
    sequences.cu_seqlens_q = offsets.data();
    sequences.cu_seqlens_kv = offsets.data();
  }
};

PackedPass backward_pass() {
  return {.of_keys = true,
          .last_block_first = false,
          .tile_rows = 128,
          .heads = 6,
          .heads_per_key = 1,
          .slots = 132,
          .bytes_per_row = 1024,
          .l2_bytes = 8 << 20,
          .max_round = 0,
          .max_rows = 4000};
}

TEST(Sm90PackedOrder, EveryTileOnceWithinTheGrid) {
  // Rows before the first sequence and after the last one; empty sequences.
  const Batch batch({3, 3, 700, 700, 4700, 4701, 5000}, 5100, kCausal);
  for (const std::int64_t max_round : {0, 4, 32}) {
    PackedPass pass = backward_pass();
    pass.max_round = max_round;
    const std::vector<PackedTile> tiles = packed_order(pass, batch.sequences);
    std::set<std::tuple<int, int, int>> seen;
    for (const PackedTile& tile : tiles) {
      EXPECT_TRUE(seen.emplace(tile.span, tile.block, tile.head).second);
      EXPECT_GE(tile.head, 0);
      EXPECT_LT(tile.head, pass.heads);
    }
    std::int64_t blocks = 0;
    for (std::int64_t span = 0; span < batch.sequences.batch + 2; ++span) {
      const Span rows = sequence_span(batch.sequences, span).kv;
      for (std::int64_t block = 0; block * 128 < rows.end - rows.begin; ++block, ++blocks) {
        for (int head = 0; head < pass.heads; ++head) {
          EXPECT_TRUE(seen.contains({static_cast<int>(span), static_cast<int>(block), head}));
        }
      }
    }
    EXPECT_EQ(static_cast<std::int64_t>(tiles.size()), blocks * pass.heads);
    EXPECT_LE(blocks, num_blocks(true, batch.sequences.batch, 5100, 128));
  }
}

// The forward's tiles are those of the rows in use.
TEST(Sm90PackedOrder, QueriesInUse) {
  Batch batch({0, 1000, 1500}, 2000, kCausal);
  const std::vector<std::int32_t> used = {200, 500};
  batch.sequences.seqused_q = used.data();
  PackedPass pass = backward_pass();
  pass.of_keys = false;
  pass.last_block_first = true;
  pass.heads_per_key = 3;
  const std::vector<PackedTile> tiles = packed_order(pass, batch.sequences);
  EXPECT_EQ(tiles.size(), 6U * (2 + 4));
  // The heads of a key head lie in one section, and the last block comes first.
  EXPECT_EQ(tiles.front().span, 1);
  EXPECT_EQ(tiles.front().block, 1);
}

TEST(Sm90PackedOrder, LongSequencesFirstTheirHeadsInSections) {
  const Batch batch({0, 300, 4300, 4400}, 4400, kCausal);
  const std::vector<PackedTile> tiles = packed_order(backward_pass(), batch.sequences);
  // 4 MB a head, and 5 heads of 32 tiles fill 132 slots: all heads are one section.
  for (std::size_t i = 0; i < 6U * 32; ++i) {
    EXPECT_EQ(tiles[i].span, 2);
    EXPECT_EQ(tiles[i].block, static_cast<int>(i) / 6);
  }
  for (std::size_t i = 6U * 32; i < 6U * 35; ++i) {
    EXPECT_EQ(tiles[i].span, 1);
  }
  EXPECT_EQ(tiles.size(), 6U * (32 + 3 + 1));
  PackedPass pass = backward_pass();
  pass.slots = 60;  // two heads fill them, and the L2 holds two
  const std::vector<PackedTile> sections = packed_order(pass, batch.sequences);
  for (std::size_t i = 0; i < 6U * 32; ++i) {
    EXPECT_EQ(sections[i].head / 2, static_cast<int>(i) / 64);
  }
}

// Under a window the longest tile of a long sequence is no longer than the window.
TEST(Sm90PackedOrder, AWindowLimitsTheWork) {
  const Batch batch({0, 600, 4600}, 4600, {400, 0, Alignment::kBottomRight});
  const PackedPass pass = backward_pass();
  EXPECT_EQ(packed_span_tiles(pass, batch.sequences, 1).longest, 400 + 128);
  EXPECT_EQ(packed_span_tiles(pass, batch.sequences, 2).longest, 400 + 128);
  EXPECT_EQ(packed_span_tiles(pass, batch.sequences, 0).longest, 0);
  const Batch nothing({0, 600}, 600, {-1, -1, Alignment::kBottomRight});
  EXPECT_EQ(packed_span_tiles(pass, nothing.sequences, 1).order.blocks, 5U);
}

TEST(Sm90PackedOrder, ClassesFallWithWork) {
  PackedPass pass = backward_pass();
  for (const std::int64_t most : {std::int64_t{1}, std::int64_t{4000}, std::int64_t{1} << 30}) {
    pass.max_rows = most;
    int before = kPackedClasses;
    for (std::int64_t longest = 0; longest <= most;
         longest += std::max<std::int64_t>(1, most / 777)) {
      const int at = packed_class(pass, longest);
      EXPECT_GE(at, 0);
      EXPECT_LE(at, before);
      before = at;
    }
    // Lengths over the bound are the caller's fault, but no reason to write elsewhere.
    EXPECT_EQ(packed_class(pass, 3 * most), 0);
  }
}

TEST(Sm90SectionOrder, HeadsThatFillTheDeviceBelongTogether) {
  // H200, d128, 4 key heads of 16, 4096 tokens x 4: 16 units of 16 clusters on 66 places. 32 MB are
  // two units, whose 32 clusters would leave half of the device to the next section.
  const std::int64_t at_least = units_that_fill(66, 16);
  EXPECT_EQ(at_least, 5);
  EXPECT_EQ(units_together(16, 16 << 20, at_least, 32 << 20), 6);
  EXPECT_EQ(units_together(16, 16 << 20, 1, 32 << 20), 2);
  EXPECT_EQ(units_together(5, 1 << 20, 3, 0), 5);  // never fewer than at_least
  EXPECT_EQ(units_together(0, 1, 1, 1), 1);
}

}  // namespace
}  // namespace flashgrad::sm90
