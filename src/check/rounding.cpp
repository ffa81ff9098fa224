// SPDX-License-Identifier: Apache-2.0
// Errors are bounds, or, where many meet, the size that they reach together (ErrorSum).
#include "check/rounding.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "reference/reference.hpp"

namespace flashgrad::check {
namespace {

using reference::Formula;
using reference::Head;
using reference::load_row;
using reference::Row;
using reference::RowState;

constexpr double square(double x) { return x * x; }

// Half the distance to x's neighbours in the dtype, or more.
double half_step(DType dtype, double x) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-53 * std::abs(x);
    case DType::kF32:
      return 0x1p-24 * std::abs(x);
    case DType::kBF16:
      return 0x1p-8 * std::abs(x);
    case DType::kF16:
      return std::max(0x1p-11 * std::abs(x), 0x1p-25);
  }
  return 0;
}

// The error of sum_j w_j x_j whose w_j are off by up to e_j. Most errors have signs of their own,
// and then squares add; equal rows or keys have equal errors, which add as they are. Either sum is
// small where the other says all, so that both are taken.
class ErrorSum {
 public:
  void add(double e_times_x) {
    squares_ += square(e_times_x);
    sum_ += e_times_x;
  }
  [[nodiscard]] double squared() const { return squares_ + square(sum_); }

 private:
  double squares_ = 0;
  double sum_ = 0;
};

using ErrorSums = Row<ErrorSum>;

void add(ErrorSums& sums, double e, const Row<double>& x, std::int64_t n) {
  for (std::size_t c = 0; c < static_cast<std::size_t>(n); ++c) {
    sums[c].add(e * x[c]);
  }
}

// What the roundings of a row leave in the numbers that all its pairs share.
struct RowErrors {
  double lse = 0;
  double delta = 0;
};

struct Query {
  Row<double> q, dout, out;
  RowState<double> state;
};

// Of a visible pair.
struct Pair {
  double p = 0;
  double dp = 0;
  double g = 0;      // dp - delta + dlse
  double slope = 1;  // the softcap's factor: ds = p * g * slope
  double s_error = 0;
  double g_error = 0;  // but for delta's own
  double slope_error = 0;
};

// Where one thread computes: too much for its stack.
struct Work {
  Query row;
  Row<double> k, v;
  ErrorSums out, dq, dk, dv;
  Row<double> dq_by_delta;
};

class Arithmetic {
 public:
  explicit Arithmetic(const Problem& p)
      : p_(p), formula_(p), u_(half_step(statistics_dtype(p.dtype), 1)) {}

  void load_query(const Head& head, std::int64_t i, Query& x) const {
    const Args& a = head.args;
    load_row(a.q, head.q(a.q, i), p_.head_dim, x.q);
    x.state = load_row_state(head, i, x.dout);
    if (!a.dout || x.state.empty || head.sees_nothing(i)) {
      x.dout.fill(0);
      x.out.fill(0);
    } else {
      load_row(a.out, head.q(a.out, i), p_.head_dim_v, x.out);
    }
  }

  [[nodiscard]] Pair pair(const Query& row, const Row<double>& k, const Row<double>& v) const {
    const RowState<double>& state = row.state;
    const Products qk = products(row.q, k, p_.head_dim);
    const Products dp = products(row.dout, v, p_.head_dim_v);
    const double s = formula_.logit(qk.sum);
    const double linear = std::abs(p_.scale * qk.sum);
    const double linear_error = std::abs(p_.scale) * qk.error;
    Pair x;
    // Anywhere within the logit's error.
    x.slope = slope(std::max(0.0, linear - linear_error));
    x.slope_error = p_.softcap > 0 ? x.slope - slope(linear + linear_error) + 8 * u_ : 0;
    x.s_error = x.slope * linear_error + 2 * u_ * std::abs(s);
    x.p = formula_.probability(state.like_lse(s), state.lse);
    x.dp = dp.sum;
    x.g = dp.sum - state.delta + state.dlse;
    x.g_error = dp.error + u_ * (std::abs(dp.sum) + std::abs(state.delta) + std::abs(state.dlse));
    return x;
  }

