// SPDX-License-Identifier: Apache-2.0
#include "check/expected.hpp"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <utility>

namespace flashgrad::check {
namespace {

using reference::Block;
using reference::Head;
using reference::kBlock;
using reference::NaiveFormula;
using Exact = reference::Formula<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();

enum Output : std::size_t { kOut, kLse, kDq, kDk, kDv, kDsinks, kNumOutputs };
constexpr std::array<const char*, kNumOutputs> kNames = {"out", "lse", "dq", "dk", "dv", "dsinks"};

bool is_16_bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

double rounded(DType dtype, double x) {
  switch (dtype) {
    case DType::kF64:
      return x;
    case DType::kF32:
      return static_cast<float>(x);
    case DType::kBF16:
      return bf16_to_f32(f32_to_bf16(f64_to_f32_odd(x)));
    case DType::kF16:
      return f16_to_f32(f32_to_f16(f64_to_f32_odd(x)));
  }
  return x;
}

// What one call stores of a unit, for R double (the oracle) or float (naive). out and lse have all
// rows, so that the backward finds row i at i; dq, dk, dv only the chosen rows and keys, in their
// order. q-like ones lie (group, row, dim).
template <class R>
struct Values {
  std::array<std::vector<R>, kDsinks> of;
};

// One kv head of one sequence with its group of query heads: the part of a call that shares nothing
// with the rest.
struct Unit {
  std::int64_t b = 0;
  std::int64_t head_kv = 0;
  Sequence at;      // where its rows and keys lie in the whole tensors
  Problem problem;  // of the unit alone: batch 1, one kv head
  Args args;        // likewise: tensors that start at the unit
  bool whole = true;
  std::vector<std::int64_t> rows;  // chosen, ascending
  std::vector<std::int64_t> keys;
  Values<double> exact;
  std::vector<bool> row_is_empty;  // (group, chosen row): sees nothing, or lse is infinite
  std::vector<bool> key_is_unseen;
  // (output, head of the group): the oracle is not 0 and the naive result points the same way, so
  // that the tested one must too.
  std::array<std::vector<bool>, kDsinks> direction_counts;

