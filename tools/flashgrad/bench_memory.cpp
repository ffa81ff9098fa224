// SPDX-License-Identifier: Apache-2.0
// Time and memory by sequence length: measured while a length takes seconds, computed beyond.
// Memory is computed exactly (the tensors' bytes and what fg_workspace_size answers); time from the
// speed at the longest length that was measured.
#include "bench_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "attention_call.hpp"
#include "bench_suites.hpp"
#include "memory.hpp"
#include "shape_case.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

// A length is measured if it should take no longer than this.
constexpr double kMaxSeconds = 10;

struct Measured {
  double seconds = 0;
  std::uint64_t memory_bytes = 0;
};

// Bytes of everything a training step holds for this call: inputs, results, gradients, and the
// larger workspace.
double computed_bytes(AttentionCall& call, const fg_options& options, check::Place place) {
  double bytes = 0;
  for (const HostTensor* tensor : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.dout,
                                   &call.dq, &call.dk, &call.dv}) {
    bytes += static_cast<double>(tensor->buffer.size());
  }
  const fg_tensors tensors = call.bind(place);
  std::size_t forward = 0;
  std::size_t backward = 0;
  require_ok(fg_workspace_size(FG_FORWARD, &tensors, &options, nullptr, &forward));
  require_ok(fg_workspace_size(FG_BACKWARD, &tensors, &options, nullptr, &backward));
  return bytes + static_cast<double>(std::max(forward, backward));
}

Measured measure(const check::Case& c, const CallOptions& call_options) {
  const std::uint64_t resident_before = resident_memory_bytes();
  reset_peak_memory();
  AttentionCall call = make_call(c, call_options.grad_f32);
  const bool on_device = call_options.place == check::Place::kCuda;
  if (on_device) {
    call.upload();
  }
  const fg_tensors tensors = call.bind(call_options.place);
  Measured result;
  std::uint64_t workspace_bytes = 0;
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    Runner runner(call_options.place);
    runner.prepare(pass, tensors, call_options.options);
    double seconds = runner.run(pass, tensors, call_options.options);
    // A short run again: the first one also starts threads and touches memory.
    if (seconds < 0.5) {
      seconds = runner.run(pass, tensors, call_options.options);
    }
    result.seconds += seconds;
    workspace_bytes = std::max(workspace_bytes, runner.workspace_bytes());
  }
  result.memory_bytes =
      on_device ? call.device_bytes() + workspace_bytes : peak_memory_bytes() - resident_before;
  return result;
}

}  // namespace

nlohmann::ordered_json bench_memory(const std::string& dtype, const CallOptions& call_options) {
  constexpr std::int64_t kFirst = 1024;
  constexpr std::int64_t kLast = std::int64_t{512} * 1024;
  const fg_options& options = call_options.options;
  print_out(
      fmt::format("one head, head_dim 64, {}, {}, forward and backward\n"
                  "  {:>9}{:>12}{:>10}{:>12}{:>12}{:>22}\n",
                  printable(dtype), describe_mask(options), "tokens", "time", "", "memory", "",
                  "standard would hold"));
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  double flops_per_second = 0;
  bool measuring = true;
  for (std::int64_t seqlen = kFirst; seqlen <= kLast; seqlen *= 2) {
    std::cerr << fmt::format("{} tokens\n", seqlen);
    const check::Case c =
        shape_case(fmt::format("b=1,hq=1,sq={},d=64", seqlen), dtype, 1, call_options);
    AttentionCall shapes = make_shapes(c, call_options.grad_f32);
    const Cost cost = cost_of(shapes, options);
    const double flops = cost.forward_flops + cost.backward_flops;
    const double bytes = computed_bytes(shapes, options, call_options.place);
    measuring = measuring && (flops_per_second == 0 || flops / flops_per_second < kMaxSeconds) &&
                2 * bytes < static_cast<double>(available_memory_bytes());
    Measured result;
    if (measuring) {
      result = measure(c, call_options);
      flops_per_second = flops / result.seconds;
    } else {
      result = {flops / flops_per_second, static_cast<std::uint64_t>(bytes)};
    }
    const char* how = measuring ? "measured" : "computed";
    print_out(fmt::format("  {:>9}{:>12}{:>10}{:>12}{:>12}{:>12} {:>9}\n", seqlen,
                          format_seconds(result.seconds), how,
                          format_bytes(static_cast<double>(result.memory_bytes)), how,
                          format_bytes(cost.standard_bytes), "computed"));
    rows.push_back({{"tokens", seqlen},
                    {"seconds", result.seconds},
                    {"memory_bytes", result.memory_bytes},
                    {"how", how},
                    {"computed_memory_bytes", bytes},
                    {"standard_bytes_computed", cost.standard_bytes}});
  }
  print_out(
      "memory: q, k, v, out, lse, dout, dq, dk, dv and the workspace; standard attention holds S "
      "and P "
      "beside the tensors\n");
  return rows;
}

}  // namespace flashgrad::tool
