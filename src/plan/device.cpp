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

namespace {

using nlohmann::json;

// What is shown in tables: something, on one line.
std::string parse_text(const json& object, const char* key) {
  constexpr std::size_t kMaxLength = 1000;
  if (!object.is_object() || !object.contains(key) || !object.at(key).is_string()) {
    throw std::invalid_argument(std::string(key) + " must be a text");
  }
  std::string text = object.at(key).get<std::string>();
  const auto hides = [](char c) { return (c >= 0 && c < ' ') || c == 0x7f; };
  if (text.empty() || text.size() > kMaxLength || std::any_of(text.begin(), text.end(), hides)) {
    throw std::invalid_argument(std::string(key) +
                                " must have 1 to 1000 characters, none of which controls anything");
  }
  return text;
}

double parse_value(const json& figure, const DeviceField& field) {
  if (!figure.is_object() || !figure.contains("value")) {
    throw std::invalid_argument("must be an object with value and source");
  }
  const json& value = figure.at("value");
  // Unknown, or the device has none, is allowed where the account can do without.
  if (field.may_be_missing && value.is_null()) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const double number = value.is_number() ? value.get<double>() : -1;
  const bool missing = field.may_be_missing && number == 0;
  if (!missing && !(number >= field.least && number <= field.most)) {
    throw std::invalid_argument(
        "must be " + std::string(field.may_be_missing ? "null, 0 or " : "") + "a number from " +
        json(field.least).dump() + " to " + json(field.most).dump());
  }
  return number;
}

}  // namespace

Device parse_device(const std::string& text) {
  Device device;
  try {
    const json root = json::parse(text, nullptr, false);
    if (!root.is_object()) {
      throw std::invalid_argument("not a JSON object");
    }
    device.name = parse_text(root, "name");
    device.what = parse_text(root, "what");
    if (!root.contains("figures") || !root.at("figures").is_object()) {
      throw std::invalid_argument("figures must be an object");
    }
    const json& figures = root.at("figures");
    for (const DeviceField& field : kDeviceFields) {
      if (!figures.contains(field.key)) {
        throw std::invalid_argument(std::string(field.key) + " is missing");
      }
      const json& figure = figures.at(field.key);
      try {
        device.*field.value = parse_value(figure, field);
        device.sources.push_back(parse_text(figure, "source"));
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(std::string(field.key) + ": " + error.what());
      }
    }
    for (const auto& [key, figure] : figures.items()) {
      const auto known = [&key = key](const DeviceField& field) { return key == field.key; };
      if (std::none_of(std::begin(kDeviceFields), std::end(kDeviceFields), known)) {
        throw std::invalid_argument(key + " is not a figure of a device");
      }
    }
    if (device.sm_count != std::floor(device.sm_count)) {
      throw std::invalid_argument("sm_count: must be a whole number");
    }
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        (device.name.empty() ? "device file" : "device '" + device.name + "'") + ": " +
        error.what());
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
  throw std::invalid_argument("no device '" + name + "', want one of: " + names +
                              ", or a file whose name ends in .json");
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
