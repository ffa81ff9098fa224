// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan predict`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "plan/measured.hpp"
#include "plan/pictures.hpp"
#include "plan_commands.hpp"
#include "plan_shape.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::ordered_json;

constexpr double kAim = 0.15;

// A file as it is given, or one of a folder's, which may have any JSON files.
struct ResultPath {
  std::string path;
  bool of_folder;
};

// Of folders the JSON files, sorted.
std::vector<ResultPath> all_files(const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  std::vector<ResultPath> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.push_back({path, false});
      continue;
    }
    std::vector<std::string> found;
    for (fs::directory_iterator entry(path, error), end; !error && entry != end;
         entry.increment(error)) {
      if (entry->path().extension() == ".json") {
        found.push_back(entry->path().string());
      }
    }
    if (error) {
      throw Error(fmt::format("--results: '{}' can't be read", printable(path)));
    }
    if (found.empty()) {
      throw Error(fmt::format("--results: '{}' has no JSON files", printable(path)));
    }
    std::sort(found.begin(), found.end());
    for (const std::string& file : found) {
      files.push_back({file, true});
    }
  }
  return files;
}

plan::ResultFile read_file(const ResultPath& file) {
  const std::string& path = file.path;
  const std::string text = read_text(path, "--results");
  try {
    return plan::read_results(text);
  } catch (const std::invalid_argument& error) {
    if (file.of_folder) {
      return {{}, {"no times of calls in a form that is known"}};
    }
    throw Error(fmt::format("--results: '{}': {}", printable(path), printable(error.what(), 500)));
  }
}

ordered_json compare(const ResultPath& result, std::vector<plan::PredictedPoint>* points,
                     int series) {
  const std::string& path = result.path;
  const plan::ResultFile file = read_file(result);
  print_out(fmt::format("{}\n", printable(path)));
  if (!file.rows.empty()) {
    print_out(
        fmt::format("  {:<58} {:>11} {:>11} {:>7}\n", "B,H,S,d", "measured", "predicted", "error"));
  }
  ordered_json rows = ordered_json::array();
  double sum = 0;
  std::size_t within = 0;
  const std::vector<double> all_predicted = plan::predict_seconds(file.rows);
  for (std::size_t i = 0; i < file.rows.size(); ++i) {
    const plan::Measured& row = file.rows[i];
    const double predicted = all_predicted[i];
    const double error = predicted / row.seconds - 1;
    sum += std::abs(error);
    points->push_back({row.seconds, predicted, series});
    within += std::abs(error) <= kAim ? 1 : 0;
    print_out(fmt::format("  {:<58} {:>11} {:>11} {:>+6.1f}%{}\n", row.what,
                          format_seconds(row.seconds), format_seconds(predicted), 100 * error,
                          std::abs(error) <= kAim ? "" : " (*)"));
    rows.push_back({{"what", row.what},
                    {"measured_seconds", row.seconds},
                    {"predicted_seconds", predicted},
                    {"error", error}});
  }
  for (const std::string& reason : file.left_out) {
    print_out(fmt::format("  not predicted: {}\n", reason));
  }
  const double mean = sum / static_cast<double>(std::max<std::size_t>(file.rows.size(), 1));
  if (!file.rows.empty()) {
    print_out(fmt::format("  {} of {} within {:.0f} %, mean {:.1f} %\n", within, file.rows.size(),
                          100 * kAim, 100 * mean));
  }
  return {{"file", path},
          {"within", within},
          {"mean_error", mean},
          {"rows", rows},
          {"left_out", file.left_out}};
}

plan::Call call_of(const PlanArguments& arguments) {
  plan::Call call;
  call.backward = arguments.pass == "backward";
  call.dtype = DType::kBF16;
  call.batch = arguments.batch;
  call.heads_q = arguments.heads;
  call.heads_kv = heads_kv(arguments);
  call.seqlen = parse_tokens(arguments).q;
  call.lengths = parse_lengths(arguments).q;
  call.head_dim = arguments.head_dim;
  call.head_dim_v = arguments.head_dim_v > 0 ? arguments.head_dim_v : arguments.head_dim;
  call.mask = plan_mask(arguments);
  call.deterministic = arguments.deterministic;
  if (call.deterministic && !call.backward) {
    throw Error("--deterministic: a forward always is");
  }
  plan::require_sane(call);
  return call;
}

// The kernels of one call, and their sum.
ordered_json one_call(const plan::Call& call) {
  using plan::Regime;
  print_out(fmt::format("{} on an H200\n  {:<32} {:>8} {:>18} {:>11} {:>11}\n",
                        plan::shape_of(call), "kernel", "launches", "tensor cores busy", "cool",
                        "sustained"));
  ordered_json kernels = ordered_json::array();
  double cool = 0;
  double sustained = 0;
  const std::vector<plan::KernelTime> times = plan::predict_sm90_kernels(call);
  for (auto first = times.begin(); first != times.end(); ++first) {
    const auto same = [&](const plan::KernelTime& time) { return time.name == first->name; };
    if (std::any_of(times.begin(), first, same)) {
      continue;
    }
    // Above head_dim 128 there are passes; one line for all launches of a kernel.
    const auto launches = std::count_if(first, times.end(), same);
    double one = 0;
    double looped = 0;
    for (const plan::KernelTime& time : times) {
      one += same(time) ? plan::seconds_of(time, Regime::kCool) : 0;
      looped += same(time) ? plan::seconds_of(time, Regime::kSustained) : 0;
    }
    print_out(fmt::format("  {:<32} {:>8} {:>17.0f}% {:>11} {:>11}\n", first->name, launches,
                          100 * first->busy, format_seconds(one), format_seconds(looped)));
    kernels.push_back({{"kernel", first->name},
                       {"launches", launches},
                       {"busy", first->busy},
                       {"cool_seconds", one},
                       {"sustained_seconds", looped}});
    cool += one;
    sustained += looped;
  }
  const double tflop = call.flop() * 1e-12;
  print_out(fmt::format("  {:<60} {:>11} {:>11}\n  {:<60} {:>11.0f} {:>11.0f}\n", "the call",
                        format_seconds(cool), format_seconds(sustained), "TFLOP/s", tflop / cool,
                        tflop / sustained));
  const std::int64_t longest = call.lengths.empty()
                                   ? call.seqlen
                                   : *std::max_element(call.lengths.begin(), call.lengths.end());
  if (!call.backward && longest <= 256) {
    print_out(
        "  by the kernel for long sequences: short ones have their own, which take less time\n");
  }
  return {{"call", plan::shape_of(call)}, {"kernels", kernels},
          {"cool_seconds", cool},         {"sustained_seconds", sustained},
          {"cool_tflops", tflop / cool},  {"sustained_tflops", tflop / sustained}};
}

}  // namespace

ordered_json plan_predict(const PlanArguments& arguments, std::string* svg) {
  if (arguments.results.empty()) {
    return one_call(call_of(arguments));
  }
  ordered_json files = ordered_json::array();
  std::vector<plan::PredictedPoint> points;
  std::vector<std::string> series;
  for (const ResultPath& result : all_files(arguments.results)) {
    const std::size_t before = points.size();
    files.push_back(compare(result, &points, static_cast<int>(series.size())));
    if (points.size() > before) {
      series.push_back(std::filesystem::path(result.path).filename().string());
    }
  }
  *svg = points.empty() ? "" : plan::scatter_svg(points, series);
  return files;
}

}  // namespace flashgrad::tool
