// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan simulate`.
#include <fmt/format.h>

#include <optional>

#include "plan/account.hpp"
#include "plan/judge.hpp"
#include "plan/pictures.hpp"
#include "plan/simulator.hpp"
#include "plan_commands.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::ordered_json;

// Of one run of the program.
int keys_of_run(const plan::ProgramChoice& choice) { return choice.keys > 0 ? choice.keys : 128; }

std::string describe(const plan::WaitSite& site) {
  return fmt::format("{}/{}/{}", site.role, site.cta, site.barrier);
}

plan::WaitSite find_wait(const plan::Program& program, const std::string& name) {
  std::string names;
  for (const plan::WaitSite& site : plan::wait_sites(program)) {
    if (describe(site) == name) {
      return site;
    }
    names += (names.empty() ? "" : ", ") + describe(site);
  }
  throw Error(fmt::format("--drop-wait: no '{}', want one of: {}", printable(name), names));
}

void print_map(const plan::Program& program) {
  for (const plan::Region& region : program.tensor_regions) {
    print_out(fmt::format("  columns {:>3} to {:>3}: {}\n", region.offset,
                          region.offset + region.size - 1, region.name));
  }
  int end = 0;
  for (const plan::Region& region : program.shared_regions) {
    end = std::max(end, region.offset + region.size);
    print_out(fmt::format("  shared {:>6} to {:>6}: {}\n", region.offset,
                          region.offset + region.size - 1, region.name));
  }
}

// Clears `ok` if one is wrong; likewise below.
ordered_json print_gradients(plan::HeadData& data, bool* ok) {
  ordered_json gradients = ordered_json::array();
  for (const check::OutputResult& output : plan::judge_gradients(data)) {
    print_out(fmt::format("  {:<3} error {:.2e}, bound {:.2e}: {}\n", output.name, output.error,
                          output.bound, output.ok ? "ok" : "WRONG"));
    gradients.push_back({{"name", output.name},
                         {"error", output.error},
                         {"bound", output.bound},
                         {"ok", output.ok}});
    *ok = *ok && output.ok;
  }
  return gradients;
}

// Of one program alone, full: the account is of one pair of tiles.
ordered_json print_shared_bytes(const plan::ProgramChoice& choice, int queries, bool* ok) {
  plan::HeadData data =
      plan::random_head(queries, keys_of_run(choice), choice.head_dim, false, 1, choice.head_dim_v);
  const plan::Program program = choice.make(data, 0);
  const plan::SimulationResult counted = plan::run(program, data);
  const auto expected = plan::shared_bytes_by_use(plan::find_kernel(choice.kernel));
  print_out(fmt::format("  shared memory, bytes per CTA and tile {:>10} {:>10}\n", "simulated",
                        "account"));
  ordered_json bytes = ordered_json::array();
  for (int use = 0; use < plan::kNumUses; ++use) {
    const auto at = static_cast<std::size_t>(use);
    const double simulated = counted.shared_bytes[0][at] / program.steps;
    print_out(fmt::format("  {:<38} {:>9.0f} {:>10.0f}\n",
                          plan::name_of(static_cast<plan::Use>(use)), simulated, expected[at]));
    bytes.push_back({{"use", plan::name_of(static_cast<plan::Use>(use))},
                     {"simulated", simulated},
                     {"account", expected[at]}});
    *ok = *ok && simulated == expected[at];
  }
  return bytes;
}

}  // namespace

ordered_json plan_simulate(const PlanArguments& arguments, std::string* svg, bool* ok) {
  const plan::ProgramChoice& choice = plan::find_program(arguments.program);
  const int keys = arguments.keys;
  if (keys % keys_of_run(choice) != 0) {
    throw Error(fmt::format("--keys: {}, want a multiple of {} for {}", keys, keys_of_run(choice),
                            choice.name));
  }
  if (arguments.queries % 128 != 0) {
    throw Error(fmt::format("--queries: {}, want a multiple of 128", arguments.queries));
  }
  if (arguments.causal && arguments.queries > keys) {
    throw Error("--causal: more queries than keys would leave rows that see nothing");
  }
  plan::HeadData data = plan::random_head(arguments.queries, keys, choice.head_dim,
                                          arguments.causal, 1, choice.head_dim_v);
  const plan::Program program = choice.make(data, 0);
  const std::optional<plan::WaitSite> dropped =
      arguments.drop_wait.empty() ? std::nullopt
                                  : std::optional(find_wait(program, arguments.drop_wait));
  const bool own_v = choice.head_dim_v > 0 && choice.head_dim_v != choice.head_dim;
  print_out(fmt::format("{}: {} CTA{}, head_dim {}{}, {} queries, {} keys{}\n", choice.name,
                        program.ctas, program.ctas == 1 ? "" : "s", choice.head_dim,
                        own_v ? fmt::format("/{}", choice.head_dim_v) : "", arguments.queries, keys,
                        arguments.causal ? ", causal" : ""));
  for (const char* const other : {choice.before, choice.after}) {
    if (other != nullptr && !dropped) {
      print_out(
          fmt::format("  with {} {} it\n", other, other == choice.before ? "before" : "after"));
    }
  }
  print_map(program);

  plan::SimulationResult result;
  if (!dropped) {
    result = plan::run_backward(choice, data, static_cast<std::uint64_t>(arguments.seed));
  } else {
    print_out(fmt::format("without the wait {}{}\n", describe(*dropped),
                          choice.keys > 0 ? ", first keys only" : ""));
    result = plan::run(plan::without(program, *dropped), data,
                       static_cast<std::uint64_t>(arguments.seed));
  }
  *svg = plan::trace_svg(program, result.trace);
  ordered_json faults = ordered_json::array();
  for (const plan::Fault& fault : result.faults) {
    print_out("fault: " + fault.message + "\n");
    faults.push_back(fault.message);
  }
  *ok = result.faults.empty();
  ordered_json json = {{"program", choice.name}, {"faults", faults}};
  if (dropped) {
    if (*ok) {
      print_out("no fault: other waits imply this one\n");
    }
    return json;
  }

  json["gradients"] = print_gradients(data, ok);
  json["shared_bytes"] = print_shared_bytes(choice, arguments.queries, ok);
  return json;
}

}  // namespace flashgrad::tool