  [[nodiscard]] Sequence sequence() const {
    Sequence s;
    s.band = at.band;
    return s;
  }
  [[nodiscard]] std::int64_t seqlen_q() const { return at.band.seqlen_q; }
};

// The parts of an output of a unit: heads, the chosen rows or keys, elements of each.
struct Extent {
  std::int64_t heads;
  const std::vector<std::int64_t>* index;
  std::int64_t dim;
};

Extent extent(const Unit& u, Output output) {
  const Problem& p = u.problem;
  switch (output) {
    case kOut:
      return {p.heads_q, &u.rows, p.head_dim_v};
    case kLse:
      return {p.heads_q, &u.rows, 1};
    case kDq:
      return {p.heads_q, &u.rows, p.head_dim};
    case kDk:
      return {1, &u.keys, p.head_dim};
    default:
      return {1, &u.keys, p.head_dim_v};
  }
}

// Where the t-th chosen row or key of a head lies in Values.
std::size_t place(const Unit& u, Output output, std::int64_t head, std::int64_t t) {
  const Extent e = extent(u, output);
  if (output == kOut || output == kLse) {
    const std::int64_t i = (*e.index)[static_cast<std::size_t>(t)];
    return static_cast<std::size_t>((head * u.seqlen_q() + i) * e.dim);
  }
  return static_cast<std::size_t>((head * static_cast<std::int64_t>(e.index->size()) + t) * e.dim);
}

std::size_t size_of(const Unit& u, Output output) {
  const Extent e = extent(u, output);
  const std::int64_t count =
      output == kOut || output == kLse ? u.seqlen_q() : static_cast<std::int64_t>(e.index->size());
  return static_cast<std::size_t>(e.heads * count * e.dim);
}

Tensor advanced(Tensor t, std::int64_t offset) {
  if (t) {
    t.data = static_cast<std::byte*>(t.data) + offset * size_bytes(t.dtype);
  }
  return t;
}

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

Unit make_unit(const Problem& p, const Args& a, std::int64_t b, std::int64_t head_kv) {
  Unit u;
  u.b = b;
  u.head_kv = head_kv;
  u.at = sequence(p, a, b);
  u.problem = p;
  u.problem.batch = 1;
  u.problem.heads_kv = 1;
  u.problem.heads_q = p.group();
  u.problem.packed = false;
  u.problem.seqlen_q = u.at.band.seqlen_q;
  u.problem.seqlen_kv = u.at.band.seqlen_kv;
  const std::int64_t head_q = head_kv * p.group();
  const auto q_like = [&](const Tensor& t) {
    return advanced(t, t.offset(u.at.batch_index, u.at.q_begin, head_q));
  };
  const auto kv_like = [&](const Tensor& t) {
    return advanced(t, t.offset(u.at.batch_index, u.at.kv_begin, head_kv));
  };
  u.args.q = q_like(a.q);
  u.args.k = kv_like(a.k);
  u.args.v = kv_like(a.v);
  u.args.out = q_like(a.out);
  u.args.lse = q_like(a.lse);
  u.args.dout = q_like(a.dout);
  u.args.dlse = q_like(a.dlse);
  if (a.sinks != nullptr) {
    const int width = p.dtype == DType::kF64 ? 8 : 4;
    u.args.sinks = static_cast<const std::byte*>(a.sinks) + head_q * width;
  }
  return u;
}

// Operations of forward and backward, with what storing an element costs.
double flops_per_pair(const Problem& p) {
  return static_cast<double>(8 * p.head_dim + 6 * p.head_dim_v);
}
double cost_of(const Unit& u) {
  double pairs = 0;
  for (std::int64_t i = 0; i < u.seqlen_q(); ++i) {
    pairs += static_cast<double>(u.at.band.kv_range(i, i + 1).size());
  }
  const Problem& p = u.problem;
  const double elements = static_cast<double>((p.heads_q * u.seqlen_q() + u.at.band.seqlen_kv) *
                                              (p.head_dim + p.head_dim_v));
  return pairs * static_cast<double>(p.heads_q) * flops_per_pair(p) + 1000 * elements;
}

// Blocks of consecutive indices below `size`, the first and the last among them, about `count`
// indices in all.
std::vector<std::int64_t> sample(std::int64_t size, double count, std::mt19937_64& random) {
  std::vector<std::int64_t> chosen;
  const std::int64_t num_blocks = (size + kBlock - 1) / kBlock;
  if (num_blocks == 0) {
    return chosen;
  }
  std::vector<std::int64_t> blocks = {0, num_blocks - 1};
  while (static_cast<double>(blocks.size()) * kBlock < std::min(count, static_cast<double>(size))) {
    blocks.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(num_blocks)));
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  for (const std::int64_t block : blocks) {
    for (std::int64_t x = block * kBlock; x < std::min(size, (block + 1) * kBlock); ++x) {
      chosen.push_back(x);
    }
  }
  return chosen;
}

std::vector<std::int64_t> all_below(std::int64_t size) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
  for (std::size_t x = 0; x < indices.size(); ++x) {
    indices[x] = static_cast<std::int64_t>(x);
  }
  return indices;
}

// A block of the chosen rows or keys of one head of a unit: what one thread computes at a time.
struct Task {
  std::size_t unit;
  std::int64_t head;
  std::int64_t begin;  // position in the unit's list
  int size;
};

// The tensor of `values` as args.out or args.lse of a unit, for the backward.
template <class R>
Tensor stored(const Unit& u, Values<R>& values, Output output) {
  Tensor t;
  t.data = values.of[output].data();
  t.dtype = sizeof(R) == 8 ? DType::kF64 : DType::kF32;
  t.row_stride = extent(u, output).dim;
  t.head_stride = u.seqlen_q() * t.row_stride;
  return t;
}

}  // namespace

struct Expected::Impl {
  Problem problem;
  Args args;
  ExpectedOptions options;
  bool backward = false;
  bool all_units = true;
  std::vector<Unit> units;
  std::vector<Task> row_tasks;
  std::vector<Task> key_tasks;
  std::string coverage = "all of it";

  // Over all units: max |n - o|, max |o|, and the largest of the rounding term of the rule.
  std::array<double, kNumOutputs> naive_error{};
  std::array<double, kNumOutputs> magnitude{};
  std::array<double, kNumOutputs> rounding{};

