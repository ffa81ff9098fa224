// SPDX-License-Identifier: Apache-2.0
// Which forwards keep all keys in shared memory, and how they divide their work, on the host.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "cuda/sm90/fwd_stream_plan.hpp"

namespace flashgrad::sm90 {
namespace {

constexpr std::int64_t kSlots = 132;

Problem problem(std::int64_t batch, std::int64_t rows, std::int64_t keys, bool causal = false) {
  Problem p;
  p.batch = batch;
  p.heads_q = p.heads_kv = 16;
  p.seqlen_q = p.max_seqlen_q = rows;
  p.seqlen_kv = p.max_seqlen_kv = keys;
  p.mask.right = causal ? 0 : kUnbounded;
  return p;
}

bool streams(const Problem& p, FwdVariant arithmetic) {
  const auto variant = stream_forward_variant(p, arithmetic);
  if (variant) {
    const FwdStreamConfig& c = fwd_stream_config(*variant);
    EXPECT_EQ(c.arithmetic, arithmetic);
  }
  return variant.has_value();
}

FwdBlocks blocks_of(const FwdStreamConfig& config, int keys) {
  const int end = (keys + config.block_n() - 1) / config.block_n();
  return {0, 0, keys / config.block_n(), end};
}

TEST(Sm90ForwardStream, SharedMemoryHoldsWhatTheLayoutSays) {
  for (const FwdStreamConfig& c : kFwdStreamConfigs) {
    EXPECT_TRUE(c.valid());
    EXPECT_EQ(c.q_bytes() % tile::kTileAlignment, 0);
    EXPECT_EQ(c.kv_bytes(c.block_n()) % tile::kTileAlignment, 0);
    EXPECT_EQ(c.kBarrierOffset % 8, 0);
    for (int keys = 1; keys <= 256; ++keys) {
      const FwdStreamLayout l = stream_layout(c, blocks_of(c, keys), keys);
      EXPECT_GE(l.q_slots, 3);  // a slot for each consumer
      EXPECT_LE(l.q_slots, c.kMaxQSlots);
      EXPECT_LE(l.pairs, c.kMaxPairs);
      EXPECT_LE(l.last_pairs, c.kMaxPairs);
      EXPECT_LE(l.q_slots * c.q_bytes() + l.pairs * 2 * c.kv_bytes(c.block_n()) +
                    l.last_pairs * 2 * c.kv_bytes(l.last_keys),
                c.kTileBytes);
      // All keys of a head at once, which a tile needs.
      const int last = l.last_pairs > 0 ? l.last_keys : 0;
      EXPECT_GE(l.pairs * c.block_n() + last, keys) << keys;
      const int in_last_block = keys - (keys - 1) / c.block_n() * c.block_n();
      if (l.last_pairs > 0) {
        EXPECT_GE(last, in_last_block);
        EXPECT_LT(last, c.block_n());
        EXPECT_EQ(c.kv_bytes(last) % tile::kTileAlignment, 0);
      }
    }
  }
}

// The layouts that were measured: benchmarks/results/sm90_forward_stream_2026-12-01.json.
TEST(Sm90ForwardStream, LayoutsAreThoseThatWereMeasured) {
  const auto layout = [](FwdStreamVariant variant, int keys) {
    const FwdStreamConfig& c = fwd_stream_config(variant);
    const FwdStreamLayout l = stream_layout(c, blocks_of(c, keys), keys);
    return std::array<int, 4>{l.q_slots, l.pairs, l.last_pairs, l.last_keys};
  };
  using Layout = std::array<int, 4>;
  EXPECT_EQ(layout(FwdStreamVariant::kD128, 256), (Layout{3, 4, 2, 16}));
  EXPECT_EQ(layout(FwdStreamVariant::kD128, 128), (Layout{4, 2, 2, 48}));
  EXPECT_EQ(layout(FwdStreamVariant::kD96, 256), (Layout{4, 2, 2, 64}));
  EXPECT_EQ(layout(FwdStreamVariant::kD64, 128), (Layout{4, 3, 0, 0}));
  EXPECT_EQ(layout(FwdStreamVariant::kD64, 256), (Layout{4, 4, 0, 0}));
  EXPECT_EQ(layout(FwdStreamVariant::kD64, 197), (Layout{4, 2, 2, 80}));
}

// H200, the fastest of what can run: benchmarks/results/sm90_forward_mid_2026-11-30.json and
// sm90_forward_stream_2026-12-01.json.
TEST(Sm90ForwardStream, RunsWhereItIsFastest) {
  for (const bool causal : {false, true}) {
    for (const FwdVariant wide : {FwdVariant::kD96, FwdVariant::kD128}) {
      for (const std::int64_t length : {80, 100, 128, 197, 256}) {
        EXPECT_TRUE(streams(problem(64, length, length, causal), wide)) << length;
      }
      EXPECT_TRUE(streams(problem(64, 77, 256, causal), wide));
      EXPECT_TRUE(streams(problem(64, 256, 77, causal), wide));
      EXPECT_TRUE(streams(problem(2, 4096, 77, causal), wide));
      EXPECT_EQ(streams(problem(4, 4096, 256, causal), wide), wide == FwdVariant::kD128 && !causal);
      EXPECT_EQ(streams(problem(100, 160, 160, causal), wide), causal);
      EXPECT_EQ(streams(problem(256, 64, 64, causal), wide), wide == FwdVariant::kD96);
      EXPECT_FALSE(streams(problem(51, 320, 320, causal), wide));
    }
    EXPECT_FALSE(streams(problem(256, 64, 64, causal), FwdVariant::kD64));
    EXPECT_EQ(streams(problem(128, 128, 128, causal), FwdVariant::kD64), !causal);
    EXPECT_TRUE(streams(problem(2, 4096, 77, causal), FwdVariant::kD64));
    EXPECT_FALSE(streams(problem(43, 384, 384, causal), FwdVariant::kD64));
    for (const FwdVariant other : {FwdVariant::kD192V128, FwdVariant::kD192, FwdVariant::kD256}) {
      EXPECT_FALSE(streams(problem(64, 256, 256, causal), other));
    }
  }
}

// Its tiles are those of sequences of one length, which the copy engine can address.
TEST(Sm90ForwardStream, RefusesWhatItCannotDo) {
  const Problem served = problem(64, 256, 256);
  ASSERT_TRUE(streams(served, FwdVariant::kD128));
  for (bool Problem::*const what :
       {&Problem::packed, &Problem::has_seqused_q, &Problem::has_seqused_kv, &Problem::has_q_offset,
        &Problem::unaligned_q, &Problem::unaligned_k, &Problem::unaligned_v}) {
    Problem p = served;
    p.*what = true;
    EXPECT_FALSE(streams(p, FwdVariant::kD128));
  }
  EXPECT_FALSE(streams(problem(64, 256, 0), FwdVariant::kD128));
}

TEST(Sm90ForwardStream, ChunksHoldEveryTileOnce) {
  for (const std::int64_t batch : {1, 8, 64, 1000}) {
    for (const std::int64_t rows : {1, 64, 65, 256, 4096, 100000}) {
      for (const std::int64_t heads_kv : {1, 4, 16}) {
        Problem p = problem(batch, rows, 77);
        p.heads_kv = heads_kv;
        const StreamChunks c = stream_chunks(p, kSlots);
        EXPECT_EQ(c.num_tiles, 16 / heads_kv * ((rows + 63) / 64));
        EXPECT_GE(c.of_head * c.tiles, c.num_tiles);
        EXPECT_LT((c.of_head - 1) * c.tiles, c.num_tiles);
        EXPECT_EQ(c.count, batch * heads_kv * c.of_head);
      }
    }
  }
  // One head of all keys is loaded once, unless that leaves multiprocessors idle.
  EXPECT_EQ(stream_chunks(problem(64, 256, 256), kSlots).tiles, 4);
  EXPECT_EQ(stream_chunks(problem(1, 256, 256), kSlots).tiles, 1);
}

}  // namespace
}  // namespace flashgrad::sm90
