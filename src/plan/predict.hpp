// SPDX-License-Identifier: Apache-2.0
// How long a call should take: on the CPU backend from counted vector instructions, on the sm90
// kernels from their account and schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"

namespace flashgrad::plan {

struct Call {
  bool backward = false;
  DType dtype = DType::kF32;
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t seqlen = 0;
  std::int64_t head_dim = 0;
  bool causal = false;

  // By the convention of docs/performance.md.
  [[nodiscard]] double flop() const;
};

// `f32_gflops`: the measured rate of f32 multiply-adds of all threads, AVX-512.
double predict_cpu_seconds(const Call& call, double f32_gflops);

// The whole call on an H200 whose SMs run at `clock_mhz`.
double predict_sm90_seconds(const Call& call, double clock_mhz);

// A measured row of a file in benchmarks/results.
struct Measured {
  std::string what;
  Call call;
  double seconds = 0;
  double f32_gflops = 0;  // CPU: the peak beside which it was measured
  double clock_mhz = 0;   // sm90
};

// The rows that the model covers, of `flashgrad bench`, benchmarks/peers.py and the sm90 programs.
// Throws std::invalid_argument if it is none of these.
std::vector<Measured> measured_rows(const std::string& json);

double predict_seconds(const Measured& row);

}  // namespace flashgrad::plan
