// SPDX-License-Identifier: Apache-2.0
// `flashgrad check`.
#include "check/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <utility>
#include <vector>

#include "check.hpp"
#include "report.hpp"
#include "shape_case.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

// Of the table's cases the oracle computes no more than so many floating-point operations whole,
// and a seeded sample of larger ones: the whole table then takes a minute or two. The conformance
// tests take more.
constexpr double kTableFlops = 2e9;

struct Tally {
  int num_passed = 0;
  int num_failed = 0;
  int num_refused = 0;
};

constexpr std::array kPlaces = {check::Place::kHost, check::Place::kCuda};

std::vector<std::string> those_on(check::Place place, const std::vector<std::string>& backends) {
  std::vector<std::string> names;
  for (const std::string& backend : backends) {
    if (check::place_of(backend) == place) {
      names.push_back(backend);
    }
  }
  return names;
}

// The backends to check: the one that was asked for, or all that can run here.
std::vector<std::string> backends_to_check(const CallOptions& call_options) {
  if (!call_options.backend.empty()) {
    return {call_options.backend};
  }
  std::vector<std::string> names;
  for (const std::string& name : backend_names()) {
    if (describe_backend(name).available != 0) {
      names.push_back(name);
    }
  }
  return names;
}

// The output that comes nearest to its bound, as a share of it.
std::string worst_output(const check::CaseResult& result) {
  std::string name = "nothing";
  double worst = -1;
  for (const check::OutputResult& output : result.outputs) {
    const double share = output.bound > 0 ? output.error / output.bound : 0;
    if (share > worst) {
      worst = share;
      name = output.name;
    }
  }
  return fmt::format("worst {} at {:.2f} of its bound", name, std::max(worst, 0.0));
}

check::CaseResult run_on(check::CaseRunner& runner, const std::string& backend,
                         const fg_options& options) {
  check::RunOptions run_options;
  run_options.backend = backend;
  run_options.num_threads = options.num_threads;
  return runner.run(run_options);
}

// The command that runs this case on this backend again.
std::string repeat_command(const check::Case& c, const std::string& backend,
                           const fg_options& options) {
  std::string command = check::command_line(c) + " --backend " + backend;
  if (options.num_threads > 0) {
    command += fmt::format(" --threads {}", options.num_threads);
  }
  return command;
}

// Runs one case on one backend, tells what went wrong, and counts. Returns a few words on how it
// went.
std::string check_case(check::CaseRunner& runner, const std::string& backend,
                       const fg_options& options, Tally& tally) {
  const check::Case& c = runner.spec();
  const check::CaseResult result = run_on(runner, backend, options);
  if (result.status == FG_UNSUPPORTED) {
    ++tally.num_refused;
    return "refused: " + result.message;
  }
  if (result.ok()) {
    ++tally.num_passed;
    return worst_output(result);
  }
  ++tally.num_failed;
  print_out(fmt::format(
      "FAIL on {}: {}\n{}{}  repeat: {}\n", backend, c.id.empty() ? check::shape_text(c) : c.id,
      result.message.empty() ? "" : "  " + result.message + "\n",
      result.outputs.empty() ? "" : format_outputs(result.outputs, result.coverage),
      repeat_command(c, backend, options)));
  return "FAIL";
}

int finish(const Tally& tally) {
  print_out(
      fmt::format("{} passed, {} failed{}\n", tally.num_passed, tally.num_failed,
                  tally.num_refused > 0 ? fmt::format(", {} refused", tally.num_refused) : ""));
  if (tally.num_failed > 0) {
    return kExitCheckFailed;
  }
  return tally.num_passed == 0 && tally.num_refused > 0 ? kExitUnsupported : kExitOk;
}

// One shape on each of the backends, every output shown.
int check_shape(const check::Case& c, const std::vector<std::string>& backends,
                const CallOptions& call_options) {
  Tally tally;
  check::CaseRunner runner(c);
  for (const std::string& backend : backends) {
    const check::CaseResult result = run_on(runner, backend, call_options.options);
    const std::string title = fmt::format("{} ({})", backend, describe_backend(backend).detail);
    if (result.status == FG_UNSUPPORTED) {
      ++tally.num_refused;
      print_out(fmt::format("{}: refused: {}\n", title, result.message));
      continue;
    }
    if (result.status == FG_INVALID_ARGUMENT) {
      throw Error(result.message);
    }
    ++(result.ok() ? tally.num_passed : tally.num_failed);
    print_out(fmt::format(
        "{}: {}\n{}{}{}", title, result.ok() ? "PASS" : "FAIL",
        format_outputs(result.outputs, result.coverage),
        result.message.empty() ? "" : result.message + "\n",
        result.ok()
            ? ""
            : fmt::format("repeat: {}\n", repeat_command(c, backend, call_options.options))));
  }
  return finish(tally);
}

