// SPDX-License-Identifier: Apache-2.0
// Backward, pass 3 of 3: dq = scale * accumulator, from fragment order (tile/fragment.hpp) to the
// caller's layout and dtype, rounded once. Rows that no key reached, also those outside every
// sequence, were zeroed by prepare and so become 0. And the sum of the sinks' gradients over all
// query blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/params.hpp"
#include "cuda/tile/fragment.hpp"

namespace flashgrad::sm90 {

inline constexpr int kFinishThreads = 256;

template <class Out>
__device__ __forceinline__ void store_8(Out* destination, const float* values, int columns,
                                        bool wide) {
  if (wide && columns >= 8) {
    Out packed[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      packed[i] = static_cast<Out>(values[i]);
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(packed)) / 16; ++i) {
      reinterpret_cast<uint4*>(destination)[i] = reinterpret_cast<const uint4*>(packed)[i];
    }
  } else {
    for (int i = 0; i < 8 && i < columns; ++i) {
      destination[i] = static_cast<Out>(values[i]);
    }
  }
}

// One CTA per query block and query head of a unit (unit_pipeline.hpp).
template <class Out, int kHeadDim>
__global__ __launch_bounds__(kFinishThreads) void bwd_finish(
    const __grid_constant__ BwdFinishParams p) {
  constexpr int kPitch = kHeadDim + 4;  // floats; spreads a column's rows over the banks
  __shared__ __align__(16) float rows[32][kPitch];
  const auto head_blocks = static_cast<unsigned>(p.head_blocks);
  const auto group = static_cast<unsigned>(p.group);
  const auto heads_kv = static_cast<unsigned>(p.heads_kv);
  const Sequences& s = p.sequences;
  const unsigned in_head = blockIdx.x % head_blocks;
  const unsigned in_group = blockIdx.x / head_blocks % group;
  const unsigned unit = blockIdx.x / head_blocks / group;
  const std::int64_t head = unit % heads_kv * group + in_group;
  const std::int64_t block = s.packed() ? in_head : unit / heads_kv * head_blocks + in_head;
  const std::int64_t span = span_of_block(s.cu_seqlens_q, s.batch, s.rows_q, block, kBlockM);
  const std::int64_t first = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM);
  const SequenceSpan sequence = sequence_span(s, span);
  const std::int64_t row_begin = sequence.q.begin + (block - first) * kBlockM;
  const float4* accumulator = reinterpret_cast<const float4*>(
      p.dq_accumulator + std::int64_t{blockIdx.x} * (kBlockM * kHeadDim));
  const bool wide = reinterpret_cast<std::uintptr_t>(p.dq.data) % 16 == 0 &&
                    p.dq.row_stride * sizeof(Out) % 16 == 0 &&
                    p.dq.head_stride * sizeof(Out) % 16 == 0 &&
                    p.dq.batch_stride * sizeof(Out) % 16 == 0;
  const auto thread = static_cast<int>(threadIdx.x);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (row_begin >= sequence.q.end) {
    return;
  }
  // 32 rows at a time: the fragments of two warps of the main kernel.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = thread; i < 32 * kHeadDim / 4; i += kFinishThreads) {
      const float4 x = accumulator[half * 32 * kHeadDim / 4 + i];
      const int warp = i / (16 * kHeadDim / 4);
      const int in_warp = i % (16 * kHeadDim / 4);
      const tile::Coordinate at =
          tile::accumulator_coordinate(warp * 32 + in_warp % 32, in_warp / 32 * 4);
      rows[at.row][at.column] = x.x * p.scale;
      rows[at.row][at.column + 1] = x.y * p.scale;
      rows[at.row + 8][at.column] = x.z * p.scale;
      rows[at.row + 8][at.column + 1] = x.w * p.scale;
    }
    __syncthreads();
#pragma unroll
    for (int i = thread; i < 32 * kHeadDim / 8; i += kFinishThreads) {
      const int r = i / (kHeadDim / 8);
      const int column = i % (kHeadDim / 8) * 8;
      const std::int64_t row = row_begin + half * 32 + r;
      if (row < sequence.q.end && column < p.head_dim) {
        store_8<Out>(
            static_cast<Out*>(p.dq.data) + p.dq.offset(sequence.batch_index, row, head) + column,
            &rows[r][column], static_cast<int>(p.head_dim) - column, wide);
      }
    }
    __syncthreads();
  }
}

inline constexpr int kSinksThreads = 256;

// One CTA per query head, always in the same order.
__global__ __launch_bounds__(kSinksThreads) void bwd_sinks(
    const __grid_constant__ BwdSinksParams p) {
  __shared__ double partial[kSinksThreads];
  const float* values = p.dsink_partial + blockIdx.x * p.num_blocks;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < p.num_blocks; i += kSinksThreads) {
    sum += values[i];
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned step = kSinksThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) {
      partial[threadIdx.x] += partial[threadIdx.x + step];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    p.dsinks[blockIdx.x] = static_cast<float>(partial[0]);
  }
}

}  // namespace flashgrad::sm90
