// SPDX-License-Identifier: Apache-2.0
// How long a call should take: on the CPU backend from counted vector instructions, on the sm90
// kernels from their account and schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/mask.hpp"
#include "plan/device.hpp"
#include "plan/kernel.hpp"

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
  // Backward: units may be served (unit_pipeline.hpp); false: by kernels that did not yet.
  bool may_serve = true;
  bool may_part = true;  // likewise, key heads in parts (in_parts)
  // Forward: as sm90::tile_rows says where later rows see more; false: it was always the last tile.
  bool incomplete_first = true;

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

// How long a tile of a kernel takes that is not at the account's bound (pipeline.hpp), in cycles.
struct TileTiming {
  double step;
  double tile;  // besides its steps
  double busy;  // share of a step in which the tensor cores work
};
TileTiming tile_timing(const Kernel& kernel, const Device& device);
// What turns at dq add in an ordered sm90 kernel: to a step, and to a tile, since the last to add
// to a block turns the sums into dq.
TileTiming turn_timing(const Kernel& kernel, const Device& device);

// Seconds in which kernels that do nothing else move bytes of the device's memory.
double stream_seconds(const Device& device, double bytes);

// Bytes a clock that a CTA moves which serves a unit (unit_pipeline.hpp). Fitted so that at full 1k
// they take 9 to 10 % of the SMs' time (docs/gpu-backward.md).
inline constexpr double kServedBytesPerClk = 30;

// What the sm90 backend launches for a call on an H200, in order.
std::vector<KernelTime> predict_sm90_kernels(const Call& call);

double seconds_of(const KernelTime& kernel, Regime regime);

// The SMs' clock while a kernel keeps the tensor cores busy for this share of the time.
double clock_mhz(Regime regime, double busy);

}  // namespace flashgrad::plan
