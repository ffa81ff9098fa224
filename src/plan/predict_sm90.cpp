// SPDX-License-Identifier: Apache-2.0
// The time of the sm90 kernels: steps from their account, tiles from their schedule, bytes of the
// kernels before and after, the clock from the power that they take.
#include <algorithm>
#include <string>
#include <utility>

#include "cuda/sm90/bwd_plan.hpp"
#include "cuda/sm90/bwd_short.hpp"
#include "cuda/sm90/fwd_tile_rows.hpp"
#include "plan/account.hpp"
#include "plan/pipeline.hpp"
#include "plan/predict.hpp"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

// Fitted, each on the file that is named (benchmarks/results); all else follows from the account,
// the schedule, the device, and in kernels_sm90.cpp a start. docs/model.md says how well they do on
// what they were not fitted on.
//
// h200_clocks_2026-11-29.json: clocks that were read in prototypes of one kernel.
constexpr double kCoolMhz = 1795;
constexpr double kSustainedMhz = 1560;
constexpr double kMhzPerBusyShare = 650;  // what the power of busy tensor cores takes, from here on
constexpr double kBusyShare = 0.7;
// sm90_bench_2026-11-29.json: of a kernel with nothing to do (memset, repair), and what prepare,
// which does nothing but read and write, reaches of the memory's rate.
constexpr double kLaunchSeconds = 4e-6;
constexpr double kStreamShare = 0.65;
// 2026-11-29-h200-peers.json, full 16k: what a step takes longer in an ordered kernel. At head_dim
// 128 that is mostly dS sent by the consumers (config.hpp); what it is at 64 is not known.
constexpr double kTurnCycles = 130;
constexpr double kTurnCyclesD64 = 600;
// Of `flashgrad plan schedule`: an addition is seen by another SM, steps and SMs differ.
constexpr double kSignalCycles = 700;
constexpr double kJitter = 0.1;
constexpr double kSpread = 0.02;

// Cycles of a device's clock in which its memory moves bytes, per SM.
double memory_cycles(const Device& device, double bytes) {
  return bytes / (device.hbm_bytes_per_s / (device.sm_count * kCoolMhz * 1e6));
}

KernelTime memory_kernel(const char* name, const Device& device, double bytes) {
  return {.name = name, .fixed_seconds = kLaunchSeconds + stream_seconds(device, bytes)};
}

ScheduleProblem schedule_of(const Call& call) {
  ScheduleProblem problem;
  problem.backward = call.backward;
  problem.batch = call.batch;
  problem.seqlen_q = problem.seqlen_kv = call.lengths.empty() ? call.seqlen : call.tokens();
  problem.packed_q = problem.packed_kv = call.lengths;
  problem.heads_q = call.heads_q;
  problem.heads_kv = call.heads_kv;
  problem.head_dim = call.head_dim;
  problem.head_dim_v = call.head_dim_v;
  problem.mask = call.mask;
  problem.incomplete_first = call.incomplete_first;
  return problem;
}

// A kernel whose tiles run on the machine in their order.
KernelTime tiles_kernel(const Kernel& kernel, const std::vector<WorkTile>& tiles,
                        const ScheduleProblem& problem, const Policy& policy,
                        const Machine& machine, const TileTiming& t) {
  const double cycles = simulate(problem, tiles, policy, machine).makespan;
  double steps = 0;
  for (const WorkTile& tile : tiles) {
    steps += static_cast<double>(tile.steps);
  }
  return {.name = kernel.name,
          .cycles = cycles,
          .busy = steps * t.step * t.busy / (machine.processors * cycles),
          .fixed_seconds = kLaunchSeconds};
}

Machine machine_of(int processors, const TileTiming& t) {
  return {.processors = processors, .step_cycles = t.step, .tile_cycles = t.tile};
}

