// SPDX-License-Identifier: Apache-2.0
// The packs of the next query block come from the third cache or from memory: they are asked for
// while the tiles of the block before are computed, a few lines per tile. Zen 5, 4096 rows: the
// backward pass takes 1 to 3 % less time, with grouped heads (whose packs are more) 4 to 5 %. To
// fetch dq's block as well was not faster.
#pragma once

#include <cstdint>

#include "cpu/backward_plan.hpp"

namespace flashgrad::cpu {

template <class Isa>
class PackPrefetch {
 public:
  PackPrefetch() = default;  // nothing comes next

  // The packs of the rows [row, row + rows) of `head`, spread over `steps` calls of step().
  PackPrefetch(const BackwardPlan<Isa>& plan, const HeadPack<Isa>& head, std::int64_t row,
               std::int64_t rows, std::int64_t steps) {
    const std::int64_t depth_row = row / Isa::kPair;
    const std::int64_t depth_rows = rows / Isa::kPair;
    add(head.q_columns, row, rows, plan.units_qk, steps);
    add(head.dout_columns, row, rows, plan.units_v, steps);
    add(head.q_depth, depth_row, depth_rows, plan.columns_qk, steps);
    add(head.dout_depth, depth_row, depth_rows, plan.columns_v, steps);
  }

  void step() {
    for (int i = 0; i < num_ranges_; ++i) {
      Range& range = ranges_[i];
      for (std::int64_t n = range.per_step; n > 0 && range.lines > 0; --n, --range.lines) {
        __builtin_prefetch(range.next, 0, 2);
        range.next += kLineBytes;
      }
    }
  }

 private:
  static constexpr std::int64_t kLineBytes = 64;
  struct Range {
    const char* next;
    std::int64_t lines;  // that are left
    std::int64_t per_step;
  };

  // `pack` is null if the call does not need it.
  void add(const typename Isa::Unit* pack, std::int64_t row, std::int64_t rows,
           std::int64_t columns, std::int64_t steps) {
    constexpr auto kUnitBytes = static_cast<std::int64_t>(sizeof(typename Isa::Unit));
    const std::int64_t lines = rows * columns * kUnitBytes / kLineBytes;
    if (pack != nullptr && lines > 0) {
      ranges_[num_ranges_++] = {reinterpret_cast<const char*>(pack + row * columns), lines,
                                ceil_div(lines, steps)};
    }
  }

  Range ranges_[4] = {};
  int num_ranges_ = 0;
};

}  // namespace flashgrad::cpu
