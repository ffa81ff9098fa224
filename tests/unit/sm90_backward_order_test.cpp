// SPDX-License-Identifier: Apache-2.0
// The order in which the ordered backward kernels add dq (cuda/sm90/bwd_order.cuh), simulated on
// the host with the kernels' own tiles, walks and turns: nobody waits for ever, the first to a
// block finds it unwritten, exactly one cluster finishes a block and does so last, and the order of
// a sequence's additions does not depend on what lies beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include "cuda/sm90/key_tile.cuh"

namespace flashgrad::sm90 {
namespace {

constexpr int kBlockN = 128;
constexpr int kCluster = 2;
constexpr int kTurnKeys = kBlockN * kCluster;

struct Lengths {
  int q, kv;
};

struct Setting {
  BandMask mask;
  int group;
  int max_round;
  int section;
};

// For each query block of each sequence and head: the clusters that added, by their first key.
using Orders = std::vector<std::map<std::pair<int, int>, std::vector<int>>>;

// A cluster under way.
struct Running {
  KeyTile tile;
  StepWalk<true> walk;
  Turn turn;
  int step = 0;
};

// Runs all clusters, `slots` at a time, started in the order of their numbers.
Orders simulate(const Setting& setting, const std::vector<Lengths>& lengths, bool packed,
                int heads_kv, int slots) {
  std::vector<std::int32_t> cu_q = {0};
  std::vector<std::int32_t> cu_kv = {0};
  for (const Lengths& l : lengths) {
    cu_q.push_back(cu_q.back() + l.q);
    cu_kv.push_back(cu_kv.back() + l.kv);
  }
  const auto batch = static_cast<std::int64_t>(lengths.size());
  BwdParams p{};
  p.sequences.batch = batch;
  p.sequences.rows_q = packed ? cu_q.back() : lengths[0].q;
  p.sequences.rows_kv = packed ? cu_kv.back() : lengths[0].kv;
  p.sequences.mask = setting.mask;
  p.sequences.cu_seqlens_q = packed ? cu_q.data() : nullptr;
  p.sequences.cu_seqlens_kv = packed ? cu_kv.data() : nullptr;
  p.heads_kv = heads_kv;
  p.group = setting.group;
  p.num_units = (packed ? 1 : batch) * heads_kv;
  p.num_kv_blocks = num_blocks(packed, packed ? batch : 1, p.sequences.rows_kv, kTurnKeys);
  p.section = std::min<std::int64_t>(setting.section, p.num_units);
  p.max_round = setting.max_round;
  p.rows.num_blocks = num_blocks(packed, batch, p.sequences.rows_q, kBlockM);
  if (setting.max_round > 0) {
    p.round =
        rotation((lengths[0].q + kBlockM - 1) / kBlockM, p.num_kv_blocks, setting.max_round).round;
  }
  std::vector<PackedTile> order;
  auto total = static_cast<std::uint32_t>(p.num_units * p.num_kv_blocks);
  if (packed) {
    order = packed_order({.of_keys = true,
                          .last_block_first = false,
                          .tile_rows = kTurnKeys,
                          .heads = static_cast<std::uint32_t>(heads_kv),
                          .heads_per_key = 1,
                          .slots = static_cast<std::uint32_t>(slots),
                          .l2_rows = static_cast<std::uint32_t>(setting.section * 3000),
                          .class_shift = class_shift(p.sequences.rows_q),
                          .max_round = setting.max_round},
                         p.sequences);
    EXPECT_LE(order.size(), total);
    total = static_cast<std::uint32_t>(order.size());
  }
  const KeyTileForm form{kBlockN, kCluster, true};

  std::map<int, int> counters;   // by slot: the turn; absent: nothing yet
  std::map<int, bool> finished;  // by slot
  std::map<int, std::vector<int>> by_slot;
  std::deque<Running> running;
  std::int64_t next = 0;
  bool progress = true;
  while (progress) {
    progress = false;
    while (next < total && static_cast<int>(running.size()) < slots) {
      const auto index = static_cast<std::uint32_t>(next++);
      const PackedTile place = packed ? order[index] : tile_place(p, kTurnKeys, index);
      const KeyTile tile = key_tile_at(p, form, place, 0);
      const KeyTile peer = key_tile_at(p, form, place, 1);
      EXPECT_EQ(tile.num_steps, peer.num_steps);
      EXPECT_EQ(tile.m_start, peer.m_start);
      EXPECT_EQ(tile.turn, peer.turn);
      progress = true;
      if (tile.num_steps > 0) {
        running.push_back({tile, StepWalk<true>(tile, setting.group), Turn(tile)});
      }
    }
    for (std::size_t i = 0; i < running.size();) {
      Running& r = running[i];
      const int slot = r.walk.slot(p.rows, r.tile);
      // What prepare writes: the number of the first cluster that the block's rows reach.
      const auto span = span_of_block(p.sequences.cu_seqlens_q, batch, p.sequences.rows_q,
                                      r.tile.q_block + r.walk.m, kBlockM);
      const SequenceSpan sequence = sequence_span(p.sequences, span);
      const std::int64_t first_row = std::int64_t{r.walk.m} * kBlockM;
      const Range keys = sequence.band.kv_range(first_row, first_row + kBlockM);
      EXPECT_FALSE(keys.empty());
      const bool nothing_yet = counters.find(slot) == counters.end();
      const int counter = nothing_yet ? static_cast<int>(keys.begin / kTurnKeys) : counters[slot];
      if (counter != r.turn.value) {
        ++i;
        continue;
      }
      progress = true;
      EXPECT_FALSE(finished[slot]);
      counters[slot] = counter + 1;
      by_slot[slot].push_back(r.tile.kv_row - static_cast<int>(sequence.kv.begin));
      if (r.walk.advance()) {
        r.turn.advance(r.walk, r.tile);
      }
      if (++r.step == r.tile.num_steps) {
        const bool finishes = finishes_dq(r.tile);
        for (int head = r.tile.head_kv * setting.group; head < (r.tile.head_kv + 1) * setting.group;
             ++head) {
          for (int range = 0; range < 2; ++range) {
            for (int m = r.tile.finish_begin[range]; m < r.tile.finish_end[range]; ++m) {
              const int at = head * static_cast<int>(p.rows.num_blocks) + r.tile.q_block + m;
              EXPECT_FALSE(finished[at]);
              finished[at] = true;
            }
          }
        }
        EXPECT_TRUE(!finishes || finished[slot]) << "its last turn is not passed on";
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }
  EXPECT_EQ(next, total);
  EXPECT_TRUE(running.empty()) << "clusters wait for each other";

  Orders orders(lengths.size());
  for (std::int64_t b = 0; b < batch; ++b) {
    const SequenceSpan sequence = sequence_span(p.sequences, packed ? b + 1 : b);
    const auto first = first_block(p.sequences.cu_seqlens_q, batch, p.sequences.rows_q,
                                   packed ? b + 1 : b, kBlockM);
    for (int head = 0; head < heads_kv * setting.group; ++head) {
      for (int m = 0; m * kBlockM < sequence.band.seqlen_q; ++m) {
        const int slot = head * static_cast<int>(p.rows.num_blocks) + static_cast<int>(first) + m;
        const Range keys =
            sequence.band.kv_range(std::int64_t{m} * kBlockM, (m + std::int64_t{1}) * kBlockM);
        EXPECT_EQ(finished[slot], !keys.empty());
        const std::int64_t clusters =
            keys.empty() ? 0 : (keys.end - 1) / kTurnKeys - keys.begin / kTurnKeys + 1;
        EXPECT_EQ(static_cast<std::int64_t>(by_slot[slot].size()), clusters);
        orders[static_cast<std::size_t>(b)][{head, m}] = by_slot[slot];
      }
    }
  }
  return orders;
}

const BandMask kFull{};
const BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};

TEST(Sm90BackwardOrder, EveryMaskFinishesEveryBlockOnceAndLast) {
  const BandMask masks[] = {kFull,
                            kCausal,
                            {kUnbounded, 0, Alignment::kTopLeft},
                            {400, 100, Alignment::kBottomRight},
                            {700, kUnbounded, Alignment::kBottomRight},
                            {-128, 864, Alignment::kTopLeft},
                            {-1, -1, Alignment::kBottomRight}};
  const Lengths all[] = {{4096, 4096}, {1024, 1024}, {1000, 1300}, {64, 5000},  {5000, 64},
                         {1, 1},       {2500, 700},  {700, 2500},  {8192, 2304}};
  for (const BandMask& mask : masks) {
    for (const Lengths& lengths : all) {
      for (const int max_round : {1, 3, 32}) {
        const bool full = mask == kFull;
        const Setting setting{mask, 1, full ? max_round : 0, 2};
        simulate(setting, {lengths, lengths, lengths}, false, 1, full ? max_round : 1);
        if (!full) {
          break;
        }
      }
    }
  }
}

TEST(Sm90BackwardOrder, GroupsOfQueryHeads) {
  simulate({kFull, 3, 8, 4}, {{3000, 3000}, {3000, 3000}}, false, 2, 8);
  simulate({kCausal, 4, 0, 4}, {{3000, 3000}, {3000, 3000}}, false, 2, 1);
  simulate({kCausal, 3, 0, 4}, {{100, 100}, {3000, 2000}, {700, 900}}, true, 4, 1);
}

TEST(Sm90BackwardOrder, TheSameAloneAndInABatch) {
  const std::vector<Lengths> lengths = {{2048, 2048}, {0, 300}, {333, 1500}, {4100, 3000}, {70, 0}};
  for (const BandMask& mask : {kFull, kCausal, BandMask{600, 10, Alignment::kBottomRight}}) {
    const Setting setting{mask, 1, mask == kFull ? 8 : 0, 2};
    const Orders packed = simulate(setting, lengths, true, 2, 8);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i].q > 0) {
        EXPECT_EQ(simulate(setting, {lengths[i]}, false, 2, 9)[0], packed[i]);
      }
    }
  }
}

TEST(Sm90BackwardOrder, RotatedClustersStartApart) {
  const Rotation r = rotation(256, 64, 32);
  EXPECT_EQ(r.segment, 8);
  EXPECT_EQ(r.round, 32);
  EXPECT_EQ(rotation(256, 64, 28).round, 16);  // fewer SMs
  EXPECT_EQ(rotation(16, 5, 32).round, 2);
  EXPECT_EQ(rotation(16, 4, 32).round, 1);  // few
  EXPECT_EQ(rotation(512, 1, 32).round, 1);
}

}  // namespace
}  // namespace flashgrad::sm90
