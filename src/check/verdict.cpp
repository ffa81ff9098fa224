// SPDX-License-Identifier: Apache-2.0
// The acceptance rule of docs/semantics.md.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "check/expected_impl.hpp"
#include "reference/reference.hpp"

namespace flashgrad::check {
namespace {

using reference::Head;
using reference::NaiveFormula;
using Exact = reference::Formula<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();

constexpr std::array<const char*, kNumOutputs> kNames = {"out", "lse", "dq", "dk", "dv", "dsinks"};

const Tensor& tensor_of(const Args& a, Output output) {
  switch (output) {
    case kOut:
      return a.out;
    case kLse:
      return a.lse;
    case kDq:
      return a.dq;
    case kDk:
      return a.dk;
    default:
      return a.dv;
  }
}

}  // namespace

bool Expected::Impl::wants(Output output) const {
  switch (output) {
    case kOut:
      return !options.given_out_lse;
    case kLse:
      return problem.wants_lse && !options.given_out_lse;
    case kDq:
      return backward && problem.wants_dq;
    case kDk:
      return backward && problem.wants_dk;
    case kDv:
      return backward && problem.wants_dv;
    default:
      return backward && problem.wants_dsinks;
  }
}

DType Expected::Impl::dtype_of(Output output) const {
  switch (output) {
    case kOut:
      return problem.dtype;
    case kDq:
      return problem.dq_dtype;
    case kDk:
      return problem.dk_dtype;
    case kDv:
      return problem.dv_dtype;
    default:
      return statistics_dtype(problem.dtype);
  }
}

double Expected::Impl::bound(Output output) const {
  const bool gradient = output >= kDq;
  const double softcap_factor = problem.softcap > 0 ? 3 : 2;
  if (problem.dtype == DType::kF64) {
    return output == kLse ? 1e-12 : 1e-12 * magnitude[output];
  }
  if (output == kLse) {
    return 1e-5;
  }
  if (is_16_bit(dtype_of(output))) {
    const double a = 2 * rounding[output] + (gradient && problem.softcap > 0 ? 3e-4 : 0);
    return softcap_factor * naive_error[output] + a;
  }
  // f32 results. Those of 16-bit inputs are made of the same rounded factors as 16-bit ones.
  const double r = is_16_bit(problem.dtype) ? softcap_factor : 2;
  return r * naive_error[output] + 1e-5 * magnitude[output];
}

namespace {

// How many times the size that roundings reach an element may be off.
constexpr double kRoundingErrors = 2;

// |x - o|, or infinity if NaN or Inf stand in other places than those of o in its dtype.
double difference(double x, double o, DType dtype) {
  if (std::isnan(o)) {
    return std::isnan(x) ? 0 : kInf;
  }
  if (x == o || x == rounded(dtype, o)) {
    return 0;
  }
  return std::isfinite(x) ? std::abs(x - o) : kInf;
}

std::string number(double x) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.6g", x);
  return text.data();
}

std::string where(std::int64_t b, std::int64_t h, const char* index_name, std::int64_t index,
                  std::int64_t dim) {
  return "batch " + std::to_string(b) + ", head " + std::to_string(h) + ", " + index_name + " " +
         std::to_string(index) + ", dim " + std::to_string(dim);
}

}  // namespace

// As the rule measures it: that of lse is relative.
double Expected::Impl::error_of(Output output, double x, double o) const {
  const double error = difference(x, o, dtype_of(output));
  return output == kLse && std::isfinite(o) ? error / (1 + std::abs(o)) : error;
}

