// SPDX-License-Identifier: Apache-2.0
// 2^x and tanh on vectors of an instruction set.
#pragma once

#include "cpu/isa/common.hpp"

namespace flashgrad::cpu {

inline constexpr float kLog2E = 1.44269504088896340736F;

// 2^x = 2^n * 2^f, n the nearest integer. The polynomials have the least maximum relative error on
// |f| <= 1/2 among those with constant term 1 (by Lawson's iteration): degree 3 1.0e-4, a 39th of a
// bf16 unit; degree 4 2.8e-6; degree 6 2e-9 before rounding, 1 ulp after. 0 far below the range,
// NaN for NaN, 0 for -inf.
template <class Isa, int kDegree>
FG_INLINE typename Isa::Vec exp2(typename Isa::Vec x) {
  static_assert(kDegree == 3 || kDegree == 4 || kDegree == 6);
  const auto n = Isa::round(x);
  const auto f = Isa::fraction(x, n);
  const auto step = [f](typename Isa::Vec p, float c) __attribute__((always_inline)) {
    return Isa::fma(p, f, Isa::set1(c));
  };
  typename Isa::Vec p;
  if constexpr (kDegree == 3) {
    p = Isa::set1(0.0550089292F);
    p = step(p, 0.242210954F);
    p = step(p, 0.693282902F);
  } else if constexpr (kDegree == 4) {
    p = Isa::set1(0.00958285294F);
    p = step(p, 0.0559064262F);
    p = step(p, 0.240240991F);
    p = step(p, 0.693124175F);
  } else {
    p = Isa::set1(1.53533620e-4F);
    p = step(p, 1.33988739e-3F);
    p = step(p, 9.61843692e-3F);
    p = step(p, 0.0555033237F);
    p = step(p, 0.240226477F);
    p = step(p, 0.693147182F);
  }
  return Isa::scale(step(p, 1.F), n);
}

// tanh to 2 ulp: a polynomial of x^2 for |x| < 0.55 (1e-9 before rounding), (1 - e) / (1 + e) with
// e = exp(-2|x|) beyond.
template <class Isa>
FG_INLINE typename Isa::Vec tanh(typename Isa::Vec x) {
  const auto a = Isa::abs(x);
  const auto z = Isa::mul(a, a);
  auto p = Isa::set1(-0.00627423963F);
  p = Isa::fma(p, z, Isa::set1(0.0210716799F));
  p = Isa::fma(p, z, Isa::set1(-0.0538523085F));
  p = Isa::fma(p, z, Isa::set1(0.13332586F));
  p = Isa::fma(p, z, Isa::set1(-0.333333164F));
  const auto near = Isa::fma(Isa::mul(p, z), a, a);
  const auto e = exp2<Isa, 6>(Isa::mul(a, Isa::set1(-2 * kLog2E)));
  const auto far = Isa::div(Isa::sub(Isa::set1(1.F), e), Isa::add(Isa::set1(1.F), e));
  return Isa::copy_sign(Isa::select(Isa::less(a, Isa::set1(0.55F)), near, far), x);
}

}  // namespace flashgrad::cpu
