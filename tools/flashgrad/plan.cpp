// SPDX-License-Identifier: Apache-2.0
// The options of `flashgrad plan`, and where its results go.
#include "plan.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "plan/device.hpp"
#include "plan/schedule.hpp"
#include "plan/simulator.hpp"
#include "plan_commands.hpp"
#include "text.hpp"
#include "whole_file.hpp"

namespace flashgrad::tool {
namespace {

constexpr int kMaxCount = 65536;  // of heads, and of sequences

// From 0 to `most`, and a number: CLI::Range lets nan through.
struct NumberRange : CLI::Validator {
  explicit NumberRange(double most) {
    func_ = [most](const std::string& text) {
      double value = 0;
      return CLI::detail::lexical_cast(text, value) && value >= 0 && value <= most
                 ? std::string()
                 : fmt::format("want 0 to {:g}", most);
    };
  }
};

std::string device_names() {
  std::string names;
  for (const plan::Device& device : plan::devices()) {
    names += (names.empty() ? "" : ", ") + device.name;
  }
  return names;
}

constexpr const char* kDeviceFile = ", or a JSON file like those of src/plan/devices";

void add_outputs(CLI::App& command, PlanArguments& arguments) {
  command.add_option("--json", arguments.json, "Also write the numbers to this file")
      ->type_name("FILE");
  command.add_option("--svg", arguments.svg, "Also draw them into this file")->type_name("FILE");
}

void add_device(CLI::App& command, PlanArguments& arguments) {
  command.add_option("--device", arguments.device, device_names() + kDeviceFile)
      ->type_name("NAME")
      ->capture_default_str();
}

// Options of which an option does not leave anything to say.
void exclude(CLI::Option* option, CLI::App& command, const std::vector<const char*>& others) {
  for (const char* const other : others) {
    option->excludes(command.get_option(other));
  }
}

void add_shape(CLI::App& command, PlanArguments& arguments) {
  command.add_option("--tokens", arguments.tokens, "Length of a sequence; K and M are 2^10, 2^20")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--batch", arguments.batch, "Sequences")
      ->type_name("N")
      ->check(CLI::Range(1, kMaxCount))
      ->capture_default_str();
  command.add_option("--heads", arguments.heads, "Query heads")
      ->type_name("N")
      ->check(CLI::Range(1, kMaxCount))
      ->capture_default_str();
  command.add_option("--heads-kv", arguments.heads_kv, "Key heads; 0: as many")
      ->type_name("N")
      ->check(CLI::Range(0, kMaxCount))
      ->capture_default_str();
  command.add_option("--head-dim", arguments.head_dim, "Of q, k and v")
      ->type_name("N")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
}

void add_tokens_kv(CLI::App& command, PlanArguments& arguments) {
  command
      .add_option("--tokens-kv", arguments.tokens_kv, "Keys of a sequence; as many if not given")
      ->type_name("N");
}

void add_mask(CLI::App& command, PlanArguments& arguments) {
  CLI::Option* causal =
      command.add_flag("--causal", arguments.causal, "A row sees the keys up to its own")
          ->disable_flag_override();
  command.add_option("--window", arguments.window, "LEFT,RIGHT, as in `flashgrad run`")
      ->type_name("LEFT,RIGHT")
      ->excludes(causal);
}

void add_roofline(CLI::App& app, PlanArguments& arguments) {
  CLI::App* roofline =
      app.add_subcommand("roofline", "Cycles per resource and tile, what binds, whether it fits");
  roofline
      ->add_option("--device", arguments.device,
                   device_names() + kDeviceFile + ", or cpu: this machine")
      ->type_name("NAME")
      ->capture_default_str();
  CLI::Option* kernel =
      roofline
          ->add_option("--kernel", arguments.kernels,
                       "In detail, one or several; hopper-backward: the best tiles for --head-dim")
          ->type_name("NAME");
  roofline->add_option("--head-dim", arguments.head_dim, "Of hopper-backward")
      ->needs(kernel)
      ->type_name("N")
      ->check(CLI::IsMember({64, 128, 192, 256}))
      ->capture_default_str();
  exclude(
      roofline
          ->add_flag("--sources", arguments.sources, "The device's figures and where they are from")
          ->disable_flag_override(),
      *roofline, {"--kernel"});
  exclude(roofline
              ->add_flag("--generations", arguments.generations,
                         "FlashAttention 1 to 4 on each device: what binds")
              ->disable_flag_override(),
          *roofline, {"--kernel", "--sources", "--device"});
  add_outputs(*roofline, arguments);
  exclude(roofline->get_option("--svg"), *roofline, {"--sources"});
}

void add_memory(CLI::App& app, PlanArguments& arguments) {
  CLI::App* memory =
      app.add_subcommand("memory", "What a backward pass holds, with P stored and made again");
  add_device(*memory, arguments);
  add_shape(*memory, arguments);
  add_tokens_kv(*memory, arguments);
  memory->add_option("--dtype", arguments.dtype, "Of the tensors")
      ->type_name("DTYPE")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  memory->add_option("--gpus", arguments.gpus, "That share the sequence")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  add_outputs(*memory, arguments);
}

void add_schedule(CLI::App& app, PlanArguments& arguments) {
  CLI::App* schedule = app.add_subcommand(
      "schedule", "Tiles on processors: makespan, idle and waiting time, working set");
  add_device(*schedule, arguments);
  add_shape(*schedule, arguments);
  add_tokens_kv(*schedule, arguments);
  std::string names;
  for (const plan::Policy& policy : plan::policies(true)) {
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  }
  schedule->add_option("--pass", arguments.pass, "forward or backward")
      ->type_name("PASS")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  schedule->add_option("--order", arguments.order, names + "; not given: what the kernels do")
      ->type_name("NAME");
  exclude(schedule->add_flag("--compare", arguments.compare, "All orders, the fastest first")
              ->disable_flag_override(),
          *schedule, {"--order"});
  add_mask(*schedule, arguments);
  schedule
      ->add_option("--align", arguments.align,
                   "Where the diagonal stands: bottom-right or top-left")
      ->type_name("CORNER")
      ->check(CLI::IsMember({"bottom-right", "top-left"}))
      ->capture_default_str();
  CLI::Option* packed =
      schedule
          ->add_option("--packed", arguments.packed, "Lengths of a packed batch instead: 128,4096")
          ->type_name("N,N,...");
  exclude(packed, *schedule, {"--tokens", "--tokens-kv", "--batch"});
  schedule
      ->add_option("--packed-kv", arguments.packed_kv,
                   "Keys of each sequence of --packed; as many if not given")
      ->needs(packed)
      ->type_name("N,N,...");
  schedule
      ->add_option("--cluster", arguments.cluster,
                   "CTAs that work together (backward); 0: as the kernels do")
      ->type_name("0|1|2")
      ->check(CLI::Range(0, 2))
      ->capture_default_str();
  schedule->add_option("--processors", arguments.processors, "0: SMs / cluster")
      ->type_name("N")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  schedule
      ->add_option("--section", arguments.section, "Heads launched together; 0: as the kernels do")
      ->type_name("N")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  schedule
      ->add_option("--step-cycles", arguments.step_cycles,
                   "Of a step; 0: as `plan predict` expects it, or where it does not, the bound")
      ->type_name("X")
      ->check(NumberRange(1e9))
      ->capture_default_str();
  schedule
      ->add_option("--tile-cycles", arguments.tile_cycles,
                   "Of a tile besides its steps; not given: as `plan predict` has it, or 0")
      ->type_name("X")
      ->check(NumberRange(1e9));
  schedule
      ->add_option("--signal-cycles", arguments.signal_cycles,
                   "From an addition to dq until another processor may add")
      ->type_name("X")
      ->check(NumberRange(1e9))
      ->capture_default_str();
  schedule
      ->add_option(
          "--turn-cycles", arguments.turn_cycles,
          "That a step takes longer with turns at dq; not given: as `plan predict` has it, or "
          "60, a fence and a counter")
      ->type_name("X")
      ->check(NumberRange(1e9));
  schedule->add_option("--slack", arguments.slack, "Steps that products may be ahead of additions")
      ->type_name("N")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
  schedule->add_option("--jitter", arguments.jitter, "Steps take up to this share longer")
      ->type_name("X")
      ->check(NumberRange(1))
      ->capture_default_str();
  schedule->add_option("--spread", arguments.spread, "Processors are slower by up to this share")
      ->type_name("X")
      ->check(NumberRange(1))
      ->capture_default_str();
  add_outputs(*schedule, arguments);
}

void add_simulate(CLI::App& app, PlanArguments& arguments) {
  CLI::App* simulate = app.add_subcommand(
      "simulate", "Run a backward kernel's tile program with real numbers and find its faults");
  std::string names;
  for (const plan::ProgramChoice& program : plan::programs()) {
    names += (names.empty() ? "" : ", ") + std::string(program.name);
  }
  simulate->add_option("--program", arguments.program, names)
      ->type_name("NAME")
      ->capture_default_str();
  simulate->add_option("--queries", arguments.queries, "Rows of q")
      ->type_name("N")
      ->check(CLI::Range(128, 8192))
      ->capture_default_str();
  simulate->add_option("--keys", arguments.keys, "Rows of k")
      ->type_name("N")
      ->check(CLI::Range(128, 8192))
      ->capture_default_str();
  simulate->add_flag("--causal", arguments.causal, "A row sees the keys up to its own")
      ->disable_flag_override();
  simulate->add_option("--seed", arguments.seed, "Of the order of events that no barrier orders")
      ->type_name("N")
      ->check(CLI::Range(0, INT32_MAX))
      ->capture_default_str();
  simulate
      ->add_option("--drop-wait", arguments.drop_wait,
                   "Leave out a wait; any other text lists the waits")
      ->type_name("ROLE/CTA/BARRIER");
  add_outputs(*simulate, arguments);
}

void add_predict(CLI::App& app, PlanArguments& arguments) {
  CLI::App* predict = app.add_subcommand(
      "predict",
      "Times of one call on an H200, or predicted beside measured in benchmarks/results");
  CLI::Option* results = predict
                             ->add_option("--results", arguments.results,
                                          "Files of `flashgrad bench`, benchmarks/peers.py and the "
                                          "GPU programs, or a folder of "
                                          "them; without it the call of the other options")
                             ->type_name("FILE");
  add_shape(*predict, arguments);
  predict->add_option("--head-dim-v", arguments.head_dim_v, "Of v; 0: as q and k")
      ->type_name("N")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  predict->add_option("--pass", arguments.pass, "forward or backward")
      ->type_name("PASS")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  add_mask(*predict, arguments);
  exclude(
      predict
          ->add_option("--packed", arguments.packed, "Lengths of a packed batch instead: 128,4096")
          ->type_name("N,N,..."),
      *predict, {"--tokens", "--batch"});
  predict->add_flag("--deterministic", arguments.deterministic, "dq in a fixed order (backward)")
      ->disable_flag_override();
  exclude(results, *predict,
          {"--tokens", "--batch", "--heads", "--heads-kv", "--head-dim", "--head-dim-v", "--pass",
           "--causal", "--window", "--packed", "--deterministic"});
  add_outputs(*predict, arguments);
  predict->get_option("--svg")->needs(results);
}

void write_file(const std::string& path, const std::string& text) {
  const std::array parts = {std::as_bytes(std::span(text))};
  write_whole_file(path, parts);
}

}  // namespace

void add_plan(CLI::App& app, PlanArguments& arguments) {
  CLI::App* plan = app.add_subcommand(
      "plan", "Explain the speed: a model of kernels, memory and schedules; needs no GPU");
  plan->require_subcommand(1);
  add_roofline(*plan, arguments);
  add_memory(*plan, arguments);
  add_schedule(*plan, arguments);
  add_simulate(*plan, arguments);
  add_predict(*plan, arguments);
}

int plan_command(CLI::App& app, const PlanArguments& arguments) {
  const CLI::App& plan = *app.get_subcommand("plan");
  nlohmann::ordered_json result;
  std::string svg;
  bool ok = true;
  for (const std::optional<std::string>* path : {&arguments.json, &arguments.svg}) {
    if (*path) {
      check_writable(**path);
    }
  }
  try {
    if (plan.got_subcommand("roofline")) {
      result = plan_roofline(arguments, &svg);
    } else if (plan.got_subcommand("memory")) {
      result = plan_memory(arguments, &svg);
    } else if (plan.got_subcommand("schedule")) {
      result = plan_schedule(arguments, &svg);
    } else if (plan.got_subcommand("predict")) {
      result = plan_predict(arguments, &svg);
    } else {
      result = plan_simulate(arguments, &svg, &ok);
    }
  } catch (const std::invalid_argument& error) {
    throw Error(printable(error.what(), 1000));
  }
  if (arguments.svg && svg.empty()) {
    throw Error("--svg: nothing to draw: no row of the files was predicted");
  }
  if (arguments.json) {
    write_file(*arguments.json,
               result.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  if (arguments.svg) {
    write_file(*arguments.svg, svg);
  }
  return ok ? kExitOk : kExitCheckFailed;
}

}  // namespace flashgrad::tool
