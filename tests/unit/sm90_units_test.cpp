// SPDX-License-Identifier: Apache-2.0
// How units pass through the backward's main kernel (cuda/sm90/unit_pipeline.hpp), simulated on the
// host with the kernel's own order of tiles: with any number of CTAs at a time nobody waits for
// ever; every unit is prepared before it is read, added to in a slot that nobody else uses, and
// finished once, after the last addition and, if there was none, when the slot is its own.
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
  int units;
  int tiles;  // of a unit
  int section;
  int multiprocessors;  // that the plan is for
};

BwdParams params(const Setting& s) {
  BwdParams p{};
  p.sequences.batch = s.units;
  p.sequences.rows_q = kBlockM;
  p.sequences.rows_kv = s.tiles * kBlockN;
  p.heads_kv = p.group = 1;
  p.num_units = s.units;
  p.num_kv_blocks = s.tiles;
  p.section = s.section;
  return p;
}

// What a CTA does: it serves unit `unit`, or computes a tile of it.
struct Work {
  bool serves;
  int unit;
  int part = 0;
};

std::vector<Work> works_in_order(const Setting& s, int lag, int last_parts) {
  const BwdParams p = params(s);
  std::vector<Work> works;
  for (int i = 0; i < s.units * (s.tiles + 1) + lag * last_parts; ++i) {
    const ServedOrder order(i, s.section, s.tiles, s.units, last_parts);
    works.push_back(order.serves()
                        ? Work{true, static_cast<int>(order.unit), static_cast<int>(order.part)}
                        : Work{false, served_place(p, order).span});
  }
  return works;
}

// Units whose keys no row sees: their tiles add nothing, and wait for nobody.
bool is_unseen(int unit) { return unit % 3 == 1; }

struct Unit {
  bool prepared = false;
  int added = 0;  // tiles that have
  int finished = 0;
};

void simulate(const Setting& s, int resident) {
  SCOPED_TRACE(testing::Message() << s.units << " units of " << s.tiles << ", section " << s.section
                                  << ", " << s.multiprocessors << " SMs, " << resident
                                  << " resident");
  const UnitPipeline pipeline =
      plan_units(s.units, s.tiles, s.section, s.section == 1, s.multiprocessors, 1);
  ASSERT_GT(pipeline.lag, 0);
  const std::vector<Work> works = works_in_order(s, pipeline.lag, pipeline.last_parts);

  std::vector<Unit> units(static_cast<std::size_t>(s.units));
  const auto unit = [&](int u) -> Unit& { return units.at(static_cast<std::size_t>(u)); };
  for (int u = 0; u < pipeline.lead; ++u) {
    unit(u).prepared = true;
  }
  std::vector<int> slots(static_cast<std::size_t>(pipeline.slots), -1);  // whose sums; -1: zeros
  const auto slot = [&](int u) -> int& {
    return slots.at(static_cast<std::size_t>(u % pipeline.slots));
  };
  // The slot of the unit is not another's any more.
  const auto has_slot = [&](int u) {
    const int before = u - pipeline.slots;
    return before < 0 || unit(before).finished > 0;
  };
  const auto finish = [&](int u) {
    EXPECT_EQ(unit(u).added, s.tiles);
    EXPECT_EQ(slot(u), is_unseen(u) ? -1 : u);
    if (pipeline.reused(u, s.units)) {
      slot(u) = -1;
    }
    ++unit(u).finished;
  };
  struct Running {
    Work work;
    int phase = 0;
  };
  // Does the next thing that the CTA has to do, unless it has to wait.
  const auto advance = [&](Running& r) {
    const int u = r.work.unit;
    if (r.work.serves) {
      if (r.phase == 0) {
        if (u + pipeline.lead < s.units) {
          unit(u + pipeline.lead).prepared = true;
        }
      } else if (u >= pipeline.lag) {
        if (unit(u - pipeline.lag).added < s.tiles || !has_slot(u - pipeline.lag)) {
          return false;
        }
        if (r.work.part == 0) {  // the others finish other blocks
          finish(u - pipeline.lag);
        }
      }
    } else if (r.phase == 0) {
      if (is_unseen(u)) {
        r.phase = 1;
        return true;
      }
      if (!unit(u).prepared || !has_slot(u)) {
        return false;
      }
      EXPECT_TRUE(slot(u) == -1 || slot(u) == u);
      slot(u) = u;
    } else {
      ++unit(u).added;
    }
    ++r.phase;
    return true;
  };

  std::mt19937 random(static_cast<unsigned>(resident));
  std::vector<Running> running;
  std::size_t next = 0;
  while (next < works.size() || !running.empty()) {
    while (next < works.size() && static_cast<int>(running.size()) < resident) {
      running.push_back({works[next++]});
    }
    std::shuffle(running.begin(), running.end(), random);
    const auto moved =
        std::find_if(running.begin(), running.end(), [&](Running& r) { return advance(r); });
    ASSERT_NE(moved, running.end()) << "everybody waits, " << next << " have started";
    if (moved->phase == 2) {
      running.erase(moved);
    }
  }
  for (const Unit& u : units) {
    EXPECT_EQ(u.finished, 1);
  }
}

