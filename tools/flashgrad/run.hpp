// SPDX-License-Identifier: Apache-2.0
// `flashgrad run`: tensors from a file, results to a file.
#pragma once

#include "options.hpp"

namespace flashgrad::tool {

struct RunArguments {
  CallArguments call;
  std::string input;
  std::string output;
  bool check = false;
};

// Returns the exit status, or throws Error; then no output was written.
int run_command(const RunArguments& arguments);

}  // namespace flashgrad::tool
