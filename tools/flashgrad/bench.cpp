// SPDX-License-Identifier: Apache-2.0
// `flashgrad bench`: the suites. flashgrad, standard attention and the peak loop take turns, so
// that a machine that slows down slows them all; every figure is the median over the rounds.
#include "bench.hpp"

#include <fmt/format.h>
#include <malloc.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "attention_call.hpp"
#include "bench_machine.hpp"
#include "bench_memory.hpp"
#include "bench_suites.hpp"
#include "core/dtype.hpp"
#include "memory.hpp"
#include "peak.hpp"
#include "shape_case.hpp"
#include "standard_attention.hpp"
#include "text.hpp"
#include "whole_file.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::ordered_json;

double median(std::vector<double> values) {
  if (values.empty()) {
    return NAN;
  }
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double timed(const std::function<void()>& f) {
  const double begin = omp_get_wtime();
  f();
  return omp_get_wtime() - begin;
}

// Medians over the rounds; those of the ratios are over each round's own. NaN where there is no
// baseline.
struct PassResult {
  double seconds = NAN;
  double gflops = NAN;
  double fraction_of_peak = NAN;
  double standard_seconds = NAN;
  double speedup = NAN;
};

// What one shape, dtype and mask came to.
struct Row {
  check::Case c;
  std::string mask;
  std::string backend;
  PassResult forward;
  PassResult backward;
  double peak_gflops = NAN;
  std::uint64_t memory_bytes = 0;
  std::uint64_t standard_memory_bytes = 0;
  std::string no_standard;  // why
  int num_rounds = 0;
};

// The times of one pass, round by round.
struct PassTimes {
  std::vector<double> ours;
  std::vector<double> standard;  // empty without a baseline

  [[nodiscard]] PassResult summary(double flops, const std::vector<double>& peak_gflops) const {
    std::vector<double> fractions;
    std::vector<double> speedups;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      fractions.push_back(flops / ours[i] * 1e-9 / peak_gflops[i]);
      if (!standard.empty()) {
        speedups.push_back(standard[i] / ours[i]);
      }
    }
    PassResult result;
    result.seconds = median(ours);
    result.gflops = flops / result.seconds * 1e-9;
    result.fraction_of_peak = median(fractions);
    result.standard_seconds = median(standard);
    result.speedup = median(speedups);
    return result;
  }
};