  void choose();
  void make_tasks();
  template <class F, class R>
  void compute(const F& f, std::vector<Values<R>*>& values) const;
  [[nodiscard]] bool has_overflow(const std::vector<Values<float>>& naive) const;
  void replace_overflow(std::vector<Values<float>>& naive) const;
  void measure(const std::vector<Values<float>>& naive);
  [[nodiscard]] bool wants(Output output) const;
  [[nodiscard]] DType dtype_of(Output output) const;
  [[nodiscard]] double bound(Output output) const;
  [[nodiscard]] OutputResult compare(const Args& produced, Output output) const;
  [[nodiscard]] OutputResult compare_dsinks(const Args& produced) const;
  void check_unused(const Args& produced, Output output, OutputResult* result) const;
  void check_finite(const Args& produced, Output output, OutputResult* result) const;
  [[nodiscard]] int threads() const {
    return options.num_threads > 0 ? options.num_threads : omp_get_max_threads();
  }
  // Whether the backward of this unit takes args.out and args.lse rather than what was computed
  // here.
  [[nodiscard]] bool takes_given(const Unit& u, bool for_keys) const {
    return options.given_out_lse || (for_keys && !u.whole);
  }
};

// All units if they cost no more than max_flops; else as many as that, at least one, in which case
// perhaps a few of its rows and keys.
void Expected::Impl::choose() {
  const Problem& p = problem;
  const std::int64_t num_units = p.batch * p.heads_kv;
  std::mt19937_64 random(options.seed);
  std::vector<std::int64_t> order = all_below(num_units);
  double total = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    total += cost_of(make_unit(p, args, b, 0)) * static_cast<double>(p.heads_kv);
  }
  all_units = total <= options.max_flops;
  if (!all_units) {
    std::shuffle(order.begin(), order.end(), random);
    std::swap(order.front(), *std::find(order.begin(), order.end(), num_units - 1));
  }
  double spent = 0;
  for (const std::int64_t n : order) {
    Unit u = make_unit(p, args, n / p.heads_kv, n % p.heads_kv);
    const double cost = cost_of(u);
    if (!all_units && spent > 0 && spent + cost > options.max_flops) {
      continue;
    }
    if (cost <= options.max_flops) {
      u.rows = all_below(u.seqlen_q());
      u.keys = all_below(u.at.band.seqlen_kv);
    } else {
      const double share = options.max_flops / cost / 2;
      u.whole = false;
      u.rows = sample(u.seqlen_q(), share * static_cast<double>(u.seqlen_q()), random);
      u.keys =
          sample(u.at.band.seqlen_kv, share * static_cast<double>(u.at.band.seqlen_kv), random);
      coverage = std::to_string(u.rows.size()) + " of " + std::to_string(u.seqlen_q()) +
                 " rows and " + std::to_string(u.keys.size()) + " of " +
                 std::to_string(u.at.band.seqlen_kv) + " keys of one head";
    }
    spent += std::max(cost, 1.0);
    units.push_back(std::move(u));
  }
  if (!all_units && (units.empty() || units.front().whole)) {
    coverage = std::to_string(units.size()) + " of " + std::to_string(num_units) + " heads";
  }
}

void Expected::Impl::make_tasks() {
  for (std::size_t n = 0; n < units.size(); ++n) {
    const Unit& u = units[n];
    const auto add = [&](std::vector<Task>& tasks, std::int64_t heads, std::size_t count) {
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::size_t begin = 0; begin < count; begin += kBlock) {
          tasks.push_back({n, head, static_cast<std::int64_t>(begin),
                           static_cast<int>(std::min<std::size_t>(kBlock, count - begin))});
        }
      }
    };
    add(row_tasks, u.problem.heads_q, u.rows.size());
    add(key_tasks, 1, u.keys.size());
  }
}

