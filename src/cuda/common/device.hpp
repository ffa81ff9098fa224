// SPDX-License-Identifier: Apache-2.0
// The CUDA device of a call: its properties, making it current, and errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.hpp"

namespace flashgrad::cuda {

struct DeviceProperties {
  int compute_capability = 0;  // 10 * major + minor
  int num_multiprocessors = 0;
  int l2_bytes = 0;
};

// FG_DEVICE_ERROR with the runtime's own words, or ok.
Status check(cudaError_t error, const char* what);

// The number of devices; 0 without a driver or a GPU. `reason`, if not null, says why it is 0.
int device_count(std::string* reason);

// Asked of the runtime once per device.
Status device_properties(int device, DeviceProperties* properties);

// "NVIDIA H200". Takes milliseconds.
std::string device_name(int device);

// Makes `device` current and restores the caller's on destruction.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  [[nodiscard]] const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

}  // namespace flashgrad::cuda