  // Of p by an error of its exponent: p * (exp(error) - 1), but no p is over 1, and f32 may take
  // one below its normal numbers for 0.
  [[nodiscard]] double growth(double p, double error) const {
    if (p < 0x1p-126 && p_.dtype != DType::kF64) {
      return p * std::exp(std::min(error, 700.0));
    }
    return std::min(p * std::expm1(std::min(error, 700.0)), 1.0);
  }
  // Of p as an operand; 1 needs no rounding.
  [[nodiscard]] double rounding_of(double p) const {
    return std::min(half_step(p_.dtype, p), 1 - p);
  }
  // Of the backward's p, whose exponent is off by `exponent_error`.
  [[nodiscard]] double p_error(const Pair& x, double exponent_error) const {
    return growth(x.p, exponent_error) + rounding_of(x.p);
  }
  // Of ds, but for what g is off by: p may be rounded before it is multiplied by g, and ds is
  // after.
  [[nodiscard]] double ds_error(const Pair& x, double exponent_error) const {
    const double roundings =
        std::hypot(rounding_of(x.p) * x.slope, half_step(p_.dtype, x.p * x.slope));
    const double factor_error =
        growth(x.p, exponent_error) * x.slope + x.p * x.slope_error + roundings;
    return x.g * factor_error;
  }
  // Of the forward's p, the sum of which is 1 whatever its logit is off by.
  [[nodiscard]] double p_error_forward(const Pair& x) const {
    return (1 - x.p) * growth(x.p, x.s_error) + rounding_of(x.p);
  }

  // With an out and an lse that the backward is given, as they are.
  [[nodiscard]] RowErrors errors_of_given(const Query& row) const {
    return {2 * u_ * std::abs(row.state.lse), products(row.dout, row.out, p_.head_dim_v).error};
  }
  // With those of a forward: the logits' errors move lse; what out loses to p as an operand and to
  // its own rounding stays in delta.
  [[nodiscard]] RowErrors errors_of_computed(const Head& head, std::int64_t i, Work& w) const {
    RowErrors errors = errors_of_given(w.row);
    double sum_of_growth = 0;
    ErrorSum by_p;
    ErrorSum by_out;
    for_each_key(head, i, w, [&](const Pair& x) {
      sum_of_growth += growth(x.p, x.s_error);
      by_p.add(p_error_forward(x) * x.dp);
    });
    for (std::size_t c = 0; c < static_cast<std::size_t>(p_.head_dim_v); ++c) {
      by_out.add(std::copysign(half_step(p_.dtype, w.row.out[c]), w.row.out[c]) * w.row.dout[c]);
    }
    errors.lse += std::log1p(sum_of_growth);
    errors.delta += std::sqrt(by_p.squared() + by_out.squared());
    return errors;
  }

  // Calls f(pair) for the keys that row i, which w.row holds, may see; w.k and w.v hold the key.
  template <class F>
  void for_each_key(const Head& head, std::int64_t i, Work& w, F&& f) const {
    const Range keys = head.sequence.band.kv_range(i, i + 1);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      load_key(head, j, w);
      f(pair(w.row, w.k, w.v));
    }
  }
  void load_key(const Head& head, std::int64_t j, Work& w) const {
    const Args& a = head.args;
    load_row(a.k, head.kv(a.k, j), p_.head_dim, w.k);
    load_row(a.v, head.kv(a.v, j), p_.head_dim_v, w.v);
  }

 private:
  // A sum of n products, and what it loses in f32: none of its partial sums exceeds half of the
  // sizes and the sum, and n roundings with random signs reach sqrt(n) times one.
  struct Products {
    double sum = 0;
    double error = 0;
  };
  [[nodiscard]] Products products(const Row<double>& a, const Row<double>& b,
                                  std::int64_t n) const {
    Products result;
    double size = 0;
    for (std::size_t c = 0; c < static_cast<std::size_t>(n); ++c) {
      result.sum += a[c] * b[c];
      size += std::abs(a[c] * b[c]);
    }
    result.error = std::sqrt(static_cast<double>(n)) * u_ * (size + std::abs(result.sum)) / 2;
    return result;
  }
  // 1 - tanh(s / softcap)^2
  [[nodiscard]] double slope(double s) const {
    return p_.softcap > 0 ? 1 / square(std::cosh(s / p_.softcap)) : 1;
  }

  const Problem& p_;
  Formula<double> formula_;
  double u_;  // unit roundoff of the statistics and accumulators
};

// The errors of one unit.
class UnitErrors {
 public:
  UnitErrors(const Unit& u, const Statistics& of_rows, const Statistics& of_keys, bool backward)
      : u_(u),
        p_(u.problem),
        of_rows_(of_rows),
        of_keys_(of_keys),
        backward_(backward),
        arithmetic_(u.problem),
        rows_(static_cast<std::size_t>(u.problem.heads_q * u.seqlen_q())) {
    for (std::size_t output = 0; output < kDsinks; ++output) {
      if (output <= kLse || backward) {
        errors_.of[output].assign(size_of(u, static_cast<Output>(output)), 0);
      }
    }
  }