TEST(Sm90Units, FindTheClustersOfTheirTiles) {
  for (const Setting& s : {Setting{41, 3, 3, 13}, Setting{90, 6, 7, 20}, Setting{5, 1, 2, 4}}) {
    const BwdParams p = params(s);
    for (int u = 0; u < s.units; ++u) {
      for (int block = 0; block < s.tiles; ++block) {
        const ServedOrder order(ServedOrder::cluster_of(u, block, s.section, s.tiles, s.units),
                                s.section, s.tiles, s.units, 1);
        ASSERT_FALSE(order.serves());
        const KeyTile tile = key_tile_at(p, {kBlockN, 1, false}, served_place(p, order), 0);
        EXPECT_EQ(tile.batch_index, u);
        EXPECT_EQ(tile.kv_row, block * kBlockN);
      }
    }
  }
}

TEST(Sm90Units, TheLastSectionTakesWhatIsLeft) {
  for (const auto& [units, last] : {std::pair{3, 3}, {4, 4}, {5, 5}, {8, 4}, {9, 5}, {23, 7}}) {
    int in_last = 0;
    for (int u = 0; u < units; ++u) {
      const ServedSection section(u / 4, 4, units);
      EXPECT_TRUE(section.begin <= u && u < section.begin + section.units);
      EXPECT_TRUE(section.units == 4 || section.begin + section.units == units);
      in_last += section.begin + section.units == units ? 1 : 0;
    }
    EXPECT_EQ(in_last, last) << units;
  }
}

TEST(Sm90Units, PassThroughInAnyOrder) {
  const Setting settings[] = {{256, 8, 1, 132}, {256, 8, 16, 132}, {64, 32, 4, 132},
                              {41, 3, 3, 13},   {90, 6, 7, 20},    {55, 1, 2, 4},
                              {48, 24, 5, 132}, {36, 12, 11, 132}};
  for (const Setting& s : settings) {
    // Fewer may run than the plan counts on, and more.
    for (const int resident : {1, 2, s.multiprocessors, 3 * s.multiprocessors}) {
      simulate(s, resident);
    }
  }
}

TEST(Sm90Units, EveryTileAndUnitHasOneCta) {
  const Setting s{41, 5, 4, 13};
  std::vector<int> tiles(41, 0);
  std::vector<int> served(41 + 7, 0);
  for (const Work& work : works_in_order(s, 7, 3)) {
    ++(work.serves ? served : tiles)[static_cast<std::size_t>(work.unit)];
  }
  EXPECT_EQ(tiles, std::vector<int>(41, 5));
  std::vector<int> expected(41 + 7, 1);
  std::fill(expected.begin() + 41, expected.end(), 3);
  EXPECT_EQ(served, expected);
}

// Nearly as many CTAs as run at a time start between the last tile of a unit and who waits for it,
// so that they seldom do.
TEST(Sm90Units, FarEnoughApart) {
  for (const bool equal_tiles : {true, false}) {
    for (const int tiles : {1, 2, 8, 32, 128}) {
      SCOPED_TRACE(tiles);
      Setting s{1000, tiles, 0, 132};
      s.section = static_cast<int>(unit_section(tiles, equal_tiles, s.multiprocessors));
      const UnitPipeline pipeline = plan_units(s.units, tiles, s.section, equal_tiles, 132, 1);
      const std::vector<Work> works = works_in_order(s, 0, 1);
      std::vector<int> first(1000, 1 << 30);
      std::vector<int> last(1000, 0);
      std::vector<int> served(1000, 0);
      for (int i = 0; i < static_cast<int>(works.size()); ++i) {
        const Work& work = works[static_cast<std::size_t>(i)];
        const auto u = static_cast<std::size_t>(work.unit);
        if (work.serves) {
          served[u] = i;
        } else {
          first[u] = std::min(first[u], i);
          last[u] = std::max(last[u], i);
        }
      }
      // But for the last section, which some wait for a little more.
      for (int u = pipeline.slots; u < s.units - 2 * s.section; ++u) {
        const auto at = [u](int distance) { return static_cast<std::size_t>(u - distance); };
        EXPECT_GE(served[at(0)] - last[at(pipeline.lag)], equal_tiles ? 132 : 100);
        EXPECT_GE(first[at(0)] - served[at(pipeline.lead)], 132);
        EXPECT_GE(first[at(0)] - served[at(pipeline.slots - pipeline.lag)], 33);
      }
      EXPECT_LE(pipeline.slots * tiles, 6 * 132 + 2 * tiles) << "more than the L2 may hold";
    }
  }
}

TEST(Sm90Units, FewUnitsHaveASlotEach) {
  const UnitPipeline pipeline = plan_units(16, 8, 1, true, 132, 1);
  EXPECT_EQ(pipeline.slots, 16);
  EXPECT_EQ(pipeline.lag, 0);
  EXPECT_EQ(pipeline.lead, 0);
}

}  // namespace
}  // namespace flashgrad::sm90
