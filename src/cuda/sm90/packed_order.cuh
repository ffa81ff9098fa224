// SPDX-License-Identifier: Apache-2.0
// Makes the order of a packed batch's tiles (packed_order.hpp), on the device.
#pragma once

#include <cstdint>

#include "cuda/sm90/packed_order.hpp"

namespace flashgrad::sm90 {

// By one CTA: a counting sort of the spans.
//
// Every piece of code is there once, in loops: what takes the time is to fetch it, cold, from
// beyond the L2.
template <int kThreads>
__device__ __forceinline__ void make_packed_order(const PackedPass& pass,
                                                  const Sequences& sequences,
                                                  std::uint32_t capacity, PackedTile* tiles,
                                                  std::uint32_t* num_tiles) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kPerThread = static_cast<int>(kPackedClasses) / kThreads;
  static_assert(kPackedClasses % kThreads == 0 && kThreads % 32 == 0);
  __shared__ std::uint32_t position[kPackedClasses];  // where the next span of a class goes
  __shared__ std::uint32_t warp_sums[kWarps];
  struct Ready {  // a span whose place is known
    std::uint32_t first;
    SectionOrder order;
  };
  __shared__ Ready ready[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  for (int i = thread; i < static_cast<int>(kPackedClasses); i += kThreads) {
    position[i] = 0;
  }
  __syncthreads();
  const std::int64_t num_spans = sequences.batch + 2;
  // First all spans are counted, then all are written.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
#pragma unroll 1
    for (std::int64_t base = 0; base < num_spans; base += kThreads) {
      PackedSpan s{};
      std::uint32_t first = 0;
      if (base + thread < num_spans) {
        s = packed_span_tiles(pass, sequences, base + thread);
        first = atomicAdd(&position[s.work_class], s.num_tiles());
      }
      if (round == 0) {
        continue;
      }
      ready[thread] = {first, s.order};
      __syncthreads();
      const int in_use =
          num_spans - base < kThreads ? static_cast<int>(num_spans - base) : kThreads;
#pragma unroll 1
      for (int n = 0; n < in_use; ++n) {
        const PackedSpan of{ready[n].order, pass.last_block_first, 0};
        // So that short spans are not all one warp's.
        const int own = (warp + n) % kWarps;
#pragma unroll 1
        for (std::uint32_t i = static_cast<std::uint32_t>(own * 32 + lane); i < of.num_tiles();
             i += kThreads) {
          if (ready[n].first + i < capacity) {
            tiles[ready[n].first + i] = of.tile(base + n, i);
          }
        }
      }
      __syncthreads();
    }
    if (round == 1) {
      break;
    }
    __syncthreads();
    std::uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      count += position[thread * kPerThread + i];
    }
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
#pragma unroll 1
    for (int w = 0; w < warp; ++w) {
      sum += warp_sums[w];
    }
    if (thread == kThreads - 1) {
      // Offsets that decrease could ask for more tiles than there is room for.
      *num_tiles = min(sum, capacity);
    }
    std::uint32_t at = sum - count;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const std::uint32_t in_class = position[thread * kPerThread + i];
      position[thread * kPerThread + i] = at;
      at += in_class;
    }
    __syncthreads();
  }
}

}  // namespace flashgrad::sm90
