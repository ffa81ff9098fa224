// SPDX-License-Identifier: Apache-2.0
// How many rows the forward's tiles have where there are few tiles. Plain arithmetic on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::sm90 {

// What a step of a tile takes whose rows are those of 1, 2 or 3 consumers, in parts of one with
// all of them. H200, one tile a CTA: head_dim 128, 205 steps, 180, 220 and 269 us; head_dim 256,
// 65 and 84 us of 52 steps.
constexpr double step_cost(int num_consumers, int used) {
  return num_consumers == used ? 1 : num_consumers == 2 ? 0.78 : used == 1 ? 0.66 : 0.82;
}
// What a tile takes besides, in such steps.
inline constexpr double kTileCost = 2.5;

// The tiles of a call: those of `units` heads (of a batch entry each), of which each begins at a
// multiple of what `consumers` of the kernel's `num_consumers` have, longest first.
struct ForwardTiles {
  Band band;
  std::int64_t units;
  int num_consumers;
  int block_n;
  bool last_block_first;
};

// How many steps `slots` CTAs take for them at least: for the work of all, or for the most tiles
// that one CTA must take of the longest.
inline double forward_makespan(const ForwardTiles& t, int consumers, std::int64_t slots) {
  const std::int64_t block_m = std::int64_t{64} * consumers;
  const std::int64_t blocks = (t.band.seqlen_q + block_m - 1) / block_m;
  const std::int64_t tiles = t.units * blocks;
  const auto cost = [&](std::int64_t rank) {
    const std::int64_t m_begin = (t.last_block_first ? blocks - 1 - rank : rank) * block_m;
    const std::int64_t steps =
        (t.band.kv_range(m_begin, m_begin + block_m).size() + t.block_n - 1) / t.block_n;
    return step_cost(t.num_consumers, consumers) * static_cast<double>(steps) + kTileCost;
  };
  constexpr std::int64_t kSamples = 16;
  double work = 0;
  for (std::int64_t i = 0; i < kSamples; ++i) {
    work += cost((2 * i + 1) * blocks / (2 * kSamples));
  }
  double most = work / kSamples * static_cast<double>(tiles) / static_cast<double>(slots);
  // Of the longest k * slots + 1 tiles one CTA takes k + 1.
  for (std::int64_t k = 0; k * slots < tiles; ++k) {
    double of_cta = 0;
    for (std::int64_t j = 0; j <= k; ++j) {
      of_cta += cost((k * slots - j) / t.units);
    }
    most = std::max(most, of_cta);
  }
  return most;
}

// Rows of a tile, a multiple of 64: as many as the consumers have, or fewer where tiles are so few
// that what the longest of them takes matters more than what all do. No row's bits depend on it.
inline int forward_block_m(const ForwardTiles& t, std::int64_t slots) {
  const std::int64_t rows = std::int64_t{64} * t.num_consumers;
  const std::int64_t blocks = (t.band.seqlen_q + rows - 1) / rows;
  // With more, all consumers are always faster; none of the products overflows.
  const std::int64_t few = 2 * slots;
  if (t.units > few || blocks > few || t.units * blocks > few) {
    return static_cast<int>(rows);
  }
  int best = t.num_consumers;
  double shortest = forward_makespan(t, best, slots);
  for (int consumers = best - 1; consumers > 0; --consumers) {
    const double makespan = forward_makespan(t, consumers, slots);
    if (makespan < shortest) {
      best = consumers;
      shortest = makespan;
    }
  }
  return 64 * best;
}

}  // namespace flashgrad::sm90
