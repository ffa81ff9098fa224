// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan predict`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include "plan/predict.hpp"
#include "plan_commands.hpp"
#include "text.hpp"

namespace flashgrad::tool {

nlohmann::ordered_json plan_predict(const PlanArguments& arguments) {
  constexpr double kAim = 0.15;
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const std::string& path : arguments.results) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      throw Error(fmt::format("--results: '{}' can't be read", printable(path)));
    }
    const std::vector<plan::Measured> rows =
        plan::measured_rows({std::istreambuf_iterator<char>(file), {}});
    print_out(fmt::format("{}\n  {:<36} {:>11} {:>11} {:>7}\n", printable(path), "B,H,S,d",
                          "measured", "predicted", "error"));
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    double sum = 0;
    std::size_t within = 0;
    for (const plan::Measured& row : rows) {
      const double predicted = plan::predict_seconds(row);
      const double error = predicted / row.seconds - 1;
      sum += std::abs(error);
      within += std::abs(error) <= kAim ? 1 : 0;
      print_out(fmt::format("  {:<36} {:>11} {:>11} {:>+6.1f}%\n", row.what,
                            format_seconds(row.seconds), format_seconds(predicted), 100 * error));
      list.push_back({{"what", row.what},
                      {"measured_seconds", row.seconds},
                      {"predicted_seconds", predicted},
                      {"error", error}});
    }
    const auto count = static_cast<double>(std::max<std::size_t>(rows.size(), 1));
    print_out(fmt::format("  {} of {} within {:.0f} %, mean {:.1f} %\n", within, rows.size(),
                          100 * kAim, 100 * sum / count));
    files.push_back(
        {{"file", path}, {"within", within}, {"mean_error", sum / count}, {"rows", list}});
  }
  return files;
}

}  // namespace flashgrad::tool
