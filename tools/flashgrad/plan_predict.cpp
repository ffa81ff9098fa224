// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan predict`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "plan/measured.hpp"
#include "plan_commands.hpp"
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
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(first), files.end());
  }
  return files;
}

plan::ResultFile read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    throw Error(fmt::format("--results: '{}' can't be read", printable(path)));
  }
  try {
    return plan::read_results(text);
  } catch (const std::invalid_argument& error) {
    throw Error(fmt::format("--results: '{}': {}", printable(path), printable(error.what(), 500)));
  }
}

ordered_json compare(const std::string& path) {
  const plan::ResultFile file = read_file(path);
  print_out(fmt::format("{}\n", printable(path)));
  if (!file.rows.empty()) {
    print_out(
        fmt::format("  {:<58} {:>11} {:>11} {:>7}\n", "B,H,S,d", "measured", "predicted", "error"));
  }
  ordered_json rows = ordered_json::array();
  double sum = 0;
  std::size_t within = 0;
  for (const plan::Measured& row : file.rows) {
    const double predicted = plan::predict_seconds(row);
    const double error = predicted / row.seconds - 1;
    sum += std::abs(error);
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

ordered_json plan_predict(const PlanArguments& arguments) {
  ordered_json files = ordered_json::array();
  for (const std::string& path : all_files(arguments.results)) {
    files.push_back(compare(path));
  }
  return files;
}

}  // namespace flashgrad::tool
