// SPDX-License-Identifier: Apache-2.0
// How many units (key heads) the backward works on together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashgrad::sm90 {

// As many units of `unit_bytes` (their q, dout and dq accumulators) as stay in the L2: H200,
// causal, 32 MB of its 60 MB measure best at 4k and 16k. At least `at_least`, and all sections of
// about the same size: a last one of few units would leave most of the device idle.
inline std::int64_t bwd_section(std::int64_t num_units, std::int64_t unit_bytes,
                                std::int64_t at_least, std::int64_t l2_bytes) {
  const std::int64_t in_l2 = l2_bytes * 8 / 15 / std::max<std::int64_t>(1, unit_bytes);
  const std::int64_t num_sections =
      std::max<std::int64_t>(1, num_units / std::max<std::int64_t>({1, at_least, in_l2}));
  return std::max<std::int64_t>(1, (num_units + num_sections - 1) / num_sections);
}

}  // namespace flashgrad::sm90
