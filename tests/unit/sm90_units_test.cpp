// SPDX-License-Identifier: Apache-2.0
// How units pass through the backward's main kernel (cuda/sm90/unit_pipeline.hpp), simulated on the
// host with the kernels' own tiles and shares: with any number of CTAs at a time nobody waits for
// ever; every block of every unit is prepared before it is read, added to in a slot that nobody
// else uses, and finished once, after the last addition.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/unit_pipeline.hpp"

namespace flashgrad::sm90 {
namespace {

constexpr int kBlockN = 128;

struct Setting {
  int batch;
  int heads_kv;
  int group;
  int seqlen_q;
  int seqlen_kv;
  int section;
  int multiprocessors;  // that the plan is for
  int resident;         // CTAs at a time
};

struct Unit {
  int prepared = 0;  // tiles that have
  int added = 0;
  int finished = 0;
  std::vector<int> prepared_blocks;
  std::vector<int> finished_blocks;
};

struct Running {
  int tile;
  int unit;
  int share;
  int phase = 0;
};

void simulate(const Setting& s, unsigned seed) {
  SCOPED_TRACE(testing::Message() << s.batch << " x " << s.heads_kv << " x " << s.group << ", "
                                  << s.seqlen_q << " x " << s.seqlen_kv << ", section "
                                  << s.section << ", " << s.multiprocessors << " SMs, "
                                  << s.resident << " resident");
  BwdParams p{};
  p.sequences.batch = s.batch;
  p.sequences.rows_q = s.seqlen_q;
  p.sequences.rows_kv = s.seqlen_kv;
  p.heads_kv = s.heads_kv;
  p.group = s.group;
  p.num_units = std::int64_t{s.batch} * s.heads_kv;
  p.num_kv_blocks = (s.seqlen_kv + kBlockN - 1) / kBlockN;
  p.section = s.section;
  const int num_units = static_cast<int>(p.num_units);
  const int tiles = static_cast<int>(p.num_kv_blocks);
  const int blocks = s.group * ((s.seqlen_q + kBlockM - 1) / kBlockM);
  const UnitPipeline pipeline =
      plan_units(num_units, tiles, s.section, s.section == 1, s.multiprocessors);
  ASSERT_GT(pipeline.lag, 0);

  std::vector<Unit> units(static_cast<std::size_t>(num_units));
  const auto unit = [&](int u) -> Unit& { return units.at(static_cast<std::size_t>(u)); };
  for (int u = 0; u < num_units; ++u) {
    unit(u).prepared_blocks.assign(static_cast<std::size_t>(blocks), u < pipeline.lead ? 1 : 0);
    unit(u).finished_blocks.assign(static_cast<std::size_t>(blocks), 0);
  }
  // By slot and block: whose sums it holds; -1: zeros.
  std::vector<std::vector<int>> slots(static_cast<std::size_t>(pipeline.slots),
                                      std::vector<int>(static_cast<std::size_t>(blocks), -1));
  const auto slot = [&](int u) -> std::vector<int>& {
    return slots.at(static_cast<std::size_t>(u % pipeline.slots));
  };
  const auto finish = [&](int u, int block) {
    const auto b = static_cast<std::size_t>(block);
    EXPECT_EQ(unit(u).added, tiles);
    EXPECT_EQ(slot(u)[b], u);
    if (pipeline.reused(u, num_units)) {
      slot(u)[b] = -1;
    }
    ++unit(u).finished_blocks[b];
  };
  // Does the next thing that the tile has to do, if it need not wait.
  const auto advance = [&](Running& t) {
    const UnitShare share = unit_share(t.share, tiles, blocks);
    const int later = t.unit + pipeline.lead;
    const int earlier = t.unit - pipeline.lag;
    const int before = t.unit - pipeline.slots;
    switch (t.phase) {
      case 0:
        if (later < num_units) {
          for (int b = share.begin; b < share.end; ++b) {
            ++unit(later).prepared_blocks[static_cast<std::size_t>(b)];
          }
          ++unit(later).prepared;
        }
        break;
      case 1:
        if (earlier >= 0) {
          if (unit(earlier).added < tiles) {
            return false;
          }
          for (int b = share.begin; b < share.end; ++b) {
            finish(earlier, b);
          }
          ++unit(earlier).finished;
        }
        break;
      case 2:
        if ((before >= 0 && unit(before).finished < tiles) ||
            (t.unit >= pipeline.lead && unit(t.unit).prepared < tiles)) {
          return false;
        }
        for (int b = 0; b < blocks; ++b) {
          const auto at = static_cast<std::size_t>(b);
          EXPECT_EQ(unit(t.unit).prepared_blocks[at], 1);
          EXPECT_TRUE(slot(t.unit)[at] == -1 || slot(t.unit)[at] == t.unit);
          slot(t.unit)[at] = t.unit;
        }
        break;
      default:
        ++unit(t.unit).added;
    }
    ++t.phase;
    return true;
  };

  std::mt19937 random(seed);
  std::vector<Running> running;
  int next = 0;
  while (next < num_units * tiles || !running.empty()) {
    while (next < num_units * tiles && static_cast<int>(running.size()) < s.resident) {
      const KeyTile tile = key_tile<kBlockN, 1>(p, next);
      running.push_back(
          {next, tile.batch_index * s.heads_kv + tile.head_kv, tile.kv_row / kBlockN});
      ++next;
    }
    std::shuffle(running.begin(), running.end(), random);
    const auto moved =
        std::find_if(running.begin(), running.end(), [&](Running& t) { return advance(t); });
    ASSERT_NE(moved, running.end()) << "everybody waits, " << next << " tiles have started";
    if (moved->phase == 4) {
      running.erase(moved);
    }
  }
  for (int u = num_units - pipeline.lag; u < num_units; ++u) {  // what the finish kernel does
    for (int b = 0; b < blocks; ++b) {
      finish(u, b);
    }
  }
  for (const Unit& u : units) {
    EXPECT_EQ(u.prepared_blocks, std::vector<int>(static_cast<std::size_t>(blocks), 1));
    EXPECT_EQ(u.finished_blocks, std::vector<int>(static_cast<std::size_t>(blocks), 1));
  }
}

TEST(Sm90Units, PassThroughInAnyOrder) {
  const Setting settings[] = {
      {16, 16, 1, 1024, 1024, 1, 132, 132}, {16, 16, 1, 1024, 1024, 8, 132, 132},
      {10, 4, 4, 300, 260, 3, 13, 13},      {30, 3, 1, 64, 700, 7, 20, 20},
      {11, 5, 2, 900, 100, 1, 4, 4},        {50, 1, 8, 129, 513, 2, 16, 16}};
  for (Setting s : settings) {
    // Fewer may run than the plan counts on, and more.
    for (const int resident : {1, 2, s.multiprocessors, 3 * s.multiprocessors}) {
      s.resident = resident;
      simulate(s, static_cast<unsigned>(resident));
    }
  }
}

// Nearly as many tiles as run at a time start between the last tile of a unit and the first that
// waits for it, so that it seldom does.
TEST(Sm90Units, FarEnoughApart) {
  for (const bool equal_tiles : {true, false}) {
    for (const int tiles : {1, 2, 8, 32, 128}) {
      const int num_units = 1000;
      BwdParams p{};
      p.sequences.batch = num_units;
      p.sequences.rows_q = 64;
      p.sequences.rows_kv = tiles * kBlockN;
      p.heads_kv = p.group = 1;
      p.num_units = num_units;
      p.num_kv_blocks = tiles;
      p.section = unit_section(tiles, equal_tiles, 132);
      const UnitPipeline pipeline = plan_units(num_units, tiles, p.section, equal_tiles, 132);
      std::vector<int> first(num_units, num_units * tiles);
      std::vector<int> last(num_units, 0);
      for (int i = 0; i < num_units * tiles; ++i) {
        const auto u = static_cast<std::size_t>(key_tile<kBlockN, 1>(p, i).batch_index);
        first[u] = std::min(first[u], i);
        last[u] = std::max(last[u], i);
      }
      const int shares = pipeline.slots - pipeline.lag;
      for (int u = pipeline.slots; u < num_units; ++u) {
        const auto at = [u](int distance) { return static_cast<std::size_t>(u - distance); };
        EXPECT_GE(first[at(0)] - last[at(pipeline.lag)], equal_tiles ? 132 : 115) << tiles;
        EXPECT_GE(first[at(0)] - last[at(pipeline.lead)], equal_tiles ? 132 : 115) << tiles;
        EXPECT_GE(first[at(0)] - last[at(shares)], tiles >= 32 ? 3 : 16) << tiles;
      }
      EXPECT_LE(pipeline.slots * tiles, 6 * 132 + 2 * tiles) << "more than the L2 may hold";
    }
  }
}

TEST(Sm90Units, FewUnitsHaveASlotEach) {
  const UnitPipeline pipeline = plan_units(16, 8, 1, true, 132);
  EXPECT_EQ(pipeline.slots, 16);
  EXPECT_EQ(pipeline.lag, 0);
  EXPECT_EQ(pipeline.lead, 0);
}

}  // namespace
}  // namespace flashgrad::sm90
