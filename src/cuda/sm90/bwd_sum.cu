// SPDX-License-Identifier: Apache-2.0
// Implements bwd_sum.hpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/launch.hpp"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_sum.hpp"

namespace flashgrad::sm90 {
namespace {

constexpr int kThreads = 256;
// Of a row of a head, 8 columns at a time.
constexpr int kLanes = 16;
constexpr int kRowsPerCta = kThreads / kLanes;

// Whether 8 columns can be read and written at once.
__device__ __forceinline__ bool is_wide(const BwdSumParams::Gradient& g) {
  const std::int64_t size = g.sum.dtype == DType::kF32 ? 4 : 2;
  const auto strides =
      static_cast<std::uintptr_t>(g.sum.row_stride | g.sum.head_stride | g.sum.batch_stride);
  return g.columns % 8 == 0 &&
         (reinterpret_cast<std::uintptr_t>(g.sum.data) | size * strides) % 16 == 0;
}

template <class T>
__device__ __forceinline__ void sum_gradient(const BwdSumParams& p, const BwdSumParams::Gradient& g,
                                             std::uint32_t index) {
  const std::uint32_t row = index / p.heads;
  const std::uint32_t head = index - row * p.heads;
  const std::uint32_t batch = row / p.rows;
  const std::int64_t to = g.sum.offset(batch, row - batch * p.rows, head);
  const float* const from = g.parts + std::int64_t{index} * p.parts * g.columns;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (is_wide(g)) {
    for (int column = 8 * lane; column < g.columns; column += 8 * kLanes) {
      float4 sum[2] = {};
#pragma unroll 4
      for (int part = 0; part < p.parts; ++part) {
        const auto* const at = reinterpret_cast<const float4*>(from + part * g.columns + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 x = __ldcs(at + i);
          sum[i].x += x.x;
          sum[i].y += x.y;
          sum[i].z += x.z;
          sum[i].w += x.w;
        }
      }
      if (g.sum.dtype == DType::kF32) {
        auto* const out = reinterpret_cast<float4*>(static_cast<float*>(g.sum.data) + to + column);
        out[0] = sum[0];
        out[1] = sum[1];
      } else {
        *reinterpret_cast<uint4*>(static_cast<T*>(g.sum.data) + to + column) =
            make_uint4(ptx::pack<T>(sum[0].x, sum[0].y), ptx::pack<T>(sum[0].z, sum[0].w),
                       ptx::pack<T>(sum[1].x, sum[1].y), ptx::pack<T>(sum[1].z, sum[1].w));
      }
    }
    return;
  }
  for (int column = lane; column < g.columns; column += kLanes) {
    float sum = 0;
    for (int part = 0; part < p.parts; ++part) {
      sum += from[part * g.columns + column];
    }
    if (g.sum.dtype == DType::kF32) {
      static_cast<float*>(g.sum.data)[to + column] = sum;
    } else {
      static_cast<T*>(g.sum.data)[to + column] = static_cast<T>(sum);
    }
  }
}

// 16 threads for a row of a head: first those of dk, then those of dv. 32 bits count the rows
// (head_parts in bwd_plan.hpp).
template <class T>
__global__ __launch_bounds__(kThreads) void bwd_sum(const __grid_constant__ BwdSumParams p) {
  const auto total = static_cast<std::uint32_t>(p.num_rows) * p.heads;
  const unsigned ctas = (total + kRowsPerCta - 1) / kRowsPerCta;
  const bool of_dk = p.dk.sum && blockIdx.x < ctas;
  const unsigned cta = p.dk.sum && !of_dk ? blockIdx.x - ctas : blockIdx.x;
  const std::uint32_t index = cta * kRowsPerCta + threadIdx.x / kLanes;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (index < total) {
    sum_gradient<T>(p, of_dk ? p.dk : p.dv, index);
  }
}

}  // namespace

Status launch_bwd_sum(DType dtype, const BwdSumParams& params, void* stream) {
  const std::int64_t ctas = (params.num_rows * params.heads + kRowsPerCta - 1) / kRowsPerCta;
  const cuda::LaunchShape shape{
      .num_ctas = ctas * ((params.dk.sum ? 1 : 0) + (params.dv.sum ? 1 : 0)),
      .num_threads = kThreads,
      .overlaps_predecessor = true};
  const auto launch = [&](auto* kernel) {
    return cuda::launch("sm90 backward sum", kernel, shape, stream, params);
  };
  return dtype == DType::kBF16 ? launch(bwd_sum<__nv_bfloat16>) : launch(bwd_sum<__half>);
}

}  // namespace flashgrad::sm90