  // The n-th chosen row of a query head.
  void compute_row(std::int64_t head_q, std::int64_t n, Work& w) {
    const std::int64_t i = u_.rows[static_cast<std::size_t>(n)];
    const Head head{p_, of_rows_.args, u_.sequence(), head_q};
    arithmetic_.load_query(head, i, w.row);
    if (w.row.state.empty) {
      return;
    }
    const RowErrors row = of_rows_.given ? arithmetic_.errors_of_given(w.row)
                                         : arithmetic_.errors_of_computed(head, i, w);
    row_errors_of(head_q, i) = row;
    errors_.of[kLse][slot(u_, kLse, head_q, n)] = row.lse;
    w.out.fill({});
    w.dq.fill({});
    w.dq_by_delta.fill(0);
    arithmetic_.for_each_key(head, i, w, [&](const Pair& x) {
      add(w.out, arithmetic_.p_error_forward(x), w.v, p_.head_dim_v);
      add(w.dq, arithmetic_.ds_error(x, x.s_error), w.k, p_.head_dim);
      add(w.dq, x.p * x.slope * x.g_error, w.k, p_.head_dim);
      reference::add_scaled(w.dq_by_delta, x.p * x.slope * row.delta, w.k, p_.head_dim);
    });
    store(kOut, p_.dtype, slot(u_, kOut, head_q, n), 1, 0, w.out);
    if (backward_) {
      for (std::size_t c = 0; c < static_cast<std::size_t>(p_.head_dim); ++c) {
        w.dq[c].add(w.dq_by_delta[c]);
      }
      store(kDq, p_.dq_dtype, slot(u_, kDq, head_q, n), p_.scale, row.lse, w.dq);
    }
  }

  // The n-th chosen key, after all rows.
  void compute_key(std::int64_t n, Work& w) {
    const std::int64_t j = u_.keys[static_cast<std::size_t>(n)];
    Head head{p_, of_keys_.args, u_.sequence(), 0};
    arithmetic_.load_key(head, j, w);
    w.dk.fill({});
    w.dv.fill({});
    const Range rows = u_.at.band.q_range(j, j + 1);
    for (; head.head_q < p_.heads_q; ++head.head_q) {
      for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        arithmetic_.load_query(head, i, w.row);
        if (w.row.state.empty) {
          continue;
        }
        const Pair x = arithmetic_.pair(w.row, w.k, w.v);
        const RowErrors row =
            of_keys_.given ? arithmetic_.errors_of_given(w.row) : row_errors_of(head.head_q, i);
        const double exponent_error = x.s_error + row.lse;
        add(w.dv, arithmetic_.p_error(x, exponent_error), w.row.dout, p_.head_dim_v);
        add(w.dk, arithmetic_.ds_error(x, exponent_error), w.row.q, p_.head_dim);
        add(w.dk, x.p * x.slope * (x.g_error + row.delta), w.row.q, p_.head_dim);
      }
    }
    store(kDk, p_.dk_dtype, slot(u_, kDk, 0, n), p_.scale, 0, w.dk);
    store(kDv, p_.dv_dtype, slot(u_, kDv, 0, n), 1, 0, w.dv);
  }

  Values<double> take() { return std::move(errors_); }

 private:
  // Of a result o = factor * sum: the sum's error, o times an error of lse that all its terms
  // share, and its rounding.
  void store(Output output, DType dtype, std::size_t at, double factor, double lse_error,
             const ErrorSums& sums) {
    const auto dim = static_cast<std::size_t>(extent(u_, output).dim);
    for (std::size_t c = 0; c < dim; ++c) {
      const double o = u_.exact.of[output][at + c];
      errors_.of[output][at + c] = std::sqrt(square(factor) * sums[c].squared() +
                                             square(lse_error * o) + square(half_step(dtype, o)));
    }
  }
  RowErrors& row_errors_of(std::int64_t head_q, std::int64_t i) {
    return rows_[static_cast<std::size_t>(head_q * u_.seqlen_q() + i)];
  }

  const Unit& u_;
  const Problem& p_;
  const Statistics& of_rows_;
  const Statistics& of_keys_;
  bool backward_;
  Arithmetic arithmetic_;
  std::vector<RowErrors> rows_;  // (heads_q, seqlen_q), of the chosen rows
  Values<double> errors_;
};

}  // namespace

Values<double> rounding_errors(const Unit& u, const Statistics& of_rows, const Statistics& of_keys,
                               bool backward, int num_threads) {
  UnitErrors errors(u, of_rows, of_keys, backward);
  const auto num_rows = static_cast<std::int64_t>(u.rows.size());
  const auto num_keys = backward ? static_cast<std::int64_t>(u.keys.size()) : 0;
#pragma omp parallel num_threads(num_threads)
  {
    const auto work = std::make_unique<Work>();
#pragma omp for collapse(2) schedule(dynamic)
    for (std::int64_t head_q = 0; head_q < u.problem.heads_q; ++head_q) {
      for (std::int64_t n = 0; n < num_rows; ++n) {
        errors.compute_row(head_q, n, *work);
      }
    }
#pragma omp for schedule(dynamic)
    for (std::int64_t n = 0; n < num_keys; ++n) {
      errors.compute_key(n, *work);
    }
  }
  return errors.take();
}

}  // namespace flashgrad::check
