// SPDX-License-Identifier: Apache-2.0
// The register-tile product that all matrix products of attention are made of.
//
// C (rows, columns) = A (rows, depth) * B (depth, columns), depth counted in units
// (isa/common.hpp). B is packed in panels of kWidth = kVecs * kLanes columns, the last one as many
// whole vectors as are left:
//
//     B: [panel][depth of the block][columns of the panel]
//
// so a tile reads it contiguously. A is read one unit at a time, row-major (a[m * lda + k]) or
// column-major (a[k * lda + m]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/isa/common.hpp"

namespace flashgrad::cpu {

template <class Isa>
inline constexpr int kWidth = Isa::kVecs* Isa::kLanes;

FG_INLINE constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
FG_INLINE constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t by) {
  return (n + by - 1) / by;
}

// The nearest finite number of f32: a factor beyond its range must not make NaN of a product with
// 0.
FG_INLINE constexpr float finite_float(double x) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return x > kMax ? kMax : x < -kMax ? -kMax : static_cast<float>(x);
}

// Rows of a tile of `kN` vectors: a narrow last panel takes twice the rows, to hide the latency of
// the multiply-add.
template <class Isa, int kN>
inline constexpr int kTileRows = 2 * kN > Isa::kVecs ? Isa::kRows : 2 * Isa::kRows;

// A block's rows are padded to this, so no tile has fewer rows than it works on.
template <class Isa>
inline constexpr int kRowMultiple = 2 * Isa::kRows;

template <class Isa, int kM, int kN>
FG_INLINE void set_zero(typename Isa::Vec (&acc)[kM][kN]) {
  FG_UNROLL
  for (int m = 0; m < kM; ++m) {
    FG_UNROLL
    for (int n = 0; n < kN; ++n) {
      acc[m][n] = Isa::zero();
    }
  }
}

// acc += A * B for a tile of kM rows and one panel of kN vectors.
template <class Isa, int kM, int kN, bool kColumnMajorA>
FG_INLINE void add_product(const typename Isa::Unit* a, std::ptrdiff_t lda,
                           const typename Isa::Unit* b, std::ptrdiff_t depth,
                           typename Isa::Vec (&acc)[kM][kN]) {
#pragma GCC unroll 2
  for (std::ptrdiff_t k = 0; k < depth; ++k) {
    typename Isa::UnitVec row[kN];
    FG_UNROLL
    for (int n = 0; n < kN; ++n) {
      row[n] = Isa::load_units(b + k * (kN * Isa::kLanes) + n * Isa::kLanes);
    }
    FG_UNROLL
    for (int m = 0; m < kM; ++m) {
      const typename Isa::UnitVec x =
          Isa::broadcast(kColumnMajorA ? a[k * lda + m] : a[m * lda + k]);
      FG_UNROLL
      for (int n = 0; n < kN; ++n) {
        acc[m][n] = Isa::multiply_add(acc[m][n], x, row[n]);
      }
    }
  }
}

// acc = A * B, likewise.
template <class Isa, int kM, int kN, bool kColumnMajorA>
FG_INLINE void multiply(const typename Isa::Unit* a, std::ptrdiff_t lda,
                        const typename Isa::Unit* b, std::ptrdiff_t depth,
                        typename Isa::Vec (&acc)[kM][kN]) {
  set_zero<Isa>(acc);
  add_product<Isa, kM, kN, kColumnMajorA>(a, lda, b, depth, acc);
}

// Units of a logit's dot product that are summed in a row.
inline constexpr std::ptrdiff_t kLogitPart = 32;

// acc = A * B for logits, A row-major. The exponential makes of an error of s a relative error of
// p, and one long chain of additions would err about twice as much as the textbook formula
// compiled for vectors, which keeps several sums. So with f32 each kLogitPart of the depth have a
// sum of their own; the sums are added in order. (Zen 5, head_dim 128: 0.4 % of the backward pass.)
// bf16 rounds p by far more.
template <class Isa, int kM, int kN>
FG_INLINE void multiply_logits(const typename Isa::Unit* a, std::ptrdiff_t lda,
                               const typename Isa::Unit* b, std::ptrdiff_t depth,
                               typename Isa::Vec (&acc)[kM][kN]) {
  if constexpr (Isa::kPair == 2) {
    multiply<Isa, kM, kN, false>(a, lda, b, depth, acc);
  } else {
    multiply<Isa, kM, kN, false>(a, lda, b, depth < kLogitPart ? depth : kLogitPart, acc);
    for (std::ptrdiff_t k = kLogitPart; k < depth; k += kLogitPart) {
      const std::ptrdiff_t left = depth - k;
      typename Isa::Vec part[kM][kN];
      multiply<Isa, kM, kN, false>(a + k, lda, b + k * (kN * Isa::kLanes),
                                   left < kLogitPart ? left : kLogitPart, part);
      FG_UNROLL
      for (int m = 0; m < kM; ++m) {
        FG_UNROLL
        for (int n = 0; n < kN; ++n) {
          acc[m][n] = Isa::add(acc[m][n], part[m][n]);
        }
      }
    }
  }
}

