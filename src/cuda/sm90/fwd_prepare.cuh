// SPDX-License-Identifier: Apache-2.0
// What runs before the forward's main kernel: the work list of a packed batch, whose lengths only
// the device knows, and the fill of rows that belong to no sequence.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/sm90/fwd_params.hpp"

namespace flashgrad::sm90 {

inline constexpr int kFwdPrepareThreads = 1024;

// One CTA. A counting sort of all (sequence, query block) by their number of keys, longest first.
// The order of ties changes from call to call: it decides when a tile runs, not what it computes.
__device__ __forceinline__ void make_schedule(const Sequences& sequences, int block_m,
                                              std::int64_t max_seqlen_kv, std::uint32_t capacity,
                                              FwdScheduleEntry* schedule,
                                              std::uint32_t* schedule_size) {
  constexpr int kBuckets = kFwdPrepareThreads;
  __shared__ std::uint32_t position[kBuckets];
  __shared__ std::uint32_t warp_sums[kBuckets / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  position[thread] = 0;
  __syncthreads();
  const auto for_each_tile = [&](auto&& visit) {
    for (std::int64_t span = 1 + warp; span <= sequences.batch; span += kBuckets / 32) {
      const Band band = sequence_span(sequences, span).band;
      const auto blocks = static_cast<std::int32_t>((band.seqlen_q + block_m - 1) / block_m);
      for (std::int32_t m_block = lane; m_block < blocks; m_block += 32) {
        const std::int64_t m_begin = static_cast<std::int64_t>(m_block) * block_m;
        const std::int64_t bucket =
            band.kv_range(m_begin, m_begin + block_m).size() * kBuckets / (max_seqlen_kv + 1);
        visit(FwdScheduleEntry{static_cast<std::int32_t>(span), m_block},
              static_cast<int>(max(kBuckets - 1 - bucket, std::int64_t{0})));
      }
    }
  };
  for_each_tile([&](FwdScheduleEntry, int bucket) { atomicAdd(&position[bucket], 1U); });
  __syncthreads();
  const std::uint32_t count = position[thread];
  std::uint32_t sum = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t below = __shfl_up_sync(0xffffffffU, sum, distance);
    sum += lane >= distance ? below : 0;
  }
  if (lane == 31) {
    warp_sums[warp] = sum;
  }
  __syncthreads();
  for (int w = 0; w < warp; ++w) {
    sum += warp_sums[w];
  }
  position[thread] = sum - count;
  if (thread == kBuckets - 1) {
    // Offsets that decrease could ask for more tiles than there is room for.
    *schedule_size = min(sum, capacity);
  }
  __syncthreads();
  for_each_tile([&](FwdScheduleEntry entry, int bucket) {
    const std::uint32_t at = atomicAdd(&position[bucket], 1U);
    if (at < capacity) {
      schedule[at] = entry;
    }
  });
}

// Whether row `row` of batch entry `batch_index` (0 if packed) belongs to a sequence and is one of
// its rows that count.
__device__ __forceinline__ bool row_is_used(const Sequences& s, std::int64_t batch_index,
                                            std::int64_t row) {
  std::int64_t b = batch_index;
  std::int64_t begin = 0;
  if (s.packed()) {
    std::int64_t low = 0;
    std::int64_t high = s.batch + 1;
    while (low < high) {  // the first offset above `row`
      const std::int64_t middle = (low + high) / 2;
      if (s.cu_seqlens_q[middle] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    b = low - 1;
    if (b < 0 || b >= s.batch) {
      return false;
    }
    begin = s.cu_seqlens_q[b];
  }
  return s.seqused_q == nullptr || row - begin < s.seqused_q[b];
}

struct FwdPrepareParams {
  Sequences sequences;
  Tensor out;
  Tensor lse;  // null: not wanted
  std::int64_t heads_q;
  std::int64_t head_dim_v;
  std::int64_t num_rows;  // of all batch entries
  std::int64_t max_seqlen_kv;
  std::int32_t block_m;
  std::uint32_t capacity;        // of the schedule
  FwdScheduleEntry* schedule;    // (capacity); null: fixed length
  std::uint32_t* schedule_size;  // written with the schedule
  std::uint32_t* next_work;      // becomes 0
};

// CTA 0 makes the work list; the others, a warp a row, write out = 0 and lse = -inf where a row is
// not used.
static __global__ void __launch_bounds__(kFwdPrepareThreads, 1)
    fwd_prepare(const __grid_constant__ FwdPrepareParams p) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      *p.next_work = 0;
    }
    if (p.schedule != nullptr) {
      make_schedule(p.sequences, p.block_m, p.max_seqlen_kv, p.capacity, p.schedule,
                    p.schedule_size);
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr std::int64_t kWarps = kFwdPrepareThreads / 32;
  const std::int64_t stride = (gridDim.x - 1) * kWarps;
  for (std::int64_t i = (blockIdx.x - 1) * kWarps + threadIdx.x / 32; i < p.num_rows; i += stride) {
    const std::int64_t batch_index = i / p.sequences.rows_q;
    const std::int64_t row = i % p.sequences.rows_q;
    if (row_is_used(p.sequences, batch_index, row)) {
      continue;
    }
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      auto* const out = static_cast<std::uint16_t*>(p.out.data) + p.out.offset(batch_index, row, h);
      for (std::int64_t c = lane; c < p.head_dim_v; c += 32) {
        out[c] = 0;
      }
      if (p.lse && lane == 0) {
        static_cast<float*>(p.lse.data)[p.lse.offset(batch_index, row, h)] = -CUDART_INF_F;
      }
    }
  }
}

}  // namespace flashgrad::sm90