// Fills `values`, one for each unit.
template <class F, class R>
void Expected::Impl::compute(const F& f, std::vector<Values<R>*>& values) const {
  for (std::size_t n = 0; n < units.size(); ++n) {
    for (std::size_t output = 0; output < kDsinks; ++output) {
      if (output <= kLse || backward) {
        values[n]->of[output].assign(size_of(units[n], static_cast<Output>(output)), R{0});
      }
    }
  }
  const auto write = [&](const Task& task, Output output, int r, const R* from) {
    const Unit& u = units[task.unit];
    R* to = values[task.unit]->of[output].data() + place(u, output, task.head, task.begin + r);
    std::copy(from, from + extent(u, output).dim, to);
  };
#pragma omp parallel for schedule(dynamic) num_threads(threads())
  for (const Task& task : row_tasks) {
    const Unit& u = units[task.unit];
    const Head head{u.problem, u.args, u.sequence(), task.head};
    Block<R> out;
    std::array<R, kBlock> lse;
    reference::forward_rows(f, head, &u.rows[static_cast<std::size_t>(task.begin)], task.size, out,
                            lse);
    for (int r = 0; r < task.size; ++r) {
      write(task, kOut, r, out[static_cast<std::size_t>(r)].data());
      write(task, kLse, r, &lse[static_cast<std::size_t>(r)]);
    }
  }
  if (!backward) {
    return;
  }
  const auto backward_args = [&](const Task& task, bool for_keys) {
    const Unit& u = units[task.unit];
    Args a = u.args;
    if (!takes_given(u, for_keys)) {
      a.out = stored(u, *values[task.unit], kOut);
      a.lse = stored(u, *values[task.unit], kLse);
    }
    return a;
  };
#pragma omp parallel for schedule(dynamic) num_threads(threads())
  for (const Task& task : row_tasks) {
    const Unit& u = units[task.unit];
    const Args a = backward_args(task, false);
    const Head head{u.problem, a, u.sequence(), task.head};
    Block<R> dq;
    reference::backward_rows(f, head, &u.rows[static_cast<std::size_t>(task.begin)], task.size, dq);
    for (int r = 0; r < task.size; ++r) {
      write(task, kDq, r, dq[static_cast<std::size_t>(r)].data());
    }
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads())
  for (const Task& task : key_tasks) {
    const Unit& u = units[task.unit];
    const Args a = backward_args(task, true);
    const Head head{u.problem, a, u.sequence(), 0};
    Block<R> dk;
    Block<R> dv;
    reference::backward_keys(f, head, &u.keys[static_cast<std::size_t>(task.begin)], task.size, dk,
                             dv);
    for (int r = 0; r < task.size; ++r) {
      write(task, kDk, r, dk[static_cast<std::size_t>(r)].data());
      write(task, kDv, r, dv[static_cast<std::size_t>(r)].data());
    }
  }
}

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
      return problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  }
}

// Whether a naive value is not finite where the oracle's is.
bool Expected::Impl::has_overflow(const std::vector<Values<float>>& naive) const {
  for (std::size_t n = 0; n < units.size(); ++n) {
    for (std::size_t output = 0; output < kDsinks; ++output) {
      const std::vector<float>& x = naive[n].of[output];
      const std::vector<double>& o = units[n].exact.of[output];
      for (std::size_t e = 0; e < x.size(); ++e) {
        if (!std::isfinite(x[e]) && std::isfinite(o[e])) {
          return true;
        }
      }
    }
  }
  return false;
}

void Expected::Impl::replace_overflow(std::vector<Values<float>>& naive) const {
  std::vector<Values<float>> in_f32(units.size());
  std::vector<Values<float>*> pointers;
  for (Values<float>& values : in_f32) {
    pointers.push_back(&values);
  }
  compute(NaiveFormula(problem, DType::kF32), pointers);
  for (std::size_t n = 0; n < units.size(); ++n) {
    for (std::size_t output = 0; output < kDsinks; ++output) {
      std::vector<float>& x = naive[n].of[output];
      for (std::size_t e = 0; e < x.size(); ++e) {
        if (!std::isfinite(x[e])) {
          x[e] = in_f32[n].of[output][e];
        }
      }
    }
  }
}

