// SPDX-License-Identifier: Apache-2.0
// The order of a packed batch's tiles (cuda/sm90/packed_order.hpp), on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/sm90/key_tile.cuh"
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
          .l2_rows = 8192,
          .class_shift = class_shift(4000),
          .max_round = 0};
}

TEST(Sm90PackedOrder, EveryTileOnceWithinTheGrid) {
  // Rows before the first sequence and after the last one; empty sequences.
  const Batch batch({3, 3, 700, 700, 4700, 4701, 5000}, 5100, kCausal);
  for (const int max_round : {0, 4, 32}) {
    PackedPass pass = backward_pass();
    pass.max_round = max_round;
    const std::vector<PackedTile> tiles = packed_order(pass, batch.sequences);
    std::set<std::tuple<int, int, int>> seen;
    for (const PackedTile& tile : tiles) {
      EXPECT_TRUE(seen.emplace(tile.span, tile.block, tile.head).second);
      EXPECT_GE(tile.head, 0);
      EXPECT_LT(tile.head, static_cast<int>(pass.heads));
    }
    std::int64_t blocks = 0;
    for (std::int64_t span = 0; span < batch.sequences.batch + 2; ++span) {
      const Span rows = sequence_span(batch.sequences, span).kv;
      for (std::int64_t block = 0; block * 128 < rows.end - rows.begin; ++block, ++blocks) {
        for (int head = 0; head < static_cast<int>(pass.heads); ++head) {
          EXPECT_TRUE(seen.contains({static_cast<int>(span), static_cast<int>(block), head}));
        }
      }
    }
    EXPECT_EQ(static_cast<std::int64_t>(tiles.size()), blocks * std::int64_t{pass.heads});
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
  // The L2 holds 2 heads of 4000 queries, but 198 tiles of 7 heads would fill 132 places well: all
  // heads are one section.
  for (std::size_t i = 0; i < 6U * 32; ++i) {
    EXPECT_EQ(tiles[i].span, 2);
    EXPECT_EQ(tiles[i].block, static_cast<int>(i) / 6);
  }
  for (std::size_t i = 6U * 32; i < 6U * 35; ++i) {
    EXPECT_EQ(tiles[i].span, 1);
  }
  EXPECT_EQ(tiles.size(), 6U * (32 + 3 + 1));
  PackedPass pass = backward_pass();
  pass.slots = 40;  // two heads fill them
  const std::vector<PackedTile> sections = packed_order(pass, batch.sequences);
  for (std::size_t i = 0; i < 6U * 32; ++i) {
    EXPECT_EQ(sections[i].head / 2, static_cast<int>(i) / 64);
  }
}

// Under a window the longest tile of a long sequence is no longer than the window.
TEST(Sm90PackedOrder, AWindowLimitsTheWork) {
  const Batch batch({0, 600, 4600}, 4600, {400, 0, Alignment::kBottomRight});
  const PackedPass pass = backward_pass();
  const auto work_class = [&](std::int64_t span) {
    return packed_span_tiles(pass, batch.sequences, span).work_class;
  };
  EXPECT_EQ(work_class(1), work_class(2));
  EXPECT_LT(work_class(1), work_class(0));
  EXPECT_EQ(work_class(0), kPackedClasses - 1);
  const Batch nothing({0, 600}, 600, {-1, -1, Alignment::kBottomRight});
  EXPECT_EQ(packed_span_tiles(pass, nothing.sequences, 1).order.blocks, 5U);
}

TEST(Sm90PackedOrder, ClassesFallWithWork) {
  for (const std::int32_t most : {1, 4000, 1 << 30}) {
    PackedPass pass = backward_pass();
    pass.class_shift = class_shift(most);
    std::uint32_t before = kPackedClasses;
    for (std::int32_t length = 0; length <= most && length >= 0;
         length += std::max(1, most / 777)) {
      const Batch batch({0, length}, length, kCausal);
      const std::uint32_t at = packed_span_tiles(pass, batch.sequences, 1).work_class;
      EXPECT_LE(at, before);
      before = at;
    }
    if (most == 4000) {  // a length over the bound: the caller's fault
      const Batch batch({0, 1 << 20}, 1 << 20, kCausal);
      EXPECT_EQ(packed_span_tiles(pass, batch.sequences, 1).work_class, 0U);
    }
  }
}

// Where the maps end with each sequence, only keys of the sequence itself that nobody sees must be
// cleared; else also those of the next one that lie in its last tile.
TEST(Sm90PackedOrder, DeadKeysOfALastTile) {
  Batch batch({0, 300, 600}, 600, kCausal);
  const std::vector<std::int32_t> used = {300, 200};
  batch.sequences.seqused_kv = used.data();
  BwdParams p{};
  p.sequences = batch.sequences;
  p.heads_kv = p.group = 1;
  const auto dead = [&](std::int32_t span, std::int32_t block) {
    return key_tile_at(p, {128, 1, false}, {span, block, 0}, 0).has_dead_keys;
  };
  EXPECT_EQ(dead(1, 1), 0);
  EXPECT_EQ(dead(1, 2), 1);
  EXPECT_EQ(dead(2, 1), 1);
  p.ragged_rows = 1 << 30;
  EXPECT_EQ(dead(1, 1), 0);
  EXPECT_EQ(dead(1, 2), 0);
  EXPECT_EQ(dead(2, 1), 1);
}

TEST(Sm90SectionOrder, HeadsThatFillTheDeviceBelongTogether) {
  // H200, d128, 4 key heads of 16, 4096 tokens x 4: 16 units of 16 clusters on 66 places. The L2
  // holds two units, whose 32 clusters would leave half of the device to the next section.
  EXPECT_EQ(units_that_fill(66, 16), 7U);
  EXPECT_EQ(units_together(16, 2, 7), 8U);
  EXPECT_EQ(units_together(16, 2, 1), 2U);
  EXPECT_EQ(units_together(16, 9, 7), 16U);  // not 9 and then 7
  EXPECT_EQ(units_together(5, 1, 9), 5U);
  EXPECT_EQ(units_together(0, 1, 1), 1U);
  EXPECT_EQ(units_that_fill(66, 0), 99U);
}

TEST(Sm90SectionOrder, KeysInUse) {
  const auto in_use = [](const BandMask& mask) {
    return keys_in_use(Band::of(mask, 16384, 16384), 16384, 128);
  };
  EXPECT_EQ(in_use({}), 16384U);
  EXPECT_EQ(in_use(kCausal), 16384U);
  EXPECT_EQ(in_use({kUnbounded, -5000, Alignment::kBottomRight}), 16384U);
  EXPECT_EQ(in_use({1024, 0, Alignment::kBottomRight}), 2U * (1024 + 128));
  EXPECT_EQ(in_use({10000, 0, Alignment::kBottomRight}), 16384U);
  EXPECT_EQ(in_use({-1000, -1000, Alignment::kBottomRight}), 1U);  // an empty band
}

// Sections one after the other, in each round by round; every tile once.
TEST(Sm90SectionOrder, RunsEveryTileOnce) {
  for (const std::uint32_t units : {1U, 5U, 16U}) {
    for (const std::uint32_t section : {1U, 3U, 16U}) {
      for (const std::uint32_t blocks : {1U, 7U, 32U}) {
        for (const std::uint32_t round : {1U, 4U, 32U}) {
          const SectionOrder order{units, section, blocks, round};
          std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
          std::pair<std::uint32_t, std::uint32_t> before{0, 0};
          for (std::uint32_t i = 0; i < units * blocks; ++i) {
            const SectionTile tile = section_tile(order, i);
            ASSERT_LT(tile.unit, units);
            ASSERT_LT(tile.block, blocks);
            EXPECT_TRUE(seen.emplace(tile.unit, tile.block).second);
            const std::pair<std::uint32_t, std::uint32_t> now{tile.unit / section,
                                                              tile.block / round};
            EXPECT_LE(before, now);
            before = now;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashgrad::sm90
