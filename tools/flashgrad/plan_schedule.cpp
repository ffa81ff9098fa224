// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan schedule`, and the shape options.
#include <fmt/format.h>

#include <algorithm>

#include "options.hpp"
#include "plan/account.hpp"
#include "plan/schedule.hpp"
#include "plan_commands.hpp"
#include "plan_shape.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::ordered_json;

// More steps than this would take minutes to run through.
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 24;

// The kernel whose tiles are scheduled, by pass, device and cluster. A step is 64 queries in the
// backward, a block of keys in the forward.
struct Scheduled {
  const plan::Kernel* kernel;
  plan::TileSize tile;
  double steps_of_64;  // of the kernel's own step
};

Scheduled scheduled_kernel(const PlanArguments& arguments, const plan::Device& device) {
  const bool blackwell = device.tensor_memory_columns > 0;
  if (arguments.pass == "forward") {
    if (blackwell) {
      return {&plan::find_kernel("fa4-forward"), {.rows = 128, .keys = 128}, 1};
    }
    return {&plan::find_kernel("sm90-forward-D128"), {.rows = 192, .keys = 80}, 1};
  }
  if (arguments.cluster == 2) {
    return {&plan::find_kernel(blackwell ? "fa4-backward-2cta" : "sm90-backward-D128Cluster"),
            {.keys = 128, .cluster = 2},
            blackwell ? 2.0 : 1.0};
  }
  return {&plan::find_kernel(blackwell ? "fa4-backward" : "sm90-backward-D128"),
          {.keys = 128},
          blackwell ? 2.0 : 1.0};
}

struct Run {
  const plan::Policy* policy;
  plan::Timeline timeline;
};

}  // namespace

std::int64_t parse_tokens(const std::string& text) {
  const bool kilo = !text.empty() && text.back() == 'K';
  const bool mega = !text.empty() && text.back() == 'M';
  const std::int64_t number =
      parse_integer(std::string_view(text).substr(0, text.size() - (kilo || mega ? 1 : 0)),
                    "--tokens", 1, 1 << 30);
  return number * (kilo ? 1 << 10 : mega ? 1 << 20 : 1);
}

std::vector<std::int32_t> parse_lengths(const std::string& text) {
  std::vector<std::int32_t> lengths;
  std::int64_t total = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    lengths.push_back(static_cast<std::int32_t>(
        parse_integer(std::string_view(text).substr(begin, end - begin), "--packed", 0, 1 << 24)));
    total += lengths.back();
    begin = end + 1;
  }
  if (total > 1 << 30) {
    throw Error("--packed: more than 2^30 tokens");
  }
  return lengths;
}

int heads_kv(const PlanArguments& arguments) {
  const int heads = arguments.heads_kv == 0 ? arguments.heads : arguments.heads_kv;
  if (arguments.heads % heads != 0) {
    throw Error(
        fmt::format("--heads-kv: {} does not divide {} query heads", heads, arguments.heads));
  }
  return heads;
}

BandMask plan_mask(const PlanArguments& arguments) {
  CallArguments call;
  call.causal = arguments.causal;
  if (!arguments.window.empty()) {
    call.window = arguments.window;
  }
  const CallOptions options(call);
  return {options.options.window_left, options.options.window_right, Alignment::kBottomRight};
}

