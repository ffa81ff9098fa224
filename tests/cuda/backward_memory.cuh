// SPDX-License-Identifier: Apache-2.0
// Elements of strided tensors on the GPU, and random normals for them, for sm90_backward.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "backward_layout.hpp"

namespace flashgrad {

static __device__ double load(const Tensor& t, std::int64_t at) {
  if (t.dtype == DType::kBF16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[at]);
  }
  if (t.dtype == DType::kF16) {
    return __half2float(static_cast<const __half*>(t.data)[at]);
  }
  return static_cast<const float*>(t.data)[at];
}
static __device__ void store(const Tensor& t, std::int64_t at, double x) {
  if (t.dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(t.data)[at] = __double2bfloat16(x);
  } else if (t.dtype == DType::kF16) {
    static_cast<__half*>(t.data)[at] = __double2half(x);
  } else {
    static_cast<float*>(t.data)[at] = static_cast<float>(x);
  }
}

static __device__ double normal(std::uint64_t i, std::uint64_t seed) {
  std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  const double u = (static_cast<double>(z >> 32) + 0.5) / 4294967296.0;
  const double v = static_cast<double>(z & 0xffffffffU) / 4294967296.0;
  return sqrt(-2 * log(u)) * cospi(2 * v);
}

// Rows that meet nothing stay NaN.
static __global__ void fill(Tensor t, const Line* lines, std::int64_t num_lines, int heads,
                            int columns, std::uint64_t seed, double scale) {
  const std::int64_t total = num_lines * heads * columns;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const Line& line = lines[i / columns / heads];
    if (line.begin < line.end) {
      store(t, t.offset(line.batch_index, line.row, i / columns % heads) + i % columns,
            scale * normal(i, seed));
    }
  }
}

}  // namespace flashgrad
