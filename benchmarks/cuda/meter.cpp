// SPDX-License-Identifier: Apache-2.0
// NVML by dlopen: a machine without it is measured without clock and energy.
#include "meter.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>

namespace flashgrad::bench {

template <class F>
F Meter::find(const char* name) const {
  return device_ != nullptr ? reinterpret_cast<F>(dlsym(library_, name)) : nullptr;
}

Meter::Meter() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW)) {
  if (library_ == nullptr) {
    return;
  }
  const auto init = reinterpret_cast<int (*)()>(dlsym(library_, "nvmlInit_v2"));
  const auto handle = reinterpret_cast<int (*)(const char*, void**)>(
      dlsym(library_, "nvmlDeviceGetHandleByPciBusId_v2"));
  std::array<char, 32> bus_id{};
  // Not by its index: NVML counts the GPUs that CUDA_VISIBLE_DEVICES hides too.
  if (init == nullptr || handle == nullptr || init() != 0 ||
      cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), 0) != cudaSuccess ||
      handle(bus_id.data(), &device_) != 0) {
    device_ = nullptr;
  }
}

std::string Meter::driver_version() const {
  std::array<char, 96> text{};
  const auto get = find<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion");
  return get != nullptr && get(text.data(), text.size()) == 0 ? text.data() : "unknown";
}

double Meter::joules() const {
  unsigned long long millijoules = 0;
  if (const auto get =
          find<int (*)(void*, unsigned long long*)>("nvmlDeviceGetTotalEnergyConsumption")) {
    get(device_, &millijoules);
  }
  return static_cast<double>(millijoules) * 1e-3;
}

unsigned Meter::clock(const char* function) const {
  constexpr int kMultiprocessors = 1;  // NVML_CLOCK_SM
  unsigned value = 0;
  if (const auto get = find<int (*)(void*, int, unsigned*)>(function)) {
    get(device_, kMultiprocessors, &value);
  }
  return value;
}

unsigned Meter::megahertz() const { return clock("nvmlDeviceGetClockInfo"); }
unsigned Meter::max_megahertz() const { return clock("nvmlDeviceGetMaxClockInfo"); }

double Meter::power_limit_watts() const {
  unsigned milliwatts = 0;
  if (const auto get = find<int (*)(void*, unsigned*)>("nvmlDeviceGetEnforcedPowerLimit")) {
    get(device_, &milliwatts);
  }
  return milliwatts * 1e-3;
}

}  // namespace flashgrad::bench