ordered_json plan_schedule(const PlanArguments& arguments, std::string* svg) {
  const plan::Device& device = plan::find_device(arguments.device);
  Scheduled scheduled = scheduled_kernel(arguments, device);
  plan::ScheduleProblem problem;
  problem.backward = arguments.pass == "backward";
  problem.batch = arguments.batch;
  problem.heads_q = arguments.heads;
  problem.heads_kv = heads_kv(arguments);
  problem.head_dim = arguments.head_dim;
  problem.mask = plan_mask(arguments);
  if (arguments.packed.empty()) {
    problem.seqlen_q = problem.seqlen_kv = parse_tokens(arguments.tokens);
  } else {
    problem.packed_q = problem.packed_kv = parse_lengths(arguments.packed);
    for (const std::int32_t length : problem.packed_q) {
      problem.seqlen_q += length;
    }
    problem.seqlen_kv = problem.seqlen_q;
  }
  problem.l2_bytes = static_cast<std::int64_t>(device.l2_bytes);
  if (problem.seqlen_q / 64 * (problem.seqlen_kv / 128) * problem.heads_q * problem.batch >
      kMaxSteps) {
    throw Error(fmt::format("more than {} steps; take fewer heads or tokens", kMaxSteps));
  }

  plan::Machine machine;
  machine.processors = arguments.processors > 0
                           ? arguments.processors
                           : static_cast<int>(device.sm_count) / scheduled.tile.cluster;
  scheduled.tile.max_round = std::clamp(machine.processors / 2, 1, 32);
  scheduled.tile.slots = machine.processors;
  problem.section =
      arguments.section > 0 ? arguments.section : plan::heads_in_l2(problem, scheduled.tile);
  machine.step_cycles = arguments.step_cycles > 0 ? arguments.step_cycles
                                                  : plan::account(*scheduled.kernel, device).bound /
                                                        scheduled.steps_of_64;
  machine.tile_cycles = arguments.tile_cycles;
  machine.signal_cycles = arguments.signal_cycles;
  machine.turn_cycles = arguments.turn_cycles;
  machine.slack = arguments.slack;
  machine.jitter = arguments.jitter;
  machine.processor_spread = arguments.spread;

  std::vector<Run> runs;
  for (const plan::Policy& policy : plan::policies(problem.backward)) {
    if (arguments.compare || arguments.order == policy.name) {
      runs.push_back(
          {&policy, plan::simulate(problem, plan::launch_order(problem, policy, scheduled.tile),
                                   policy, machine)});
    }
  }
  if (runs.empty()) {
    plan::find_policy(problem.backward, arguments.order);  // throws the list of names
  }
  const auto cost = [](const Run& run) {
    return run.timeline.deadlock ? 1e300 : run.timeline.makespan;
  };
  std::stable_sort(runs.begin(), runs.end(),
                   [&](const Run& x, const Run& y) { return cost(x) < cost(y); });

  print_out(fmt::format(
      "{} by {} on {} {} of {}, {:.0f} cycles a step, sections of {} heads\n"
      "  {:<24} {:>9} {:>6} {:>6} {:>8} {:>9}\n",
      arguments.pass, scheduled.kernel->name, machine.processors,
      scheduled.tile.cluster == 2 ? "pairs of SMs" : "SMs", device.name, machine.step_cycles,
      problem.section, "order", "kcycles", "speed", "idle", "waiting", "in use"));
  ordered_json rows = ordered_json::array();
  for (const Run& run : runs) {
    const plan::Timeline& t = run.timeline;
    if (t.deadlock) {
      print_out(fmt::format("  {:<24} deadlock: waits for tiles that have not started\n",
                            run.policy->name));
    } else {
      print_out(fmt::format("  {:<24} {:>9.0f} {:>5.1f}% {:>5.1f}% {:>7.1f}% {:>9}  {}\n",
                            run.policy->name, t.makespan / 1000,
                            100 * runs.front().timeline.makespan / t.makespan, 100 * t.idle,
                            100 * t.waiting, format_bytes(t.peak_bytes), run.policy->description));
    }
    rows.push_back({{"order", run.policy->name},
                    {"deadlock", t.deadlock},
                    {"makespan_cycles", t.makespan},
                    {"idle", t.idle},
                    {"waiting", t.waiting},
                    {"peak_heads", t.peak_heads},
                    {"bytes_in_use", t.peak_bytes}});
  }
  *svg = plan::gantt_svg(runs.front().timeline,
                         fmt::format("{}, {}", arguments.pass, runs.front().policy->name));
  return {{"kernel", scheduled.kernel->name}, {"device", device.name},
          {"processors", machine.processors}, {"step_cycles", machine.step_cycles},
          {"section", problem.section},       {"orders", rows}};
}

}  // namespace flashgrad::tool
