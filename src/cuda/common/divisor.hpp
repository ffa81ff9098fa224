// SPDX-License-Identifier: Apache-2.0
// Divides 32-bit numbers by one that the host knows, exactly.
#pragma once

#include <cstdint>

namespace flashgrad::cuda {

struct Divisor {
  std::uint32_t divisor;
  std::uint64_t reciprocal;  // 2^64 / divisor, rounded up

  explicit Divisor(std::uint32_t d) : divisor(d), reciprocal(UINT64_MAX / d + 1) {}
#ifdef __CUDACC__
  __device__ __forceinline__ std::uint32_t quotient(std::uint32_t n) const {
    return divisor == 1 ? n : static_cast<std::uint32_t>(__umul64hi(n, reciprocal));
  }
#endif
};

}  // namespace flashgrad::cuda
