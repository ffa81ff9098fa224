// SPDX-License-Identifier: Apache-2.0
// Which sequences the sm90 forward cuts, where, and where their parts lie, on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/mask.hpp"
#include "cuda/sm90/fwd_split.hpp"
#include "cuda/sm90/fwd_split_use.hpp"
#include "cuda/sm90/sequences.cuh"

namespace flashgrad::sm90 {
namespace {

Band full(std::int64_t rows, std::int64_t keys) { return Band::of({}, rows, keys); }

TEST(Sm90Split, CutsFewRowsOfManyKeysOnly) {
  EXPECT_EQ(key_chunks(full(1, 1279), 80).count, 1);
  EXPECT_EQ(key_chunks(full(1, 1280), 80).count, 2);
  EXPECT_EQ(key_chunks(full(16, 1280), 80).count, 2);
  EXPECT_EQ(key_chunks(full(17, 100000), 80).count, 1);
  EXPECT_EQ(key_chunks(full(0, 100000), 80).count, 1);
  EXPECT_EQ(key_chunks(full(5, 0), 80).count, 1);
  // A window of 300 keys, wherever it lies.
  EXPECT_EQ(key_chunks(Band::of({.left = 299, .right = 0}, 1, 100000), 80).count, 1);
}

TEST(Sm90Split, ChunksCoverTheVisibleBlocksOnce) {
  for (const FwdConfig& c : kFwdConfigs) {
    for (const std::int64_t rows : {1, 15, 16}) {
      for (const std::int64_t keys :
           {768, 801, 1600, 4096, 51200, 131072, 1000003, (1 << 30) - 1}) {
        for (const BandMask& mask : {BandMask{}, BandMask{.left = 2000, .right = 0}}) {
          const Band band = Band::of(mask, rows, keys);
          const KeyChunks chunks = key_chunks(band, c.block_n);
          const Range hull = band.kv_range(0, rows);
          ASSERT_LE(chunks.begin * c.block_n, hull.begin);
          ASSERT_GE(chunks.end * c.block_n, hull.end);
          ASSERT_LE(chunks.count, kMaxChunks);
          ASSERT_EQ(chunks.first(0), chunks.begin);
          ASSERT_EQ(chunks.first(chunks.count), chunks.end);
          for (std::int32_t chunk = 0; chunk < chunks.count; ++chunk) {
            ASSERT_LT(chunks.first(chunk), chunks.first(chunk + 1));
          }
        }
      }
    }
  }
}

TEST(Sm90Split, PartsOfAPackedBatchLieApartAndInTheWorkspace) {
  std::mt19937 random(1);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    const int block_n = kFwdConfigs[random() % std::size(kFwdConfigs)].block_n;
    const std::int64_t max_rows = 1 + below(kSplitRows);
    std::vector<std::int32_t> offsets{static_cast<std::int32_t>(below(500))};
    std::vector<std::int64_t> rows;
    for (int n = 0; n < 20; ++n) {
      rows.push_back(below(max_rows + 1));
      offsets.push_back(offsets.back() + static_cast<std::int32_t>(below(n % 3 == 0 ? 50 : 6000)));
    }
    const std::int64_t total = offsets.back();
    const SplitSlots slots = SplitSlots::of(true, 20, total, max_rows, block_n);
    const std::int64_t blocks = num_blocks(true, 20, total, slots.keys);
    std::int64_t next = 0;
    for (std::int64_t n = 0; n < 20; ++n) {
      const std::int64_t begin = offsets[static_cast<std::size_t>(n)];
      const std::int64_t keys = offsets[static_cast<std::size_t>(n + 1)] - begin;
      const KeyChunks chunks = key_chunks(full(rows[static_cast<std::size_t>(n)], keys), block_n);
      // A CTA for each chunk.
      const std::int64_t first = first_block(offsets.data(), 20, total, n + 1, slots.keys);
      const std::int64_t behind = first_block(offsets.data(), 20, total, n + 2, slots.keys);
      ASSERT_LE(first + chunks.count, std::min(behind, blocks));
      if (chunks.count > 1) {
        ASSERT_GE(slots.first(true, n + 1, begin), next);
        next = slots.first(true, n + 1, begin) + chunks.count;
      }
    }
    ASSERT_LE(next, slots.all);
  }
}

TEST(Sm90Split, PartsOfABatchEntryFitItsSlots) {
  for (const FwdConfig& c : kFwdConfigs) {
    for (const std::int64_t padded : {768, 1650, 4096, 131072}) {
      const SplitSlots slots = SplitSlots::of(false, 3, padded, 100, c.block_n);
      EXPECT_EQ(slots.all, 3 * slots.of_entry);
      EXPECT_EQ(slots.rows, kSplitRows);
      for (const std::int64_t rows : {1, 16}) {
        for (const std::int64_t keys : {padded, padded - 1, padded / 2}) {
          ASSERT_LE(key_chunks(full(rows, keys), c.block_n).count, slots.of_entry)
              << rows << " x " << keys << " of " << padded;
        }
      }
    }
  }
}

TEST(Sm90Split, IsAskedOnlyWhereASequenceMayBeCut) {
  const auto use = [](std::int64_t rows, std::int64_t keys, std::int64_t group, bool packed) {
    Problem p;
    p.batch = 2;
    p.heads_q = 8;
    p.heads_kv = 8 / group;
    p.head_dim = p.head_dim_v = 128;
    p.packed = packed;
    p.seqlen_q = p.max_seqlen_q = rows;
    p.seqlen_kv = p.max_seqlen_kv = keys;
    const SplitUse result = split_use(p, 80);
    EXPECT_EQ(split_workspace_bytes(p, 80) > 0, result == SplitUse::kCut || keys >= 1280) << keys;
    return result;
  };
  EXPECT_EQ(use(1, 1279, 1, false), SplitUse::kNone);
  EXPECT_EQ(use(1, 1280, 1, false), SplitUse::kAll);
  EXPECT_EQ(use(16, 1280, 1, true), SplitUse::kAll);
  EXPECT_EQ(use(16, 513, 4, false), SplitUse::kAll);
  EXPECT_EQ(use(16, 512, 4, false), SplitUse::kNone);
  EXPECT_EQ(use(17, 1279, 4, true), SplitUse::kNone);
  EXPECT_EQ(use(17, 1280, 4, true), SplitUse::kCut);
  EXPECT_EQ(use(1000, 1000, 1, true), SplitUse::kNone);
}

TEST(Sm90Split, LongSequencesOfOneLengthNeedNoWorkspace) {
  Problem p;
  p.batch = 2;
  p.heads_q = p.heads_kv = 8;
  p.seqlen_q = p.max_seqlen_q = 17;
  p.seqlen_kv = p.max_seqlen_kv = 100000;
  EXPECT_EQ(split_use(p, 80), SplitUse::kNone);
  EXPECT_EQ(split_workspace_bytes(p, 80), 0U);
  p.has_seqused_q = true;
  EXPECT_EQ(split_use(p, 80), SplitUse::kCut);
}

TEST(Sm90Split, PiecesOfSharedMemoryFollowEachOther) {
  for (const FwdConfig& c : kFwdConfigs) {
    const FwdSplitConfig split{c};
    EXPECT_TRUE(split.valid()) << c.head_dim;
    EXPECT_EQ(split.ctas(), c.head_dim <= 128 ? 2 : 1);
    EXPECT_LE(split.ctas() * (split.shared_bytes() + 1024), 228 * 1024);
    for (const int tile : {split.k_offset(), split.v_offset()}) {
      EXPECT_EQ(tile % tile::kTileAlignment, 0) << c.head_dim;
    }
    EXPECT_EQ(split.tiles_offset() % 16, 0);
    EXPECT_EQ(split.barrier_offset() % 8, 0);
  }
}

}  // namespace
}  // namespace flashgrad::sm90
