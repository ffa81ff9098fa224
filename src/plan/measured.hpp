// SPDX-License-Identifier: Apache-2.0
// The measured rows of a file in benchmarks/results, as calls that can be predicted.
#pragma once

#include <string>
#include <vector>

#include "plan/predict.hpp"

namespace flashgrad::plan {

struct Measured {
  std::string what;
  Call call;
  double seconds = 0;
  bool gpu = false;
  Regime regime = Regime::kCool;  // of the GPU
  double f32_gflops = 0;          // CPU: the peak beside which it was measured
};

struct ResultFile {
  std::vector<Measured> rows;
  std::vector<std::string> left_out;  // what of it is not predicted, each with the reason
};

// Throws std::invalid_argument if it can't be, or is more than can be predicted in a minute.
void require_sane(const Call& call);

// "backward bf16 1,16/4,16384,128 causal".
std::string shape_of(const Call& call);

// Of `flashgrad bench`, benchmarks/peers.py (on the CPU and on a GPU), bench_cuda and the programs
// of the sm90 kernels. A file without times of calls has no rows and says why. Throws
// std::invalid_argument if it is none of benchmarks/results.
ResultFile read_results(const std::string& json);

// Of each row, in their order.
std::vector<double> predict_seconds(const std::vector<Measured>& rows);

}  // namespace flashgrad::plan
