// SPDX-License-Identifier: Apache-2.0
// (1) and (2) of bwd_prepare.cuh for the clusters of the main kernel that serve units
// (bwd_units.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

template <class T>
__device__ __forceinline__ float dot_8(uint4 a, uint4 b) {
  const T* x = reinterpret_cast<const T*>(&a);
  const T* y = reinterpret_cast<const T*>(&b);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  }
  return sum;
}

// Whether out and dout can be read 16 bytes at a time. Of all tensors of rows dout alone may have a
// last stride other than 1, which is 0.
FG_HOST_DEVICE inline bool all_wide(const RowInputs& p) {
  return p.dout && p.dout.dim_stride == 1 && has_aligned_rows(p.out) && has_aligned_rows(p.dout) &&
         p.head_dim_v % 8 == 0;
}

// (1) and (2) for kRows rows of a sequence from row `row_begin` on, whose first is number
// `statistic` of the row statistics. 16 lanes, `lane` of them; both halves of a warp together. The
// lane's own row is lane * kRows / 16, so 16 / kRows lanes share one, and the first of them speaks
// for it. The inputs are all_wide() and head_dim_v is at most 128. Returns the marks of
// RowStatistics::unreadable that the lane's own row gives.
//
// The loads of all rows are issued together, also of rows that turn out not to count: waiting for
// lse first would double the latency.
template <class T, int kRows>
__device__ __forceinline__ int prepare_rows(const RowInputs& p, const RowStatistics& rows,
                                            std::int64_t rows_q, const SequenceSpan& sequence,
                                            std::int64_t row_begin, std::int64_t head,
                                            std::int64_t statistic, int lane) {
  constexpr int kSharing = 16 / kRows;
  const std::int64_t b = sequence.batch_index;
  const std::int64_t first_row = sequence.q.begin + row_begin;
  const int left = static_cast<int>(clamp_to(sequence.band.seqlen_q - row_begin, 0, kRows));
  const int own = lane / kSharing;
  const std::int64_t row = row_begin + own;
  const bool exists = own < left;
  const float lse =
      exists ? static_cast<const float*>(p.lse.data)[p.lse.offset(b, first_row + own, head)]
             : INFINITY;
  const float dlse =
      exists && p.dlse
          ? static_cast<const float*>(p.dlse.data)[p.dlse.offset(b, first_row + own, head)]
          : 0.0F;
  float delta[kRows];
  const int columns_left = 8 * lane < p.head_dim_v ? left : 0;
  const T* const out =
      static_cast<const T*>(p.out.data) + p.out.offset(b, first_row, head) + 8 * lane;
  const T* const dout =
      static_cast<const T*>(p.dout.data) + p.dout.offset(b, first_row, head) + 8 * lane;
  uint4 x[kRows];
  uint4 y[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    x[i] = y[i] = make_uint4(0, 0, 0, 0);
    if (i < columns_left) {
      x[i] = __ldcs(reinterpret_cast<const uint4*>(out + i * p.out.row_stride));
      y[i] = *reinterpret_cast<const uint4*>(dout + i * p.dout.row_stride);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    delta[i] = dot_8<T>(x[i], y[i]);
  }
  // Sums over the lanes; while a lane has several rows it gives half of them away.
#pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    const int half = kRows * step / 16;
    const bool upper = (lane & step) != 0;
    if (half == 0) {
      delta[0] += __shfl_xor_sync(0xffffffffU, delta[0], step);
    }
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? delta[i] : delta[i + half];
      delta[i] = (upper ? delta[i + half] : delta[i]) + __shfl_xor_sync(0xffffffffU, given, step);
    }
  }
  const bool read = exists && !sequence.band.kv_range(row, row + 1).empty() && !isinf(lse);
  const float neg_delta = read ? dlse - delta[0] : 0.0F;
  int marks = 0;
  if (lane % kSharing == 0) {
    constexpr float kLog2E = 1.4426950408889634F;
    rows.neg_lse_log2[statistic + own] = read ? -lse * kLog2E : -INFINITY;
    rows.neg_delta[statistic + own] = neg_delta;
    // Rows past the end of the tensor come as zeros from the copy engine.
    const bool unreadable = !read && first_row + own < rows_q;
    marks = unreadable ? 1 : read && isnan(lse + neg_delta) ? kHasNan : 0;
  }
  return marks;
}

}  // namespace flashgrad::sm90
