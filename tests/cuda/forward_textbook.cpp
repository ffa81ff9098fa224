// SPDX-License-Identifier: Apache-2.0
// Implements forward_textbook.hpp.
#include "forward_textbook.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "core/mask.hpp"

namespace flashgrad {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Sums {
  double squared_error = 0;
  double squared_norm = 0;
  double lse_error = 0;
  bool misplaced = false;

  void add(const Sums& other) {
    squared_error += other.squared_error;
    squared_norm += other.squared_norm;
    lse_error = std::max(lse_error, other.lse_error);
    misplaced = misplaced || other.misplaced;
  }
};

struct Row {
  std::vector<double> out;
  double lse = 0;
};

float lse_at(const ForwardCall& call, std::int64_t entry, std::int64_t row, std::int64_t head) {
  return call.lse[static_cast<std::size_t>((entry * call.out.heads + head) * call.out.rows + row)];
}

// The scores of row i of the sequence with the keys that it sees.
std::vector<double> scores_of(const ForwardCall& call, const Sequence& s, std::int64_t i,
                              std::int64_t head, const Range& keys) {
  const Problem& p = call.problem;
  const float* const q_row = &call.q.values[call.q.at(s.batch_index, s.q_begin + i, head)];
  std::vector<double> scores;
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    const float* const k_row =
        &call.k.values[call.k.at(s.batch_index, s.kv_begin + j, head / p.group())];
    double x = 0;
    for (std::int64_t e = 0; e < p.head_dim; ++e) {
      x += static_cast<double>(q_row[e]) * k_row[e];
    }
    x *= p.scale;
    scores.push_back(p.softcap > 0 ? p.softcap * std::tanh(x / p.softcap) : x);
  }
  return scores;
}

Row textbook(const ForwardCall& call, const Sequence& s, std::int64_t i, std::int64_t head,
             const Range& keys) {
  const std::vector<double> scores = scores_of(call, s, i, head, keys);
  const double sink = call.sinks.empty() ? -kInf : call.sinks[static_cast<std::size_t>(head)];
  double top = sink;
  for (const double x : scores) {
    top = x > top || std::isnan(x) ? x : top;
  }
  double sum = sink > -kInf ? std::exp(sink - top) : 0;
  for (const double x : scores) {
    sum += std::exp(x - top);
  }
  Row row;
  row.lse = keys.empty() && !(sink > -kInf) ? -kInf : top + std::log(sum);
  row.out.assign(static_cast<std::size_t>(call.v.columns), 0.0);
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    const float* const v_row =
        &call.v.values[call.v.at(s.batch_index, s.kv_begin + j, head / call.problem.group())];
    const double probability = std::exp(scores[static_cast<std::size_t>(j - keys.begin)] - row.lse);
    for (std::size_t e = 0; e < row.out.size(); ++e) {
      row.out[e] += probability * v_row[e];
    }
  }
  return row;
}

void compare_row(const ForwardCall& call, const Sequence& s, std::int64_t i, std::int64_t head,
                 Sums* sums) {
  const Range keys = s.band.kv_range(i, i + 1);
  const Row want = textbook(call, s, i, head, keys);
  const std::uint16_t* const out = &call.out.bits[call.out.at(s.batch_index, s.q_begin + i, head)];
  for (std::size_t e = 0; e < want.out.size(); ++e) {
    const double got = widen(out[e], call.problem.dtype);
    if (std::isfinite(got) != std::isfinite(want.out[e]) || (keys.empty() && got != 0)) {
      sums->misplaced = true;
    } else if (std::isfinite(got)) {
      sums->squared_error += (got - want.out[e]) * (got - want.out[e]);
      sums->squared_norm += want.out[e] * want.out[e];
    }
  }
  if (call.problem.wants_lse) {
    const double got = lse_at(call, s.batch_index, s.q_begin + i, head);
    if (std::isnan(got) != std::isnan(want.lse) || std::isinf(got) != std::isinf(want.lse)) {
      sums->misplaced = true;
    } else if (std::isfinite(got)) {
      sums->lse_error =
          std::max(sums->lse_error, std::abs(got - want.lse) / (1 + std::abs(want.lse)));
    }
  }
}

// Whether rows that no sequence uses are other than 0 (lse: -inf), or gaps were written.
bool wrong_outside(const ForwardCall& call) {
  const HostTensor& out = call.out;
  const std::int64_t width = out.columns + (call.spec.odd_strides ? 3 : 0);
  for (std::int64_t i = 0; i < out.entries * out.rows; ++i) {
    const bool used = call.row_used[static_cast<std::size_t>(i)] != 0;
    for (std::int64_t h = 0; h < out.heads; ++h) {
      const std::uint16_t* const row = &out.bits[out.at(i / out.rows, i % out.rows, h)];
      for (std::int64_t e = 0; e < width; ++e) {
        const float got = widen(row[e], call.problem.dtype);
        if (e >= out.columns ? !std::isnan(got) : !used && got != 0) {
          return true;
        }
      }
      if (call.problem.wants_lse && !used &&
          lse_at(call, i / out.rows, i % out.rows, h) != -std::numeric_limits<float>::infinity()) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

ForwardErrors compare_with_textbook(const ForwardCall& call) {
  const unsigned num_threads = std::max(1U, std::thread::hardware_concurrency());
  std::vector<Sums> sums(num_threads);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      std::int64_t n = 0;
      for (const Sequence& s : call.sequences) {
        for (std::int64_t i = 0; i < s.band.seqlen_q * call.out.heads; ++i, ++n) {
          if (n % num_threads == t) {
            compare_row(call, s, i / call.out.heads, i % call.out.heads, &sums[t]);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  Sums total;
  for (const Sums& s : sums) {
    total.add(s);
  }
  return {.out = total.squared_norm > 0 ? std::sqrt(total.squared_error / total.squared_norm) : 0,
          .lse = total.lse_error,
          .misplaced = total.misplaced || wrong_outside(call)};
}

}  // namespace flashgrad
