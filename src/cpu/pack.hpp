// SPDX-License-Identifier: Apache-2.0
// Puts staged rows (rows.hpp: contiguous units, zero padded) into the orders that micro_kernel.hpp
// reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/isa/common.hpp"
#include "cpu/micro_kernel.hpp"

namespace flashgrad::cpu {

// Units of a staged row of n elements: a multiple of kLanes.
template <class Isa>
FG_INLINE constexpr std::int64_t staged_units(std::int64_t n) {
  return round_up(ceil_div(n, Isa::kPair), Isa::kLanes);
}

// kLanes staged rows become kLanes columns of a B panel whose depth runs along the row: dst[u *
// kWidth + r] = rows[r * ld + u] for all `units` (a multiple of kLanes). `dst` is the first of
// these columns.
template <class Isa>
FG_INLINE void pack_columns(const typename Isa::Unit* rows, std::ptrdiff_t ld, std::int64_t units,
                            typename Isa::Unit* dst) {
  for (std::int64_t u = 0; u < units; u += Isa::kLanes) {
    Isa::transpose(rows + u, ld, dst + u * kWidth<Isa>, kWidth<Isa>);
  }
}

// num_rows (a multiple of kPair) staged rows become depth entries of B panels whose columns run
// along the row. `columns` (a multiple of kLanes) of each row are taken; panels hold block_depth
// units, the first row goes to unit k_begin.
template <class Isa>
FG_INLINE void pack_depth(const typename Isa::Unit* rows, std::ptrdiff_t ld, std::int64_t num_rows,
                          std::int64_t columns, typename Isa::Unit* dst, std::ptrdiff_t block_depth,
                          std::int64_t k_begin) {
  for (std::int64_t panel = 0; panel < columns; panel += kWidth<Isa>) {
    const std::int64_t width = columns - panel < kWidth<Isa> ? columns - panel : kWidth<Isa>;
    typename Isa::Unit* out = dst + panel * block_depth + k_begin * width;
    for (std::int64_t r = 0; r < num_rows; r += Isa::kPair, out += width) {
      const typename Isa::Unit* row = rows + r * ld + panel / Isa::kPair;
      if constexpr (Isa::kPair == 1) {
        for (std::int64_t c = 0; c < width; c += Isa::kLanes) {
          Isa::store_units(out + c, Isa::load_units(row + c));
        }
      } else {
        for (std::int64_t c = 0; c < width; c += 2 * Isa::kLanes) {
          typename Isa::UnitVec lo;
          typename Isa::UnitVec hi;
          Isa::interleave(Isa::load_units(row + c / 2), Isa::load_units(row + ld + c / 2), lo, hi);
          Isa::store_units(out + c, lo);
          if (c + Isa::kLanes < width) {
            Isa::store_units(out + c + Isa::kLanes, hi);
          }
        }
      }
    }
  }
}

}  // namespace flashgrad::cpu
