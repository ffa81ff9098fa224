// SPDX-License-Identifier: Apache-2.0
// How the units of a backward call (key heads of a batch entry) pass through its main kernel, up to
// head dim 128. Tiles start in the order of their numbers, unit after unit or section after section
// of units, so few units are under way at a time. A tile of unit u, while its own keys are being
// loaded,
//   - prepares a share of the rows of unit u + lead: the first `lead` units are left to prepare;
//   - finishes a share of unit u - lag, to which all have added by then: it writes dq, and zeros
//     over the sums. The last `lag` units are left to finish.
// So the f32 sums of dq need room for a ring of slots only, which stays in the L2: unit u has slot
// u % slots, which unit u - slots has left.
//
// Nobody waits for ever: a tile waits for all of unit u - lag and, of the units u - lead and
// u - slots + lag, for the shares that they have in u and in u - slots. Those are units of earlier
// sections, whose tiles have smaller numbers, and CTAs start in the order of their numbers. Mostly
// nobody waits at all, since that many other tiles have started since.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::sm90 {

// 32 bits suffice: there are fewer than 2^31 CTAs.
struct UnitPipeline {
  enum Count : std::int32_t { kPrepared, kAdded, kFinished, kNumCounts };

  std::int32_t slots = 0;  // of units whose sums of dq are kept
  std::int32_t lead = 0;   // 0: the prepare kernel prepares all
  std::int32_t lag = 0;    // 0: the finish kernel finishes all, and there is a slot for each unit
  std::int32_t head_blocks = 0;  // query blocks per query head of a unit
  // (num_units, kNumCounts), zeroed: warps that have done with the unit what Count says. Null if
  // nobody counts.
  std::uint32_t* counters = nullptr;

  // Whether unit `unit`, once finished, leaves its slot to another one.
  FG_HOST_DEVICE constexpr bool reused(std::int64_t unit, std::int64_t num_units) const {
    return unit + slots < num_units;
  }
};

// Query blocks [begin, end) of a unit, counted through its query heads.
struct UnitShare {
  std::int32_t begin;
  std::int32_t end;
};

// What tile `tile` of the `tiles` of a unit does of another one with `blocks` query blocks. In 32
// bits, since each tile waits for it: the first `blocks % tiles` tiles do one more.
FG_HOST_DEVICE constexpr UnitShare unit_share(std::int32_t tile, std::int32_t tiles,
                                              std::int32_t blocks) {
  const auto each = static_cast<std::int32_t>(static_cast<std::uint32_t>(blocks) /
                                              static_cast<std::uint32_t>(tiles));
  const std::int32_t more = blocks - each * tiles;
  const std::int32_t begin = tile * each + (tile < more ? tile : more);
  return {begin, begin + each + (tile < more ? 1 : 0)};
}

// Units whose tiles are launched together, longest first, on `num_multiprocessors` that run one tile
// each: about as many as fill them, so that a section ends and the next begins without a gap
// (simulated: causal 4k in sections of 4 units 0.98 to 1.00 busy, of 2 0.95). Where all tiles take
// as long there is nothing to gain.
inline std::int64_t unit_section(std::int64_t tiles, bool equal_tiles,
                                 std::int64_t num_multiprocessors) {
  if (equal_tiles || tiles == 0) {
    return 1;
  }
  return std::max<std::int64_t>(1, (4 * num_multiprocessors + tiles) / (4 * tiles));
}

// Slots, lead and lag for `num_units` units of `tiles` tiles each, launched in sections of `section`
// units. Without lead and lag if there are too few units.
inline UnitPipeline plan_units(std::int64_t num_units, std::int64_t tiles, std::int64_t section,
                               bool equal_tiles, std::int64_t num_multiprocessors) {
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
  // What tiles do for other units they have done soon after they start.
  const std::int64_t slots = distance + section + (num_multiprocessors / 8 + tiles - 1) / tiles;
  if (distance < num_units) {
    pipeline.lead = pipeline.lag = static_cast<std::int32_t>(distance);
    pipeline.slots = static_cast<std::int32_t>(std::min(num_units, slots));
  }
  return pipeline;
}

}  // namespace flashgrad::sm90
