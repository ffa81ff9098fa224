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

// Files as they are given; of folders the JSON files, sorted.
std::vector<std::string> all_files(const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.push_back(path);
      continue;
    }
    const std::size_t first = files.size();
    for (fs::directory_iterator entry(path, error), end; !error && entry != end;
         entry.increment(error)) {
      if (entry->path().extension() == ".json") {
        files.push_back(entry->path().string());
      }
    }
    if (error) {
      throw Error(fmt::format("--results: '{}' can't be read", printable(path)));
    }
    if (files.size() == first) {
      throw Error(fmt::format("--results: '{}' has no JSON files", printable(path)));
    }
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(first), files.end());
  }
  return files;
}

plan::ResultFile read_file(const std::string& path) {
  const std::string text = read_text(path, "--results");
  try {
    return plan::read_results(text);
  } catch (const std::invalid_argument& error) {
    throw Error(fmt::format("--results: '{}': {}", printable(path), printable(error.what(), 500)));
  }
}

ordered_json compare(const std::string& path, std::vector<plan::PredictedPoint>* points,
                     int series) {
  const plan::ResultFile file = read_file(path);
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

}  // namespace

ordered_json plan_predict(const PlanArguments& arguments, std::string* svg) {
  ordered_json files = ordered_json::array();
  std::vector<plan::PredictedPoint> points;
  std::vector<std::string> series;
  for (const std::string& path : all_files(arguments.results)) {
    const std::size_t before = points.size();
    files.push_back(compare(path, &points, static_cast<int>(series.size())));
    if (points.size() > before) {
      series.push_back(std::filesystem::path(path).filename().string());
    }
  }
  *svg = points.empty() ? "" : plan::scatter_svg(points, series);
  return files;
}

}  // namespace flashgrad::tool
