// SPDX-License-Identifier: Apache-2.0
// The command line `flashgrad`: run, check, bench, plan, info. Exit status 0: fine, 1: a check
// failed, 2: bad usage or input, 3: unsupported.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "bench.hpp"
#include "bench_suites.hpp"
#include "check.hpp"
#include "flashgrad/flashgrad.h"
#include "info.hpp"
#include "plan.hpp"
#include "run.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

constexpr const char* kShapeHelp = "One shape instead: b=1,hq=8,hkv=2,sq=512,sk=512,d=64[,dv=64]";

// What --shape takes besides; a command that repeats a failing case may use any of it.
constexpr const char* kShapeFooter =
    "SHAPE is KEY=VALUE,...: b sequences, hq query and hkv key heads, sq queries and sk keys of\n"
    "head_dim d, values of head_dim dv. Left out: b=1, hq=1, hkv=hq, sq=1, sk=sq, d=64, dv=d.\n"
    "Packed: cu_q=0:100:512,cu_kv=0:100:512 (b, sq and sk follow), max_q, max_kv.";

void add_run(CLI::App& app, RunArguments& arguments) {
  CLI::App* run = app.add_subcommand("run", "Attention of tensors in a safetensors file");
  run->footer(
      "Reads q, k, v and, if present, dout, out, lse, dlse, sinks, cu_seqlens_q, cu_seqlens_kv,\n"
      "seqused_q, seqused_kv, q_offset. Writes out and lse; with dout or dlse also dq, dk, dv, "
      "and\n"
      "dsinks if there are sinks. With out and lse in the input, backward uses them.\n"
      "q, k, v, dout and out are (batch, seqlen, heads, head_dim) in F32, BF16 or F16, or packed\n"
      "(total, heads, head_dim) with cu_seqlens (batch + 1, I32). lse and dlse are (batch, heads,\n"
      "seqlen) or (heads, total), sinks (heads), all F32. seqused is (batch, I32), q_offset "
      "(batch,\n"
      "I64). F64 throughout: --backend reference.");
  run->add_option("--input", arguments.input, "safetensors file to read")
      ->required()
      ->type_name("FILE");
  run->add_option("--output", arguments.output, "safetensors file to write, whole or not at all")
      ->required()
      ->type_name("FILE");
  add_call_options(*run, arguments.call);
  run->add_flag("--check", arguments.check, "Compare each output with the float64 oracle")
      ->disable_flag_override();
}

void add_check(CLI::App& app, CheckArguments& arguments) {
  CLI::App* check = app.add_subcommand(
      "check",
      "Compare every backend with the float64 oracle, on cases that attention libraries got wrong");
  CLI::Option* shape =
      check->add_option("--shape", arguments.shape, kShapeHelp)->type_name("SHAPE");
  check->add_option("--case", arguments.case_id, "One entry of the table instead")
      ->type_name("ID")
      ->excludes(shape);
  check->add_option("--dtype", arguments.dtype, "Of --shape: f32, bf16, f16 (f64: reference)")
      ->type_name("DTYPE")
      ->capture_default_str();
  check->add_option("--seed", arguments.seed, "Of the random numbers")
      ->type_name("N")
      ->capture_default_str();
  add_call_options(*check, arguments.call);
  check->get_option("--backend")
      ->description(
          fmt::format("auto (every one that can run here), {}", fmt::join(backend_names(), ", ")));
  check->footer([] {
    return std::string(kShapeFooter) +
           "\nFor each sequence, joined by ':': used_q, used_kv, q_offset. What tensors hold: q, "
           "k, "
           "v,\ndout, dlse, sinks = n (normal numbers), 3n (times 3), a number (everywhere) or "
           "none.\nnull=lse:dq:dk:dv leaves outputs out. layout = own, fused, size1, huge, "
           "dout_view "
           "or dout_0.\n\nID is one of\n" +
           table_ids();
  });
  // The table's cases have masks and factors of their own.
  for (const char* option :
       {"--dtype", "--causal", "--window", "--align", "--scale", "--softcap", "--deterministic",
        "--max-seqlen-q", "--max-seqlen-kv", "--grad-dtype"}) {
    check->get_option(option)->needs(shape);
  }
}