// An entry of the table on the backends of a place: a line for each.
void check_entry(const check::TableEntry& entry, const std::vector<std::string>& backends,
                 const CallOptions& call_options, std::uint64_t seed, Tally& tally) {
  const check::Place place = check::place_of(backends.front());
  const std::vector<check::Case> cases = check::cases_on(entry, place);
  if (cases.empty()) {
    print_out(fmt::format("--    {}: {}\n", entry.id, entry.not_on_a_cpu));
    return;
  }
  std::vector<std::string> words(backends.size());
  std::vector<bool> failed(backends.size(), false);
  for (check::Case c : cases) {
    c.seed = seed;
    check::CaseRunner runner(std::move(c), kTableFlops);
    for (std::size_t b = 0; b < backends.size(); ++b) {
      const int num_failed_before = tally.num_failed;
      words[b] = check_case(runner, backends[b], call_options.options, tally);
      failed[b] = failed[b] || tally.num_failed > num_failed_before;
    }
  }
  std::string changes;
  if (place == check::Place::kHost && !entry.shrunk.empty()) {
    changes = "; " + entry.shrunk;
  } else if (cases.front().dtype != entry.full_size.front().dtype) {
    changes =
        fmt::format("; {} for {}", name(cases.front().dtype), name(entry.full_size.front().dtype));
  }
  for (std::size_t b = 0; b < backends.size(); ++b) {
    print_out(fmt::format("{}  {:<10} {} ({} cases{}): {}\n", failed[b] ? "FAIL" : "ok  ",
                          backends[b], entry.id, cases.size(), changes, words[b]));
  }
}

// The case table.
int check_table(const CallOptions& call_options, std::uint64_t seed) {
  const std::vector<std::string> backends = backends_to_check(call_options);
  const std::vector<check::TableEntry>& table = check::table();
  Tally tally;
  std::size_t num_entries = 0;
  for (const check::TableEntry& entry : table) {
    ++num_entries;
    std::cerr << fmt::format("[{}/{}] {}\n", num_entries, table.size(), entry.id);
    for (const check::Place place : kPlaces) {
      if (const auto there = those_on(place, backends); !there.empty()) {
        check_entry(entry, there, call_options, seed, tally);
      }
    }
  }
  return finish(tally);
}

}  // namespace

std::string table_ids() {
  constexpr std::size_t kColumns = 90;
  std::string text;
  std::size_t column = 0;
  for (const check::TableEntry& entry : check::table()) {
    const bool wraps = column + entry.id.size() > kColumns;
    text += column == 0 ? "  " : wraps ? ",\n  " : ", ";
    text += entry.id;
    column = (column == 0 || wraps ? 2 : column + 2) + entry.id.size();
  }
  return text;
}

int check_command(const CheckArguments& arguments) {
  const CallOptions call_options(arguments.call);
  const auto seed =
      static_cast<std::uint64_t>(parse_integer(arguments.seed, "--seed", 0, INT64_MAX));
  try {
    if (arguments.shape) {
      const check::Case c = shape_case(*arguments.shape, arguments.dtype, seed, call_options);
      return check_shape(c, backends_to_check(call_options), call_options);
    }
    if (arguments.case_id) {
      int status = kExitOk;
      for (const check::Place place : kPlaces) {
        const auto backends = those_on(place, backends_to_check(call_options));
        for (check::Case c : backends.empty() ? std::vector<check::Case>{}
                                              : check::find_cases(*arguments.case_id, place)) {
          c.seed = seed;
          print_out(fmt::format("{}: {}\n", c.id, check::shape_text(c)));
          status = std::max(status, check_shape(c, backends, call_options));
        }
      }
      return status;
    }
  } catch (const std::invalid_argument& error) {
    throw Error(printable(error.what(), 400));
  }
  return check_table(call_options, seed);
}

}  // namespace flashgrad::tool