// |a - b| / |b| over all elements.
double relative_difference(const Buffer& a, const Buffer& b, DType dtype) {
  double difference = 0;
  double norm = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(a.size()) / size_bytes(dtype); ++i) {
    const double x = load_f64(a.data(), dtype, i);
    const double y = load_f64(b.data(), dtype, i);
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

// A comparison of speeds means nothing unless both compute the same.
void require_agreement(const AttentionCall& call, const StandardAttention& standard, DType dtype) {
  const double tolerance = dtype == DType::kF32 ? 1e-4 : 3e-2;
  struct Pair {
    const char* name;
    const Buffer& ours;
    const Buffer& theirs;
  };
  for (const Pair& pair :
       {Pair{"out", call.out.buffer, standard.out()}, Pair{"dq", call.dq.buffer, standard.dq()},
        Pair{"dk", call.dk.buffer, standard.dk()}, Pair{"dv", call.dv.buffer, standard.dv()}}) {
    const double difference = relative_difference(pair.ours, pair.theirs, dtype);
    if (!(difference < tolerance)) {
      throw Error(
          fmt::format("{} of flashgrad and of standard attention differ by {:.2e} of its norm",
                      pair.name, difference),
          kExitCheckFailed);
    }
  }
}

Row measure(const check::Case& c, const CallOptions& call_options) {
  constexpr int kMinRounds = 3;
  constexpr int kMaxRounds = 15;
  constexpr double kEnoughSeconds = 2;

  Row row;
  row.c = c;
  fg_options options = call_options.options;
  options.window_left = c.mask.left;
  options.window_right = c.mask.right;
  options.alignment = c.mask.alignment == Alignment::kTopLeft ? FG_TOP_LEFT : FG_BOTTOM_RIGHT;
  options.max_seqlen_q = c.max_seqlen_q > 0 ? c.max_seqlen_q : options.max_seqlen_q;
  options.max_seqlen_kv = c.max_seqlen_kv > 0 ? c.max_seqlen_kv : options.max_seqlen_kv;
  row.mask = describe_mask(options);
  const int num_threads = omp_get_max_threads();

  const bool on_device = call_options.place == check::Place::kCuda;
  const std::uint64_t resident_before = resident_memory_bytes();
  reset_peak_memory();
  AttentionCall call = make_call(c, call_options.grad_f32);
  const fg_tensors tensors = call.bind(call_options.place);
  const char* backend = nullptr;
  require_ok(fg_supports(FG_BACKWARD, &tensors, &options, &backend));
  row.backend = backend;
  if (on_device) {
    call.upload();
    call.bind(call_options.place);
  }
  Runner forward(call_options.place);
  Runner backward(call_options.place);
  forward.prepare(FG_FORWARD, tensors, options);
  backward.prepare(FG_BACKWARD, tensors, options);
  // The first runs start threads and touch memory; they are not timed.
  forward.run(FG_FORWARD, tensors, options);
  backward.run(FG_BACKWARD, tensors, options);
  row.memory_bytes =
      on_device ? call.device_bytes() + forward.workspace_bytes() + backward.workspace_bytes()
                : peak_memory_bytes() - resident_before;

  const std::uint64_t resident_between = resident_memory_bytes();
  reset_peak_memory();
  std::unique_ptr<StandardAttention> standard;
  if (on_device) {
    row.no_standard = "not on a GPU";
  } else {
    standard = make_standard_attention(call, options, row.no_standard);
  }
  if (standard != nullptr) {
    standard->forward();
    standard->backward();
    // Its own results and matrices, and the inputs, which both share.
    row.standard_memory_bytes = peak_memory_bytes() - resident_between + call.q.buffer.size() +
                                call.k.buffer.size() + call.v.buffer.size() +
                                call.dout.buffer.size();
    require_agreement(call, *standard, c.dtype);
  }

  const Cost cost = cost_of(call, options);
  PassTimes forward_times;
  PassTimes backward_times;
  std::vector<double> peaks;
  const double begin = omp_get_wtime();
  while (row.num_rounds < kMinRounds ||
         (row.num_rounds < kMaxRounds && omp_get_wtime() - begin < kEnoughSeconds)) {
    forward_times.ours.push_back(forward.run(FG_FORWARD, tensors, options));
    backward_times.ours.push_back(backward.run(FG_BACKWARD, tensors, options));
    if (standard != nullptr) {
      forward_times.standard.push_back(timed([&] { standard->forward(); }));
      backward_times.standard.push_back(timed([&] { standard->backward(); }));
    }
    peaks.push_back(on_device                 ? NAN
                    : c.dtype == DType::kBF16 ? measure_bf16_peak(num_threads).gflops
                                              : measure_f32_peak(num_threads).gflops);
    ++row.num_rounds;
  }
  row.forward = forward_times.summary(cost.forward_flops, peaks);
  row.backward = backward_times.summary(cost.backward_flops, peaks);
  row.peak_gflops = median(peaks);
  return row;
}

std::string title_of(const check::Case& c) {
  return fmt::format("{} {}", name(c.dtype), check::shape_text(c));
}

// One line for each pass.
std::string lines_of(const Row& row) {
  const auto line = [&](const char* title, const PassResult& pass) {
    const std::string standard =
        std::isnan(pass.speedup)
            ? fmt::format("{:>11}{:>8}{:>12}", "-", "-", "-")
            : fmt::format("{:>11}{:>7.2f}x{:>12}", format_seconds(pass.standard_seconds),
                          pass.speedup,
                          format_bytes(static_cast<double>(row.standard_memory_bytes)));
    const std::string share =
        std::isnan(pass.fraction_of_peak) ? "-" : fmt::format("{:.2f}", pass.fraction_of_peak);
    return fmt::format("  {:<9}{:>11}{:>9.1f}{:>9}{:>11}{}\n", title, format_seconds(pass.seconds),
                       pass.gflops, share, format_bytes(static_cast<double>(row.memory_bytes)),
                       standard);
  };
  const std::string reason =
      row.no_standard.empty() ? "" : fmt::format(" (no standard attention: {})", row.no_standard);
  return fmt::format("{}, {}{}\n", title_of(row.c), row.mask, reason) +
         line("forward", row.forward) + line("backward", row.backward);
}

ordered_json json_of(const PassResult& pass) {
  ordered_json result = {{"seconds", pass.seconds}, {"gflops", pass.gflops}};
  if (!std::isnan(pass.fraction_of_peak)) {
    result["fraction_of_peak"] = pass.fraction_of_peak;
  }
  if (!std::isnan(pass.speedup)) {
    result["standard_seconds"] = pass.standard_seconds;
    result["speedup"] = pass.speedup;
  }
  return result;
}

ordered_json json_of(const Row& row) {
  ordered_json result = {{"shape", check::shape_text(row.c)},
                         {"dtype", name(row.c.dtype)},
                         {"mask", row.mask},
                         {"backend", row.backend},
                         {"rounds", row.num_rounds},
                         {"forward", json_of(row.forward)},
                         {"backward", json_of(row.backward)},
                         {"memory_bytes", row.memory_bytes}};
  if (!std::isnan(row.peak_gflops)) {
    result["peak_gflops"] = row.peak_gflops;
  }
  if (row.no_standard.empty()) {
    result["standard_memory_bytes"] = row.standard_memory_bytes;
  } else {
    result["no_standard"] = row.no_standard;
  }
  return result;
}

ordered_json run_suite(const std::vector<check::Case>& cases, const CallOptions& call_options) {
  print_out(fmt::format("  {:<9}{:>11}{:>9}{:>9}{:>11}{:>11}{:>8}{:>12}\n", "pass", "time",
                        "GFLOP/s", "of peak", "memory", "standard", "faster", "its memory"));
  ordered_json rows = ordered_json::array();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    std::cerr << fmt::format("[{}/{}] {}\n", i + 1, cases.size(), title_of(cases[i]));
    try {
      const Row row = measure(cases[i], call_options);
      print_out(lines_of(row));
      rows.push_back(json_of(row));
    } catch (const Error& error) {
      if (error.exit_status() != kExitUnsupported || cases.size() == 1) {
        throw;
      }
      print_out(fmt::format("{}: refused: {}\n", title_of(cases[i]), error.what()));
    }
  }
  if (rows.empty()) {
    throw Error("no shape of the suite is supported", kExitUnsupported);
  }
  return rows;
}

