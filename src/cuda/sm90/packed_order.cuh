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
  constexpr int kPerThread = kPackedClasses / kThreads;
  static_assert(kPackedClasses % kThreads == 0 && kThreads % 32 == 0);
  __shared__ std::uint32_t position[kPackedClasses];  // where the next span of a class goes
  __shared__ std::uint32_t warp_sums[kThreads / 32];
  __shared__ std::uint32_t num_tiles;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  for (int i = thread; i < kPackedClasses; i += kThreads) {
    position[i] = 0;
  }
  __syncthreads();
  const std::int64_t num_spans = sequences.batch + 2;
  for (std::int64_t span = thread; span < num_spans; span += kThreads) {
    const PackedSpan s = packed_span_tiles(pass, sequences, span);
    atomicAdd(&position[packed_class(pass, s.longest)], static_cast<std::uint32_t>(s.num_tiles()));
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
  // A lane a span, neighbours in different warps; a span of many tiles is written by its warp.
  constexpr std::uint32_t kMany = 32;
  for (std::int64_t base = 0; base < num_spans; base += kThreads) {
    const std::int64_t span = base + lane * (kThreads / 32) + warp;
    PackedSpan s{};
    std::uint32_t first = 0;
    if (span < num_spans) {
      s = packed_span_tiles(pass, sequences, span);
      first = atomicAdd(&position[packed_class(pass, s.longest)],
                        static_cast<std::uint32_t>(s.num_tiles()));
    }
    const auto write = [&](const PackedSpan& of, std::int64_t number, std::uint32_t begin,
                           std::uint32_t from, std::uint32_t step) {
      for (std::uint32_t i = from; i < of.num_tiles(); i += step) {
        if (begin + i < capacity) {
          take(begin + i, of.tile(number, i));
        }
      }
    };
    const bool many = s.num_tiles() > kMany;
    if (!many) {
      write(s, span, first, 0, 1);
    }
    for (std::uint32_t left = __ballot_sync(0xffffffffU, many); left != 0; left &= left - 1) {
      const int source = __ffs(static_cast<int>(left)) - 1;
      PackedSpan of = s;
      of.order.section = __shfl_sync(0xffffffffU, s.order.section, source);
      of.order.blocks = __shfl_sync(0xffffffffU, s.order.blocks, source);
      of.order.round = __shfl_sync(0xffffffffU, s.order.round, source);
      of.order.units = static_cast<std::uint32_t>(pass.heads);
      of.last_block_first = pass.last_block_first;
      write(of, base + source * (kThreads / 32) + warp, __shfl_sync(0xffffffffU, first, source),
            static_cast<std::uint32_t>(lane), 32);
    }
  }
  return num_tiles;
}

}  // namespace flashgrad::sm90
