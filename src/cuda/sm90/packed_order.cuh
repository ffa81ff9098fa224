// SPDX-License-Identifier: Apache-2.0
// Makes the order of a packed batch's tiles (packed_order.hpp), on the device.
#pragma once

#include <cstdint>

#include "cuda/sm90/packed_order.hpp"

namespace flashgrad::sm90 {

// By one CTA: a counting sort of the spans. Hands every tile with its number, below `capacity`, to
// `take`; returns how many there are.
template <int kThreads, class Take>
__device__ __forceinline__ std::uint32_t make_packed_order(const PackedPass& pass,
                                                           const Sequences& sequences,
                                                           std::uint32_t capacity, Take&& take) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kPerThread = static_cast<int>(kPackedClasses) / kThreads;
  static_assert(kPackedClasses % kThreads == 0 && kThreads % 32 == 0);
  __shared__ std::uint32_t position[kPackedClasses];  // where the next span of a class goes
  __shared__ std::uint32_t warp_sums[kWarps];
  __shared__ std::uint32_t num_tiles;
  // Spans of many tiles, which all warps write together.
  struct Many {
    std::int64_t span;
    std::uint32_t first;
    SectionOrder order;
  };
  __shared__ Many many[kThreads];
  __shared__ std::uint32_t num_many;
  constexpr std::uint32_t kFew = 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  for (int i = thread; i < static_cast<int>(kPackedClasses); i += kThreads) {
    position[i] = 0;
  }
  if (thread == 0) {
    num_many = 0;
  }
  __syncthreads();
  const std::int64_t num_spans = sequences.batch + 2;
  const auto of_span = [&](std::int64_t span) {
    return span < num_spans ? packed_span_tiles(pass, sequences, span) : PackedSpan{};
  };
  const PackedSpan first_span = of_span(thread);
  for (std::int64_t span = thread; span < num_spans; span += kThreads) {
    const PackedSpan s = span == thread ? first_span : of_span(span);
    atomicAdd(&position[s.work_class], s.num_tiles());
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
  for (int w = 0; w < warp; ++w) {
    sum += warp_sums[w];
  }
  if (thread == kThreads - 1) {
    // Offsets that decrease could ask for more tiles than there is room for.
    num_tiles = min(sum, capacity);
  }
  std::uint32_t at = sum - count;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const std::uint32_t in_class = position[thread * kPerThread + i];
    position[thread * kPerThread + i] = at;
    at += in_class;
  }
  __syncthreads();
  const auto write = [&](const PackedSpan& s, std::int64_t span, std::uint32_t first,
                         std::uint32_t index) {
    if (first + index < capacity) {
      take(first + index, s.tile(span, index));
    }
  };
  for (std::int64_t base = 0; base < num_spans; base += kThreads) {
    const std::int64_t span = base + thread;
    const PackedSpan s = base == 0 ? first_span : of_span(span);
    if (s.num_tiles() > 0) {
      const std::uint32_t first = atomicAdd(&position[s.work_class], s.num_tiles());
      if (s.num_tiles() > kFew) {
        many[atomicAdd(&num_many, 1U)] = {span, first, s.order};
      } else {
        for (std::uint32_t i = 0; i < s.num_tiles(); ++i) {
          write(s, span, first, i);
        }
      }
    }
    __syncthreads();
    for (std::uint32_t n = 0; n < num_many; ++n) {
      const PackedSpan of{many[n].order, pass.last_block_first, 0};
      const std::uint32_t own = (static_cast<std::uint32_t>(warp) + n) % kWarps;
      for (std::uint32_t i = own * 32 + lane; i < of.num_tiles(); i += kThreads) {
        write(of, many[n].span, many[n].first, i);
      }
    }
    __syncthreads();
    if (thread == 0) {
      num_many = 0;
    }
    __syncthreads();
  }
  return num_tiles;
}

}  // namespace flashgrad::sm90
