// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan schedule`.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cuda/sm90/bwd_plan.hpp"
#include "plan/account.hpp"
#include "plan/pictures.hpp"
#include "plan/predict.hpp"
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

// The kernel whose tiles are scheduled, and how they run. A step is 64 queries in the backward, a
// block of keys in the forward.
struct Scheduled {
  plan::Kernel kernel;
  plan::TileSize tile;
  plan::Machine machine;
};

bool is_blackwell(const plan::Device& device) { return device.tensor_memory_columns > 0; }

// This library's kernels, whose ends are known as well.
bool is_sm90_backward(const plan::ScheduleProblem& problem, const plan::Device& device) {
  return problem.backward && !is_blackwell(device);
}

// By pass, device, cluster and, if the kernels choose, whether dq is added in order.
plan::Kernel kernel_of(const PlanArguments& arguments, const plan::ScheduleProblem& problem,
                       const plan::Device& device, bool ordered) {
  const int d = arguments.head_dim;
  if (!problem.backward) {
    return is_blackwell(device) ? plan::fa4_forward(d) : plan::sm90_forward_kernel(d, d);
  }
  if (is_blackwell(device)) {
    return plan::fa4_backward(d, std::max(arguments.cluster, 1));
  }
  if (d > 128) {
    throw Error(
        "--head-dim: above 128 the sm90 backward runs in passes of two kernels, which `flashgrad "
        "plan predict` times; want at most 128");
  }
  if (arguments.cluster > 0) {
    return plan::sm90_backward_kernel(d, false, arguments.cluster == 2);
  }
  Problem p = problem.to_problem();
  p.deterministic = ordered;
  return plan::sm90_backward_variant(sm90::find_variant(p, ordered));
}

Scheduled schedule_of(const PlanArguments& arguments, const plan::ScheduleProblem& problem,
                      const plan::Device& device, const plan::Policy& policy) {
  const bool kernels_turns = policy.turns == plan::Policy::Turns::kKernel;
  const bool ordered = policy.turns != plan::Policy::Turns::kFree;
  Scheduled s;
  s.kernel = kernel_of(arguments, problem, device, kernels_turns);
  plan::require_fit(s.kernel, device);
  s.tile = {.rows = s.kernel.queries, .keys = s.kernel.keys, .cluster = s.kernel.ctas};
  // FlashAttention-4's backward makes steps of 128 queries.
  const double steps_of_64 = problem.backward ? s.kernel.queries / 64.0 : 1;
  const bool expected = s.kernel.workers > 0;
  plan::TileTiming timing{.step = plan::account(s.kernel, device).bound, .tile = 0, .busy = 0};
  double turn_cycles = 60;
  if (expected) {
    // So that the steps take as long on average.
    timing = plan::tile_timing(s.kernel, device);
    timing.step /= 1 + arguments.jitter / 2 + arguments.spread / 2;
    const plan::TileTiming turns = plan::turn_timing(s.kernel, device);
    turn_cycles = turns.step;
    timing.tile += kernels_turns ? turns.tile : 0;
  }
  s.machine.processors = arguments.processors > 0
                             ? arguments.processors
                             : std::max(static_cast<int>(device.sm_count) / s.tile.cluster, 1);
  s.machine.step_cycles =
      arguments.step_cycles > 0 ? arguments.step_cycles : timing.step / steps_of_64;
  s.machine.tile_cycles = arguments.tile_cycles >= 0 ? arguments.tile_cycles : timing.tile;
  s.machine.signal_cycles = arguments.signal_cycles;
  s.machine.turn_cycles = !ordered                     ? 0
                          : arguments.turn_cycles >= 0 ? arguments.turn_cycles
                                                       : turn_cycles;
  s.machine.slack = arguments.slack;
  s.machine.jitter = arguments.jitter;
  s.machine.processor_spread = arguments.spread;
  s.machine.served_bytes_per_clk = plan::kServedBytesPerClk * s.kernel.ctas;
  s.tile.max_round = std::clamp(s.machine.processors / 2, 1, 32);
  s.tile.slots = s.machine.processors;
  return s;
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
  std::int64_t head_parts;
  Scheduled scheduled;
  plan::ServedUnits units;  // of policies that serve
  plan::Timeline timeline;
  double end_cycles;  // of the kernels before and after

  [[nodiscard]] double cycles() const {
    return timeline.deadlock ? 1e300 : timeline.makespan + end_cycles;
  }
  [[nodiscard]] double bytes_in_use() const {  // at most
    return timeline.peak_bytes + static_cast<double>(units.slots) * units.slot_bytes;
  }
};

