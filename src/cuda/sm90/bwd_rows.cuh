// SPDX-License-Identifier: Apache-2.0
// (1) and (2) of bwd_prepare.cuh for the clusters of the main kernel that serve units
// (bwd_units.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/mma.cuh"
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

// 128 columns of out and dout in 16 rows, a lane's part: rows lane / 4 and 8 more, in each four
// times 8 columns, those of the four lanes of a row next to each other.
struct RowPieces {
  uint4 out[2][4];
  uint4 dout[2][4];
};

// 8 elements, as many as `count`, the others 0.
template <class T>
__device__ __forceinline__ uint4 gather_8(const T* from, std::int64_t stride, int count) {
  std::uint32_t pairs[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) {
      pairs[i / 2] |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(from)[i * stride]}
                      << (i % 2 * 16);
    }
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Loads columns from `column` on. `out` and `dout` are the lane's first row; rows from `left` on,
// counted from there, are zeros.
template <class T>
__device__ __forceinline__ void load_pieces(RowPieces& pieces, const RowInputs& p, bool wide,
                                            const T* out, const T* dout, int left, int column) {
  const auto columns = static_cast<int>(p.head_dim_v);
  const auto load = [&](auto&& load_8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int c = column + 32 * k;
        pieces.out[i][k] = pieces.dout[i][k] = make_uint4(0, 0, 0, 0);
        if (8 * i < left && c < columns) {
          load_8(pieces.out[i][k], pieces.dout[i][k], 8 * i, c);
        }
      }
    }
  };
  if (wide) {
    load([&](uint4& x, uint4& y, int row, int c) {
      x = __ldcs(reinterpret_cast<const uint4*>(out + row * p.out.row_stride + c));
      y = *reinterpret_cast<const uint4*>(dout + row * p.dout.row_stride + c);
    });
  } else {
    load([&](uint4& x, uint4& y, int row, int c) {
      if (p.dout) {
        x = gather_8(out + row * p.out.row_stride + c, 1, columns - c);
        y = gather_8(dout + row * p.dout.row_stride + c * p.dout.dim_stride, p.dout.dim_stride,
                     columns - c);
      }
    });
  }
}

// Adds the products of 8 rows of dout and of out each, of whose 8 x 8 elements the diagonal is (1):
// with scalar products the instructions take as long as the memory.
template <class T>
__device__ __forceinline__ void multiply_pieces(float (&products)[2][4], const RowPieces& pieces) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 a = pieces.dout[0][k];
    const uint4 b = pieces.dout[1][k];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = pieces.out[i][k];
      ptx::multiply_16x8<T>(products[i], a.x, b.x, a.y, b.y, x.x, x.y);
      ptx::multiply_16x8<T>(products[i], a.z, b.z, a.w, b.w, x.z, x.w);
    }
  }
}

// (1) to (3) for 16 rows of a query head, by a warp: in prepare, and in ordered kernels, where a
// sequence must get the same bits from either.
template <class T>
class WarpRows {
 public:
  // Loads rows from `row_begin` of the sequence on, also rows that turn out not to count.
  __device__ __forceinline__ WarpRows(const RowInputs& in, const SequenceSpan& sequence,
                                      std::int64_t row_begin, std::int64_t head, int lane)
      : in_(in),
        sequence_(sequence),
        head_(head),
        lane_(lane),
        row_(static_cast<int>(row_begin) + lane / 4),
        speaks_(lane % 4 == lane / 8) {
    left_ = static_cast<int>(clamp_to(sequence.band.seqlen_q - row_, 0, 16));
    seen_by_none_ = (sequence.band.kv_range(row_, row_ + 1).empty() ? 1U : 0U) |
                    (sequence.band.kv_range(row_ + 8, row_ + 9).empty() ? 2U : 0U);
    load(0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (speaks_ && 8 * i < left_) {
        const auto at = [&](const Tensor& t) {
          return static_cast<const float*>(t.data)[offset(t) + 8 * i * t.row_stride];
        };
        lse_[i] = at(in.lse);
        if (in.dlse) {
          dlse_[i] = at(in.dlse);
        }
      }
    }
  }

