// SPDX-License-Identifier: Apache-2.0
// In what order the tiles of several heads run. Plain arithmetic, for host and device.
#pragma once

#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::sm90 {

// The tiles of `units` heads (of a batch entry each) in sections of `section`, so that what their
// tiles share stays in the L2. In a section round by round of `round` neighbouring blocks,
// ascending, and in a round one unit after the other: with rounds of one and a causal mask, the
// longest tiles of the backward come first.
struct SectionOrder {
  std::uint32_t units;
  std::uint32_t section;
  std::uint32_t blocks;  // of a unit
  std::uint32_t round;
};

struct SectionTile {
  std::uint32_t unit;
  std::uint32_t block;
};

// Tile `index` of units * blocks. 32 bits: a 64-bit division takes four times as long.
FG_HOST_DEVICE constexpr SectionTile section_tile(const SectionOrder& order, std::uint32_t index) {
  const std::uint32_t section = index / (order.section * order.blocks);
  const std::uint32_t in_section = index - section * (order.section * order.blocks);
  const std::uint32_t left = order.units - section * order.section;
  const std::uint32_t units = left < order.section ? left : order.section;
  const std::uint32_t first = in_section / (units * order.round) * order.round;
  const std::uint32_t in_round = in_section - first * units;
  const std::uint32_t width =
      order.blocks - first < order.round ? order.blocks - first : order.round;
  return {section * order.section + in_round / width, first + in_round % width};
}

// Units in a section: as many as fit the L2, at least `at_least`, and all sections of about the
// same size: a last one of few units would leave most of the device idle.
FG_HOST_DEVICE constexpr std::uint32_t units_together(std::uint32_t num_units, std::uint32_t in_l2,
                                                      std::uint32_t at_least) {
  const std::uint32_t most = in_l2 > at_least ? in_l2 : at_least;
  const std::uint32_t together = most > 1 ? most : 1;
  const std::uint32_t sections = num_units > together ? num_units / together : 1;
  return num_units > 0 ? (num_units + sections - 1) / sections : 1;
}

// Units of which one and a half times as many tiles start together (`tiles` of each) as run at a
// time. With fewer, long tiles of the next section begin late. In simulations of causal masks with
// 1 to 32 heads, groups of 1 to 16 and 1k to 16k tokens such sections take at most 3 % longer than
// one section of all; with as many as run at a time it is 13 %, without a bound 37 %. H200, d128,
// causal 4k, 16 query and 4 key heads: see docs/gpu-backward.md.
FG_HOST_DEVICE constexpr std::uint32_t units_that_fill(std::uint32_t slots, std::uint32_t tiles) {
  const std::uint32_t of_unit = tiles > 0 ? tiles : 1;
  return (slots * 3 / 2 + of_unit - 1) / of_unit;
}

// Units of which as many tiles start together as run at a time, where all take as long, or
// `otherwise` if the last section would have fewer: a round of few units leaves most of the device
// to the next one, which waits for it. H200, d128, ordered, full, TFLOP/s: 4k, 64 units in sections
// of 13, 9 and 8: 619, 596 and 625; 8k, 10 units in one of 10 and in those of 4: 650 and 560.
FG_HOST_DEVICE constexpr std::uint32_t units_at_a_time(std::uint32_t num_units, std::uint32_t slots,
                                                       std::uint32_t tiles,
                                                       std::uint32_t otherwise) {
  const std::uint32_t units = tiles > 0 && slots > tiles ? slots / tiles : 1;
  return num_units % units == 0 ? units : otherwise;
}

// Of `met` keys that the forward's tiles of a head meet, those in use at a time. Under a band it is
// about twice what one tile meets, of which neighbours meet most as well. H200, d128, window 1024,
// 16k: 491 -> 497 TFLOP/s; the backward's sections count all rows, since with half of them it fell
// from 431 to 424.
FG_HOST_DEVICE constexpr std::uint32_t keys_in_use(const Band& band, std::int64_t met,
                                                   std::int64_t tile_rows) {
  const std::int64_t reach = band.hi - band.lo + tile_rows;  // may be 2^62
  const std::int64_t in_use = reach < met / 2 ? 2 * reach : met;
  return in_use > 1 ? static_cast<std::uint32_t>(in_use) : 1;
}

// The share of the L2 that the backward's sections may fill with q, dout and the sums of dq: H200,
// causal, 32 MB of its 60 MB measure best at 4k and 16k.
constexpr std::int64_t bwd_l2_share(std::int64_t l2_bytes) { return l2_bytes * 8 / 15; }
// And the forward's, with k and v: half, the rest is for what streams through.
constexpr std::int64_t fwd_l2_share(std::int64_t l2_bytes) { return l2_bytes / 2; }

// Where the clusters of a sequence that all walk the same query blocks start, in the backward's
// ordered kernels: in rounds of `round` neighbours, number j of a round at the top of segment j. So
// no two add to a block at the same time, and each follows its predecessor at a distance of one
// segment. Depends on the sequence's own lengths and the device (max_round) alone.
//
// Short sequences do not rotate: their few clusters follow each other, and each waits for the one
// before at its first block only. H200, d128, full 1k: 452 -> 458 TFLOP/s.
struct Rotation {
  std::int64_t segment;  // query blocks, a power of two
  std::int64_t round;    // clusters, as many as segments
};

FG_HOST_DEVICE constexpr Rotation rotation(std::int64_t num_m_blocks, std::int64_t num_clusters,
                                           std::int64_t max_round) {
  if (num_m_blocks <= 16 && num_clusters <= 4) {
    return {16, 1};
  }
  const std::int64_t most = num_clusters < max_round ? num_clusters : max_round;
  const std::int64_t limit = most > 1 ? most : 1;
  Rotation r{8, num_m_blocks > 8 ? (num_m_blocks + 7) / 8 : 1};
  while (r.round > limit) {
    r.segment *= 2;
    r.round = (num_m_blocks + r.segment - 1) / r.segment;
  }
  return r;
}

}  // namespace flashgrad::sm90
