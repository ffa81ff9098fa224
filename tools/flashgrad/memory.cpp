// SPDX-License-Identifier: Apache-2.0
// Memory figures from Linux's /proc and control groups.
#include "memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

#include "text.hpp"

namespace flashgrad::tool {
namespace {

// The number of KiB after `key` ("VmHWM:") in a file of such lines.
std::optional<std::uint64_t> kib_field(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    std::uint64_t kib = 0;
    if (word == key && file >> kib) {
      return kib * 1024;
    }
  }
  return std::nullopt;
}

// A file that holds one number; "max" (no limit) reads as none.
std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

}  // namespace

std::uint64_t available_memory_bytes() {
  std::uint64_t available = kib_field("/proc/meminfo", "MemAvailable:").value_or(UINT64_MAX);
  struct Files {
    const char* limit;
    const char* used;
  };
  // Version 2 and version 1 of control groups, as a container sees its own.
  for (const Files& files : {Files{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
                             Files{"/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                   "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}) {
    const auto limit = number_in(files.limit);
    const auto used = number_in(files.used);
    if (limit && used) {
      available = std::min(available, *limit > *used ? *limit - *used : 0);
    }
  }
  return available;
}

void require_memory(double bytes) {
  const auto available = static_cast<double>(available_memory_bytes());
  if (bytes > available) {
    throw Error(fmt::format("not enough memory: {} wanted, {} available", format_bytes(bytes),
                            format_bytes(available)));
  }
}

std::uint64_t peak_memory_bytes() { return kib_field("/proc/self/status", "VmHWM:").value_or(0); }

std::uint64_t resident_memory_bytes() {
  return kib_field("/proc/self/status", "VmRSS:").value_or(0);
}

bool reset_peak_memory() {
  // Writing 5 sets the mark to what is resident now (proc(5)).
  std::ofstream file("/proc/self/clear_refs");
  return static_cast<bool>(file << "5" << std::flush);
}

}  // namespace flashgrad::tool
