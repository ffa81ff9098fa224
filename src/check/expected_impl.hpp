// SPDX-License-Identifier: Apache-2.0
// The inside of Expected: expected.cpp computes, verdict.cpp judges.
#pragma once

#include <omp.h>

#include <array>
#include <string>
#include <vector>

#include "check/expected.hpp"
#include "check/unit.hpp"

namespace flashgrad::check {

inline bool is_16_bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// x in a dtype, rounded once.
inline double rounded(DType dtype, double x) {
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

// A block of the chosen rows or keys of one head of a unit: what one thread computes at a time.
struct Task {
  std::size_t unit;
  std::int64_t head;
  std::int64_t begin;  // position in the unit's list
  int size;
};

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
  void replace_overflow(std::vector<Values<float>>& naive);
  void measure(const std::vector<Values<float>>& naive);
  [[nodiscard]] bool wants(Output output) const;
  [[nodiscard]] DType dtype_of(Output output) const;
  [[nodiscard]] double bound(Output output) const;
  // What the arithmetic costs each element of each unit (rounding.hpp). Computed when first needed.
  [[nodiscard]] const std::vector<Values<double>>& rounding_errors() const;
  mutable std::vector<Values<double>> rounding_errors_of_units;
  // Whether those may turn an output of a head: its direction then says nothing.
  [[nodiscard]] bool turned_by_rounding(std::size_t unit, Output output, std::int64_t head) const;
  [[nodiscard]] double error_of(Output output, double x, double o) const;
  template <class F>
  void for_each_element(const Args& produced, Output output, const Unit& u, std::int64_t head,
                        F&& f) const;
  [[nodiscard]] OutputResult compare(const Args& produced, Output output) const;
  template <class Name>
  std::string compare_with_rounding(const Args& produced, Output output, OutputResult* result,
                                    Name&& name_of) const;
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
  // The arguments of the backward whose forward made `values`.
  template <class R>
  [[nodiscard]] Args backward_args(const Unit& u, const Values<R>& values, bool for_keys) const {
    Args a = u.args;
    if (!takes_given(u, for_keys)) {
      a.out = stored(u, values, kOut);
      a.lse = stored(u, values, kLse);
    }
    return a;
  }
};

}  // namespace flashgrad::check
