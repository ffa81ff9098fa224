// SPDX-License-Identifier: Apache-2.0
// Backward, pass 3 of 3: dq = scale * accumulator, from fragment order (tile/fragment.hpp) to the
// caller's layout and dtype, rounded once. Rows that no key reached, also those outside every
// sequence, were zeroed by prepare and so become 0. And the sum of the sinks' gradients over all
// query blocks.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/query_block.cuh"
#include "cuda/tile/fragment.hpp"

namespace flashgrad::sm90 {

inline constexpr int kFinishThreads = 128;

// One CTA per query block and query head of a unit (unit_pipeline.hpp). Where a block lies among
// the sequences is looked up while its sums are on their way.
template <class T, int kHeadDim>
__global__ __launch_bounds__(kFinishThreads,
                             4) void bwd_finish(const __grid_constant__ BwdFinishParams p) {
  const auto thread = static_cast<int>(threadIdx.x);
  const float* const sums = p.dq_accumulator + std::int64_t{blockIdx.x} * (kBlockM * kHeadDim) +
                            tile::fragment_order<kHeadDim>(thread, 0);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  float dq[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; i += 4) {
    const float4 sum = ptx::load_sum(sums + tile::fragment_order<kHeadDim>(0, i));
    dq[i] = sum.x;
    dq[i + 1] = sum.y;
    dq[i + 2] = sum.z;
    dq[i + 3] = sum.w;
  }
  const auto head_blocks = static_cast<unsigned>(p.head_blocks);
  const auto group = static_cast<unsigned>(p.group);
  const auto heads_kv = static_cast<unsigned>(p.heads_kv);
  const Sequences& s = p.sequences;
  const unsigned in_head = blockIdx.x % head_blocks;
  const unsigned in_group = blockIdx.x / head_blocks % group;
  const unsigned unit = blockIdx.x / head_blocks / group;
  const std::int64_t block = s.packed() ? in_head : unit / heads_kv * head_blocks + in_head;
  const QueryBlock of = find_query_block(s, block);
  const std::int64_t row = of.sequence.q.begin + of.row_begin();
  const OutputRows rows{p.dq,
                        static_cast<int>(of.sequence.batch_index),
                        row,
                        static_cast<int>(unit % heads_kv * group + in_group),
                        static_cast<int>(clamp_to(of.sequence.q.end - row, 0, kBlockM)),
                        static_cast<int>(p.head_dim)};
  store_registers<kHeadDim, T>(dq, p.scale, rows, thread);
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