  // The first row's number among the row statistics is `statistic`; rows of the sequence from
  // `rows_end` on come as zeros. Returns the lane's marks for RowStatistics::unreadable, and adds
  // its part of (3) to `dsink`.
  __device__ __forceinline__ int finish(const RowStatistics& rows, std::int64_t rows_end,
                                        std::int64_t statistic, float* dsink) {
    float products[2][4] = {};
    multiply_pieces<T>(products, pieces_);
#pragma unroll 1
    for (int column = 128; column < in_.head_dim_v; column += 128) {
      load(column);
      multiply_pieces<T>(products, pieces_);
    }
    int marks = 0;
    if (!speaks_) {
      return 0;
    }
    const int left_to_load = static_cast<int>(clamp_to(rows_end - row_, 0, 16));
    const float sink = in_.sinks != nullptr ? in_.sinks[head_] : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float delta = lane_ / 4 % 2 == 0 ? products[i][2 * i] : products[i][2 * i + 1];
      const bool read = 8 * i < left_ && (seen_by_none_ >> i & 1U) == 0 && !isinf(lse_[i]);
      const float neg_delta = read ? dlse_[i] - delta : 0.0F;
      constexpr float kLog2E = 1.4426950408889634F;
      const std::int64_t at = statistic + lane_ / 4 + 8 * i;
      rows.neg_lse_log2[at] = read ? -lse_[i] * kLog2E : -INFINITY;
      rows.neg_delta[at] = neg_delta;
      const bool unreadable = !read && 8 * i < left_to_load;
      marks |= unreadable ? 1 : read && isnan(lse_[i] + neg_delta) ? kHasNan : 0;
      if (!isinf(lse_[i]) && sink != -INFINITY) {
        *dsink += expf(sink - lse_[i]) * (read ? neg_delta : dlse_[i]);
      }
    }
    return marks;
  }

 private:
  __device__ __forceinline__ std::int64_t offset(const Tensor& t) const {
    return t.offset(sequence_.batch_index, sequence_.q.begin + row_, head_);
  }
  __device__ __forceinline__ void load(int column) {
    load_pieces(pieces_, in_, all_wide(in_), static_cast<const T*>(in_.out.data) + offset(in_.out),
                static_cast<const T*>(in_.dout.data) + offset(in_.dout), left_,
                column + lane_ % 4 * 8);
  }

  const RowInputs& in_;
  const SequenceSpan& sequence_;
  std::int64_t head_;
  int lane_;
  int row_;      // the lane's first, of two
  bool speaks_;  // gets diagonals of the products
  int left_;
  RowPieces pieces_;
  float lse_[2] = {INFINITY, INFINITY};
  float dlse_[2] = {0, 0};
  unsigned seen_by_none_;
};

// dq = 0 in `count` rows, none of which sees a key, from row `row` of the sequence on, by threads
// `thread` of `threads`.
__device__ __forceinline__ void clear_dq(const Tensor& dq, std::int64_t head_dim,
                                         const SequenceSpan& sequence, std::int64_t row,
                                         std::int64_t count, std::int64_t head, int thread,
                                         int threads) {
  const std::int64_t left = sequence.q.end - sequence.q.begin - row;
  const std::int64_t total = (left < count ? left : count) * head_dim;
  for (std::int64_t i = thread; i < total; i += threads) {
    const std::int64_t at =
        dq.offset(sequence.batch_index, sequence.q.begin + row + i / head_dim, head) + i % head_dim;
    if (dq.dtype == DType::kF32) {
      static_cast<float*>(dq.data)[at] = 0;
    } else {
      static_cast<std::uint16_t*>(dq.data)[at] = 0;
    }
  }
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
