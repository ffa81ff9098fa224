// SPDX-License-Identifier: Apache-2.0
// Where and when a measurement was made: the head of every result file.
#pragma once

#include <nlohmann/json.hpp>

namespace flashgrad::tool {

// version, date (UTC), cpu, threads, and the peaks, measured now.
nlohmann::ordered_json describe_machine(int num_threads);

}  // namespace flashgrad::tool
