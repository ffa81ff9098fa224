// SPDX-License-Identifier: Apache-2.0
// (1) to (3) of bwd_prepare.cuh, by a warp: for the prepare kernel and for the clusters of the main
// kernel that serve units (bwd_units.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/matrix.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

// span_of_block of sequences.cuh by a converged warp: 32 offsets at a time, since each load that
// depends on the one before costs a trip to the L2.
__device__ __forceinline__ std::int64_t span_of_block_by_warp(const Sequences& s,
                                                              std::int64_t index) {
  if (!s.packed()) {
    return span_of_block(nullptr, s.batch, s.rows_q, index, kBlockM);
  }
  // The span is one of `count` from `low` on, and `low` begins at or before the block.
  std::int64_t low = 0;
  std::int64_t count = s.batch + 2;
  while (count > 1) {
    const std::int64_t step = (count + 31) / 32;
    const std::int64_t offset = step * (threadIdx.x % 32);
    const unsigned before =
        __ballot_sync(0xffffffffU, offset < count && first_block(s.cu_seqlens_q, s.batch, s.rows_q,
                                                                 low + offset, kBlockM) <= index);
    const std::int64_t last = step * (31 - __clz(static_cast<int>(before)));
    low += last;
    count = count - last < step ? count - last : step;
  }
  return low;
}

FG_HOST_DEVICE inline bool is_wide(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.dim_stride == 1 &&
         t.row_stride % 8 == 0 && t.head_stride % 8 == 0 && t.batch_stride % 8 == 0;
}

// Whether out and dout can be read 16 bytes at a time.
FG_HOST_DEVICE inline bool all_wide(const RowInputs& p) {
  return p.dout && is_wide(p.out) && is_wide(p.dout) && p.head_dim_v % 8 == 0;
}

// What a lane found in its own rows.
struct PreparedRow {
  int marks;    // of RowStatistics::unreadable
  float dsink;  // what they add in (3)
};

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

// (1) to (3) for 16 rows of a sequence from row `row_begin` on, whose first is number `statistic`
// of the row statistics, by a warp; (3) with kSinks. head_dim_v is at most kMaxColumns. Rows from
// `rows_end` on the copy engine fills with zeros. `wide`: the inputs are all_wide().
//
// (1) is the diagonal of a product of 8 rows of dout and 8 of out on the tensor cores: with scalar
// products the instructions take longer than the memory, and the lanes' sums must be added up. All
// loads are issued together, also of rows that turn out not to count: waiting for lse first would
// double the latency.
template <class T, bool kSinks, int kMaxColumns>
__device__ __forceinline__ PreparedRow prepare_rows(const RowInputs& p, bool wide,
                                                    const RowStatistics& rows,
                                                    std::int64_t rows_end,
                                                    const SequenceSpan& sequence,
                                                    std::int64_t row_begin, std::int64_t head,
                                                    std::int64_t statistic, int lane) {
  const std::int64_t row = row_begin + lane / 4;
  const int left = static_cast<int>(clamp_to(sequence.band.seqlen_q - row, 0, 16));
  const auto offset = [&](const Tensor& t) {
    return t.offset(sequence.batch_index, sequence.q.begin + row, head);
  };
  const T* const out = static_cast<const T*>(p.out.data) + offset(p.out);
  const T* const dout = static_cast<const T*>(p.dout.data) + offset(p.dout);
  RowPieces pieces;
  load_pieces(pieces, p, wide, out, dout, left, lane % 4 * 8);
  // The lanes that get the diagonals.
  const bool speaks = lane % 4 == lane / 8;
  float lse[2] = {INFINITY, INFINITY};
  float dlse[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (speaks && 8 * i < left) {
      lse[i] = static_cast<const float*>(p.lse.data)[offset(p.lse) + 8 * i * p.lse.row_stride];
      if (p.dlse) {
        dlse[i] =
            static_cast<const float*>(p.dlse.data)[offset(p.dlse) + 8 * i * p.dlse.row_stride];
      }
    }
  }
  float products[2][4] = {};  // of dout and out's first 8 rows, and the last 8
#pragma unroll 1
  for (int column = 0;;) {
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
    column += 128;
    if (kMaxColumns <= 128 || column >= p.head_dim_v) {
      break;
    }
    load_pieces(pieces, p, wide, out, dout, left, column + lane % 4 * 8);
  }
  PreparedRow result{0, 0};
  if (speaks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float delta = lane / 4 % 2 == 0 ? products[i][2 * i] : products[i][2 * i + 1];
      const std::int64_t at = row + 8 * i;
      const bool read =
          8 * i < left && !sequence.band.kv_range(at, at + 1).empty() && !isinf(lse[i]);
      const float neg_delta = read ? dlse[i] - delta : 0.0F;
      constexpr float kLog2E = 1.4426950408889634F;
      rows.neg_lse_log2[statistic + lane / 4 + 8 * i] = read ? -lse[i] * kLog2E : -INFINITY;
      rows.neg_delta[statistic + lane / 4 + 8 * i] = neg_delta;
      const bool unreadable = !read && sequence.q.begin + at < rows_end;
      result.marks |= unreadable ? 1 : read && isnan(lse[i] + neg_delta) ? kHasNan : 0;
      if constexpr (kSinks) {
        const float sink = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
        if (!isinf(lse[i]) && sink != -INFINITY) {
          result.dsink += expf(sink - lse[i]) * (read ? neg_delta : dlse[i]);
        }
      }
    }
  }
  return result;
}

}  // namespace flashgrad::sm90
