// SPDX-License-Identifier: Apache-2.0
// Schedules: every tile once, bounds, turns, and what the orders cost.
#include "plan/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

#include "plan/pictures.hpp"

namespace flashgrad::plan {
namespace {

const BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};

ScheduleProblem causal_problem(std::int64_t seqlen, std::int64_t heads, std::int64_t section) {
  ScheduleProblem problem;
  problem.seqlen_q = problem.seqlen_kv = seqlen;
  problem.heads_q = problem.heads_kv = heads;
  problem.mask = kCausal;
  problem.section = section;
  return problem;
}

std::int64_t total_steps(const std::vector<WorkTile>& tiles) {
  std::int64_t steps = 0;
  for (const WorkTile& tile : tiles) {
    steps += tile.steps;
  }
  return steps;
}

TEST(PlanSchedule, EveryPolicyRunsEveryTileOnce) {
  for (const bool backward : {false, true}) {
    ScheduleProblem problem = causal_problem(2048, 6, 4);
    problem.backward = backward;
    std::int64_t steps = 0;
    for (const Policy& policy : policies(backward)) {
      if (policy.serves) {
        continue;  // a few heads are not (ServedUnits)
      }
      const std::vector<WorkTile> tiles = launch_order(problem, policy, {});
      std::set<std::pair<std::int64_t, std::int64_t>> seen;
      for (const WorkTile& tile : tiles) {
        seen.emplace(tile.unit, tile.first_row);
      }
      EXPECT_EQ(seen.size(), tiles.size()) << policy.name;
      EXPECT_EQ(tiles.size(), 6U * 2048 / 128) << policy.name;
      steps = steps == 0 ? total_steps(tiles) : steps;
      EXPECT_EQ(total_steps(tiles), steps) << policy.name;
    }
  }
}

// Causal, 8 key blocks of 128: block n is seen by query blocks 2n to 15.
TEST(PlanSchedule, StepsAreTheVisibleBlocks) {
  const ScheduleProblem problem = causal_problem(1024, 1, 1);
  const std::vector<WorkTile> tiles =
      launch_order(problem, find_policy(true, "natural"), {.keys = 128});
  ASSERT_EQ(tiles.size(), 8U);
  for (std::int64_t n = 0; n < 8; ++n) {
    EXPECT_EQ(tiles[static_cast<std::size_t>(n)].steps, 16 - 2 * n);
  }
}

TEST(PlanSchedule, TimesAreExactWithoutTurns) {
  const ScheduleProblem problem = causal_problem(1024, 1, 1);
  const Policy& policy = find_policy(true, "natural");
  const std::vector<WorkTile> tiles = launch_order(problem, policy, {.keys = 128});
  const Machine one{.processors = 1, .step_cycles = 10, .tile_cycles = 3};
  const Timeline alone = simulate(problem, tiles, policy, one);
  EXPECT_DOUBLE_EQ(alone.makespan, 72 * 10 + 8 * 3);
  EXPECT_DOUBLE_EQ(alone.idle, 0);
  EXPECT_EQ(alone.peak_heads, 1);
  const Timeline wide =
      simulate(problem, tiles, policy, {.processors = 8, .step_cycles = 10, .tile_cycles = 3});
  EXPECT_DOUBLE_EQ(wide.makespan, 163);
  EXPECT_NEAR(wide.idle, 1 - (72 * 10 + 8 * 3) / (8 * 163.0), 1e-12);
}

// Longest first inside sections beats one head after the other from the short end; the opposite
// order has the longest tail.
TEST(PlanSchedule, LongestFirstShortensTheTail) {
  ScheduleProblem problem = causal_problem(4096, 16, 4);
  const TileSize pair{.cluster = 2};
  const Machine machine{.processors = 66};
  const auto makespan = [&](const char* name) {
    const Policy& policy = find_policy(true, name);
    return simulate(problem, launch_order(problem, policy, pair), policy, machine).makespan;
  };
  EXPECT_LT(makespan("sections"), makespan("turns-shortest-swizzled"));
  problem.backward = false;
  const auto forward = [&](const char* name) {
    const Policy& policy = find_policy(false, name);
    return simulate(problem, launch_order(problem, policy, {}), policy, {.processors = 132})
        .makespan;
  };
  EXPECT_LT(forward("sections"), forward("natural"));
}

// FlashAttention-4's deterministic order (85 to 90 % of the free speed on a B200) never waits, but
// its longest tiles end last; longest first, against the order of the query blocks, comes closer.
TEST(PlanSchedule, WhereDeterminismLosesItsTime) {
  const ScheduleProblem problem = causal_problem(16384, 16, 4);
  const auto run = [&](const char* name, double turn_cycles) {
    const Policy& policy = find_policy(true, name);
    return simulate(problem, launch_order(problem, policy, {.cluster = 2}), policy,
                    {.processors = 74,
                     .step_cycles = 1344,
                     .signal_cycles = 700,
                     .turn_cycles = turn_cycles,
                     .jitter = 0.1,
                     .processor_spread = 0.02});
  };
  const double free = run("sections", 0).makespan;
  const Timeline shortest = run("turns-shortest-swizzled", 0);
  EXPECT_NEAR(shortest.waiting, 0, 1e-9);
  EXPECT_LT(free / shortest.makespan, 0.96);
  EXPECT_GT(free / shortest.makespan, 0.93);
  // With a lock and a fence of 100 cycles in each step of 64 queries.
  EXPECT_LT(free / run("turns-shortest-swizzled", 100).makespan, 0.90);
  EXPECT_GT(free / run("turns-shortest-swizzled", 100).makespan, 0.85);
  const Timeline longest = run("turns-sm90", 0);
  EXPECT_GT(longest.waiting, 0);
  EXPECT_GT(free / longest.makespan, 0.99);
  // Turns in ascending order, against the way the tiles walk.
  EXPECT_LT(free / run("turns-natural", 0).makespan, 0.7);
}

TEST(PlanSchedule, SectionsBoundTheWorkingSet) {
  ScheduleProblem problem = causal_problem(4096, 32, 4);
  const Policy& policy = find_policy(true, "sections");
  const Timeline four =
      simulate(problem, launch_order(problem, policy, {}), policy, {.processors = 132});
  problem.section = 32;
  const Timeline all =
      simulate(problem, launch_order(problem, policy, {}), policy, {.processors = 132});
  EXPECT_LT(four.peak_heads, all.peak_heads);
  EXPECT_EQ(all.peak_heads, 32);
}

TEST(PlanSchedule, PackedBatchesSortedByWork) {
  ScheduleProblem problem = causal_problem(0, 4, 4);
  problem.packed_q = {128, 256, 512, 384, 128, 4096};
  problem.packed_kv = problem.packed_q;
  for (const std::int32_t length : problem.packed_q) {
    problem.seqlen_q += length;
  }
  problem.seqlen_kv = problem.seqlen_q;
  const Machine machine{.processors = 132};
  const auto run = [&](const char* name) {
    const Policy& policy = find_policy(true, name);
    const std::vector<WorkTile> tiles = launch_order(problem, policy, {});
    EXPECT_EQ(tiles.size(), 4U * (1 + 2 + 4 + 3 + 1 + 32));
    return simulate(problem, tiles, policy, machine).makespan;
  };
  EXPECT_LE(run("longest-first"), run("natural"));
}

// The benchmark's packed batch (benchmarks/cuda/rows.cpp): as the kernels order it, little is idle.
TEST(PlanSchedule, PackedBatchesInTheKernelsOrder) {
  ScheduleProblem problem = causal_problem(0, 16, 2);
  problem.packed_q = {1,   1459, 479, 3,   26, 17,   128,  659, 1, 1,  1240, 15,
                      470, 1,    16,  285, 3,  6425, 3218, 1,   1, 41, 1894};
  problem.packed_kv = problem.packed_q;
  for (const std::int32_t length : problem.packed_q) {
    problem.seqlen_q += length;
  }
  problem.seqlen_kv = problem.seqlen_q;
  const Machine machine{.processors = 132, .step_cycles = 10, .tile_cycles = 30};
  for (const bool backward : {false, true}) {
    problem.backward = backward;
    const auto run = [&](const char* name) {
      const Policy& policy = find_policy(backward, name);
      const TileSize tile{.rows = 192, .keys = backward ? 128 : 80};
      return simulate(problem, launch_order(problem, policy, tile), policy, machine);
    };
    const Timeline kernels = run("sections");
    EXPECT_LT(kernels.idle, 0.02);
    EXPECT_LT(kernels.makespan, run("natural").makespan);
    EXPECT_EQ(kernels.intervals.size(), run("natural").intervals.size());
  }
}

// With turns, no order of events may change the order of additions: it is the same for machines of
// any size and speed.
TEST(PlanSchedule, TurnsFixTheOrderOfAdditions) {
  const ScheduleProblem problem = causal_problem(2048, 4, 4);
  for (const Policy& policy : policies(true)) {
    if (policy.turns == Policy::Turns::kFree || policy.turns == Policy::Turns::kPlanned) {
      continue;
    }
    const std::vector<WorkTile> tiles = launch_order(problem, policy, {});
    std::vector<std::vector<std::size_t>> orders;
    for (const Machine& machine :
         {Machine{.processors = 7}, Machine{.processors = 132, .jitter = 0.3},
          Machine{.processors = 30, .signal_cycles = 500, .processor_spread = 0.1}}) {
      const Timeline timeline = simulate(problem, tiles, policy, machine);
      ASSERT_FALSE(timeline.deadlock) << policy.name;
      EXPECT_EQ(timeline.intervals.size(), tiles.size());
      // Additions to the last query block of head 0, which every tile of the head visits.
      std::vector<std::pair<double, std::size_t>> additions;
      std::size_t first = 0;
      for (std::size_t t = 0; t < tiles.size(); ++t) {
        const auto steps = static_cast<std::size_t>(tiles[t].steps);
        if (tiles[t].head == 0) {
          const bool descends = policy.walk == Policy::Walk::kDescending;
          additions.emplace_back(timeline.add_times[first + (descends ? 0 : steps - 1)], t);
        }
        first += steps;
      }
      std::sort(additions.begin(), additions.end());
      std::vector<std::size_t> order;
      for (const auto& [time, tile] : additions) {
        order.push_back(tile);
      }
      orders.push_back(order);
    }
    EXPECT_EQ(orders[0], orders[1]) << policy.name;
    EXPECT_EQ(orders[0], orders[2]) << policy.name;
  }
}

// On full masks the kernel's tiles start apart, in rounds. A second round of the same head beside
// the first waits for all of it, so a section has to have enough heads to fill the processors with
// first rounds; and with fewer processors than a round nothing would ever end.
TEST(PlanSchedule, RotatingTilesNeedSectionsThatFillTheProcessors) {
  ScheduleProblem problem = causal_problem(8192, 16, 4);
  problem.mask = {};
  const Policy& policy = find_policy(true, "turns-sm90");
  const TileSize pair{.cluster = 2};
  const std::vector<WorkTile> tiles = launch_order(problem, policy, pair);
  std::map<std::int64_t, std::set<std::int64_t>> turns;
  for (const WorkTile& tile : tiles) {
    ASSERT_EQ(tile.visits.size(), static_cast<std::size_t>(tile.steps));
    for (std::size_t i = 0; i < tile.visits.size(); ++i) {
      EXPECT_TRUE(turns[tile.visits[i]].insert(tile.turns[i]).second);
    }
  }
  EXPECT_EQ(turns.size(), 16U * 8192 / 64);
  for (const auto& [block, taken] : turns) {  // 32 key blocks take turns 0 to 31
    EXPECT_EQ(taken.size(), 32U);
    EXPECT_EQ(*taken.rbegin(), 31);
  }
  const Machine machine{.processors = 64, .signal_cycles = 700, .jitter = 0.05};
  const Timeline four = simulate(problem, tiles, policy, machine);
  EXPECT_LT(four.waiting, 0.02);
  problem.section = 1;
  const Timeline one = simulate(problem, launch_order(problem, policy, pair), policy, machine);
  EXPECT_FALSE(one.deadlock);
  EXPECT_GT(one.waiting, 0.1);
  EXPECT_TRUE(simulate(problem, tiles, policy, {.processors = 8}).deadlock);
}

// As bwd_launch.cu and fwd_launch.cu cut them.
TEST(PlanSchedule, SectionsOfTheKernels) {
  constexpr double kL2 = 60 << 20;
  const TileSize pair{.cluster = 2, .max_round = 32};
  ScheduleProblem problem = causal_problem(4096, 16, 0);
  problem.batch = 4;
  EXPECT_EQ(kernel_section(problem, find_policy(true, "sections"), pair, 66, kL2), 8);
  problem = causal_problem(16384, 16, 0);
  EXPECT_EQ(kernel_section(problem, find_policy(true, "turns-sm90"), pair, 66, kL2), 2);
  problem.mask = {};
  EXPECT_EQ(kernel_section(problem, find_policy(true, "sections"), pair, 66, kL2), 2);
  // Rounds of 32: those of two heads run at a time on 66 pairs.
  EXPECT_EQ(kernel_section(problem, find_policy(true, "turns-sm90"), pair, 66, kL2), 2);
  problem.seqlen_q = problem.seqlen_kv = 4096;  // rounds of 8
  EXPECT_EQ(kernel_section(problem, find_policy(true, "turns-sm90"), pair, 66, kL2), 8);
  problem.heads_q = problem.heads_kv = 10;  // 2 would be left for the last section
  EXPECT_EQ(kernel_section(problem, find_policy(true, "turns-sm90"), pair, 66, kL2), 10);
  problem.heads_q = problem.heads_kv = 16;
  problem.seqlen_q = problem.seqlen_kv = 1024;  // 4 pairs, which do not rotate
  EXPECT_EQ(kernel_section(problem, find_policy(true, "turns-sm90"), pair, 66, kL2), 16);
  problem.seqlen_q = problem.seqlen_kv = 16384;
  problem.backward = false;
  EXPECT_EQ(kernel_section(problem, find_policy(false, "sections"), {}, 132, kL2), 3);
  problem.heads_kv = 4;
  EXPECT_EQ(kernel_section(problem, find_policy(false, "sections"), {}, 132, kL2), 12);
}

// One key head in 32 pairs of tiles: the longest walks 64 query blocks of 16 heads twice. In parts
// the same steps fill the device.
TEST(PlanSchedule, KeyHeadsInParts) {
  const Policy& policy = find_policy(true, "sections");
  const TileSize tile{.cluster = 2, .slots = 66};
  ScheduleProblem whole = causal_problem(8192, 8, 1);
  whole.heads_kv = 1;
  whole.section = 8;
  const ScheduleProblem divided = in_parts(whole, false, 132);
  EXPECT_EQ(divided.heads_kv, divided.head_parts);
  EXPECT_GT(divided.head_parts, 1);
  const std::vector<WorkTile> tiles = launch_order(whole, policy, tile);
  const std::vector<WorkTile> part_tiles = launch_order(divided, policy, tile);
  EXPECT_EQ(total_steps(part_tiles), total_steps(tiles));
  const Machine machine{.processors = 66};
  EXPECT_LT(simulate(divided, part_tiles, policy, machine).makespan,
            0.4 * simulate(whole, tiles, policy, machine).makespan);
  EXPECT_EQ(end_bytes(whole, policy, tile).sum, 0);
  // f32 parts of dk and dv are read, 16 bits written.
  EXPECT_EQ(end_bytes(divided, policy, tile).sum,
            8192.0 * 256 * (4.0 * static_cast<double>(divided.head_parts) + 2));
  EXPECT_EQ(in_parts(causal_problem(8192, 8, 1), false, 132).head_parts, 1);
}

// Above head dim 128: every step of every pass makes 64 x 64 of dS, which dq's kernel reads once.
TEST(PlanSchedule, WidePassesMakeAndReadAllOfDs) {
  for (const BandMask& mask : {BandMask{}, kCausal, BandMask{512, 0, Alignment::kBottomRight}}) {
    ScheduleProblem problem = causal_problem(8192, 8, 1);
    problem.heads_kv = 4;
    problem.head_dim = 256;
    problem.mask = mask;
    const std::int64_t cluster = wide_cluster(problem);
    const std::vector<WidePassTiles> passes = wide_launch_order(problem, 132, 60 << 20);
    // 8 heads of 128 x 128 images of 8 KB are 1 GiB, which is the room.
    EXPECT_EQ(passes.size(), 1U);
    std::int64_t made = 0;
    std::int64_t read = 0;
    for (const WidePassTiles& pass : passes) {
      made += cluster * total_steps(pass.keys);
      read += 2 * cluster * total_steps(pass.queries);
    }
    const Band band = Band::of(mask, 8192, 8192);
    std::int64_t images = 0;
    for (std::int64_t m = 0; m < 128; ++m) {
      for (std::int64_t n = 0; n < 128; ++n) {
        images += band.is_empty(64 * m, 64 * m + 64, 64 * n, 64 * n + 64) ? 0 : 8;
      }
    }
    // A cluster, and a tile of 128 queries, walk what any of their parts needs.
    EXPECT_GE(made, images);
    EXPECT_LE(made, images + 8 * 128 * 2);
    EXPECT_GE(read, images);
    EXPECT_LE(read, images + 8 * 128 * 4);
  }
  ScheduleProblem problem = causal_problem(16384, 8, 1);
  problem.head_dim = 256;
  EXPECT_EQ(wide_launch_order(problem, 132, 60 << 20).size(), 4U);
}

TEST(PlanSchedule, GanttHasABarForEveryTile) {
  const ScheduleProblem problem = causal_problem(1024, 2, 2);
  const Policy& policy = find_policy(true, "sections");
  const Timeline timeline =
      simulate(problem, launch_order(problem, policy, {}), policy, {.processors = 4});
  const std::string svg = gantt_svg(timeline, "test");
  std::size_t bars = 0;
  for (std::size_t at = svg.find("hsl("); at != std::string::npos; at = svg.find("hsl(", at + 1)) {
    ++bars;
  }
  EXPECT_EQ(bars, timeline.intervals.size());
}

}  // namespace
}  // namespace flashgrad::plan
