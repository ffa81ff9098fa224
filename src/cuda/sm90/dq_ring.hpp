// SPDX-License-Identifier: Apache-2.0
// Room for the f32 sums of dq. Tiles start in the order of their units, so at any time only a few
// units are being added to, and the sums of as many and some more stay in the L2 in a ring of
// slots: unit u has slot u % slots. Tiles of unit u, when they start, also finish a share of unit
// u - distance, which is complete by then: they write its dq, and zeros to the slot for unit
// u - distance + slots. The last `distance` units are left to the finish kernel.
//
// Nobody waits for ever: a tile waits for all of unit u - distance, and for the share that tiles of
// unit u - slots + distance have in unit u - slots; those are units of earlier sections, so their
// tiles have smaller numbers, and CTAs start in the order of their numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::sm90 {

// 32 bits suffice: there are fewer than 2^31 CTAs.
struct DqRing {
  enum Count : std::int32_t { kAdded, kFinished, kPrepared, kNumCounts };

  std::int32_t slots = 0;        // of units whose sums are kept
  std::int32_t distance = 0;     // 0: no unit is finished by the tiles of another
  std::int32_t ahead = 0;     // tiles of unit u prepare the rows of unit u + ahead; 0: none do
  std::int32_t head_blocks = 0;  // query blocks per query head of a unit
  // (num_units, kNumCounts), zeroed: warps that have done with the unit what Count says. Null if
  // nobody counts.
  std::uint32_t* counters = nullptr;

  // Whether unit `unit`, once finished, leaves its slot to another one.
  FG_HOST_DEVICE constexpr bool reused(std::int64_t unit, std::int64_t num_units) const {
    return unit + slots < num_units;
  }
};

// The share that tile `tile` of `tiles` has in finishing `blocks` query blocks.
struct DqShare {
  std::int32_t begin;
  std::int32_t end;
};
FG_HOST_DEVICE constexpr DqShare dq_share(std::int64_t tile, std::int64_t tiles,
                                          std::int64_t blocks) {
  return {static_cast<std::int32_t>(tile * blocks / tiles),
          static_cast<std::int32_t>((tile + 1) * blocks / tiles)};
}

struct DqRingPlan {
  std::int64_t section;  // units whose tiles are launched together
  std::int32_t slots;
  std::int32_t distance;
  std::int32_t ahead;
};

}  // namespace flashgrad::sm90
