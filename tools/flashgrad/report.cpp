// SPDX-License-Identifier: Apache-2.0
// The verdict on each output of a call, in words.
#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace flashgrad::tool {

bool all_ok(const std::vector<check::OutputResult>& outputs) {
  return std::all_of(outputs.begin(), outputs.end(), [](const auto& output) { return output.ok; });
}

std::string format_outputs(const std::vector<check::OutputResult>& outputs,
                           const std::string& coverage) {
  std::string text = fmt::format("{:<10}{:>12}{:>12}   against the float64 oracle, {}\n", "output",
                                 "error", "bound", coverage);
  for (const check::OutputResult& output : outputs) {
    text += fmt::format("{:<10}{:>12.3e}{:>12.3e}   {}\n", output.name, output.error, output.bound,
                        output.ok ? "ok" : "FAIL: " + output.reason);
  }
  return text;
}

}  // namespace flashgrad::tool
