// SPDX-License-Identifier: Apache-2.0
// Implements cuda/common/device.hpp on the CUDA runtime, which is linked statically, so that the
// library loads where there is no driver.
#include "cuda/common/device.hpp"

#include <array>
#include <mutex>

namespace flashgrad::cuda {

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return {};
  }
  return {FG_DEVICE_ERROR, std::string(what) + ": " + cudaGetErrorString(error)};
}

int device_count(std::string* reason) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // so that a caller's next check does not see it
    count = 0;
    if (reason != nullptr) {
      // Without a driver the runtime complains of one that is too old.
      int driver_version = 0;
      static_cast<void>(cudaDriverGetVersion(&driver_version));
      *reason = driver_version == 0 ? "no CUDA driver" : cudaGetErrorString(error);
    }
  } else if (count == 0 && reason != nullptr) {
    *reason = "no CUDA device";
  }
  return count;
}

namespace {

Status query_properties(int device, DeviceProperties* properties) {
  int major = 0;
  int minor = 0;
  FG_RETURN_IF_ERROR(
      check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
            "compute capability"));
  FG_RETURN_IF_ERROR(
      check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
            "compute capability"));
  properties->compute_capability = 10 * major + minor;
  FG_RETURN_IF_ERROR(check(cudaDeviceGetAttribute(&properties->num_multiprocessors,
                                                  cudaDevAttrMultiProcessorCount, device),
                           "multiprocessor count"));
  return check(cudaDeviceGetAttribute(&properties->l2_bytes, cudaDevAttrL2CacheSize, device),
               "L2 size");
}

// More devices than this are asked anew by every call.
constexpr int kMaxRemembered = 64;

struct Remembered {
  std::once_flag once;
  Status status;
  DeviceProperties properties;
};

}  // namespace

Status device_properties(int device, DeviceProperties* properties) {
  if (device < 0 || device >= kMaxRemembered) {
    return query_properties(device, properties);
  }
  static std::array<Remembered, kMaxRemembered> remembered;
  Remembered& known = remembered[static_cast<std::size_t>(device)];
  std::call_once(known.once, [&] { known.status = query_properties(device, &known.properties); });
  *properties = known.properties;
  return known.status;
}

std::string device_name(int device) {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, device) == cudaSuccess ? properties.name
                                                                     : "unknown device";
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  status_ = check(cudaGetDevice(&current), "current device");
  if (status_.ok() && current != device) {
    status_ = check(cudaSetDevice(device), "select device");
    if (status_.ok()) {
      previous_ = current;
    }
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) {
    static_cast<void>(cudaSetDevice(previous_));
  }
}

}  // namespace flashgrad::cuda
