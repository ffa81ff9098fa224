// SPDX-License-Identifier: Apache-2.0
// Implements check/device_memory.hpp on the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
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
  constexpr const char* kWhat = "copy between host and device";
  if (rows.width_bytes == 0) {
    return;
  }
  if (rows.count > 1) {
    require(cudaMemcpy2D(to, rows.pitch_bytes, from, rows.pitch_bytes, rows.width_bytes, rows.count,
                         kind),
            kWhat);
    require(cudaStreamSynchronize(nullptr), kWhat);
    return;
  }
  // The driver stages pageable memory through buffers of its own, which several threads fill faster
  // than one: tens of gigabytes come here.
  constexpr std::size_t kChunk = std::size_t{1} << 27;
  cudaError_t error = cudaSuccess;
#pragma omp parallel for schedule(dynamic) if (rows.width_bytes > kChunk)
  for (std::size_t begin = 0; begin < rows.width_bytes; begin += kChunk) {
    const cudaError_t result =
        cudaMemcpy(to + begin, from + begin, std::min(kChunk, rows.width_bytes - begin), kind);
    if (result != cudaSuccess) {
#pragma omp critical(flashgrad_copy_error)
      error = result;
    }
  }
  require(error, kWhat);
  // From pageable memory cudaMemcpy returns earlier, and not every stream waits for the default
  // one.
  require(cudaStreamSynchronize(nullptr), kWhat);
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t size_bytes) : size_bytes_(size_bytes) {
  void* data = nullptr;
  require(cudaMalloc(&data, size_bytes), "device memory");
  data_ = static_cast<std::byte*>(data);
  require(cudaMemset(data, 0xff, size_bytes), "device memory");
  require(cudaStreamSynchronize(nullptr), "device memory");
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

void copy_on_device(const std::byte* from, std::byte* to, std::size_t size_bytes) {
  require(cudaMemcpy(to, from, size_bytes, cudaMemcpyDeviceToDevice), "copy on the device");
}

void synchronize_device() { require(cudaDeviceSynchronize(), "CUDA"); }

std::size_t free_device_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "device memory");
  return free;
}

}  // namespace flashgrad::check
