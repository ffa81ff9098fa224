// SPDX-License-Identifier: Apache-2.0
// The steps of the forward pass on one panel of query rows and one key block. The equations:
// forward_item.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/dtype.hpp"
#include "cpu/isa/common.hpp"
#include "cpu/micro_kernel.hpp"
#include "cpu/vector_math.hpp"

namespace flashgrad::cpu {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Calls f.template operator()<kN>() with the number of vectors in a panel, at most kVecs, as a
// constant.
template <class Isa, class F>
FG_INLINE void with_vecs(std::int64_t vecs, F&& f) {
  if (vecs >= Isa::kVecs) {
    return f.template operator()<Isa::kVecs>();
  }
  if constexpr (Isa::kVecs == 4) {
    if (vecs == 3) {
      return f.template operator()<3>();
    }
    if (vecs == 2) {
      return f.template operator()<2>();
    }
  }
  f.template operator()<1>();
}

// Rows of S^T (keys [0, kM)) for a panel of kN vectors of queries, without scale; the maxima of the
// columns if all of it is visible.
template <class Isa, int kM, int kN, bool kVisible>
[[gnu::noinline]] static void logits_tile(const typename Isa::Unit* k, std::ptrdiff_t ldk,
                                          const typename Isa::Unit* q, std::ptrdiff_t depth,
                                          float* s, float* maxima) {
  typename Isa::Vec acc[kM][kN];
  multiply_logits<Isa, kM, kN>(k, ldk, q, depth, acc);
  FG_UNROLL
  for (int n = 0; n < kN; ++n) {
    FG_UNROLL
    for (int m = 0; m < kM; ++m) {
      Isa::store(s + (m * kN + n) * Isa::kLanes, acc[m][n]);
    }
    if constexpr (kVisible) {
      typename Isa::Vec highest = Isa::load(maxima + n * Isa::kLanes);
      FG_UNROLL
      for (int m = 0; m < kM; ++m) {
        highest = Isa::max(highest, acc[m][n]);
      }
      Isa::store(maxima + n * Isa::kLanes, highest);
    }
  }
}

// How raw dot products become logits, and logits exponents of 2.
struct Logits {
  float cap_input = 0;  // |scale| / softcap, or 0: no cap
  float softcap = 0;
  float to_log2 = 0;  // what a (capped) entry of S^T times log2(e) is
};

// Rows [first, last) of S^T: capped, and -inf where the column's query does not see the key. begin
// and end hold the keys that each query sees, counted from row 0. Adds to the maxima of the
// columns.
template <class Isa, int kN>
[[gnu::noinline]] static void cap_and_mask(float* s, std::int64_t first, std::int64_t last,
                                           const Logits& logits, const float* begin,
                                           const float* end, float* maxima) {
  const auto cap_input = Isa::set1(logits.cap_input);
  const auto softcap = Isa::set1(logits.softcap);
  FG_UNROLL
  for (int n = 0; n < kN; ++n) {
    const auto row_begin = Isa::load(begin + n * Isa::kLanes);
    const auto row_end = Isa::load(end + n * Isa::kLanes);
    auto highest = Isa::load(maxima + n * Isa::kLanes);
    for (std::int64_t j = first; j < last; ++j) {
      float* at = s + (j * kN + n) * Isa::kLanes;
      auto x = Isa::load(at);
      if (logits.cap_input != 0) {
        x = Isa::mul(softcap, tanh<Isa>(Isa::mul(x, cap_input)));
      }
      const auto key = static_cast<float>(j);
      const auto visible = Isa::both(Isa::less(row_begin, Isa::set1(key + 0.5F)),
                                     Isa::less(Isa::set1(key), row_end));
      x = Isa::select(visible, x, Isa::set1(-kInfinity));
      highest = Isa::max(highest, x);
      Isa::store(at, x);
    }
    Isa::store(maxima + n * Isa::kLanes, highest);
  }
}

// Equation (2) for the columns of a panel: the new maxima and what the old sums and outputs are to
// be multiplied with. On return `shift` holds what is subtracted before the exponential: the
// maximum, but 0 where no logit above -inf was seen yet.
template <class Isa, int kN>
FG_INLINE void update_maxima(const float* maxima, const Logits& logits, float* row_max,
                             float* row_sum, float* row_rescale, typename Isa::Vec (&shift)[kN]) {
  FG_UNROLL
  for (int n = 0; n < kN; ++n) {
    const auto before = Isa::load(row_max + n * Isa::kLanes);
    const auto now = Isa::max(before, Isa::load(maxima + n * Isa::kLanes));
    shift[n] = Isa::select(Isa::less(Isa::set1(-kInfinity), now), now, Isa::zero());
    const auto rescale =
        exp2<Isa, 6>(Isa::mul(Isa::sub(before, shift[n]), Isa::set1(logits.to_log2)));
    Isa::store(row_max + n * Isa::kLanes, now);
    Isa::store(row_rescale + n * Isa::kLanes, rescale);
    Isa::store(row_sum + n * Isa::kLanes, Isa::mul(Isa::load(row_sum + n * Isa::kLanes), rescale));
  }
}

// Equation (3) for rows [first, last) of S^T and a panel of kN vectors of queries: P^T in the order
// that values_tile reads, and its sums.
template <class Isa, int kN>
[[gnu::noinline]] static void probabilities(const float* s, std::int64_t first, std::int64_t last,
                                            const Logits& logits, const float* maxima,
                                            float* row_max, float* row_sum, float* row_rescale,
                                            typename Isa::Unit* p) {
  // bf16 pairs round p to 8 bits, but lse, which sums it before that, asks for degree 4 (3 would
  // move it by 6e-5).
  constexpr int kDegree = Isa::kPair == 2 ? 4 : 6;
  // bf16 pairs are made of two vectors at a time.
  constexpr int kPadded = Isa::kPair == 2 ? kN + kN % 2 : kN;
  typename Isa::Vec shift[kN];
  update_maxima<Isa, kN>(maxima, logits, row_max, row_sum, row_rescale, shift);
  const auto to_log2 = Isa::set1(logits.to_log2);
  typename Isa::Vec sum[kN];
  FG_UNROLL
  for (int n = 0; n < kN; ++n) {
    sum[n] = Isa::zero();
  }
  for (std::int64_t j = first; j < last; j += Isa::kPair) {
    typename Isa::Vec x[Isa::kPair][kPadded];
    FG_UNROLL
    for (int i = 0; i < Isa::kPair; ++i) {
      x[i][kPadded - 1] = Isa::zero();
      FG_UNROLL
      for (int n = 0; n < kN; ++n) {
        const auto logit = Isa::load(s + ((j + i) * kN + n) * Isa::kLanes);
        x[i][n] = exp2<Isa, kDegree>(Isa::mul(Isa::sub(logit, shift[n]), to_log2));
        sum[n] = Isa::add(sum[n], x[i][n]);
      }
    }
    typename Isa::Unit* const row = p + j / Isa::kPair * (kN * Isa::kLanes);
    if constexpr (Isa::kPair == 1) {
      FG_UNROLL
      for (int n = 0; n < kN; ++n) {
        Isa::store_units(row + n * Isa::kLanes, x[0][n]);
      }
    } else {
      FG_UNROLL
      for (int n = 0; n < kN; n += 2) {
        typename Isa::UnitVec lo;
        typename Isa::UnitVec hi;
        Isa::interleave(Isa::narrow(x[0][n], x[0][n + 1]), Isa::narrow(x[1][n], x[1][n + 1]), lo,
                        hi);
        Isa::store_units(row + n * Isa::kLanes, lo);
        if (n + 1 < kN) {
          Isa::store_units(row + (n + 1) * Isa::kLanes, hi);
        }
      }
    }
  }
  FG_UNROLL
  for (int n = 0; n < kN; ++n) {
    Isa::store(row_sum + n * Isa::kLanes, Isa::add(Isa::load(row_sum + n * Isa::kLanes), sum[n]));
  }
}

// O tile = rescale * O + P V for kM rows of O and kN vectors of columns; = P V if `first`.
template <class Isa, int kM, int kN>
[[gnu::noinline]] static void values_tile(const typename Isa::Unit* p, std::ptrdiff_t ldp,
                                          const typename Isa::Unit* v, std::ptrdiff_t depth,
                                          const float* rescale, bool first, float* out,
                                          std::ptrdiff_t ldo) {
  typename Isa::Vec acc[kM][kN];
  multiply<Isa, kM, kN, true>(p, ldp, v, depth, acc);
  FG_UNROLL
  for (int m = 0; m < kM; ++m) {
    const auto factor = Isa::set1(rescale[m]);
    FG_UNROLL
    for (int n = 0; n < kN; ++n) {
      float* at = out + m * ldo + n * Isa::kLanes;
      Isa::store(at, first ? acc[m][n] : Isa::fma(Isa::load(at), factor, acc[m][n]));
    }
  }
}

// The same for one row, which is `p`'s column, and the keys [begin, end) alone: where others hold a
// NaN or infinity that this row must not meet, not even times 0.
template <class Isa>
[[gnu::noinline]] static void values_row(const typename Isa::Unit* p, std::ptrdiff_t ldp,
                                         const typename Isa::Unit* v, std::ptrdiff_t ldv,
                                         std::int64_t begin, std::int64_t end, float rescale,
                                         bool first, float* out) {
  const auto element =
      [](const typename Isa::Unit& unit, std::int64_t half) __attribute__((always_inline)) {
    if constexpr (Isa::kPair == 1) {
      return unit;
    } else {
      return bf16_to_f32(static_cast<std::uint16_t>(unit >> (16 * half)));
    }
  };
  for (std::ptrdiff_t c = 0; c < ldv; c += Isa::kLanes) {
    auto sum = Isa::zero();
    for (std::int64_t j = begin; j < end; ++j) {
      const std::ptrdiff_t unit = j / Isa::kPair;
      alignas(64) float values[Isa::kLanes];
      for (int l = 0; l < Isa::kLanes; ++l) {
        values[l] = element(v[unit * ldv + c + l], j % Isa::kPair);
      }
      sum = Isa::fma(Isa::set1(element(p[unit * ldp], j % Isa::kPair)), Isa::load(values), sum);
    }
    Isa::store(out + c, first ? sum : Isa::fma(Isa::load(out + c), Isa::set1(rescale), sum));
  }
}

}  // namespace flashgrad::cpu
