// SPDX-License-Identifier: Apache-2.0
// The subcommands of `flashgrad plan`; each prints a table and returns its numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "plan.hpp"

namespace flashgrad::tool {

nlohmann::ordered_json plan_roofline(const PlanArguments& arguments);
nlohmann::ordered_json plan_memory(const PlanArguments& arguments);
// `svg` becomes the picture of the order that is shown.
nlohmann::ordered_json plan_schedule(const PlanArguments& arguments, std::string* svg);

}  // namespace flashgrad::tool
