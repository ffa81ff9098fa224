// SPDX-License-Identifier: Apache-2.0
// What is computed of a call, exactly and naively, and what the acceptance rule needs of it.
#include "check/expected.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "check/expected_impl.hpp"
#include "check/rounding.hpp"
#include "reference/reference.hpp"

namespace flashgrad::check {
namespace {

using reference::Head;
using reference::kBlock;
using reference::NaiveFormula;
using reference::Scratch;
using Exact = reference::Formula<double>;

}  // namespace

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
      // A few rows of a long sequence take as long as many of a short one: something for each
      // thread.
      const std::size_t size =
          std::clamp<std::size_t>(count / static_cast<std::size_t>(threads()), 1, kBlock);
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::size_t begin = 0; begin < count; begin += size) {
          tasks.push_back({n, head, static_cast<std::int64_t>(begin),
                           static_cast<int>(std::min(size, count - begin))});
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
    R* to = values[task.unit]->of[output].data() + slot(u, output, task.head, task.begin + r);
    std::copy(from, from + extent(u, output).dim, to);
  };
  // Calls f(task, scratch of the thread) for all tasks.
  const auto for_each = [&](const std::vector<Task>& tasks, auto&& do_task) {
#pragma omp parallel num_threads(threads())
    {
      const auto scratch = std::make_unique<Scratch<R>>();
#pragma omp for schedule(dynamic)
      for (const Task& task : tasks) {
        do_task(task, *scratch);
      }
    }
  };
  for_each(row_tasks, [&](const Task& task, Scratch<R>& scratch) {
    const Unit& u = units[task.unit];
    const Head head{u.problem, u.args, u.sequence(), task.head};
    reference::forward_rows(f, head, &u.rows[static_cast<std::size_t>(task.begin)], task.size,
                            scratch);
    for (int r = 0; r < task.size; ++r) {
      write(task, kOut, r, scratch.out[static_cast<std::size_t>(r)].data());
      write(task, kLse, r, &scratch.lse[static_cast<std::size_t>(r)]);
    }
  });
  if (!backward) {
    return;
  }
  for_each(row_tasks, [&](const Task& task, Scratch<R>& scratch) {
    const Unit& u = units[task.unit];
    const Args a = backward_args(u, *values[task.unit], false);
    const Head head{u.problem, a, u.sequence(), task.head};
    reference::backward_rows(f, head, &u.rows[static_cast<std::size_t>(task.begin)], task.size,
                             scratch);
    for (int r = 0; r < task.size; ++r) {
      write(task, kDq, r, scratch.dq[static_cast<std::size_t>(r)].data());
    }
  });
  for_each(key_tasks, [&](const Task& task, Scratch<R>& scratch) {
    const Unit& u = units[task.unit];
    const Args a = backward_args(u, *values[task.unit], true);
    const Head head{u.problem, a, u.sequence(), 0};
    reference::backward_keys(f, head, &u.keys[static_cast<std::size_t>(task.begin)], task.size,
                             scratch);
    for (int r = 0; r < task.size; ++r) {
      write(task, kDk, r, scratch.dk[static_cast<std::size_t>(r)].data());
      write(task, kDv, r, scratch.dv[static_cast<std::size_t>(r)].data());
    }
  });
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

void Expected::Impl::replace_overflow(std::vector<Values<float>>& naive) {
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
          const float y = in_f32[n].of[output][e];
          const auto r = static_cast<float>(rounded(dtype_of(static_cast<Output>(output)), y));
          x[e] = std::isfinite(r) ? r : y;
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
          const std::size_t at = slot(u, output, head, static_cast<std::int64_t>(t));
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
            oo > 0 && nn > 0 && on >= 0.9999 * std::sqrt(oo) * std::sqrt(nn) &&
            oo - 2 * on + nn <= 2e-4 * oo;
      }
    }
  }
}

const std::vector<Values<double>>& Expected::Impl::rounding_errors() const {
  if (rounding_errors_of_units.empty()) {
    const auto statistics = [&](const Unit& u, bool for_keys) {
      return Statistics{backward_args(u, u.exact, for_keys), takes_given(u, for_keys)};
    };
    for (const Unit& u : units) {
      rounding_errors_of_units.push_back(check::rounding_errors(
          u, statistics(u, false), statistics(u, true), backward, threads()));
    }
  }
  return rounding_errors_of_units;
}

Expected::Expected(const Problem& problem, const Args& args, const ExpectedOptions& options)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.problem = problem;
  impl.args = args;
  impl.options = options;
  impl.backward = problem.has_dout || problem.has_dlse;
  if (!problem.packed && problem.seqlen_q == 0 && problem.seqlen_kv == 0) {
    impl.problem.batch = 0;  // a batch of nothing, however large, is not walked through
  }
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

}  // namespace flashgrad::check
