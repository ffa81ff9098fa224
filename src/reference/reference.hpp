// SPDX-License-Identifier: Apache-2.0
// Attention as the textbook has it, forward and backward: the oracle that every other backend is
// judged by, and the backend of last resort. Each function computes a few rows (or keys) of one
// head of one sequence and nothing else, so whole problems and small samples of huge ones are
// served alike, in any order, by any number of threads, with the same bits. Nothing is stored but
// the result: logits are computed again where they are needed.
//
// The equations stand in Formula; the loops below only say which rows meet which keys. A Formula on
// float that rounds every intermediate is the "naive in the input dtype" of docs/semantics.md, and
// a wrong Formula is how tests/conformance/mutation_test.cpp proves that a wrong backend would be
// noticed.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/problem.hpp"

namespace flashgrad::reference {

inline constexpr double kMaxF32 = std::numeric_limits<float>::max();

// Rows or keys of one call. Each key is loaded and converted once for this many rows.
inline constexpr int kBlock = 8;

template <class R>
using Row = std::array<R, kMaxHeadDim>;
template <class R>
using Block = std::array<Row<R>, kBlock>;

// Where one thread computes: operands and results of a call of the functions below. Too much for
// the stack of a thread, which may be small; a few rows of 2 KB stand there.
template <class R>
struct Scratch {
  Block<R> q, dout, k, v;  // the rows, or the keys, of the call
  Block<R> out, dq, dk, dv;
  std::array<R, kBlock> lse;
};

// The scalar equations of docs/semantics.md, exact to the accuracy of R.
template <class R>
struct Formula {
  using Real = R;
  Real scale;
  Real softcap;  // 0: none

  explicit Formula(const Problem& p)
      : scale(static_cast<Real>(p.scale)), softcap(static_cast<Real>(p.softcap)) {}

  // Applied to S, P, dP and dS.
  [[nodiscard]] Real round(Real x) const { return x; }

  // s = scale * <q, k>, then softcap * tanh(s / softcap).
  [[nodiscard]] Real logit(Real dot) const {
    const Real s = scale * dot;
    return softcap > 0 ? softcap * std::tanh(s / softcap) : s;
  }
  // p = exp(s - lse). A rounded lse can lie below a huge s, which must not lift p over 1. NaN stays
  // NaN.
  [[nodiscard]] Real probability(Real s, Real lse) const {
    const Real exponent = s - lse;
    return std::exp(exponent > 0 ? Real{0} : exponent);
  }
  // The same where m, the row's largest logit, and l = sum exp(s - m) are known, of which lse is
  // m + log(l): beside an m above 1e15 no lse has a log(l). NaN if lse is.
  [[nodiscard]] Real probability(Real s, Real lse, double m, double l) const {
    return std::isnan(lse) ? lse : static_cast<Real>(std::exp(static_cast<double>(s) - m) / l);
  }
  // ds = p * (dp - delta + dlse) * (1 - (s / softcap)^2).
  [[nodiscard]] Real dlogit(Real s, Real p, Real dp, Real delta, Real dlse) const {
    const Real ds = p * (dp - delta + dlse);
    return softcap > 0 ? ds * (1 - (s / softcap) * (s / softcap)) : ds;
  }
  // What a row adds to its sink's gradient.
  [[nodiscard]] Real dsink(Real p, Real delta, Real dlse) const { return p * (dlse - delta); }
  // The results, from sum_j p_ij v_j, sum_j ds_ij k_j, sum_i ds_ij q_i and sum_i p_ij dout_i.
  [[nodiscard]] Real out(Real sum) const { return sum; }
  [[nodiscard]] Real dq(Real sum) const { return scale * sum; }
  [[nodiscard]] Real dk(Real sum) const { return scale * sum; }
  [[nodiscard]] Real dv(Real sum) const { return sum; }
};

inline float round_to(DType dtype, float x) {
  switch (dtype) {
    case DType::kBF16:
      return bf16_to_f32(f32_to_bf16(x));
    case DType::kF16:
      return f16_to_f32(f32_to_f16(x));
    default:
      return x;
  }
}

// "Naive in the input dtype": products accumulated in f32, each intermediate and result rounded to
// `dtype`. A gradient that the call wants in f32 is not rounded itself, only what it is made of.
struct NaiveFormula : Formula<float> {
  DType dtype;
  DType dq_dtype;
  DType dk_dtype;
  DType dv_dtype;