plan::ScheduleProblem problem_of(const PlanArguments& arguments, const plan::Device& device) {
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
  return problem;
}

// The order of a call, or in `why_not` why it is none of it.
Run run_order(const PlanArguments& arguments, const plan::Policy& policy,
              plan::ScheduleProblem problem, const plan::Device& device, std::string* why_not) {
  const bool on_sm90 = is_sm90_backward(problem, device);
  if (on_sm90) {
    problem = plan::in_parts(problem, policy.turns == plan::Policy::Turns::kKernel,
                             static_cast<int>(device.sm_count));
  }
  Run run{&policy, 1, problem.head_parts, schedule_of(arguments, problem, device, policy), {},
          {},      0};
  const plan::TileSize& tile = run.scheduled.tile;
  const plan::Machine& machine = run.scheduled.machine;
  if (policy.serves && !on_sm90) {
    *why_not = "only the sm90 backward serves units";
    return run;
  }
  if (policy.swizzled) {
    run.section = arguments.section > 0 ? arguments.section
                                        : plan::kernel_section(problem, policy, tile,
                                                               machine.processors, device.l2_bytes);
  }
  problem.section = run.section;
  if (policy.serves) {
    run.units = plan::served_units(problem, tile);
    *why_not = run.units.why_not;
    if (!why_not->empty()) {
      return run;
    }
  }
  run.timeline =
      plan::simulate(problem, plan::launch_order(problem, policy, tile), policy, machine);
  if (on_sm90) {
    const plan::EndBytes bytes = plan::end_bytes(problem, policy, tile);
    run.end_cycles = plan::stream_seconds(device, bytes.prepare + bytes.sum + bytes.finish) *
                     device.clock_mhz * 1e6;
  }
  return run;
}

// "66 pairs of SMs".
std::string processors_of(const Scheduled& scheduled) {
  return fmt::format("{} {}", scheduled.machine.processors,
                     scheduled.tile.cluster == 2 ? "pairs of SMs" : "SMs");
}

void print_run(const Run& run, const Run& first) {
  const plan::Timeline& t = run.timeline;
  if (t.deadlock) {
    print_out(fmt::format("  {:<24} {:>7} deadlock: waits for tiles that have not started\n",
                          run.policy->name, run.section));
    return;
  }
  print_out(fmt::format(
      "  {:<24} {:>7} {:>8.0f} {:>5.0f} {:>5.1f}% {:>5.1f}% {:>7.1f}% {:>7.1f}% {:>10}  {}{}\n",
      run.policy->name, run.section, t.makespan / 1000, run.end_cycles / 1000,
      100 * first.cycles() / run.cycles(), 100 * t.idle, 100 * t.waiting, 100 * t.serving,
      format_bytes(run.bytes_in_use()), run.policy->description,
      run.scheduled.kernel.name == first.scheduled.kernel.name
          ? ""
          : fmt::format(" ({} on {})", run.scheduled.kernel.name, processors_of(run.scheduled))));
  if (run.head_parts > 1) {
    print_out(
        fmt::format("    each key head in {} parts, whose dk and dv are summed\n", run.head_parts));
  }
  if (run.policy->serves) {
    print_out(fmt::format(
        "    a ring of {} slots of {}; units are prepared {} ahead and finished {} behind, the "
        "last {} by {} clusters each\n",
        run.units.slots, format_bytes(run.units.slot_bytes), run.units.lead, run.units.lag,
        run.units.lag, run.units.last_parts));
  }
}