std::vector<KernelTime> forward_kernels(const Call& call, const Device& device) {
  const Kernel& kernel = sm90_forward_kernel(call.head_dim, call.head_dim_v);
  ScheduleProblem problem = schedule_of(call);
  const Policy& policy = find_policy(false, "sections");
  const auto processors = static_cast<int>(device.sm_count);
  TileSize tile{.rows = kernel.queries, .keys = kernel.keys};
  TileTiming t = tile_timing(kernel, device);
  if (call.lengths.empty()) {
    tile.rows = sm90::forward_block_m({.band = Band::of(call.mask, call.seqlen, call.seqlen),
                                       .units = call.batch * call.heads_q,
                                       .num_consumers = kernel.workers,
                                       .block_n = kernel.keys,
                                       .last_block_first = call.mask.right < kUnboundedFrom},
                                      processors);
    const double cost = sm90::step_cost(kernel.workers, tile.rows / 64);
    t.step *= cost;
    t.busy *= static_cast<double>(tile.rows) / kernel.queries / cost;
  }
  problem.section = kernel_section(problem, policy, tile, processors, device.l2_bytes);
  return {memory_kernel("list", device, 0),
          tiles_kernel(kernel, launch_order(problem, policy, tile), problem, policy,
                       machine_of(processors, t), t)};
}

std::vector<KernelTime> wide_kernels(const Call& call, const Device& device) {
  const ScheduleProblem problem = schedule_of(call);
  const Policy& policy = find_policy(true, "sections");
  const std::string d = call.head_dim <= 192 ? "D192" : "D256";
  const Kernel& keys = find_kernel("sm90-backward-wide-" + d +
                                   (d == "D192" && call.head_dim_v <= 128 ? "V128" : ""));
  const Kernel& queries = find_kernel("sm90-backward-wide-dq-" + d);
  const auto sms = static_cast<int>(device.sm_count);
  const int processors = sms / wide_cluster(problem);
  std::vector<KernelTime> kernels;
  for (const WidePassTiles& pass :
       wide_launch_order(problem, sms, static_cast<std::int64_t>(device.l2_bytes))) {
    for (const auto& [kernel, tiles] :
         {std::pair(&keys, &pass.keys), std::pair(&queries, &pass.queries)}) {
      const TileTiming t = tile_timing(*kernel, device);
      kernels.push_back(
          tiles_kernel(*kernel, *tiles, problem, policy, machine_of(processors, t), t));
    }
  }
  return kernels;
}

// Head dims up to 128: prepare, the main kernel, and finish where the main one does not do that.
std::vector<KernelTime> main_kernels(const Call& call, const Device& device) {
  const auto sms = static_cast<int>(device.sm_count);
  ScheduleProblem problem = schedule_of(call);
  if (call.may_part) {
    problem = in_parts(problem, call.deterministic, sms);
  }
  Problem p = problem.to_problem();
  p.deterministic = call.deterministic;
  const int variant = sm90::find_variant(p, call.deterministic);
  const bool takes_turns = sm90::kBwdConfigs[variant].ordered;
  const Kernel& kernel = sm90_backward_variant(variant);
  const int processors = sms / kernel.ctas;
  const TileSize tile{.keys = kernel.keys,
                      .cluster = kernel.ctas,
                      .max_round = std::clamp(sms / (2 * kernel.ctas), 1, 32),
                      .slots = processors};
  const bool serves = call.may_serve && planned_section(problem, tile) > 0;
  const Policy& policy = find_policy(true, takes_turns ? "turns-sm90"
                                           : serves    ? "units"
                                                       : "sections");
  problem.section = kernel_section(problem, policy, tile, processors, device.l2_bytes);
  TileTiming t = tile_timing(kernel, device);
  Machine machine = machine_of(processors, t);
  if (takes_turns) {
    const TileTiming turns = turn_timing(kernel, device);
    machine.tile_cycles += turns.tile;
    machine.turn_cycles = turns.step;
    machine.step_cycles /= 1 + kJitter / 2 + kSpread / 2;
    machine.signal_cycles = kSignalCycles;
    machine.jitter = kJitter;
    machine.processor_spread = kSpread;
  }
  machine.served_bytes_per_clk = kServedBytesPerClk * kernel.ctas;
  const EndBytes ends = end_bytes(problem, policy, tile);
  std::vector<KernelTime> kernels = {
      memory_kernel("prepare", device, ends.prepare),
      tiles_kernel(kernel, launch_order(problem, policy, tile), problem, policy, machine, t)};
  if (ends.sum > 0) {
    kernels.push_back(memory_kernel("sum", device, ends.sum));
  }
  if (ends.finish > 0) {
    kernels.push_back(memory_kernel("finish", device, ends.finish));
  }
  return kernels;
}

