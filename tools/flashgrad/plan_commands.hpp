// SPDX-License-Identifier: Apache-2.0
// The subcommands of `flashgrad plan`; each prints a table and returns its numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "plan.hpp"

namespace flashgrad::tool {

// `svg` becomes the picture of what is shown.
nlohmann::ordered_json plan_roofline(const PlanArguments& arguments, std::string* svg);
nlohmann::ordered_json plan_memory(const PlanArguments& arguments, std::string* svg);
// Of the fastest order that is shown.
nlohmann::ordered_json plan_schedule(const PlanArguments& arguments, std::string* svg);

// `ok`: no faults, gradients within their bounds, bytes as the account has them.
nlohmann::ordered_json plan_simulate(const PlanArguments& arguments, std::string* svg, bool* ok);

nlohmann::ordered_json plan_predict(const PlanArguments& arguments, std::string* svg);

}  // namespace flashgrad::tool
