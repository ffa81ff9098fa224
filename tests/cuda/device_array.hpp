// SPDX-License-Identifier: Apache-2.0
// An array on the GPU, full of NaN until it is written, or left as it was allocated.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace flashgrad {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("CUDA error: %s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}
#define CHECK_CUDA(x) check_cuda((x), #x)

template <class T>
struct DeviceArray {
  T* data = nullptr;
  std::size_t count = 0;
  explicit DeviceArray(std::size_t n, bool unwritten = false) : count(n) {
    CHECK_CUDA(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)));
    if (!unwritten) {
      poison();
    }
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { upload(host); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  void poison() { CHECK_CUDA(cudaMemset(data, 0xff, std::max<std::size_t>(count, 1) * sizeof(T))); }
  void upload(const std::vector<T>& host) {
    CHECK_CUDA(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> host() const {
    std::vector<T> result(count);
    CHECK_CUDA(cudaMemcpy(result.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return result;
  }
};

}  // namespace flashgrad