// An error of norm 0.04 |o| turns o by less than the angle whose cosine is 0.999.
bool Expected::Impl::turned_by_rounding(std::size_t unit, Output output, std::int64_t head) const {
  const Unit& u = units[unit];
  const Extent e = extent(u, output);
  const std::vector<double>& exact = u.exact.of[output];
  const std::vector<double>& errors = rounding_errors()[unit].of[output];
  double oo = 0;
  double ee = 0;
  for (std::size_t n = 0; n < e.index->size(); ++n) {
    const std::size_t at = slot(u, output, head, static_cast<std::int64_t>(n));
    for (std::size_t c = at; c < at + static_cast<std::size_t>(e.dim); ++c) {
      if (std::isfinite(rounded(dtype_of(output), exact[c]))) {
        oo += exact[c] * exact[c];
        ee += errors[c] * errors[c];
      }
    }
  }
  return !(kRoundingErrors * std::sqrt(ee) <= 0.04 * std::sqrt(oo));
}

// Calls f(index, dim, place in Values, oracle's o, produced x) for the elements of a head of a
// unit.
template <class F>
void Expected::Impl::for_each_element(const Args& produced, Output output, const Unit& u,
                                      std::int64_t head, F&& f) const {
  const Extent e = extent(u, output);
  const bool by_key = output == kDk || output == kDv;
  const Tensor& t = tensor_of(produced, output);
  const std::int64_t h = u.head_kv * e.heads + head;
  for (std::size_t n = 0; n < e.index->size(); ++n) {
    const std::size_t at = slot(u, output, head, static_cast<std::int64_t>(n));
    const std::int64_t i = (by_key ? u.at.kv_begin : u.at.q_begin) + (*e.index)[n];
    const std::int64_t offset = t.offset(u.at.batch_index, i, h);
    for (std::int64_t c = 0; c < e.dim; ++c) {
      const std::size_t place = at + static_cast<std::size_t>(c);
      f(n, c, place, u.exact.of[output][place],
        load_f64(t.data, t.dtype, offset + c * t.dim_stride));
    }
  }
}

OutputResult Expected::Impl::compare(const Args& produced, Output output) const {
  OutputResult result;
  result.name = kNames[output];
  result.bound = bound(output);
  const bool by_key = output == kDk || output == kDv;
  const auto name_of = [&](const Unit& u, std::int64_t head, std::size_t n, std::int64_t c) {
    const Extent e = extent(u, output);
    return where(u.b, u.head_kv * e.heads + head, by_key ? "key" : "row", (*e.index)[n], c);
  };
  std::string worst;
  for (const Unit& u : units) {
    const Extent e = extent(u, output);
    for (std::int64_t head = 0; head < e.heads; ++head) {
      double ox = 0;
      double oo = 0;
      double xx = 0;
      for_each_element(
          produced, output, u, head,
          [&](std::size_t n, std::int64_t c, std::size_t, double o, double x) {
            const bool zero =
                by_key ? u.key_is_unseen[n] || (output == kDv && !problem.has_dout)
                       : output != kLse &&
                             u.row_is_empty[static_cast<std::size_t>(head) * e.index->size() + n];
            if (zero && x != 0 && result.reason.empty()) {
              result.reason = "not exactly 0 where nothing is visible: " + name_of(u, head, n, c);
            }
            const double error = error_of(output, x, o);
            if (error > result.error) {
              result.error = error;
              worst = name_of(u, head, n, c) + ": got " + number(x) + ", want " + number(o);
            }
            if (std::isfinite(o) && std::isfinite(x)) {
              ox += o * x;
              oo += o * o;
              xx += x * x;
            }
          });
      if (u.direction_counts[output][static_cast<std::size_t>(head)] && output != kLse &&
          !(ox >= 0.999 * std::sqrt(oo) * std::sqrt(xx)) && result.reason.empty() &&
          !turned_by_rounding(static_cast<std::size_t>(&u - units.data()), output, head)) {
        result.reason = "cosine similarity under 0.999: batch " + std::to_string(u.b) + ", head " +
                        std::to_string(u.head_kv * e.heads + head);
      }
    }
  }
  if (!(result.error <= result.bound) && std::isfinite(result.error)) {
    worst = compare_with_rounding(produced, output, &result, name_of);
  }
  if (!(result.error <= result.bound)) {
    result.reason = worst;
  }
  check_unused(produced, output, &result);
  check_finite(produced, output, &result);
  result.ok = result.reason.empty();
  return result;
}