ordered_json to_json(const Run& run) {
  const plan::Timeline& t = run.timeline;
  const plan::Machine& machine = run.scheduled.machine;
  ordered_json row = {{"order", run.policy->name},
                      {"kernel", run.scheduled.kernel.name},
                      {"processors", machine.processors},
                      {"step_cycles", machine.step_cycles},
                      {"tile_cycles", machine.tile_cycles},
                      {"turn_cycles", machine.turn_cycles},
                      {"section", run.section},
                      {"head_parts", run.head_parts},
                      {"deadlock", t.deadlock},
                      {"makespan_cycles", t.makespan},
                      {"end_cycles", run.end_cycles},
                      {"idle", t.idle},
                      {"waiting", t.waiting},
                      {"serving", t.serving},
                      {"peak_heads", t.peak_heads},
                      {"bytes_in_use", run.bytes_in_use()}};
  if (run.policy->serves) {
    row.update({{"slots", run.units.slots},
                {"slot_bytes", run.units.slot_bytes},
                {"lead", run.units.lead},
                {"lag", run.units.lag},
                {"last_parts", run.units.last_parts}});
  }
  return row;
}

}  // namespace

ordered_json plan_schedule(const PlanArguments& arguments, std::string* svg) {
  const plan::Device device = device_of(arguments);
  const plan::ScheduleProblem problem = problem_of(arguments, device);
  if (!problem.backward && arguments.cluster > 1) {
    throw Error("--cluster: the forward's CTAs work alone");
  }
  const plan::Policy& first = plan::policies(problem.backward).front();
  require_work(problem, schedule_of(arguments, problem, device, first).tile);
  if (!arguments.order.empty()) {
    plan::find_policy(problem.backward, arguments.order);  // throws the list of names
  }
  std::vector<Run> runs;
  ordered_json left_out = ordered_json::array();
  const auto add = [&](const plan::Policy& policy) {
    std::string why_not;
    Run run = run_order(arguments, policy, problem, device, &why_not);
    if (why_not.empty()) {
      runs.push_back(std::move(run));
    } else {
      left_out.push_back({{"order", policy.name}, {"reason", why_not}});
    }
  };
  if (arguments.compare) {
    for (const plan::Policy& policy : plan::policies(problem.backward)) {
      add(policy);
    }
  } else if (!arguments.order.empty()) {
    add(plan::find_policy(problem.backward, arguments.order));
    if (runs.empty()) {
      throw Error(fmt::format("--order {}: {}", arguments.order,
                              left_out.front().at("reason").get<std::string>()));
    }
  } else {
    // The kernels' own.
    if (is_sm90_backward(problem, device)) {
      add(plan::find_policy(true, "units"));
    }
    if (runs.empty()) {
      add(plan::find_policy(problem.backward, "sections"));
    }
  }
  std::stable_sort(runs.begin(), runs.end(),
                   [](const Run& x, const Run& y) { return x.cycles() < y.cycles(); });

  const Run& fastest = runs.front();
  const plan::Machine& machine = fastest.scheduled.machine;
  print_out(fmt::format(
      "{} by {} on {} of {}, {:.0f} cycles a step and up to {:.0f} % more, {:.0f} a tile besides\n"
      "  {:<24} {:>7} {:>8} {:>5} {:>6} {:>6} {:>8} {:>8} {:>10}\n",
      arguments.pass, fastest.scheduled.kernel.name, processors_of(fastest.scheduled), device.name,
      machine.step_cycles, 100 * (machine.jitter + machine.processor_spread), machine.tile_cycles,
      "order", "section", "kcycles", "ends", "speed", "idle", "waiting", "serving", "in use"));
  ordered_json rows = ordered_json::array();
  for (const Run& run : runs) {
    print_run(run, fastest);
    rows.push_back(to_json(run));
  }
  for (const ordered_json& left : left_out) {
    print_out(fmt::format("  {}: not here: {}\n", left.at("order").get<std::string>(),
                          left.at("reason").get<std::string>()));
  }
  *svg = plan::gantt_svg(fastest.timeline,
                         fmt::format("{}, {}", arguments.pass, fastest.policy->name));
  return {{"device", device.name}, {"orders", rows}, {"left_out", left_out}};
}

}  // namespace flashgrad::tool
