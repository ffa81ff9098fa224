// SPDX-License-Identifier: Apache-2.0
// What the shape options of `flashgrad plan` mean.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/mask.hpp"
#include "plan.hpp"

namespace flashgrad::tool {

// "4096", "512K", "2M".
std::int64_t parse_tokens(const std::string& text);

// "128,4096".
std::vector<std::int32_t> parse_lengths(const std::string& text);

// Key heads; throws if they don't divide the query heads.
int heads_kv(const PlanArguments& arguments);

BandMask plan_mask(const PlanArguments& arguments);

}  // namespace flashgrad::tool
