// SPDX-License-Identifier: Apache-2.0
// Backward, the register tiles that hold one kRows (keys) x kWidth (queries) piece of S^T and dP^T:
//
//     (1) s = K Q^T                          (2) p = exp(scale * s - lse)
//         with softcap: t = tanh(scale * s / softcap), p = exp(softcap * t - lse)
//     (3) dp = V dO^T                        (4) ds = w * (dp - delta + dlse), w = p * (1 - t^2)
//
// score_tile is (1), gradient_tile the rest. p and ds leave in the input's precision for the
// products of backward_block.hpp, w in f32 for (4).
#pragma once

#include <cstring>

#include "cpu/backward_pack.hpp"
#include "cpu/micro_kernel.hpp"
#include "cpu/vector_math.hpp"

namespace flashgrad::cpu {

// Where one tile is, and which of its queries each key may touch.
template <class Isa>
struct Tile {
  const float* neg_lse;       // of its queries
  const float* neg_delta;     // likewise
  Range visible[Isa::kRows];  // per key: its queries, counted from the tile's first
};

template <class Isa>
FG_INLINE typename Isa::Mask visible_lanes(const Tile<Isa>& tile, int m, int n,
                                           typename Isa::Vec neg_lse) {
  const std::int64_t first = n * Isa::kLanes;
  const auto adds = Isa::not_equal(neg_lse, Isa::set1(-std::numeric_limits<float>::infinity()));
  return Isa::both(Isa::lane_mask(tile.visible[m].begin - first, tile.visible[m].end - first),
                   adds);
}

// exp(s - lse). The logit is rounded before lse is subtracted, by the same operations as in the
// forward (cpu/forward_item.hpp), and log2(e) comes last: where one key outweighs all others, lse
// is s to the bit and p is 1, however large they are. (-ffp-contract=off keeps the two operations
// apart.)
template <class Isa>
FG_INLINE typename Isa::Vec probability(typename Isa::Vec s, typename Isa::Vec neg_lse) {
  const auto exponent = Isa::min_zero(Isa::add(s, neg_lse));
  return exp2 < Isa, Isa::kPair == 1 ? 6 : 3 > (Isa::mul(exponent, Isa::set1(kLog2E)));
}

// (1): scale * s in f32 to `scores`, kRows rows ld_scores floats apart.
template <class Isa>
[[gnu::noinline]] static void score_tile(const typename Isa::Unit* k_rows, std::ptrdiff_t ld_k,
                                         const typename Isa::Unit* q_columns, std::ptrdiff_t depth,
                                         float scale, float* scores, std::ptrdiff_t ld_scores) {
  constexpr int kM = Isa::kRows;
  constexpr int kN = Isa::kVecs;
  typename Isa::Vec acc[kM][kN];
  multiply_logits<Isa, kM, kN>(k_rows, ld_k, q_columns, depth, acc);
  FG_UNROLL
  for (int m = 0; m < kM; ++m) {
    FG_UNROLL
    for (int n = 0; n < kN; ++n) {
      Isa::store(scores + m * ld_scores + n * Isa::kLanes, Isa::mul(acc[m][n], Isa::set1(scale)));
    }
  }
}

// (2) for one vector of the tile: p is returned, w takes the place of the scaled logits at
// `weight`.
template <class Isa, bool kMasked, bool kSoftcap>
FG_INLINE typename Isa::Vec weigh(const Tile<Isa>& tile, float softcap, int m, int n,
                                  float* weight) {
  using Vec = typename Isa::Vec;
  const Vec neg_lse = Isa::load(tile.neg_lse + n * Isa::kLanes);
  const Vec s = Isa::load(weight);
  Vec p;
  Vec w;
  if constexpr (kSoftcap) {
    const Vec t = tanh<Isa>(s);
    p = probability<Isa>(Isa::mul(t, Isa::set1(softcap)), neg_lse);
    w = Isa::mul(p, Isa::sub(Isa::set1(1.F), Isa::mul(t, t)));
  } else {
    p = probability<Isa>(s, neg_lse);
    w = p;
  }
  if constexpr (kMasked) {
    const auto lanes = visible_lanes<Isa>(tile, m, n, neg_lse);
    p = Isa::keep(lanes, p);
    w = Isa::keep(lanes, w);
  }
  Isa::store(weight, w);
  return p;
}

// (2), (3), (4): P^T to p_rows, dS^T to ds_rows and, with kPair = 2, to ds_pairs with the keys
// interleaved. `weight` has score_tile's logits and is left with w (with kPair = 1 and no softcap
// it is p_rows). The exponentials of (2) are dealt out over the depth of (3): alone they would be
// long chains of operations on units that the multiply-adds leave idle.
template <class Isa, bool kMasked, bool kSoftcap>
[[gnu::noinline]] static void gradient_tile(const typename Isa::Unit* v_rows, std::ptrdiff_t ld_v,
                                            const typename Isa::Unit* dout_columns,
                                            std::ptrdiff_t depth, float softcap,
                                            const Tile<Isa>& tile, float* weight,
                                            std::ptrdiff_t ld_weight, typename Isa::Unit* p_rows,
                                            typename Isa::Unit* ds_rows,
                                            typename Isa::Unit* ds_pairs) {
  using Vec = typename Isa::Vec;
  constexpr int kM = Isa::kRows;
  constexpr int kN = Isa::kVecs;
  constexpr std::ptrdiff_t kSteps = kM * kN / Isa::kPair;
  Vec acc[kM][kN];
  set_zero<Isa>(acc);
  const std::ptrdiff_t part = depth / kSteps;
#pragma GCC unroll 1
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 1
    for (int n = 0; n < kN; n += Isa::kPair) {
      add_product<Isa, kM, kN, false>(v_rows, ld_v, dout_columns, part, acc);
      v_rows += part;
      dout_columns += part * (kN * Isa::kLanes);
      float* w = weight + m * ld_weight + n * Isa::kLanes;
      typename Isa::Unit* p = p_rows + m * kLdP<Isa> + n / Isa::kPair * Isa::kLanes;
      const Vec even = weigh<Isa, kMasked, kSoftcap>(tile, softcap, m, n, w);
      if constexpr (Isa::kPair == 2) {
        const Vec odd = weigh<Isa, kMasked, kSoftcap>(tile, softcap, m, n + 1, w + Isa::kLanes);
        Isa::store_units(p, Isa::narrow(even, odd));
      } else if constexpr (kSoftcap) {
        Isa::store(p, even);
      }
    }
  }
  add_product<Isa, kM, kN, false>(v_rows, ld_v, dout_columns, depth - kSteps * part, acc);
  FG_UNROLL
  for (int n = 0; n < kN; ++n) {
    const Vec neg_delta = Isa::load(tile.neg_delta + n * Isa::kLanes);
    FG_UNROLL
    for (int m = 0; m < kM; ++m) {
      Vec ds = Isa::mul(Isa::add(acc[m][n], neg_delta),
                        Isa::load(weight + m * ld_weight + n * Isa::kLanes));
      if constexpr (kMasked) {  // w is 0 there, but dp may be NaN
        ds = Isa::keep(visible_lanes<Isa>(tile, m, n, Isa::load(tile.neg_lse + n * Isa::kLanes)),
                       ds);
      }
      acc[m][n] = ds;
      if constexpr (Isa::kPair == 1) {
        Isa::store(ds_rows + m * kLdP<Isa> + n * Isa::kLanes, ds);
      }
    }
  }
  if constexpr (Isa::kPair == 2) {
    FG_UNROLL
    for (int m = 0; m < kM; m += 2) {
      FG_UNROLL
      for (int n = 0; n < kN; n += 2) {
        const auto even = Isa::narrow(acc[m][n], acc[m][n + 1]);
        const auto odd = Isa::narrow(acc[m + 1][n], acc[m + 1][n + 1]);
        Isa::store_units(ds_rows + m * kLdP<Isa> + n / 2 * Isa::kLanes, even);
        Isa::store_units(ds_rows + (m + 1) * kLdP<Isa> + n / 2 * Isa::kLanes, odd);
        typename Isa::UnitVec lo;
        typename Isa::UnitVec hi;
        Isa::interleave(even, odd, lo, hi);
        Isa::store_units(ds_pairs + m / 2 * kLdPairs<Isa> + n * Isa::kLanes, lo);
        Isa::store_units(ds_pairs + m / 2 * kLdPairs<Isa> + (n + 1) * Isa::kLanes, hi);
      }
    }
  }
}

// A tile of P^T or dS^T that the mask empties.
template <class Isa>
FG_INLINE void zero_tile(typename Isa::Unit* rows) {
  for (int m = 0; m < Isa::kRows; ++m) {
    std::memset(rows + m * kLdP<Isa>, 0, sizeof(typename Isa::Unit) * (kWidth<Isa> / Isa::kPair));
  }
}
template <class Isa>
FG_INLINE void zero_pairs(typename Isa::Unit* ds_pairs) {
  for (int m = 0; m < Isa::kRows / 2; ++m) {
    std::memset(ds_pairs + m * kLdPairs<Isa>, 0, sizeof(typename Isa::Unit) * kWidth<Isa>);
  }
}

}  // namespace flashgrad::cpu