// C tile = A * B, or += if `add`.
template <class Isa, int kM, int kN, bool kColumnMajorA>
[[gnu::noinline]] static void multiply_tile(const typename Isa::Unit* a, std::ptrdiff_t lda,
                                            const typename Isa::Unit* b, std::ptrdiff_t depth,
                                            float* c, std::ptrdiff_t ldc, bool add) {
  FG_UNROLL
  for (int m = 0; m < kM; ++m) {
    FG_UNROLL
    for (int n = 0; n < kN; ++n) {
      __builtin_prefetch(c + m * ldc + n * Isa::kLanes, 1);
    }
  }
  typename Isa::Vec acc[kM][kN];
  multiply<Isa, kM, kN, kColumnMajorA>(a, lda, b, depth, acc);
  FG_UNROLL
  for (int m = 0; m < kM; ++m) {
    FG_UNROLL
    for (int n = 0; n < kN; ++n) {
      float* p = c + m * ldc + n * Isa::kLanes;
      Isa::store(p, add ? Isa::add(Isa::load(p), acc[m][n]) : acc[m][n]);
    }
  }
}

// The units [begin, end) of the depth that a group of rows needs; the rest of A is known to be 0
// there.
struct DepthRange {
  std::ptrdiff_t begin = 0;
  std::ptrdiff_t end = 0;
};

template <class Isa, int kN, bool kColumnMajorA, class RangeOf>
FG_INLINE void multiply_panel(std::int64_t rows, const typename Isa::Unit* a, std::ptrdiff_t lda,
                              const typename Isa::Unit* b, float* c, std::ptrdiff_t ldc, bool add,
                              const RangeOf& range_of) {
  constexpr int kM = kTileRows<Isa, kN>;
  for (std::int64_t m = 0; m < rows; m += kM) {
    const DepthRange range = range_of(m, m + kM);
    const std::ptrdiff_t depth = range.end - range.begin;
    if (depth <= 0 && add) {
      continue;
    }
    const typename Isa::Unit* tile_a =
        kColumnMajorA ? a + range.begin * lda + m : a + m * lda + range.begin;
    multiply_tile<Isa, kM, kN, kColumnMajorA>(tile_a, lda, b + range.begin * (kN * Isa::kLanes),
                                              depth, c + m * ldc, ldc, add);
  }
}

// C (rows, columns) = or += A * B for all panels. `columns` is a multiple of kLanes, `rows` of
// kRowMultiple; B's panels hold `block_depth` units each; range_of(m_begin, m_end) gives the
// DepthRange of a group of rows.
template <class Isa, bool kColumnMajorA, class RangeOf>
static void multiply_panels(std::int64_t rows, std::int64_t columns, const typename Isa::Unit* a,
                            std::ptrdiff_t lda, const typename Isa::Unit* b,
                            std::ptrdiff_t block_depth, float* c, std::ptrdiff_t ldc, bool add,
                            const RangeOf& range_of) {
  for (std::int64_t column = 0; column < columns; column += kWidth<Isa>) {
    const typename Isa::Unit* panel = b + column * block_depth;
    float* out = c + column;
    const std::int64_t vecs = (columns - column) / Isa::kLanes;
    if (vecs >= Isa::kVecs) {
      multiply_panel<Isa, Isa::kVecs, kColumnMajorA>(rows, a, lda, panel, out, ldc, add, range_of);
      continue;
    }
    if constexpr (Isa::kVecs == 4) {
      if (vecs == 3) {
        multiply_panel<Isa, 3, kColumnMajorA>(rows, a, lda, panel, out, ldc, add, range_of);
        continue;
      }
      if (vecs == 2) {
        multiply_panel<Isa, 2, kColumnMajorA>(rows, a, lda, panel, out, ldc, add, range_of);
        continue;
      }
    }
    multiply_panel<Isa, 1, kColumnMajorA>(rows, a, lda, panel, out, ldc, add, range_of);
  }
}

}  // namespace flashgrad::cpu
