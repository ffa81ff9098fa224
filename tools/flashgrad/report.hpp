// SPDX-License-Identifier: Apache-2.0
// The verdict on each output of a call, in words.
#pragma once

#include <string>
#include <vector>

#include "check/expected.hpp"

namespace flashgrad::tool {

bool all_ok(const std::vector<check::OutputResult>& outputs);

// A table: output, largest error, bound, ok or what is wrong; and what part of the call was
// compared.
std::string format_outputs(const std::vector<check::OutputResult>& outputs,
                           const std::string& coverage);

}  // namespace flashgrad::tool
