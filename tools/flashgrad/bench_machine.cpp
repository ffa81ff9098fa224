// SPDX-License-Identifier: Apache-2.0
// Where and when a measurement was made.
#include "bench_machine.hpp"

#include <fmt/chrono.h>

#include <ctime>
#include <fstream>
#include <string>

#include "flashgrad/flashgrad.h"
#include "options.hpp"
#include "peak.hpp"

namespace flashgrad::tool {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      return line.substr(line.find(':') + 2);
    }
  }
  return "unknown CPU";
}

nlohmann::ordered_json json_of(const Peak& peak) {
  return {{"instruction", peak.instruction}, {"gflops", peak.gflops}};
}

}  // namespace

nlohmann::ordered_json describe_machine(int num_threads) {
  nlohmann::ordered_json backends = nlohmann::ordered_json::object();
  for (const std::string& name : backend_names()) {
    backends[name] = describe_backend(name).detail;
  }
  return {{"version", fg_version()},
          {"date", fmt::format("{:%FT%TZ}", fmt::gmtime(std::time(nullptr)))},
          {"cpu", cpu_model()},
          {"threads", num_threads},
          {"backends", backends}};
}

nlohmann::ordered_json describe_peaks(int num_threads) {
  return {{"f32_peak", json_of(measure_f32_peak(num_threads))},
          {"bf16_peak", json_of(measure_bf16_peak(num_threads))}};
}

}  // namespace flashgrad::tool
