// SPDX-License-Identifier: Apache-2.0
// `flashgrad run`.
#include "run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <optional>
#include <vector>

#include "attention_call.hpp"
#include "check/check.hpp"
#include "memory.hpp"
#include "report.hpp"
#include "safetensors.hpp"
#include "text.hpp"
#include "whole_file.hpp"

namespace flashgrad::tool {
namespace {

void note(const std::string& message) { std::cerr << "flashgrad: note: " << message << "\n"; }

struct Pass {
  fg_pass pass = FG_FORWARD;
  const char* name = "";
  std::string backend;
  double flops = 0;
  double seconds = 0;
  int num_runs = 0;
  std::uint64_t workspace_bytes = 0;
};

// A file may hold a whole model; more names than this would push what matters off the screen.
constexpr std::size_t kMaxNamesNoted = 8;

void note_unread(const std::vector<std::string>& names) {
  for (std::size_t n = 0; n < std::min(names.size(), kMaxNamesNoted); ++n) {
    note(
        fmt::format("tensor '{}' is not one of run's inputs and is not read", printable(names[n])));
  }
  if (names.size() > kMaxNamesNoted) {
    note(fmt::format("{} more tensors are not read", names.size() - kMaxNamesNoted));
  }
}

// The inputs that the file has. Every other tensor in it is named and left alone.
AttentionCall load_call(const std::string& path) {
  const SafetensorsFile file(path);
  AttentionCall call;
  struct Slot {
    const char* name;
    HostTensor* tensor;
  };
  const std::array<Slot, 13> all = {{{"q", &call.q},
                                     {"k", &call.k},
                                     {"v", &call.v},
                                     {"out", &call.out},
                                     {"lse", &call.lse},
                                     {"dout", &call.dout},
                                     {"dlse", &call.dlse},
                                     {"sinks", &call.sinks},
                                     {"cu_seqlens_q", &call.cu_seqlens_q},
                                     {"cu_seqlens_kv", &call.cu_seqlens_kv},
                                     {"seqused_q", &call.seqused_q},
                                     {"seqused_kv", &call.seqused_kv},
                                     {"q_offset", &call.q_offset}}};

  std::uint64_t total_bytes = 0;
  std::vector<std::string> unread;
  for (const TensorEntry& entry : file.entries()) {
    const auto* const slot =
        std::find_if(all.begin(), all.end(), [&](const Slot& s) { return entry.name == s.name; });
    if (slot == all.end()) {
      unread.push_back(entry.name);
      continue;
    }
    dl_dtype(entry.name, entry.dtype);  // refuses what attention can't take
    total_bytes += entry.end - entry.begin;
  }
  require_memory(static_cast<double>(total_bytes));
  for (const Slot& slot : all) {
    if (const TensorEntry* entry = file.find(slot.name)) {
      *slot.tensor = {entry->name, entry->dtype, entry->shape, file.load(*entry), {}};
    }
  }
  for (const HostTensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!tensor->given()) {
      throw Error(fmt::format("{}: no tensor '{}'; want q, k and v", printable(path),
                              tensor == &call.q   ? "q"
                              : tensor == &call.k ? "k"
                                                  : "v"));
    }
  }
  if (call.out.given() != call.lse.given()) {
    throw Error(fmt::format("{}: {} without {}; want both or neither", printable(path),
                            call.out.given() ? "out" : "lse", call.out.given() ? "lse" : "out"));
  }
  note_unread(unread);
  return call;
}

// Runs a pass, again and again while it is short, and keeps the least time: the first run also pays
// for new threads and fresh memory.
void time_pass(Pass& pass, Runner& runner, const fg_tensors& tensors, const fg_options& options) {
  constexpr double kEnoughSeconds = 0.25;
  constexpr int kMaxRuns = 20;
  double total = 0;
  do {
    const double seconds = runner.run(pass.pass, tensors, options);
    total += seconds;
    pass.seconds = pass.num_runs == 0 ? seconds : std::min(pass.seconds, seconds);
    ++pass.num_runs;
  } while (total < kEnoughSeconds && pass.num_runs < kMaxRuns);
}

std::string describe_call(const AttentionCall& call, const fg_options& options) {
  std::string text =
      fmt::format("{} q {} k {} v {}, {}", call.q.dtype, format_shape(call.q.shape),
                  format_shape(call.k.shape), format_shape(call.v.shape), describe_mask(options));
  if (!std::isnan(options.scale)) {
    text += fmt::format(", scale {}", options.scale);
  }
  if (options.softcap > 0) {
    text += fmt::format(", softcap {}", options.softcap);
  }
  for (const HostTensor* tensor :
       {&call.sinks, &call.cu_seqlens_q, &call.seqused_q, &call.seqused_kv, &call.q_offset}) {
    if (tensor->given()) {
      text += ", " + tensor->name;
    }
  }
  return text;
}

std::string report_of(const std::vector<Pass>& passes, const Cost& cost) {
  std::string text = fmt::format("{:<10}{:>12}{:>12}{:>14}   {}\n", "pass", "time", "GFLOP/s",
                                 "workspace", "standard attention would hold");
  for (const Pass& pass : passes) {
    text += fmt::format(
        "{:<10}{:>12}{:>12.1f}{:>14}   {} ({})\n", pass.name, format_seconds(pass.seconds),
        pass.flops / pass.seconds * 1e-9, fmt::format("{} B", pass.workspace_bytes),
        format_bytes(cost.standard_bytes), pass.pass == FG_FORWARD ? "S and P" : "P and dP");
  }
  return text;
}

// Runs the passes where the backend takes its tensors and leaves the results in host memory. Both
// are asked before either runs: what is refused costs no work.
std::vector<Pass> run_passes(AttentionCall& call, const CallOptions& call_options, bool forward,
                             bool backward) {
  const fg_options& options = call_options.options;
  const fg_tensors tensors = call.bind(call_options.place);
  std::vector<Pass> passes;
  const auto add_pass = [&](fg_pass pass, const char* name) {
    const char* backend = nullptr;
    require_ok(fg_supports(pass, &tensors, &options, &backend));
    Pass& added = passes.emplace_back();
    added.pass = pass;
    added.name = name;
    added.backend = backend;
  };
  if (forward) {
    add_pass(FG_FORWARD, "forward");
  }
  if (backward) {
    add_pass(FG_BACKWARD, "backward");
  }
  const bool on_device = call_options.place == check::Place::kCuda;
  if (on_device) {
    call.upload();
    call.bind(call_options.place);
  }
  for (Pass& pass : passes) {
    Runner runner(call_options.place);
    runner.prepare(pass.pass, tensors, options);
    pass.workspace_bytes = runner.workspace_bytes();
    time_pass(pass, runner, tensors, options);
  }
  if (on_device) {
    call.download();
  }
  return passes;
}

}  // namespace

