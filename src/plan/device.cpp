// SPDX-License-Identifier: Apache-2.0
// Reads device descriptions, and asks the system about this machine's processor.
#include "plan/device.hpp"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cpu/dispatch.hpp"
#include "plan/device_texts.hpp"

namespace flashgrad::plan {

Device parse_device(const std::string& json) {
  Device device;
  try {
    const nlohmann::json root = nlohmann::json::parse(json);
    root.at("name").get_to(device.name);
    root.at("what").get_to(device.what);
    const nlohmann::json& figures = root.at("figures");
    for (const DeviceField& field : kDeviceFields) {
      if (!figures.contains(field.key)) {
        throw std::invalid_argument(std::string(field.key) + " is missing");
      }
      const nlohmann::json& figure = figures.at(field.key);
      device.*field.value = figure.at("value").is_null() ? std::numeric_limits<double>::quiet_NaN()
                                                         : figure.at("value").get<double>();
      // Unknown, or the device has none, is allowed where the account can do without.
      const double value = device.*field.value;
      if (field.may_be_missing ? value < 0 || std::isinf(value)
                               : !(value > 0) || std::isinf(value)) {
        throw std::invalid_argument(std::string(field.key) + " must be " +
                                    (field.may_be_missing ? "null, 0 or more" : "more than 0"));
      }
      device.sources.push_back(figure.at("source").get<std::string>());
      if (device.sources.back().empty()) {
        throw std::invalid_argument(std::string(field.key) + " has no source");
      }
    }
    for (const auto& [key, figure] : figures.items()) {
      const auto known = [&key = key](const DeviceField& field) { return key == field.key; };
      if (std::none_of(std::begin(kDeviceFields), std::end(kDeviceFields), known)) {
        throw std::invalid_argument(key + " is not a figure of a device");
      }
    }
  } catch (const std::exception& error) {
    throw std::invalid_argument("device '" + device.name + "': " + error.what());
  }
  return device;
}

const std::vector<Device>& devices() {
  static const std::vector<Device> kDevices = [] {
    std::vector<Device> parsed;
    for (const char* text : kDeviceTexts) {
      parsed.push_back(parse_device(text));
    }
    return parsed;
  }();
  return kDevices;
}

const Device& find_device(const std::string& name) {
  std::string names;
  for (const Device& device : devices()) {
    if (device.name == name) {
      return device;
    }
    names += (names.empty() ? "" : ", ") + device.name;
  }
  throw std::invalid_argument("no device '" + name + "', want one of: " + names);
}

Cpu this_cpu() {
  const auto ask = [](int what) { return static_cast<double>(std::max(sysconf(what), 0L)); };
  Cpu cpu;
  if (const cpu::InstructionSet* set = cpu::selected_instruction_set()) {
    cpu.instruction_set = set->name;
  }
  cpu.threads = omp_get_max_threads();
  cpu.l1_bytes = ask(_SC_LEVEL1_DCACHE_SIZE);
  cpu.l2_bytes = ask(_SC_LEVEL2_CACHE_SIZE);
  cpu.l3_bytes = ask(_SC_LEVEL3_CACHE_SIZE);
  cpu.memory_bytes = ask(_SC_PHYS_PAGES) * ask(_SC_PAGESIZE);
  return cpu;
}

}  // namespace flashgrad::plan
