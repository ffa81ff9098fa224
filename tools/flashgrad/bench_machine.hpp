// SPDX-License-Identifier: Apache-2.0
// Where and when a measurement was made: the head of every result file.
#pragma once

#include <nlohmann/json.hpp>

namespace flashgrad::tool {

// version, date (UTC), cpu, threads and what the backends run on.
nlohmann::ordered_json describe_machine(int num_threads);

// The peaks of the CPU, measured now.
nlohmann::ordered_json describe_peaks(int num_threads);

}  // namespace flashgrad::tool
