// SPDX-License-Identifier: Apache-2.0
// What the options of `flashgrad plan` for shapes and devices mean.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/mask.hpp"
#include "plan.hpp"
#include "plan/device.hpp"

namespace flashgrad::tool {

// "4096", "512K", "2M".
std::int64_t parse_tokens(const std::string& text);

// "128,4096".
std::vector<std::int32_t> parse_lengths(const std::string& text);

// Key heads; throws if they don't divide the query heads.
int heads_kv(const PlanArguments& arguments);

// All of a file of at most 64 MiB; throws an Error that begins with `option`.
std::string read_text(const std::string& path, const char* option);

// By its name, or from a JSON file like those of src/plan/devices.
plan::Device device_of(const PlanArguments& arguments);

BandMask plan_mask(const PlanArguments& arguments);

}  // namespace flashgrad::tool
