// SPDX-License-Identifier: Apache-2.0
// Both questions are bounded linear equations, sum_k c_k x_k = target with 0 <= x_k <= u_k, solved
// by depth-first search from the largest coefficient down. With the nested strides of real tensors
// every level leaves one or two candidates.
#include "api/overlap.hpp"

#include <algorithm>
#include <numeric>

namespace flashgrad {
namespace {

struct Term {
  std::int64_t coefficient;  // > 0
  std::int64_t bound;        // >= 0
};

class Equation {
 public:
  // Adds coefficient * x with 0 <= x <= bound. A negative coefficient is turned round: x = bound -
  // x'.
  void add(std::int64_t coefficient, std::int64_t bound) {
    if (coefficient == 0 || bound == 0) {
      return;
    }
    if (coefficient < 0) {
      target_ -= coefficient * bound;
      coefficient = -coefficient;
    }
    for (int k = 0; k < size_; ++k) {
      if (terms_[k].coefficient == coefficient) {
        terms_[k].bound += bound;
        return;
      }
    }
    terms_[size_++] = {coefficient, bound};
  }
  void add_to_target(std::int64_t x) { target_ += x; }

  Overlap solve() {
    std::sort(terms_.begin(), terms_.begin() + size_,
              [](const Term& a, const Term& b) { return a.coefficient > b.coefficient; });
    for (int k = size_ - 1; k >= 0; --k) {
      reach_[k] = reach_[k + 1] + terms_[k].coefficient * terms_[k].bound;
      gcd_[k] = std::gcd(gcd_[k + 1], terms_[k].coefficient);
    }
    return search(0, target_);
  }

 private:
  static constexpr int kMaxSteps = 100000;

  Overlap search(int k, std::int64_t target) {
    if (target == 0) {
      return Overlap::kShared;
    }
    // Counted first: a long run of candidates that the divisor rules out takes time, too.
    if (++steps_ > kMaxSteps) {
      return Overlap::kUndecided;
    }
    if (k == size_ || target < 0 || target > reach_[k] || target % gcd_[k] != 0) {
      return Overlap::kNone;
    }
    const std::int64_t c = terms_[k].coefficient;
    const std::int64_t high = std::min(terms_[k].bound, target / c);
    const std::int64_t rest = target - reach_[k + 1];
    const std::int64_t low = rest > 0 ? (rest + c - 1) / c : 0;
    for (std::int64_t x = high; x >= low; --x) {
      if (const Overlap found = search(k + 1, target - c * x); found != Overlap::kNone) {
        return found;
      }
    }
    return Overlap::kNone;
  }

  std::array<Term, 10> terms_{};
  std::array<std::int64_t, 11> reach_{};  // the largest sum of terms k and later
  std::array<std::int64_t, 11> gcd_{};    // of the coefficients of terms k and later
  int size_ = 0;
  std::int64_t target_ = 0;
  int steps_ = 0;
};

// The lowest byte and one past the highest, relative to the base.
struct Hull {
  std::int64_t low = 0;
  std::int64_t high = 0;
};

Hull hull(const ByteLattice& a) {
  Hull h{0, a.element_bytes};
  for (int k = 0; k < a.ndim; ++k) {
    const std::int64_t extent = (a.shape[k] - 1) * a.stride_bytes[k];
    (extent < 0 ? h.low : h.high) += extent;
  }
  return h;
}

}  // namespace

bool ByteLattice::empty() const {
  return std::any_of(shape.begin(), shape.begin() + ndim, [](std::int64_t n) { return n == 0; });
}

Overlap overlap(const ByteLattice& a, const ByteLattice& b) {
  if (a.empty() || b.empty()) {
    return Overlap::kNone;
  }
  const auto distance = static_cast<std::int64_t>(b.base - a.base);
  const Hull ha = hull(a);
  const Hull hb = hull(b);
  // The hulls are small (kMaxSpanBytes in tensor_check.cpp); bases may be anything.
  if (distance >= ha.high - hb.low || distance <= ha.low - hb.high) {
    return Overlap::kNone;
  }
  // a's byte = b's byte: sum a_k i_k - sum b_k j_k + (byte in a's element) - (byte in b's element)
  // = distance
  Equation equation;
  equation.add_to_target(distance);
  for (int k = 0; k < a.ndim; ++k) {
    equation.add(a.stride_bytes[k], a.shape[k] - 1);
  }
  for (int k = 0; k < b.ndim; ++k) {
    equation.add(-b.stride_bytes[k], b.shape[k] - 1);
  }
  equation.add(1, a.element_bytes - 1);
  equation.add(-1, b.element_bytes - 1);
  return equation.solve();
}

Overlap self_overlap(const ByteLattice& a) {
  if (a.empty()) {
    return Overlap::kNone;
  }
  // Two indices differ first in dimension k, there by 1 + x, and by anything in the later ones.
  for (int k = 0; k < a.ndim; ++k) {
    if (a.shape[k] < 2) {
      continue;
    }
    Equation equation;
    equation.add_to_target(-a.stride_bytes[k]);
    equation.add(a.stride_bytes[k], a.shape[k] - 2);
    for (int m = k + 1; m < a.ndim; ++m) {
      equation.add_to_target(a.stride_bytes[m] * (a.shape[m] - 1));
      equation.add(a.stride_bytes[m], 2 * (a.shape[m] - 1));
    }
    if (const Overlap found = equation.solve(); found != Overlap::kNone) {
      return found;
    }
  }
  return Overlap::kNone;
}

}  // namespace flashgrad
