// SPDX-License-Identifier: Apache-2.0
// The time of the sm90 kernels: steps from their account, tiles from their schedule, bytes of the
// kernels before and after, the clock from the power that they take.
#include <algorithm>
#include <string>
#include <utility>

#include "cuda/sm90/bwd_plan.hpp"
#include "plan/account.hpp"
#include "plan/pipeline.hpp"
#include "plan/predict.hpp"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

// Fitted, each on the file that is named (benchmarks/results); all else follows from the account,
// the schedule and the device. docs/model.md says how well they do on what they were not fitted on.
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
// 2026-11-29-h200-peers.json, backward of 1k: a CTA starts and sets up.
constexpr double kCtaCycles = 2000;
// The same file, full 16k: what a step takes longer in an ordered kernel. At head_dim
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

struct Timing {
  double step;
  double tile;  // besides its steps
  double busy;  // share of a step in which the tensor cores work
};

Timing timing(const Kernel& kernel, const Device& device) {
  double streamed = 0;
  for (const GlobalTraffic& traffic : kernel.global_traffic) {
    streamed += traffic.level == Level::kHbm ? traffic.bytes : 0;
  }
  Timing t{};
  t.step = std::max(step_cycles(kernel, device), memory_cycles(device, streamed / kStreamShare));
  // Nothing hides the first loads, the first products and the results.
  t.tile = t.step + memory_cycles(device, kernel.tile_bytes);
  t.busy = account(kernel, device).mma / t.step;
  return t;
}

KernelTime memory_kernel(const char* name, const Device& device, double bytes) {
  return {.name = name,
          .fixed_seconds = kLaunchSeconds + bytes / (kStreamShare * device.hbm_bytes_per_s)};
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
  return problem;
}

KernelTime list_kernel(const std::string& name, const std::vector<WorkTile>& tiles, int processors,
                       const Timing& t) {
  const double cycles = list_makespan(tiles, processors, t.step, t.tile);
  double steps = 0;
  for (const WorkTile& tile : tiles) {
    steps += static_cast<double>(tile.steps);
  }
  return {.name = name,
          .cycles = cycles,
          .busy = steps * t.step * t.busy / (processors * cycles),
          .fixed_seconds = kLaunchSeconds};
}

std::vector<KernelTime> forward_kernels(const Call& call, const Device& device) {
  const Kernel& kernel = sm90_forward_kernel(call.head_dim, call.head_dim_v);
  ScheduleProblem problem = schedule_of(call);
  const Policy& policy = find_policy(false, "sections");
  const TileSize tile{.rows = kernel.queries, .keys = kernel.keys};
  const auto processors = static_cast<int>(device.sm_count);
  problem.section = kernel_section(problem, policy, tile, processors, device.l2_bytes);
  return {memory_kernel("list", device, 0),
          list_kernel(kernel.name, launch_order(problem, policy, tile), processors,
                      timing(kernel, device))};
}

std::vector<KernelTime> wide_kernels(const Call& call, const Device& device) {
  const ScheduleProblem problem = schedule_of(call);
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
      Timing t = timing(*kernel, device);
      t.tile += kCtaCycles;
      kernels.push_back(list_kernel(kernel->name, *tiles, processors, t));
    }
  }
  return kernels;
}

KernelTime ordered_kernel(const Kernel& kernel, const std::vector<WorkTile>& tiles,
                          const ScheduleProblem& problem, const Policy& policy, int processors,
                          Timing t) {
  // The last to add to a block reads the sums and writes dq: as many blocks as its keys have rows.
  const double finished = static_cast<double>(kernel.keys) * kernel.head_dim * (4 + 2);
  t.tile += memory_cycles(find_device("h200"), finished);
  const Machine machine{.processors = processors,
                        .step_cycles = t.step / (1 + kJitter / 2 + kSpread / 2),
                        .tile_cycles = t.tile,
                        .signal_cycles = kSignalCycles,
                        .turn_cycles = kernel.head_dim == 64 ? kTurnCyclesD64 : kTurnCycles,
                        .jitter = kJitter,
                        .processor_spread = kSpread};
  const double cycles = simulate(problem, tiles, policy, machine).makespan;
  KernelTime time = list_kernel(kernel.name, tiles, processors, t);
  time.busy *= time.cycles / cycles;
  time.cycles = cycles;
  return time;
}

// Head dims up to 128.
KernelTime main_kernel(const Call& call, const Device& device) {
  const std::int64_t width = std::max(call.head_dim, call.head_dim_v);
  const Kernel& kernel =
      sm90_backward_kernel(width, call.deterministic,
                           width > 96 && sm90::wants_cluster(call.mask, !call.lengths.empty(),
                                                             call.seqlen, call.seqlen));
  ScheduleProblem problem = schedule_of(call);
  const Policy& policy = find_policy(true, call.deterministic ? "turns-sm90" : "sections");
  const auto sms = static_cast<int>(device.sm_count);
  const TileSize tile{.keys = kernel.keys,
                      .cluster = kernel.ctas,
                      .max_round = std::clamp(sms / (2 * kernel.ctas), 1, 32),
                      .slots = sms / kernel.ctas};
  const int processors = sms / kernel.ctas;
  problem.section = kernel_section(problem, policy, tile, processors, device.l2_bytes);
  const std::vector<WorkTile> tiles = launch_order(problem, policy, tile);
  Timing t = timing(kernel, device);
  t.tile += kCtaCycles;
  return call.deterministic ? ordered_kernel(kernel, tiles, problem, policy, processors, t)
                            : list_kernel(kernel.name, tiles, processors, t);
}

std::vector<KernelTime> backward_kernels(const Call& call, const Device& device) {
  const auto rows = static_cast<double>(call.tokens() * call.heads_q);
  const std::int64_t widest = std::max(call.head_dim, call.head_dim_v);
  const bool wide = widest > 128;
  const bool sums = !wide && !call.deterministic;
  const double width = widest <= 64 ? 64 : widest <= 96 ? 96 : 128;
  // out and dout are read; the f32 sums of dq are cleared, and read and converted at the end.
  std::vector<KernelTime> kernels = {
      memory_kernel("prepare", device,
                    rows * (4 * static_cast<double>(call.head_dim_v) + (sums ? 4 * width : 0)))};
  if (wide) {
    for (KernelTime& kernel : wide_kernels(call, device)) {
      kernels.push_back(std::move(kernel));
    }
  } else {
    kernels.push_back(main_kernel(call, device));
  }
  if (sums) {
    kernels.push_back(memory_kernel("finish", device,
                                    rows * (4 * width + 2 * static_cast<double>(call.head_dim))));
  }
  if (!sm90::hides_nothing(call.mask)) {
    kernels.push_back(memory_kernel("repair", device, 0));
  }
  return kernels;
}

}  // namespace

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
