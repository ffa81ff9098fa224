// SPDX-License-Identifier: Apache-2.0
// `flashgrad check`: the table of known faults, or one shape, on every backend against the oracle.
#pragma once

#include <optional>
#include <string>

#include "options.hpp"

namespace flashgrad::tool {

struct CheckArguments {
  CallArguments call;
  std::optional<std::string> shape;
  std::optional<std::string> case_id;
  std::string dtype = "bf16";
  std::string seed = "1";
};

// The ids that --case takes, in lines of their own.
std::string table_ids();

// Returns the exit status, or throws Error.
int check_command(const CheckArguments& arguments);

}  // namespace flashgrad::tool
