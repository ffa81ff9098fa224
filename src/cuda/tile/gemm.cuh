// SPDX-License-Identifier: Apache-2.0
// Products of whole tiles: a warpgroup's 64 x N accumulators over several steps of 16. The caller
// surrounds them with wgmma_fence, wgmma_commit and wgmma_wait.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::tile {

enum class Start : bool { kZero, kAccumulate };

// D (64 x kN) = [D +] A B^T; A (64 x kK) and B (kN x kK) K-major in shared memory.
template <int kN, int kK, class T, Start kStart, class TileA, class TileB>
__device__ __forceinline__ void gemm_k_major(float (&d)[kN / 2], std::uint64_t desc_a,
                                             std::uint64_t desc_b) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    if (k == 0 && kStart == Start::kZero) {
      ptx::wgmma_ss<kN, T, false, 0, 0>(d, desc_a, desc_b);
    } else {
      ptx::wgmma_ss<kN, T, true, 0, 0>(d, desc_a + TileA::k_major_step(k),
                                       desc_b + TileB::k_major_step(k));
    }
  }
}

// D (64 x kN) += A B; A (64 x kK) in registers (packed accumulators), B (kK x kN) MN-major.
template <int kN, int kK, class T, class TileB>
__device__ __forceinline__ void gemm_registers(float (&d)[kN / 2], const std::uint32_t (&a)[kK / 4],
                                               std::uint64_t desc_b) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    ptx::wgmma_rs<kN, T, true, 1>(d, a + 4 * k, desc_b + TileB::mn_major_step(k));
  }
}

// D (64 x kN) = [D +] A^T B; A (kK x 64) and B (kK x kN) MN-major in shared memory.
template <int kN, int kK, class T, Start kStart, class TileA, class TileB>
__device__ __forceinline__ void gemm_mn_major(float (&d)[kN / 2], std::uint64_t desc_a,
                                              std::uint64_t desc_b) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    if (k == 0 && kStart == Start::kZero) {
      ptx::wgmma_ss<kN, T, false, 1, 1>(d, desc_a, desc_b);
    } else {
      ptx::wgmma_ss<kN, T, true, 1, 1>(d, desc_a + TileA::mn_major_step(k),
                                       desc_b + TileB::mn_major_step(k));
    }
  }
}

}  // namespace flashgrad::tile