// q, k, v, out and dout are read, dq, dk and dv written: bwd_short.cuh's least time.
double short_bytes(const Call& call) {
  const auto elements = static_cast<double>(call.head_dim + call.head_dim_v);
  return static_cast<double>(call.tokens()) * 4 *
         (static_cast<double>(call.heads_q) + static_cast<double>(call.heads_kv)) * elements;
}

std::vector<KernelTime> backward_kernels(const Call& call, const Device& device) {
  const Problem problem = schedule_of(call).to_problem();
  if (sm90::serves_short(problem)) {
    return {memory_kernel("short", device, short_bytes(call))};
  }
  std::vector<KernelTime> kernels;
  if (std::max(call.head_dim, call.head_dim_v) > 128) {
    // out and dout are read.
    const auto rows = static_cast<double>(call.tokens() * call.heads_q);
    kernels = {memory_kernel("prepare", device, rows * 4 * static_cast<double>(call.head_dim_v))};
    for (KernelTime& kernel : wide_kernels(call, device)) {
      kernels.push_back(std::move(kernel));
    }
  } else {
    kernels = main_kernels(call, device);
  }
  if (!sm90::hides_nothing(call.mask)) {
    kernels.push_back(memory_kernel("repair", device, 0));
  }
  return kernels;
}

}  // namespace

TileTiming tile_timing(const Kernel& kernel, const Device& device) {
  double streamed = 0;
  for (const GlobalTraffic& traffic : kernel.global_traffic) {
    streamed += traffic.level == Level::kHbm ? traffic.bytes : 0;
  }
  TileTiming t{};
  t.step = std::max(step_cycles(kernel, device), memory_cycles(device, streamed / kStreamShare));
  // Nothing hides the first loads, the first products and the results.
  t.tile = t.step + memory_cycles(device, kernel.tile_bytes) + kernel.start_cycles;
  t.busy = account(kernel, device).mma / t.step;
  return t;
}

TileTiming turn_timing(const Kernel& kernel, const Device& device) {
  // As many rows as it has keys: sums are read, dq is written.
  const double finished = static_cast<double>(kernel.keys) * kernel.head_dim * (4 + 2);
  return {.step = kernel.head_dim == 64 ? kTurnCyclesD64 : kTurnCycles,
          .tile = memory_cycles(device, finished),
          .busy = 0};
}

double stream_seconds(const Device& device, double bytes) {
  return bytes / (kStreamShare * device.hbm_bytes_per_s);
}

const char* name_of(Regime regime) { return regime == Regime::kCool ? "cool" : "sustained"; }

double clock_mhz(Regime regime, double busy) {
  const double mhz = regime == Regime::kCool ? kCoolMhz : kSustainedMhz;
  return std::min(kCoolMhz, mhz - kMhzPerBusyShare * (busy - kBusyShare));
}

double seconds_of(const KernelTime& kernel, Regime regime) {
  return kernel.cycles / (clock_mhz(regime, kernel.busy) * 1e6) + kernel.fixed_seconds;
}

std::vector<KernelTime> predict_sm90_kernels(const Call& call) {
  const Device& h200 = find_device("h200");
  return call.backward ? backward_kernels(call, h200) : forward_kernels(call, h200);
}

}  // namespace flashgrad::plan
