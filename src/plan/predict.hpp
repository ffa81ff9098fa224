// SPDX-License-Identifier: Apache-2.0
// How long a call should take: on the CPU backend from counted vector instructions, on the sm90
// kernels from their account and schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/mask.hpp"

namespace flashgrad::plan {

struct Call {
  bool backward = false;
  DType dtype = DType::kF32;
  std::int64_t batch = 1;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t seqlen = 0;
  std::vector<std::int32_t> lengths{};  // of a packed batch; empty: batch times seqlen
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  BandMask mask{};
  bool deterministic = false;

  // Tokens of the batch.
  [[nodiscard]] std::int64_t tokens() const;
  [[nodiscard]] bool causal() const { return mask.left >= kUnboundedFrom && mask.right == 0; }
  // By the convention of docs/performance.md: visible pairs of one head, and what they cost.
  [[nodiscard]] double pairs() const;
  [[nodiscard]] double flop() const;
  bool operator==(const Call&) const = default;
};

// `f32_gflops`: the measured rate of f32 multiply-adds of all threads, AVX-512.
double predict_cpu_seconds(const Call& call, double f32_gflops);

// How the GPU was measured (docs/performance.md): in single calls cycles bind; in a loop the power
// cap pulls the clock down.
enum class Regime : std::uint8_t { kCool, kSustained };
const char* name_of(Regime regime);

// A kernel of a call.
struct KernelTime {
  std::string name;
  double cycles = 0;         // of the SMs' clock, as long as the longest SM works
  double busy = 0;           // share of them in which the tensor cores work
  double fixed_seconds = 0;  // that no clock changes: launch, memory
};

// What the sm90 backend launches for a call on an H200, in order.
std::vector<KernelTime> predict_sm90_kernels(const Call& call);

double seconds_of(const KernelTime& kernel, Regime regime);

// The SMs' clock while a kernel keeps the tensor cores busy for this share of the time.
double clock_mhz(Regime regime, double busy);

}  // namespace flashgrad::plan
