// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan schedule`.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "plan/account.hpp"
#include "plan/pictures.hpp"
#include "plan/schedule.hpp"
#include "plan_commands.hpp"
#include "plan_shape.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::ordered_json;

// More steps than this would take minutes to run through.
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 24;
constexpr double kMaxTiles = 1 << 21;

// The kernel whose tiles are scheduled, by pass, device and cluster. A step is 64 queries in the
// backward, a block of keys in the forward.
struct Scheduled {
  plan::Kernel kernel;
  plan::TileSize tile;
  double steps_of_64;  // of the kernel's own step
};

Scheduled scheduled_kernel(const PlanArguments& arguments, const plan::Device& device) {
  const bool blackwell = device.tensor_memory_columns > 0;
  const int d = arguments.head_dim;
  Scheduled scheduled;
  if (arguments.pass == "forward") {
    scheduled.kernel = blackwell ? plan::fa4_forward(d) : plan::sm90_forward_kernel(d, d);
    scheduled.tile = {.rows = scheduled.kernel.queries, .keys = scheduled.kernel.keys};
    scheduled.steps_of_64 = 1;
  } else if (blackwell) {
    scheduled = {
        plan::fa4_backward(d, arguments.cluster), {.keys = 128, .cluster = arguments.cluster}, 2};
  } else if (d > 128) {
    throw Error(
        "--head-dim: above 128 the sm90 backward runs in passes of two kernels, which `flashgrad "
        "plan predict` times; want at most 128");
  } else {
    scheduled.kernel = plan::sm90_backward_kernel(d, false, arguments.cluster == 2);
    scheduled.tile = {.keys = scheduled.kernel.keys, .cluster = scheduled.kernel.ctas};
    scheduled.steps_of_64 = 1;
  }
  plan::require_fit(scheduled.kernel, device);
  return scheduled;
}

// Something to do, and not too much of it.
void require_work(const plan::ScheduleProblem& problem, const plan::TileSize& tile) {
  const double tiles = static_cast<double>(std::max(problem.seqlen_q, problem.seqlen_kv)) / 64 *
                       static_cast<double>(problem.heads_q) * static_cast<double>(problem.batch);
  std::int64_t steps = 0;
  if (tiles <= kMaxTiles) {
    for (const plan::WorkTile& work :
         plan::launch_order(problem, plan::find_policy(problem.backward, "natural"), tile)) {
      steps += work.steps;
    }
  }
  if (tiles > kMaxTiles || steps > kMaxSteps) {
    throw Error(fmt::format("more than {} tiles or {} steps; take fewer heads or tokens", kMaxTiles,
                            kMaxSteps));
  }
  if (steps == 0) {
    throw Error("nothing to do: no row sees a key");
  }
}

struct Run {
  const plan::Policy* policy;
  std::int64_t section;
  plan::Timeline timeline;
};

}  // namespace

ordered_json plan_schedule(const PlanArguments& arguments, std::string* svg) {
  const plan::Device device = device_of(arguments);
  Scheduled scheduled = scheduled_kernel(arguments, device);
  plan::ScheduleProblem problem;
  problem.backward = arguments.pass == "backward";
  problem.batch = arguments.batch;
  problem.heads_q = arguments.heads;
  problem.heads_kv = heads_kv(arguments);
  problem.head_dim = arguments.head_dim;
  problem.mask = plan_mask(arguments);
  if (arguments.packed.empty()) {
    const Tokens tokens = parse_tokens(arguments);
    problem.seqlen_q = tokens.q;
    problem.seqlen_kv = tokens.kv;
  } else {
    const Lengths lengths = parse_lengths(arguments);
    problem.packed_q = lengths.q;
    problem.packed_kv = lengths.kv;
    problem.seqlen_q = std::accumulate(lengths.q.begin(), lengths.q.end(), std::int64_t{0});
    problem.seqlen_kv = std::accumulate(lengths.kv.begin(), lengths.kv.end(), std::int64_t{0});
  }
  problem.l2_bytes = device.l2_bytes;
  require_work(problem, scheduled.tile);

  plan::Machine machine;
  machine.processors = arguments.processors > 0
                           ? arguments.processors
                           : static_cast<int>(device.sm_count) / scheduled.tile.cluster;
  scheduled.tile.max_round = std::clamp(machine.processors / 2, 1, 32);
  scheduled.tile.slots = machine.processors;
  machine.step_cycles = arguments.step_cycles > 0
                            ? arguments.step_cycles
                            : plan::account(scheduled.kernel, device).bound / scheduled.steps_of_64;
  machine.tile_cycles = arguments.tile_cycles;
  machine.signal_cycles = arguments.signal_cycles;
  machine.turn_cycles = arguments.turn_cycles;
  machine.slack = arguments.slack;
  machine.jitter = arguments.jitter;
  machine.processor_spread = arguments.spread;

  std::vector<Run> runs;
  for (const plan::Policy& policy : plan::policies(problem.backward)) {
    if (arguments.compare || arguments.order == policy.name) {
      problem.section = !policy.swizzled ? 1
                        : arguments.section > 0
                            ? arguments.section
                            : plan::kernel_section(problem, policy, scheduled.tile,
                                                   machine.processors, device.l2_bytes);
      runs.push_back({&policy, problem.section,
                      plan::simulate(problem, plan::launch_order(problem, policy, scheduled.tile),
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
      "{} by {} on {} {} of {}, {:.0f} cycles a step\n"
      "  {:<24} {:>7} {:>9} {:>6} {:>6} {:>8} {:>9}\n",
      arguments.pass, scheduled.kernel.name, machine.processors,
      scheduled.tile.cluster == 2 ? "pairs of SMs" : "SMs", device.name, machine.step_cycles,
      "order", "section", "kcycles", "speed", "idle", "waiting", "in use"));
  ordered_json rows = ordered_json::array();
  for (const Run& run : runs) {
    const plan::Timeline& t = run.timeline;
    if (t.deadlock) {
      print_out(fmt::format("  {:<24} {:>7} deadlock: waits for tiles that have not started\n",
                            run.policy->name, run.section));
    } else {
      print_out(fmt::format("  {:<24} {:>7} {:>9.0f} {:>5.1f}% {:>5.1f}% {:>7.1f}% {:>9}  {}\n",
                            run.policy->name, run.section, t.makespan / 1000,
                            100 * runs.front().timeline.makespan / t.makespan, 100 * t.idle,
                            100 * t.waiting, format_bytes(t.peak_bytes), run.policy->description));
    }
    rows.push_back({{"order", run.policy->name},
                    {"section", run.section},
                    {"deadlock", t.deadlock},
                    {"makespan_cycles", t.makespan},
                    {"idle", t.idle},
                    {"waiting", t.waiting},
                    {"peak_heads", t.peak_heads},
                    {"bytes_in_use", t.peak_bytes}});
  }
  *svg = plan::gantt_svg(runs.front().timeline,
                         fmt::format("{}, {}", arguments.pass, runs.front().policy->name));
  return {{"kernel", scheduled.kernel.name},
          {"device", device.name},
          {"processors", machine.processors},
          {"step_cycles", machine.step_cycles},
          {"orders", rows}};
}

}  // namespace flashgrad::tool
