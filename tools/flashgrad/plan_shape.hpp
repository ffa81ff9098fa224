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

// Rows of q and keys of a sequence: "4096", "512K", "2M".
struct Tokens {
  std::int64_t q;
  std::int64_t kv;
};
Tokens parse_tokens(const PlanArguments& arguments);

// Of the sequences of a packed batch, "128,4096".
struct Lengths {
  std::vector<std::int32_t> q;
  std::vector<std::int32_t> kv;
};
Lengths parse_lengths(const PlanArguments& arguments);

// Key heads; throws if they don't divide the query heads.
int heads_kv(const PlanArguments& arguments);

// All of a file of at most 64 MiB; throws an Error that begins with `option`.
std::string read_text(const std::string& path, const char* option);

// By its name, or from a JSON file like those of src/plan/devices.
plan::Device device_of(const PlanArguments& arguments);

BandMask plan_mask(const PlanArguments& arguments);

}  // namespace flashgrad::tool
