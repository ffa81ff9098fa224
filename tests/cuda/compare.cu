// SPDX-License-Identifier: Apache-2.0
// Compares bits on the device.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace flashgrad::check {
namespace {

__global__ void count_kernel(const std::uint16_t* a, const std::uint16_t* b, std::size_t num_words,
                             unsigned long long* count) {
  unsigned long long differences = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < num_words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    differences += a[i] != b[i] ? 1 : 0;
  }
  if (differences > 0) {
    atomicAdd(count, differences);
  }
}

}  // namespace

void count_differences(const void* a, const void* b, std::size_t num_words,
                       unsigned long long* count, cudaStream_t stream) {
  count_kernel<<<264, 256, 0, stream>>>(static_cast<const std::uint16_t*>(a),
                                        static_cast<const std::uint16_t*>(b), num_words, count);
}

}  // namespace flashgrad::check
