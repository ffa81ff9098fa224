// SPDX-License-Identifier: Apache-2.0
// `flashgrad bench --memory`: what a sequence costs as it grows.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "options.hpp"

namespace flashgrad::tool {

// Forward and backward of one head of 64, from 1024 to 512K tokens, as a table and as JSON.
nlohmann::ordered_json bench_memory(const std::string& dtype, const CallOptions& call_options);

}  // namespace flashgrad::tool