int run_command(const RunArguments& arguments) {
  const CallOptions call_options(arguments.call);
  const fg_options& options = call_options.options;
  refuse_same_file(arguments.input, arguments.output);
  check_writable(arguments.output);
  AttentionCall call = load_call(arguments.input);

  const bool backward = call.dout.given() || call.dlse.given();
  const bool forward = !call.out.given() || !backward;
  if (call.out.given() && !backward) {
    note(
        "out and lse without dout or dlse: there is no backward to use them, forward computes "
        "them");
  }
  if (forward) {
    call.make_outputs();
  }
  if (backward) {
    call.make_gradients(call_options.grad_f32);
  }
  std::vector<Pass> passes = run_passes(call, call_options, forward, backward);
  const Cost cost = cost_of(call, options);
  for (Pass& pass : passes) {
    pass.flops = pass.pass == FG_FORWARD ? cost.forward_flops : cost.backward_flops;
  }

  std::string text = describe_call(call, options) + "\n";
  for (const Pass& pass : passes) {
    if (&pass == &passes.front() || pass.backend != passes.front().backend) {
      text += fmt::format("backend {}: {}\n", pass.backend, describe_backend(pass.backend).detail);
    }
  }
  text += report_of(passes, cost);

  bool passed = true;
  if (arguments.check) {
    check::ExpectedOptions expected;
    expected.num_threads = options.num_threads;
    const check::Judgement judgement = check::judge(call.bind(), options, !forward, expected);
    text += format_outputs(judgement.outputs, judgement.coverage);
    passed = all_ok(judgement.outputs);
    text += passed ? "PASS\n" : "FAIL\n";
  }

  std::vector<OutputTensor> outputs;
  std::string names;
  for (const HostTensor* tensor :
       {&call.out, &call.lse, &call.dq, &call.dk, &call.dv, &call.dsinks}) {
    if (tensor->given()) {
      outputs.push_back({tensor->name, tensor->dtype, tensor->shape,
                         std::span<const std::byte>(tensor->buffer.data(), tensor->buffer.size())});
      names += (names.empty() ? "" : ", ") + tensor->name;
    }
  }
  text += fmt::format("writing {} to {}\n", names, printable(arguments.output, 4000));
  // Before the file: if nobody can be told, nothing is written.
  print_out(text);
  write_safetensors(arguments.output, outputs, {{"flashgrad", fg_version()}});
  return passed ? kExitOk : kExitCheckFailed;
}

}  // namespace flashgrad::tool
