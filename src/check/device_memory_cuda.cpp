// SPDX-License-Identifier: Apache-2.0
// Implements check/device_memory.hpp on the CUDA runtime.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "check/device_memory.hpp"

namespace flashgrad::check {
namespace {

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

void copy(const std::byte* from, std::byte* to, const Rows& rows, cudaMemcpyKind kind) {
  if (rows.width_bytes == 0) {
    return;
  }
  require(rows.count == 1 ? cudaMemcpy(to, from, rows.width_bytes, kind)
                          : cudaMemcpy2D(to, rows.pitch_bytes, from, rows.pitch_bytes,
                                         rows.width_bytes, rows.count, kind),
          "copy between host and device");
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t size_bytes) : size_bytes_(size_bytes) {
  void* data = nullptr;
  require(cudaMalloc(&data, size_bytes), "device memory");
  data_ = static_cast<std::byte*>(data);
  require(cudaMemset(data, 0xff, size_bytes), "device memory");
}

DeviceMemory::~DeviceMemory() { static_cast<void>(cudaFree(data_)); }

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

void upload(const std::byte* host, std::byte* device, const Rows& rows) {
  copy(host, device, rows, cudaMemcpyHostToDevice);
}

void download(const std::byte* device, std::byte* host, const Rows& rows) {
  copy(device, host, rows, cudaMemcpyDeviceToHost);
}

void synchronize_device() { require(cudaDeviceSynchronize(), "CUDA"); }

std::size_t free_device_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "device memory");
  return free;
}

}  // namespace flashgrad::check