// Where the bound of the whole output is not kept, each element may still lose what the arithmetic
// costs it. Leaves the error and the bound of the element that exceeds its own the most, and
// describes it.
template <class Name>
std::string Expected::Impl::compare_with_rounding(const Args& produced, Output output,
                                                  OutputResult* result, Name&& name_of) const {
  const double bound_of_all = result->bound;
  double largest = -1;
  std::string worst;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const Unit& u = units[unit];
    const std::vector<double>& errors = rounding_errors()[unit].of[output];
    for (std::int64_t head = 0; head < extent(u, output).heads; ++head) {
      for_each_element(
          produced, output, u, head,
          [&](std::size_t n, std::int64_t c, std::size_t at, double o, double x) {
            const double error = error_of(output, x, o);
            const double scale = output == kLse ? 1 + std::abs(std::isfinite(o) ? o : 0) : 1;
            const double own = std::max(bound_of_all, kRoundingErrors * errors[at] / scale);
            const double share = error > 0 ? error / own : 0;
            if (!(share <= largest)) {
              largest = share;
              result->error = error;
              result->bound = own;
              worst = name_of(u, head, n, c) + ": got " + number(x) + ", want " + number(o);
            }
          });
    }
  }
  return worst;
}

// Rows and keys of no sequence hold 0, lse -inf.
void Expected::Impl::check_unused(const Args& produced, Output output, OutputResult* result) const {
  const bool by_key = output == kDk || output == kDv;
  const Tensor& t = tensor_of(produced, output);
  const double want = output == kLse ? -kInf : 0;
  const std::int64_t heads = by_key ? problem.heads_kv : problem.heads_q;
  const std::int64_t dim = output == kLse                   ? 1
                           : output == kDq || output == kDk ? problem.head_dim
                                                            : problem.head_dim_v;
  const auto check = [&](std::int64_t batch_index, Range rows) {
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t c = 0; c < dim; ++c) {
          const double x =
              load_f64(t.data, t.dtype, t.offset(batch_index, i, h) + c * t.dim_stride);
          if (x != want && result->reason.empty()) {
            result->error = kInf;
            result->reason = "row of no sequence is not " +
                             std::string(output == kLse ? "-inf" : "0") + ": " +
                             where(batch_index, h, by_key ? "key" : "row", i, c);
          }
        }
      }
    }
  };
  if (by_key) {
    for_each_unused_kv(problem, args, check);
  } else {
    for_each_unused_q(problem, args, check);
  }
}

// Of what was not computed here: no NaN, and no Inf but where f16 overflows or lse says that a row
// is empty.
void Expected::Impl::check_finite(const Args& produced, Output output, OutputResult* result) const {
  if (all_units && (units.empty() || units.front().whole)) {
    return;
  }
  const bool by_key = output == kDk || output == kDv;
  const Tensor& t = tensor_of(produced, output);
  const std::int64_t dim = units.empty() ? 0 : extent(units.front(), output).dim;
  const std::int64_t heads = by_key ? problem.heads_kv : problem.heads_q;
  const std::int64_t rows = by_key ? problem.seqlen_kv : problem.seqlen_q;
  const std::int64_t entries = problem.packed ? 1 : problem.batch;
  bool finite = true;
#pragma omp parallel for collapse(2) num_threads(threads()) reduction(&& : finite)
  for (std::int64_t b = 0; b < entries; ++b) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t c = 0; c < dim; ++c) {
          const double x = load_f64(t.data, t.dtype, t.offset(b, i, h) + c * t.dim_stride);
          finite = finite && !std::isnan(x) &&
                   (!std::isinf(x) || t.dtype == DType::kF16 || (output == kLse && x < 0));
        }
      }
    }
  }
  if (!finite && result->reason.empty()) {
    result->error = kInf;
    result->reason = "NaN or Inf outside the sample";
  }
}