  NaiveFormula(const Problem& p, DType rounded_to)
      : Formula<float>(p),
        dtype(rounded_to),
        dq_dtype(p.dq_dtype == DType::kF32 ? DType::kF32 : rounded_to),
        dk_dtype(p.dk_dtype == DType::kF32 ? DType::kF32 : rounded_to),
        dv_dtype(p.dv_dtype == DType::kF32 ? DType::kF32 : rounded_to) {}
  [[nodiscard]] float round(float x) const { return round_to(dtype, x); }
  using Formula<float>::probability;
  [[nodiscard]] float probability(float s, float lse, double /*m*/, double /*l*/) const {
    return probability(s, lse);
  }
  [[nodiscard]] float out(float sum) const { return round_to(dtype, sum); }
  [[nodiscard]] float dq(float sum) const { return round_to(dq_dtype, scale * sum); }
  [[nodiscard]] float dk(float sum) const { return round_to(dk_dtype, scale * sum); }
  [[nodiscard]] float dv(float sum) const { return round_to(dv_dtype, sum); }
};

// One head of one sequence: where to find the rows i (of query head `head_q`) and the keys j.
struct Head {
  const Problem& problem;
  const Args& args;
  Sequence sequence;
  std::int64_t head_q;

  [[nodiscard]] std::int64_t head_kv() const { return head_q / problem.group(); }
  [[nodiscard]] std::int64_t q(const Tensor& t, std::int64_t i) const {
    return t.offset(sequence.batch_index, sequence.q_begin + i, head_q);
  }
  [[nodiscard]] std::int64_t kv(const Tensor& t, std::int64_t j) const {
    return t.offset(sequence.batch_index, sequence.kv_begin + j, head_kv());
  }
  // -inf: no sink.
  [[nodiscard]] double sink() const {
    return args.sinks != nullptr ? load_f64(args.sinks, statistics_dtype(problem.dtype), head_q)
                                 : -std::numeric_limits<double>::infinity();
  }
  [[nodiscard]] bool sees_nothing(std::int64_t i) const {
    return sequence.band.kv_range(i, i + 1).empty();
  }
};

template <class R>
void load_row(const Tensor& t, std::int64_t offset, std::int64_t size, Row<R>& row) {
  const auto each = [&](auto&& load) {
    for (std::int64_t c = 0; c < size; ++c) {
      row[static_cast<std::size_t>(c)] = static_cast<R>(load(offset + c * t.dim_stride));
    }
  };
  switch (t.dtype) {
    case DType::kF64:
      return each([data = static_cast<const double*>(t.data)](auto e) { return data[e]; });
    case DType::kF32:
      return each([data = static_cast<const float*>(t.data)](auto e) { return data[e]; });
    case DType::kBF16:
      return each([data = static_cast<const std::uint16_t*>(t.data)](auto e) {
        return bf16_to_f32(data[e]);
      });
    case DType::kF16:
      return each([data = static_cast<const std::uint16_t*>(t.data)](auto e) {
        return f16_to_f32(data[e]);
      });
  }
}

template <class R>
R dot(const Row<R>& a, const Row<R>& b, std::int64_t size) {
  R sum = 0;
  const R* pa = a.data();
  const R* pb = b.data();
#pragma omp simd reduction(+ : sum)
  for (std::int64_t c = 0; c < size; ++c) {
    sum += pa[c] * pb[c];
  }
  return sum;
}

// sum += w * x
template <class R>
void add_scaled(Row<R>& sum, R w, const Row<R>& x, std::int64_t size) {
  R* ps = sum.data();
  const R* px = x.data();
#pragma omp simd
  for (std::int64_t c = 0; c < size; ++c) {
    ps[c] += w * px[c];
  }
}

// The hull of the keys that rows[0, num_rows) may see, and of the rows that may see keys[0,
// num_keys).
inline Range keys_of(const Band& band, const std::int64_t* rows, int num_rows) {
  return num_rows > 0 ? band.kv_range(rows[0], rows[num_rows - 1] + 1) : Range{};
}
inline Range rows_of(const Band& band, const std::int64_t* keys, int num_keys) {
  return num_keys > 0 ? band.q_range(keys[0], keys[num_keys - 1] + 1) : Range{};
}

// What the backward needs of row i besides its vectors.
template <class R>
struct RowState {
  bool empty = true;  // adds nothing to any gradient
  R lse = 0;
  bool lse_is_f32 = false;
  R delta = 0;
  R dlse = 0;