// The shapes of a suite have dtypes and masks of their own; these would change nothing.
void refuse_what_suites_have(const BenchArguments& arguments) {
  const CallArguments defaults;
  const char* option = arguments.dtype                          ? "--dtype"
                       : arguments.call.causal                  ? "--causal"
                       : arguments.call.window                  ? "--window"
                       : arguments.call.align != defaults.align ? "--align"
                                                                : nullptr;
  if (option != nullptr) {
    throw Error(
        fmt::format("{}: a suite's shapes have their own; want --shape or --memory", option));
  }
}

}  // namespace

int bench_command(const BenchArguments& arguments) {
  const CallOptions call_options(arguments.call);
  if (!arguments.shape && !arguments.memory) {
    refuse_what_suites_have(arguments);
  }
  const std::string dtype = arguments.dtype.value_or("bf16");
  const int num_threads = call_options.options.num_threads > 0 ? call_options.options.num_threads
                                                               : omp_get_max_threads();
  // The library takes the number per call; the baseline and the peak loops take OpenMP's.
  omp_set_num_threads(num_threads);
  // Large blocks then go back to the system when they are freed, and the next peak starts without
  // them.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  if (arguments.json) {
    check_writable(*arguments.json);
  }

  constexpr std::uint64_t kSeed = 1;
  std::vector<check::Case> cases;
  if (arguments.shape) {
    cases.push_back(shape_case(*arguments.shape, dtype, kSeed, call_options));
    require_plain(cases.back());
  } else if (arguments.memory) {
    shape_case("sq=1", dtype, kSeed, call_options);  // refuses a dtype before the peak is measured
  } else {
    cases = load_suite(arguments.suite);
  }
  ordered_json report = describe_machine(num_threads);
  if (call_options.place == check::Place::kCuda) {
    print_out(fmt::format("flashgrad {}, {}\n", fg_version(),
                          describe_backend(call_options.backend).detail));
  } else {
    std::cerr << "measuring the peak\n";
    report.update(describe_peaks(num_threads));
    print_out(
        fmt::format("flashgrad {}, {}, {} threads\npeak {:.0f} GFLOP/s ({}), {:.0f} GFLOP/s ({})\n",
                    fg_version(), report["cpu"].get<std::string>(), num_threads,
                    report["f32_peak"]["gflops"].get<double>(),
                    report["f32_peak"]["instruction"].get<std::string>(),
                    report["bf16_peak"]["gflops"].get<double>(),
                    report["bf16_peak"]["instruction"].get<std::string>()));
  }
  if (arguments.memory) {
    report["memory"] = bench_memory(dtype, call_options);
  } else {
    report["rows"] = run_suite(cases, call_options);
  }
  if (arguments.json) {
    const std::string text = report.dump(1) + "\n";
    const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
    write_whole_file(*arguments.json, std::span(&bytes, 1));
  }
  return kExitOk;
}

}  // namespace flashgrad::tool
