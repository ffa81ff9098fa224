// SPDX-License-Identifier: Apache-2.0
// Clock, energy and driver of CUDA's first GPU, through NVML, which is loaded at run time.
#pragma once

#include <string>

namespace flashgrad::bench {

// Without NVML all numbers are 0 and all texts "unknown".
class Meter {
 public:
  Meter();

  [[nodiscard]] std::string driver_version() const;
  // Since the driver was loaded; millijoules are what NVML counts.
  [[nodiscard]] double joules() const;
  // Of the multiprocessors, now and at most.
  [[nodiscard]] unsigned megahertz() const;
  [[nodiscard]] unsigned max_megahertz() const;
  [[nodiscard]] double power_limit_watts() const;

 private:
  template <class F>
  F find(const char* name) const;
  [[nodiscard]] unsigned clock(const char* function) const;

  void* library_ = nullptr;
  void* device_ = nullptr;
};

}  // namespace flashgrad::bench
