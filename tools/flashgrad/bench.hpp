// SPDX-License-Identifier: Apache-2.0
// `flashgrad bench`: forward and backward against standard attention, alternating in one run.
#pragma once

#include <optional>
#include <string>

#include "options.hpp"

namespace flashgrad::tool {

struct BenchArguments {
  CallArguments call;
  std::string suite = "cpu";
  std::optional<std::string> shape;
  std::optional<std::string> dtype;  // of shape and memory; bf16 without
  std::optional<std::string> json;
  bool memory = false;
};

// Returns the exit status, or throws Error.
int bench_command(const BenchArguments& arguments);

}  // namespace flashgrad::tool
