// SPDX-License-Identifier: Apache-2.0
// From f32 sums of dq in global memory, in fragment order, to rows of dq: for who adds to a block
// last in ordered kernels (bwd_order.cuh), and for who finishes a unit in others (bwd_units.cuh).
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

// kColumns columns of a warp's 16 rows of dq in 16 bits: of each row half, and of each 32 columns,
// two neighbours from each of four times 8 columns.
template <int kColumns>
using PackedRows = std::uint32_t[2][kColumns / 32][4];

// A warp's sums on their way, kColumns columns of 16 rows at a time, through kRoom bytes of shared
// memory: a load that is waited for takes as long as a third of a step, and into registers few
// could be under way. Each lane has places of its own, so nobody waits for another.
template <int kColumns, int kRoom>
class SumsRing {
 public:
  static constexpr int kItemBytes = 16 * kColumns * 4;
  static constexpr int kDepth = kRoom / kItemBytes;
  static constexpr int kBytes = kDepth * kItemBytes;

  __device__ SumsRing(std::uint32_t room, int lane)
      : own_(room + static_cast<std::uint32_t>(lane * 16)) {}

  // Loads the next; `sums` is the lane's first. kDepth of them, or fewer if there are no more and
  // `any` is false, come before the first take().
  __device__ __forceinline__ void fetch(bool any, const float* sums) {
    if (any) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        ptx::copy_async(own_ + at_ + j * 512, sums + j * 128);
      }
    }
    ptx::copy_async_commit();
    at_ = at_ == kBytes - kItemBytes ? 0 : at_ + kItemBytes;
  }

  // Takes the oldest, whose place the next one gets.
  template <class T>
  __device__ __forceinline__ void take(PackedRows<kColumns>& x, float scale) {
    ptx::copy_async_wait<kDepth - 1>();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 sum = ptx::load_shared_float4(own_ + at_ + j * 512);
      x[0][j / 4][j % 4] = ptx::pack<T>(sum.x * scale, sum.y * scale);
      x[1][j / 4][j % 4] = ptx::pack<T>(sum.z * scale, sum.w * scale);
    }
  }

 private:
  std::uint32_t own_;
  std::uint32_t at_ = 0;  // of the next to be loaded, which is the oldest
};

// Rows `row` on, of which `count` exist, from column `column` on, 16 bytes at a time.
template <int kColumns>
__device__ __forceinline__ void store_packed(PackedRows<kColumns>& x, const Tensor& dq, int batch,
                                             int row, int count, int head, int column, int lane) {
  const int q = lane % 4;
  const int r = lane / 4;
  auto* out = reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(dq.data) +
                                       dq.offset(batch, row + r, head) + column + 8 * q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < kColumns / 32; ++k) {
      transpose_quad(x[half][k], q);
      if (r + 8 * half < count) {
        out[4 * k] = make_uint4(x[half][k][0], x[half][k][1], x[half][k][2], x[half][k][3]);
      }
    }
    out += dq.row_stride;  // 8 rows
  }
}

// The same element by element, for f32, odd strides and partial widths.
template <int kColumns, class T>
__device__ __forceinline__ void finish_elements(const BwdParams& p, const float* sums, int batch,
                                                int row, int count, int head, int column,
                                                int lane) {
  const int q = lane % 4;
  const int r = lane / 4;
  const std::int64_t at = p.dq.offset(batch, row + r, head) + column;
#pragma unroll 1
  for (int j = 0; j < kColumns / 8; ++j) {
    const float4 sum = ptx::load_sum(sums + j * 128);
    const float values[4] = {sum.x * p.scale, sum.y * p.scale, sum.z * p.scale, sum.w * p.scale};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = 8 * j + 2 * q + i % 2;
      if (r + i / 2 * 8 < count && column + c < p.head_dim) {
        const std::int64_t element = at + i / 2 * 8 * p.dq.row_stride + c;
        if (p.dq.dtype == DType::kF32) {
          static_cast<float*>(p.dq.data)[element] = values[i];
        } else {
          static_cast<T*>(p.dq.data)[element] = static_cast<T>(values[i]);
        }
      }
    }
  }
}

}  // namespace flashgrad::sm90