void add_bench(CLI::App& app, BenchArguments& arguments) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Time forward and backward against standard attention (oneDNN's products)");
  CLI::Option* suite =
      bench
          ->add_option("--suite", arguments.suite,
                       fmt::format("Shapes to measure: {}, or a JSON file", suite_names()))
          ->type_name("NAME")
          ->capture_default_str();
  CLI::Option* shape = bench->add_option("--shape", arguments.shape, kShapeHelp)
                           ->type_name("SHAPE")
                           ->excludes(suite);
  bench
      ->add_flag("--memory", arguments.memory,
                 "Instead: time and memory by sequence length, up to 512K")
      ->disable_flag_override()
      ->excludes(shape)
      ->excludes(suite);
  bench
      ->add_option("--dtype", arguments.dtype,
                   "Of --shape and --memory: f32, bf16 (default), f16 (f64: reference)")
      ->type_name("DTYPE");
  bench->add_option("--json", arguments.json, "Also write the results to this file")
      ->type_name("FILE");
  add_call_options(*bench, arguments.call);
  bench->footer(kShapeFooter);
}

// What was wrong with the arguments, and the command whose --help tells more, "flashgrad plan
// memory", as far as subcommands were named.
std::string describe_usage_error(const CLI::App& app, const CLI::ParseError& error) {
  std::string command = app.get_name();
  const CLI::App* deepest = &app;
  while (!deepest->get_subcommands().empty()) {
    deepest = deepest->get_subcommands().back();
    command += " " + deepest->get_name();
  }
  std::vector<std::string> names;  // of which one is needed here
  for (const CLI::App* subcommand : deepest->get_subcommands(nullptr)) {
    names.push_back(subcommand->get_name());
  }
  std::string what = printable(error.what(), 400);
  if (!names.empty() && error.get_name() == "RequiredError") {
    const std::vector<std::string> got = deepest->remaining();
    what = fmt::format("command: got {}, want one of: {}",
                       got.empty() ? "none" : "'" + printable(got.front()) + "'",
                       fmt::join(names, ", "));
  }
  return fmt::format("{} ({} --help tells more)", what, command);
}

// CLI11 takes "--causal=" for "--causal".
void refuse_missing_values(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
      throw Error(fmt::format("{}: nothing follows the '='", printable(argument)));
    }
  }
}

int dispatch(int argc, char** argv) {
  refuse_missing_values(argc, argv);
  CLI::App app("Exact attention, forward and backward.", "flashgrad");
  app.set_version_flag("--version", fmt::format("flashgrad {}", fg_version()));
  app.require_subcommand(1);
  RunArguments run;
  add_run(app, run);
  CheckArguments check;
  add_check(app, check);
  BenchArguments bench;
  add_bench(app, bench);
  PlanArguments plan;
  add_plan(app, plan);
  CLI::App* info = app.add_subcommand("info", "Version, backends and what is supported");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      const int exit_status = app.exit(error, text, text);
      print_out(text.str());
      return exit_status;
    }
    throw Error(describe_usage_error(app, error));
  }
  if (info->parsed()) {
    return info_command();
  }
  if (app.got_subcommand("check")) {
    return check_command(check);
  }
  if (app.got_subcommand("bench")) {
    return bench_command(bench);
  }
  if (app.got_subcommand("plan")) {
    return plan_command(app, plan);
  }
  return run_command(run);
}

bool returns_from_main = false;  // NOLINT(*-avoid-non-const-global-variables)

// GNU's OpenMP says so and exits with status 1, "a check failed", where it can't start a thread.
void exit_without_main() {
  if (!returns_from_main) {
    std::cerr << "flashgrad: OpenMP ended the program; it may need fewer --threads, or higher "
                 "limits of processes and memory (ulimit)\n";
    _exit(kExitBadInput);
  }
}

int run(int argc, char** argv) {
  const auto fail = [](std::string_view message, int exit_status) {
    std::cerr << "flashgrad: " << message << "\n";
    return exit_status;
  };
  try {
    return dispatch(argc, argv);
  } catch (const Error& error) {
    return fail(error.what(), error.exit_status());
  } catch (const std::bad_alloc&) {
    return fail("not enough memory", kExitBadInput);
  } catch (const std::exception& error) {
    return fail(printable(error.what(), 4000), kExitBadInput);
  }
}

}  // namespace
}  // namespace flashgrad::tool

int main(int argc, char** argv) {
  using namespace flashgrad::tool;  // NOLINT(google-build-using-namespace)
  // A write over the file size limit then fails like one to a full disk, and one to a pipe that
  // nobody reads like one to a closed file: with a message, and nothing left behind.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  std::atexit(exit_without_main);
  const int exit_status = run(argc, argv);
  returns_from_main = true;
  return exit_status;
}