  // s to be compared with lse: an s that rounds to an f32 lse counts as it. Where one key outweighs
  // all others lse is its s so rounded, and p is 1, however large they are.
  [[nodiscard]] R like_lse(R s) const {
    return lse_is_f32 && static_cast<float>(s) == static_cast<float>(lse) ? lse : s;
  }
};

// delta_i = <dout_i, out_i>; also loads dout_i. An empty row (lse = +-inf) and one that sees only
// its sink read neither.
template <class R>
RowState<R> load_row_state(const Head& head, std::int64_t i, Row<R>& dout) {
  const Args& a = head.args;
  RowState<R> state;
  const double lse = load_f64(a.lse.data, a.lse.dtype, head.q(a.lse, i));
  if (std::isinf(lse)) {
    return state;
  }
  state.empty = false;
  state.lse = static_cast<R>(lse);
  state.lse_is_f32 = a.lse.dtype == DType::kF32;
  if (a.dlse) {
    state.dlse = static_cast<R>(load_f64(a.dlse.data, a.dlse.dtype, head.q(a.dlse, i)));
  }
  if (a.dout && !head.sees_nothing(i)) {
    Row<R> out;
    load_row(a.dout, head.q(a.dout, i), head.problem.head_dim_v, dout);
    load_row(a.out, head.q(a.out, i), head.problem.head_dim_v, out);
    state.delta = dot(dout, out, head.problem.head_dim_v);
  }
  return state;
}

// scratch.lse, out: lse_i = log( sum_{visible j} exp(s_ij) + exp(sink) )  and
// out_i = sum_j p_ij v_j  of ascending `rows` of one head.
template <class F, class R = typename F::Real>
void forward_rows(const F& f, const Head& head, const std::int64_t* rows, int num_rows,
                  Scratch<R>& scratch) {
  const Args& a = head.args;
  const Band& band = head.sequence.band;
  const std::int64_t d = head.problem.head_dim;
  const std::int64_t dv = head.problem.head_dim_v;
  Block<R>& q = scratch.q;
  Block<R>& out = scratch.out;
  std::array<R, kBlock>& lse = scratch.lse;
  Row<R> k;
  Row<R> v;
  // The running maximum m and the sum l of exp(s - m): a later, higher m rescales l. exp(s - s) is
  // 1, or NaN if s is infinite: a visible logit of +inf makes the row NaN.
  std::array<double, kBlock> m;
  std::array<double, kBlock> l;
  for (int r = 0; r < num_rows; ++r) {
    load_row(a.q, head.q(a.q, rows[r]), d, q[r]);
    out[r].fill(0);
    m[r] = head.sink();
    l[r] = m[r] == -std::numeric_limits<double>::infinity() ? 0 : std::exp(m[r] - m[r]);
  }
  const Range keys = keys_of(band, rows, num_rows);
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    load_row(a.k, head.kv(a.k, j), d, k);
    for (int r = 0; r < num_rows; ++r) {
      if (!band.visible(rows[r], j)) {
        continue;
      }
      const auto s = static_cast<double>(f.round(f.logit(dot(q[r], k, d))));
      if (s > m[r]) {
        l[r] = l[r] * std::exp(m[r] - s) + std::exp(s - s);
        m[r] = s;
      } else if (s != -std::numeric_limits<double>::infinity()) {
        l[r] += std::exp(s - m[r]);
      }
    }
  }
  // An lse of f32 that the logits exceed is NaN, and so is the row: +inf would call it empty.
  const double highest =
      head.problem.dtype == DType::kF64 ? std::numeric_limits<double>::max() : kMaxF32;
  for (int r = 0; r < num_rows; ++r) {
    const double x = m[r] + std::log(l[r]);
    lse[r] = x > highest ? std::numeric_limits<R>::quiet_NaN() : static_cast<R>(x);
  }
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    load_row(a.k, head.kv(a.k, j), d, k);
    load_row(a.v, head.kv(a.v, j), dv, v);
    for (int r = 0; r < num_rows; ++r) {
      if (!band.visible(rows[r], j) || std::isinf(lse[r])) {
        continue;
      }
      const R s = f.round(f.logit(dot(q[r], k, d)));
      const R p = f.round(f.probability(s, lse[r], m[r], l[r]));
      add_scaled(out[r], p, v, dv);
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    for (R& x : out[r]) {
      x = f.out(x);
    }
  }
}