namespace {

// What a tensor core may lose of a row's dsink: of each product of delta what lies below 2^-25 of
// the largest, whose size it takes from the exponents of its factors. That of a denormal number is
// the least that the dtype has.
double cut_of_dsink(const Head& head, std::int64_t i) {
  reference::Row<double> dout;
  const auto state = reference::load_row_state<double>(head, i, dout);
  const Args& a = head.args;
  const std::int64_t columns = head.problem.head_dim_v;
  if (state.empty || !a.dout || head.sees_nothing(i)) {
    return 0;
  }
  reference::Row<double> out;
  reference::load_row(a.out, head.q(a.out, i), columns, out);
  const double least = head.problem.dtype == DType::kF16 ? 0x1p-14 : 0x1p-126;
  double largest = 0;
  for (std::size_t c = 0; c < static_cast<std::size_t>(columns); ++c) {
    const auto size = [least](double x) { return x == 0 ? 0 : std::max(std::abs(x), least); };
    largest = std::max(largest, size(dout[c]) * size(out[c]));
  }
  const double p = std::exp(std::min(head.sink() - state.lse, 0.0));
  return p * std::sqrt(static_cast<double>(columns)) * 0x1p-25 * largest;
}

}  // namespace

// dsinks are a sum over rows of what out and lse, the backward's inputs, say; the oracle takes
// those that it is given, so that only the arithmetic of the sum is judged here, to f32's accuracy.
OutputResult Expected::Impl::compare_dsinks(const Args& produced) const {
  OutputResult result;
  result.name = kNames[kDsinks];
  const DType dtype = dtype_of(kDsinks);
  const auto heads = static_cast<std::size_t>(problem.heads_q);
  std::vector<double> exact(heads);
  std::vector<double> naive(heads);
  std::vector<double> cut(heads);
#pragma omp parallel for num_threads(threads())
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const Head head{problem, produced, sequence(problem, produced, b),
                      static_cast<std::int64_t>(h)};
      exact[h] += reference::backward_sink(Exact(problem), head);
      naive[h] += reference::backward_sink(NaiveFormula(problem, DType::kF32), head);
      for (std::int64_t i = 0; i < head.sequence.band.seqlen_q; ++i) {
        const double row = is_16_bit(problem.dtype) ? cut_of_dsink(head, i) : 0;
        cut[h] += row * row;
      }
    }
  }
  double naive_max = 0;
  double magnitude_max = 0;
  double cut_max = 0;
  for (std::size_t h = 0; h < heads; ++h) {
    if (std::isfinite(exact[h])) {
      cut_max = std::max(cut_max, std::sqrt(cut[h]));
      magnitude_max = std::max(magnitude_max, std::abs(exact[h]));
      naive_max = std::max(naive_max, std::abs(naive[h] - exact[h]));
    }
  }
  result.bound = dtype == DType::kF64
                     ? 1e-12 * magnitude_max
                     : 2 * naive_max + 1e-5 * magnitude_max + kRoundingErrors * cut_max;
  for (std::size_t h = 0; h < heads; ++h) {
    const double x = load_f64(produced.dsinks, dtype, static_cast<std::int64_t>(h));
    const double error = difference(x, exact[h], dtype);
    if (error > result.error) {
      result.error = error;
      if (!(error <= result.bound)) {
        result.reason =
            "head " + std::to_string(h) + ": got " + number(x) + ", want " + number(exact[h]);
      }
    }
  }
  result.ok = result.reason.empty();
  return result;
}

std::vector<OutputResult> Expected::compare(const Args& produced, bool forward,
                                            bool backward) const {
  std::vector<OutputResult> results;
  for (const Output output : {kOut, kLse, kDq, kDk, kDv}) {
    if (impl_->wants(output) && (output <= kLse ? forward : backward)) {
      results.push_back(impl_->compare(produced, output));
    }
  }
  if (backward && impl_->wants(kDsinks)) {
    results.push_back(impl_->compare_dsinks(produced));
  }
  return results;
}

const std::string& Expected::coverage() const { return impl_->coverage; }

}  // namespace flashgrad::check
