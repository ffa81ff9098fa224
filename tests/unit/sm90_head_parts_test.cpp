// SPDX-License-Identifier: Apache-2.0
// Key heads whose query heads are divided among tiles (bwd_plan.hpp): into how many parts, and that
// each part reads its own keys.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>

#include "cuda/sm90/bwd_plan.hpp"
#include "cuda/sm90/key_tile.cuh"

namespace flashgrad::sm90 {
namespace {

constexpr BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};
constexpr int kMultiprocessors = 132;

Problem problem(std::int64_t batch, std::int64_t seqlen, std::int64_t heads_q,
                std::int64_t heads_kv) {
  Problem p;
  p.batch = batch;
  p.seqlen_q = p.seqlen_kv = p.max_seqlen_q = p.max_seqlen_kv = seqlen;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.head_dim = p.head_dim_v = 128;
  p.wants_dq = p.wants_dk = p.wants_dv = true;
  p.mask = kCausal;
  return p;
}

// Every query head walks each block of its own key head's keys once, and no other's.
TEST(HeadParts, QueryHeadsMeetTheirOwnKeyHead) {
  const Problem whole = problem(1, 1000, 12, 2);
  for (const std::int64_t parts : {1, 2, 3, 6}) {
    const Problem p = divide_heads(whole, parts);
    BwdParams params{};
    params.sequences.batch = p.batch;
    params.sequences.rows_q = params.sequences.rows_kv = p.seqlen_q;
    params.sequences.mask = p.mask;
    params.heads_kv = p.heads_kv;
    params.group = p.group();
    RowStatistics rows{};
    rows.num_blocks = 16;
    std::map<std::int64_t, int> visits;  // of a query head, its block and a key block
    for (int head = 0; head < p.heads_kv; ++head) {
      for (int block = 0; block < 8; ++block) {
        const KeyTile tile = key_tile_at(params, {128, 1, false, static_cast<std::int32_t>(parts)},
                                         {0, block, head}, 0);
        StepWalk<false> walk(tile, static_cast<int>(p.group()));
        for (int step = 0; step < tile.num_steps; ++step) {
          EXPECT_EQ(walk.head / whole.group(), tile.head_loaded);
          ++visits[walk.slot(rows, tile) * std::int64_t{8} + block];
          walk.advance();
        }
      }
    }
    // Key block i of 128 is seen from query block 2 i on.
    EXPECT_EQ(visits.size(), 12U * (16 + 14 + 12 + 10 + 8 + 6 + 4 + 2)) << parts;
    for (const auto& [at, count] : visits) {
      EXPECT_EQ(count, 1) << at;
    }
  }
}

TEST(HeadParts, DivideGroupsOnlyWhereTilesAreFew) {
  const auto parts = [](const Problem& p) { return head_parts(p, kMultiprocessors); };
  EXPECT_EQ(parts(problem(1, 1024, 16, 16)), 1);
  EXPECT_GT(parts(problem(1, 8192, 8, 1)), 1);
  EXPECT_GT(parts(problem(4, 4096, 16, 1)), 1);
  // Rows of docs/performance.md that have tiles enough.
  EXPECT_EQ(parts(problem(4, 4096, 16, 4)), 1);
  EXPECT_EQ(parts(problem(1, 16384, 16, 4)), 1);
  EXPECT_EQ(parts(problem(64, 4096, 8, 1)), 1);
  Problem only_dq = problem(1, 8192, 8, 1);
  only_dq.wants_dk = only_dq.wants_dv = false;
  EXPECT_EQ(parts(only_dq), 1);
  Problem wide = problem(1, 8192, 8, 1);
  wide.head_dim = 256;
  EXPECT_EQ(parts(wide), 1);
  // 2^32 rows of key heads, which the sum of the parts does not count.
  Problem many = problem(8, std::int64_t{1} << 29, 8, 1);
  many.deterministic = true;
  EXPECT_EQ(parts(many), 1);
  many.batch = 7;
  EXPECT_GT(parts(many), 1);
  for (const std::int64_t group : {2, 3, 8, 12, 71}) {
    for (const std::int64_t seqlen : {1, 128, 1000, 8192, 100000}) {
      for (const bool deterministic : {false, true}) {
        Problem p = problem(2, seqlen, 2 * group, 2);
        p.deterministic = deterministic;
        EXPECT_EQ(group % parts(p), 0) << group << " " << seqlen;
      }
    }
  }
}

// The order in which a deterministic call adds dk and dv.
TEST(HeadParts, FollowFromTheHeadsAloneIfDeterministic) {
  for (const auto& [heads_q, heads_kv] : {std::pair{8, 1}, {16, 2}, {32, 8}, {9, 3}}) {
    Problem p = problem(1, 128, heads_q, heads_kv);
    p.deterministic = true;
    const std::int64_t alone = head_parts(p, kMultiprocessors);
    for (const std::int64_t batch : {1, 7, 300}) {
      for (const std::int64_t seqlen : {64, 5000, 100000}) {
        for (const bool packed : {false, true}) {
          Problem other = problem(batch, seqlen, heads_q, heads_kv);
          other.deterministic = true;
          other.packed = packed;
          EXPECT_EQ(head_parts(other, kMultiprocessors), alone);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashgrad::sm90