// scratch.dq: dq_i = scale * sum_j ds_ij k_j  of ascending `rows` of one head, from args.out,
// args.lse, args.dout and args.dlse.
template <class F, class R = typename F::Real>
void backward_rows(const F& f, const Head& head, const std::int64_t* rows, int num_rows,
                   Scratch<R>& scratch) {
  const Args& a = head.args;
  const Band& band = head.sequence.band;
  const std::int64_t d = head.problem.head_dim;
  const std::int64_t dv = head.problem.head_dim_v;
  Block<R>& q = scratch.q;
  Block<R>& dout = scratch.dout;
  Block<R>& dq = scratch.dq;
  std::array<RowState<R>, kBlock> state;
  Row<R> k;
  Row<R> v;
  for (int r = 0; r < num_rows; ++r) {
    load_row(a.q, head.q(a.q, rows[r]), d, q[r]);
    state[r] = load_row_state(head, rows[r], dout[r]);
    dq[r].fill(0);
  }
  const Range keys = keys_of(band, rows, num_rows);
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    load_row(a.k, head.kv(a.k, j), d, k);
    load_row(a.v, head.kv(a.v, j), dv, v);
    for (int r = 0; r < num_rows; ++r) {
      if (!band.visible(rows[r], j) || state[r].empty) {
        continue;
      }
      const R s = f.round(f.logit(dot(q[r], k, d)));
      const R p = f.round(f.probability(state[r].like_lse(s), state[r].lse));
      const R dp = a.dout ? f.round(dot(dout[r], v, dv)) : R{0};
      const R ds = f.round(f.dlogit(s, p, dp, state[r].delta, state[r].dlse));
      add_scaled(dq[r], ds, k, d);
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    for (R& x : dq[r]) {
      x = f.dq(x);
    }
  }
}

// scratch.dk, dv: dk_j = scale * sum_i ds_ij q_i  and  dv_j = sum_i p_ij dout_i  of ascending
// `keys` of one kv head, the sums over all query heads of its group (head.head_q is the first).
// Without dout, dv is exactly 0.
template <class F, class R = typename F::Real>
void backward_keys(const F& f, Head head, const std::int64_t* keys, int num_keys,
                   Scratch<R>& scratch) {
  const Args& a = head.args;
  const Band& band = head.sequence.band;
  const std::int64_t d = head.problem.head_dim;
  const std::int64_t d_v = head.problem.head_dim_v;
  Block<R>& k = scratch.k;
  Block<R>& v = scratch.v;
  Block<R>& dk = scratch.dk;
  Block<R>& dv = scratch.dv;
  Row<R> q;
  Row<R> dout;
  for (int c = 0; c < num_keys; ++c) {
    load_row(a.k, head.kv(a.k, keys[c]), d, k[c]);
    load_row(a.v, head.kv(a.v, keys[c]), d_v, v[c]);
    dk[c].fill(0);
    dv[c].fill(0);
  }
  const Range rows = rows_of(band, keys, num_keys);
  const std::int64_t group_begin = head.head_q;
  for (std::int64_t g = 0; g < head.problem.group(); ++g) {
    head.head_q = group_begin + g;
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const RowState<R> state = load_row_state(head, i, dout);
      if (state.empty) {
        continue;
      }
      load_row(a.q, head.q(a.q, i), d, q);
      for (int c = 0; c < num_keys; ++c) {
        if (!band.visible(i, keys[c])) {
          continue;
        }
        const R s = f.round(f.logit(dot(q, k[c], d)));
        const R p = f.round(f.probability(state.like_lse(s), state.lse));
        const R dp = a.dout ? f.round(dot(dout, v[c], d_v)) : R{0};
        const R ds = f.round(f.dlogit(s, p, dp, state.delta, state.dlse));
        add_scaled(dk[c], ds, q, d);
        if (a.dout) {
          add_scaled(dv[c], p, dout, d_v);
        }
      }
    }
  }
  for (int c = 0; c < num_keys; ++c) {
    for (R& x : dk[c]) {
      x = f.dk(x);
    }
    for (R& x : dv[c]) {
      x = f.dv(x);
    }
  }
}

// What one head of one sequence adds to dsink_h: sum_i exp(sink_h - lse_i) * (dlse_i - delta_i).
template <class F, class R = typename F::Real>
double backward_sink(const F& f, const Head& head) {
  const double sink = head.sink();
  double sum = 0;
  if (sink == -std::numeric_limits<double>::infinity()) {
    return sum;
  }
  Row<R> dout;
  for (std::int64_t i = 0; i < head.sequence.band.seqlen_q; ++i) {
    const RowState<R> state = load_row_state(head, i, dout);
    if (!state.empty) {
      const R p = f.probability(static_cast<R>(sink), state.lse);
      sum += static_cast<double>(f.dsink(p, state.delta, state.dlse));
    }
  }
  return sum;
}

}  // namespace flashgrad::reference
