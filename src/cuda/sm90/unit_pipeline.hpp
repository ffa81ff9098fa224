// SPDX-License-Identifier: Apache-2.0
// How the units of a backward call (key heads of a batch entry) pass through its main kernel, up to
// head dim 128. Tiles start in the order of their numbers, unit after unit or section after section
// of units, so few units are under way at a time. Before the tiles of a section start, for each of
// its units u, a cluster that
//   - prepares the rows of unit u + lead: the first `lead` units are left to the prepare kernel;
//   - finishes unit u - lag, to which all have added by then: it writes dq, and zeros over its
//     sums.
// After the last tile the last units are finished by `last_parts` clusters each, since by then the
// device has nothing else to do.
//
// So the f32 sums of dq need room for a ring of slots only, which stays in the L2: unit u has slot
// u % slots, which unit u - slots has left.
//
// Nobody waits for ever: who serves unit u waits for the tiles of unit u - lag and for those who
// serve unit u - slots, and a tile of unit u for those who serve units u - lead and u - slots +
// lag. All of these have smaller numbers, and CTAs start in the order of their numbers. Mostly
// nobody waits at all, since that many other tiles have started since.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::sm90 {

// KeyTile::num_steps of a CTA that serves a unit.
inline constexpr int kServesUnit = -1;

// KeyTile::rows_ready.
inline constexpr std::uint32_t kRowsReadable = 1;  // all of them
inline constexpr std::uint32_t kRowsMarked = 2;    // some blocks are marked

// In a unit's kPrepared: some of its blocks are marked in RowStatistics::unreadable.
inline constexpr std::uint32_t kSomeMarked = 0x80000000U;

// 32 bits suffice: there are fewer than 2^31 CTAs.
struct UnitPipeline {
  enum Count : std::int32_t { kPrepared, kAdded, kFinished, kNumCounts };

  std::int32_t slots = 0;  // of units whose sums of dq are kept
  std::int32_t lead = 0;   // 0: the prepare kernel prepares all
  std::int32_t lag = 0;    // 0: the finish kernel finishes all, and there is a slot for each unit
  std::int32_t last_parts = 0;
  std::int32_t head_blocks = 0;  // query blocks per query head of a unit
  // (num_units, kNumCounts), zeroed: warps that have done with the unit what Count says. Null if
  // nobody counts.
  std::uint32_t* counters = nullptr;

  // Whether some clusters serve units.
  FG_HOST_DEVICE constexpr bool serves() const { return lead > 0 || lag > 0; }
  // Whether unit `unit`, once finished, leaves its slot to another one.
  FG_HOST_DEVICE constexpr bool reused(std::int64_t unit, std::int64_t num_units) const {
    return unit + slots < num_units;
  }
};

// Units whose tiles are launched together: `section` of them, in the last section with those that
// are left over. A section of few would leave most of the device idle while its longest tiles run:
// H200, d128, 3 x 1500 causal rows of 12 heads in sections of 11, 11, 11 and 3 take 170 us, in
// sections of 11, 11 and 14 151.
struct ServedSection {
  std::int64_t begin;
  std::int64_t units;

  // Number `number`, if all were alike.
  FG_HOST_DEVICE constexpr ServedSection(std::int64_t number, std::int64_t section,
                                         std::int64_t num_units)
      : begin(number * section), units(section) {
    if (num_units - begin < section && begin > 0) {
      begin -= section;
    }
    if (num_units - begin < 2 * section) {
      units = num_units - begin;
    }
  }
  // Units that are served at its begin.
  [[nodiscard]] FG_HOST_DEVICE constexpr std::int64_t first(std::int64_t section) const {
    return units < section ? units : section;
  }
};

// What cluster number `index` of the main kernel does where units are served: each section begins
// with one cluster for each of its first `section` units and ends with those for the others, if
// there are any; who served these before would wait for the section before. After the last section
// come those that serve units beyond the last, `last_parts` for each.
struct ServedOrder {
  std::int64_t unit = 0;
  std::int64_t block = -1;  // it computes this tile of the unit, or -1: it serves the unit,
  std::int64_t part = 0;    // as this one of the clusters that do

  FG_HOST_DEVICE constexpr ServedOrder(std::int64_t index, std::int64_t section, std::int64_t tiles,
                                       std::int64_t num_units, std::int64_t last_parts) {
    const std::int64_t beyond = index - num_units * (tiles + 1);
    if (beyond >= 0) {
      unit = num_units + beyond / last_parts;
      part = beyond % last_parts;
      return;
    }
    const ServedSection of(index / (section * (tiles + 1)), section, num_units);
    const std::int64_t tile = index - of.begin * (tiles + 1) - of.first(section);
    if (tile >= 0 && tile < of.units * tiles) {
      block = tile / of.units;
      unit = of.begin + tile % of.units;
    } else {
      unit = of.begin + of.first(section) + (tile < 0 ? tile : tile - of.units * tiles);
    }
  }

  [[nodiscard]] FG_HOST_DEVICE constexpr bool serves() const { return block < 0; }

  // The number of the cluster that computes tile `block` of unit `of`.
  FG_HOST_DEVICE static constexpr std::int64_t cluster_of(std::int64_t of, std::int64_t block,
                                                          std::int64_t section, std::int64_t tiles,
                                                          std::int64_t num_units) {
    const ServedSection in(of / section, section, num_units);
    return in.begin * (tiles + 1) + in.first(section) + block * in.units + of - in.begin;
  }
};

// Units whose tiles are launched together, longest first, on `num_multiprocessors` that run one
// tile each: about as many as fill them, so that a section ends and the next begins without a gap
// (simulated: causal 4k in sections of 4 units 0.98 to 1.00 busy, of 2 0.95). Where all tiles take
// as long there is nothing to gain.
inline std::int64_t unit_section(std::int64_t tiles, bool equal_tiles,
                                 std::int64_t num_multiprocessors) {
  if (equal_tiles || tiles == 0) {
    return 1;
  }
  return std::max<std::int64_t>(1, (4 * num_multiprocessors + tiles) / (4 * tiles));
}

// Slots, lead and lag for `num_units` units of `tiles` tiles each, launched in sections of
// `section` units. Without lead and lag if there are too few units.
inline UnitPipeline plan_units(std::int64_t num_units, std::int64_t tiles, std::int64_t section,
                               bool equal_tiles, std::int64_t num_multiprocessors, int cluster) {
  UnitPipeline pipeline;
  pipeline.slots = static_cast<std::int32_t>(num_units);
  if (tiles == 0) {
    return pipeline;
  }
  // A unit has ended once so many tiles have started after its last one, at the end of its section;
  // the last ones are short unless all take as long.
  const std::int64_t later = num_multiprocessors * (equal_tiles ? 10 : 7) / 8;
  const std::int64_t in_section = tiles * section;
  const std::int64_t distance = section * (1 + (later + in_section - 1) / in_section);
  // Who serves a unit takes a quarter of a tile's time.
  const std::int64_t slots = distance + section + (num_multiprocessors / 3 + tiles - 1) / tiles;
  if (distance < num_units) {
    pipeline.lead = pipeline.lag = static_cast<std::int32_t>(distance);
    pipeline.slots = static_cast<std::int32_t>(std::min(num_units, slots));
    pipeline.last_parts = static_cast<std::int32_t>(
        std::max<std::int64_t>(1, num_multiprocessors / (distance * cluster)));
  }
  return pipeline;
}

}  // namespace flashgrad::sm90
