// SPDX-License-Identifier: Apache-2.0
// What runs before the forward's main kernel when lengths lie on the device: the order of a packed batch's tiles, and the fill of rows
// that belong to no sequence. And the copy of tensors that the copy engine cannot address.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_tile.cuh"

namespace flashgrad::cuda {

inline constexpr int kPrepareThreads = 1024;

// One CTA. A counting sort of all (sequence, query block) by their number of keys, longest first; ties in any order, which changes when a
// tile runs but not what it computes.
template <int kBlockM>
__device__ void make_schedule(const FwdParams& p, FwdScheduleEntry* schedule, std::uint32_t* schedule_size, std::int64_t max_seqlen_kv) {
  constexpr int kBuckets = kPrepareThreads;
  __shared__ std::uint32_t first[kBuckets];
  __shared__ std::uint32_t warp_sums[kBuckets / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  first[thread] = 0;
  __syncthreads();
  const auto for_each_tile = [&](auto&& visit) {
    for (std::int64_t b = warp; b < p.batch; b += kPrepareThreads / 32) {
      const FwdSequence s = load_sequence(p, static_cast<std::int32_t>(b));
      const auto blocks = static_cast<std::int32_t>((s.band.seqlen_q + kBlockM - 1) / kBlockM);
      for (std::int32_t m_block = lane; m_block < blocks; m_block += 32) {
        const std::int64_t keys = s.band.kv_range(static_cast<std::int64_t>(m_block) * kBlockM, static_cast<std::int64_t>(m_block + 1) * kBlockM).size();
        const std::int64_t bucket = keys * kBuckets / (max_seqlen_kv + 1);
        visit(FwdScheduleEntry{static_cast<std::int32_t>(b), m_block}, kBuckets - 1 - static_cast<int>(bucket < kBuckets ? bucket : kBuckets - 1));
      }
    }
  };
  for_each_tile([&](FwdScheduleEntry, int bucket) { atomicAdd(&first[bucket], 1U); });
  __syncthreads();
  const std::uint32_t count = first[thread];
  std::uint32_t up_to = count;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const std::uint32_t below = __shfl_up_sync(0xffffffffU, up_to, d);
    up_to += lane >= d ? below : 0;
  }
  if (lane == 31) {
    warp_sums[warp] = up_to;
  }
  __syncthreads();
  std::uint32_t before = 0;
  for (int w = 0; w < warp; ++w) {
    before += warp_sums[w];
  }
  first[thread] = before + up_to - count;
  if (thread == kBuckets - 1) {
    // Offsets that decrease could ask for more tiles than there is room for.
    *schedule_size = min(before + up_to, p.num_m_blocks);
  }
  __syncthreads();
  for_each_tile([&](FwdScheduleEntry entry, int bucket) {
    const std::uint32_t position = atomicAdd(&first[bucket], 1U);
    if (position < p.num_m_blocks) {
      schedule[position] = entry;
    }
  });
}

// Whether a row of the tensors belongs to a sequence, and is one of the rows that count.
__device__ __forceinline__ bool row_is_used(const FwdParams& p, std::int64_t batch_index, std::int32_t row) {
  std::int64_t b = batch_index;
  std::int32_t begin = 0;
  if (p.cu_seqlens_q != nullptr) {
    std::int64_t low = 0;
    std::int64_t high = p.batch + 1;
    while (low < high) {  // the first offset above `row`
      const std::int64_t middle = (low + high) / 2;
      if (p.cu_seqlens_q[middle] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    b = low - 1;
    if (b < 0 || b >= p.batch) {
      return false;
    }
    begin = p.cu_seqlens_q[b];
  }
  return p.seqused_q == nullptr || row - begin < p.seqused_q[b];
}

// CTA 0 makes the schedule (if packed); the others, a warp a row, write out = 0 and lse = -inf where a row is not used.
template <class T, int kBlockM>
__global__ void __launch_bounds__(kPrepareThreads, 1)
    fwd_prepare_kernel(const __grid_constant__ FwdParams p, FwdScheduleEntry* schedule, std::uint32_t* schedule_size, std::uint32_t* next_work, std::int64_t max_seqlen_kv,
                       std::int64_t num_rows) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0 && next_work != nullptr) {
      *next_work = 0;
    }
    if (schedule != nullptr) {
      make_schedule<kBlockM>(p, schedule, schedule_size, max_seqlen_kv);
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x - 1) * (kPrepareThreads / 32);
  for (std::int64_t r = (blockIdx.x - 1) * static_cast<std::int64_t>(kPrepareThreads / 32) + threadIdx.x / 32; r < num_rows; r += warps) {
    const std::int64_t batch_index = r / p.seqlen_q;
    const auto row = static_cast<std::int32_t>(r % p.seqlen_q);
    if (row_is_used(p, batch_index, row)) {
      continue;
    }
    for (std::uint32_t h = 0; h < p.heads_q; ++h) {
      T* const out = static_cast<T*>(p.out) + batch_index * p.out_batch_stride + row * p.out_row_stride + h * p.out_head_stride;
      for (std::int32_t c = lane; c < p.head_dim_v; c += 32) {
        out[c] = T(0.0F);
      }
      if (p.lse != nullptr && lane == 0) {
        p.lse[batch_index * p.lse_batch_stride + row * p.lse_row_stride + h * p.lse_head_stride] = -CUDART_INF_F;
      }
    }
  }
}

struct CopyParams {
  const std::uint16_t* source;
  std::uint16_t* destination;  // (batch, rows, heads, columns rounded up to 8), compact; the padding is never read
  std::int64_t rows, heads, columns;
  std::int64_t batch_stride, row_stride, head_stride;  // of the source
  std::int64_t num_vectors;                            // batch * rows * heads
};

// A warp a vector of columns.
static __global__ void __launch_bounds__(256) copy_compact_kernel(const CopyParams p) {
  const std::int64_t padded = (p.columns + 7) / 8 * 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = blockIdx.x * std::int64_t{8} + threadIdx.x / 32; i < p.num_vectors; i += gridDim.x * std::int64_t{8}) {
    const std::int64_t h = i % p.heads;
    const std::int64_t row = i / p.heads % p.rows;
    const std::int64_t b = i / p.heads / p.rows;
    const std::uint16_t* const source = p.source + b * p.batch_stride + row * p.row_stride + h * p.head_stride;
    for (std::int64_t c = lane; c < p.columns; c += 32) {
      p.destination[i * padded + c] = source[c];
    }
  }
}

}  // namespace flashgrad::cuda