// Takes from the naive values all that the rule needs of them. Where naive is not finite, `naive`
// holds the f32 computation's.
void Expected::Impl::measure(const std::vector<Values<float>>& naive) {
  for (std::size_t n = 0; n < units.size(); ++n) {
    Unit& u = units[n];
    for (const Output output : {kOut, kLse, kDq, kDk, kDv}) {
      if (output > kLse && !backward) {
        continue;
      }
      const Extent e = extent(u, output);
      const DType dtype = dtype_of(output);
      u.direction_counts[output].assign(static_cast<std::size_t>(e.heads), false);
      for (std::int64_t head = 0; head < e.heads; ++head) {
        double on = 0;
        double oo = 0;
        double nn = 0;
        for (std::size_t t = 0; t < e.index->size(); ++t) {
          const std::size_t at = place(u, output, head, static_cast<std::int64_t>(t));
          for (std::int64_t c = 0; c < e.dim; ++c) {
            const double o = u.exact.of[output][at + static_cast<std::size_t>(c)];
            if (!std::isfinite(o)) {
              continue;
            }
            magnitude[output] = std::max(magnitude[output], std::abs(o));
            if (is_16_bit(dtype)) {
              const auto r = static_cast<float>(rounded(dtype, o));
              if (std::isfinite(r)) {
                const double moved = rounded(dtype, static_cast<double>((r + 0.3F) - 0.3F));
                rounding[output] = std::max(rounding[output], std::abs(moved - r));
              }
            }
            const double x =
                naive.empty()
                    ? o
                    : static_cast<double>(naive[n].of[output][at + static_cast<std::size_t>(c)]);
            if (std::isfinite(x)) {
              naive_error[output] = std::max(naive_error[output], std::abs(x - o));
              on += o * x;
              oo += o * o;
              nn += x * x;
            }
          }
        }
        u.direction_counts[output][static_cast<std::size_t>(head)] =
            oo > 0 && nn > 0 && on >= 0.9999 * std::sqrt(oo) * std::sqrt(nn);
      }
    }
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

// |x - o|, or infinity if NaN or Inf stand in other places than those of o in its dtype.
double error_of(double x, double o, DType dtype) {
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

OutputResult Expected::Impl::compare(const Args& produced, Output output) const {
  OutputResult result;
  result.name = kNames[output];
  result.bound = bound(output);
  const DType dtype = dtype_of(output);
  const bool by_key = output == kDk || output == kDv;
  const Tensor& t = tensor_of(produced, output);
  std::string worst;
  for (const Unit& u : units) {
    const Extent e = extent(u, output);
    for (std::int64_t head = 0; head < e.heads; ++head) {
      const std::int64_t h = u.head_kv * e.heads + head;
      double ox = 0;
      double oo = 0;
      double xx = 0;
      for (std::size_t n = 0; n < e.index->size(); ++n) {
        const std::int64_t index = (*e.index)[n];
        const std::size_t at = place(u, output, head, static_cast<std::int64_t>(n));
        const std::int64_t offset =
            t.offset(u.at.batch_index, (by_key ? u.at.kv_begin : u.at.q_begin) + index, h);
        const bool zero =
            by_key ? u.key_is_unseen[n] || (output == kDv && !problem.has_dout)
                   : output != kLse &&
                         u.row_is_empty[static_cast<std::size_t>(head) * e.index->size() + n];
        for (std::int64_t c = 0; c < e.dim; ++c) {
          const double o = u.exact.of[output][at + static_cast<std::size_t>(c)];
          const double x = load_f64(t.data, t.dtype, offset + c * t.dim_stride);
          double error = error_of(x, o, dtype);
          if (output == kLse && std::isfinite(error)) {
            error /= 1 + std::abs(std::isfinite(o) ? o : 0);
          }
          if (zero && x != 0 && result.reason.empty()) {
            result.reason = "not exactly 0 where nothing is visible: " +
                            where(u.b, h, by_key ? "key" : "row", index, c);
          }
          if (error > result.error) {
            result.error = error;
            worst = where(u.b, h, by_key ? "key" : "row", index, c) + ": got " + number(x) +
                    ", want " + number(o);
          }
          if (std::isfinite(o) && std::isfinite(x)) {
            ox += o * x;
            oo += o * o;
            xx += x * x;
          }
        }
      }
      if (u.direction_counts[output][static_cast<std::size_t>(head)] && output != kLse &&
          !(ox >= 0.999 * std::sqrt(oo) * std::sqrt(xx)) && result.reason.empty()) {
        result.reason = "cosine similarity under 0.999: batch " + std::to_string(u.b) + ", head " +
                        std::to_string(h);
      }
    }
  }
  if (!(result.error <= result.bound)) {
    result.reason = worst;
  }
  check_unused(produced, output, &result);
  check_finite(produced, output, &result);
  result.ok = result.reason.empty();
  return result;
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

// dsinks are a sum over rows of what out and lse, the backward's inputs, say; the oracle takes
// those that it is given, so that only the arithmetic of the sum is judged here, to f32's accuracy.
OutputResult Expected::Impl::compare_dsinks(const Args& produced) const {
  OutputResult result;
  result.name = kNames[kDsinks];
  const DType dtype = dtype_of(kDsinks);
  const auto heads = static_cast<std::size_t>(problem.heads_q);
  std::vector<double> exact(heads);
  std::vector<double> naive(heads);
#pragma omp parallel for num_threads(threads())
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const Head head{problem, produced, sequence(problem, produced, b),
                      static_cast<std::int64_t>(h)};
      exact[h] += reference::backward_sink(Exact(problem), head);
      naive[h] += reference::backward_sink(NaiveFormula(problem, DType::kF32), head);
    }
  }
  double naive_max = 0;
  double magnitude_max = 0;
  for (std::size_t h = 0; h < heads; ++h) {
    if (std::isfinite(exact[h])) {
      magnitude_max = std::max(magnitude_max, std::abs(exact[h]));
      naive_max = std::max(naive_max, std::abs(naive[h] - exact[h]));
    }
  }
  result.bound =
      dtype == DType::kF64 ? 1e-12 * magnitude_max : 2 * naive_max + 1e-5 * magnitude_max;
  for (std::size_t h = 0; h < heads; ++h) {
    const double x = load_f64(produced.dsinks, dtype, static_cast<std::int64_t>(h));
    const double error = error_of(x, exact[h], dtype);
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

Expected::Expected(const Problem& problem, const Args& args, const ExpectedOptions& options)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.problem = problem;
  impl.args = args;
  impl.options = options;
  impl.backward = problem.has_dout || problem.has_dlse;
  impl.choose();
  impl.make_tasks();

  std::vector<Values<double>*> exact;
  for (Unit& u : impl.units) {
    exact.push_back(&u.exact);
  }
  const Exact f(problem);
  impl.compute(f, exact);
  for (std::size_t n = 0; n < impl.units.size(); ++n) {
    Unit& u = impl.units[n];
    Args a = u.args;
    if (!options.given_out_lse) {
      a.lse = stored(u, u.exact, kLse);
    }
    const auto is_empty = [&](const Args& of, std::int64_t head, std::int64_t i) {
      return u.at.band.kv_range(i, i + 1).empty() ||
             std::isinf(load_f64(of.lse.data, of.lse.dtype, of.lse.offset(0, i, head)));
    };
    for (std::int64_t head = 0; head < u.problem.heads_q; ++head) {
      for (const std::int64_t i : u.rows) {
        u.row_is_empty.push_back(is_empty(a, head, i));
      }
    }
    const Args& of_keys = impl.takes_given(u, true) ? u.args : a;
    for (const std::int64_t j : u.keys) {
      bool unseen = true;
      const Range rows = impl.backward ? u.at.band.q_range(j, j + 1) : Range{};
      for (std::int64_t head = 0; head < u.problem.heads_q && unseen; ++head) {
        for (std::int64_t i = rows.begin; i < rows.end && unseen; ++i) {
          unseen = is_empty(of_keys, head, i);
        }
      }
      u.key_is_unseen.push_back(unseen);
    }
  }

  std::vector<Values<float>> naive;
  if (problem.dtype != DType::kF64) {
    naive.resize(impl.units.size());
    std::vector<Values<float>*> pointers;
    for (Values<float>& values : naive) {
      pointers.push_back(&values);
    }
    const NaiveFormula rounding(problem, problem.dtype);
    impl.compute(rounding, pointers);
    // "Where n is not finite, n in f32."
    if (is_16_bit(problem.dtype) && impl.has_overflow(naive)) {
      impl.replace_overflow(naive);
    }
  }
  impl.measure(naive);
}

Expected::~Expected() = default;

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
