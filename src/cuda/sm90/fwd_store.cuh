// SPDX-License-Identifier: Apache-2.0
// The end of a forward tile: out and lse of a warp's 16 rows.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/sm90/fwd_softmax.cuh"
#include "cuda/sm90/fwd_tile.cuh"

namespace flashgrad::sm90 {

// Writes O times `factor`. Each quad first exchanges its columns, so that a thread holds 8
// neighbours.
template <int kColumns, class T>
__device__ __forceinline__ void store_out(const float (&o)[kColumns / 2], const float (&factor)[2],
                                          const FwdParams& p, T* out, int row, int num_rows) {
  const int lane_of_quad = static_cast<int>(threadIdx.x) % 4;
  const auto pick = [](const std::uint32_t(&x)[4], int i) {
    const std::uint32_t low = (i & 1) != 0 ? x[1] : x[0];
    const std::uint32_t high = (i & 1) != 0 ? x[3] : x[2];
    return (i & 2) != 0 ? high : low;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    T* const row_out = out + (row + 8 * r) * p.out.row_stride;
#pragma unroll
    for (int c = 0; c < kColumns / 32; ++c) {
      std::uint32_t mine[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * c + j) + 2 * r;
        // A row that sees nothing is 0, whatever V holds.
        mine[j] = factor[r] == 0.0F ? 0U : ptx::pack<T>(o[i] * factor[r], o[i + 1] * factor[r]);
      }
      std::uint32_t received[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        received[j] = __shfl_xor_sync(0xffffffffU, pick(mine, lane_of_quad ^ j), j);
      }
      union {
        uint4 vector;
        std::uint32_t pair[4];
        std::uint16_t element[8];
      } columns;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        columns.pair[j] = pick(received, lane_of_quad ^ j);
      }
      const int first = 32 * c + 8 * lane_of_quad;
      if (row + 8 * r >= num_rows) {
        continue;
      }
      if (p.out_vectors) {
        if (first < p.head_dim_v) {
          *reinterpret_cast<uint4*>(row_out + first) = columns.vector;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (first + e < p.head_dim_v) {
            reinterpret_cast<std::uint16_t*>(row_out)[first + e] = columns.element[e];
          }
        }
      }
    }
  }
}

// A row's sum with the sink's share in it: out = factor O, lse = ln(2) lse_log2.
struct RowSum {
  float sum;
  float factor;
  float lse_log2;
};

// `sum` is of 2^(scores - exponent), which are 0 where nothing is visible.
__device__ __forceinline__ RowSum finish_sum(float exponent, float sum, const FwdParams& p,
                                             int head) {
  // Logits beyond f32 make their row NaN: an lse of +inf would call it empty.
  if (exponent == CUDART_INF_F) {
    sum = CUDART_NAN_F;
  }
  float factor = sum == 0.0F ? 0.0F : 1.0F / sum;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * 1.4426950408889634F;
    const float top = fmaxf(exponent, sink);
    if (top != -CUDART_INF_F) {
      const float weight = ptx::exp2_approx(exponent - top);
      sum = sum * weight + ptx::exp2_approx(sink - top);
      factor = factor == 0.0F ? 0.0F : weight / sum;
      exponent = top;
    }
  }
  return {sum, factor, sum == 0.0F ? -CUDART_INF_F : exponent + log2f(sum)};
}

// Logits, as exponents of 2, beyond which one rounding may move them by a few units.
inline constexpr float kHugeExponent = 0x1p26F;

// One warp computes one row of out and lse anew, key by key, of nothing but the keys that the row
// sees. It runs where the products of whole tiles go wrong: V of the other keys is multiplied by 0,
// and 0 * NaN is NaN; and logits of millions are off by more than the exponent of 2 can be when
// c s - c m is rounded once, where the difference s - m is exact.
template <int kColumns, bool kScoreFunction, class T>
__device__ __forceinline__ void recompute_row(const FwdParams& p, const FwdTile& tile,
                                              int row_in_tile) {
  constexpr int kColumnsOfLane = (kColumns + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Range keys = tile.band.kv_range(tile.m_begin + row_in_tile, tile.m_begin + row_in_tile + 1);
  const T* const q = static_cast<const T*>(p.q.data) + tile.q_offset + row_in_tile * p.q.row_stride;
  const float scale = kScoreFunction ? 1.0F : p.scale_log2;
  const auto score_of = [&](std::int64_t key) {
    const T* const k = static_cast<const T*>(p.k.data) + tile.k_offset + key * p.k.row_stride;
    float score = 0.0F;
#pragma unroll 1
    for (int c = 0; c < p.head_dim; ++c) {
      score = fmaf(static_cast<float>(q[c]), static_cast<float>(k[c]), score);
    }
    return kScoreFunction ? score_function(score, p) : score;
  };
  float maximum = -CUDART_INF_F;
#pragma unroll 1
  for (std::int64_t key = keys.begin + lane; key < keys.end; key += 32) {
    maximum = fmaxf(maximum, score_of(key));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, step));
  }
  float o[kColumnsOfLane] = {};
  float sum = 0.0F;
#pragma unroll 1
  for (std::int64_t first = keys.begin; first < keys.end; first += 32) {
    float probability = 0.0F;
    if (first + lane < keys.end) {
      probability = ptx::exp2_approx((score_of(first + lane) - maximum) * scale);
    }
    sum += probability;
    const int count = static_cast<int>(min(keys.end - first, std::int64_t{32}));
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const T* const v =
          static_cast<const T*>(p.v.data) + tile.v_offset + (first + j) * p.v.row_stride;
      const float weight = __shfl_sync(0xffffffffU, probability, j);
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        o[c] = lane + 32 * c < p.head_dim_v
                   ? fmaf(weight, static_cast<float>(v[lane + 32 * c]), o[c])
                   : 0.0F;
      }
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, step);
  }
  const RowSum row = finish_sum(maximum * scale, sum, p, tile.head);
  T* const out = static_cast<T*>(p.out.data) + tile.out_offset + row_in_tile * p.out.row_stride;
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    if (lane + 32 * c < p.head_dim_v) {
      out[lane + 32 * c] = static_cast<T>(o[c] * row.factor);
    }
  }
  if (p.lse && lane == 0) {
    static_cast<float*>(p.lse.data)[tile.lse_offset + row_in_tile * p.lse.row_stride] =
        row.lse_log2 * 0.6931471805599453F;
  }
}

// out = O / l, lse = ln(2) (c m + log2 l), with the sink's share in l and lse. `warp_row` is the
// warp's first row in the tile.
template <int kColumns, bool kScoreFunction, class T>
__device__ __forceinline__ void finish_rows(const float (&o)[kColumns / 2], const SoftmaxRows& rows,
                                            const FwdParams& p, const FwdTile& tile, int warp_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp_row + lane / 4;
  float factor[2];
  bool suspicious[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    const float exponent = rows.maximum[r] == -CUDART_INF_F
                               ? -CUDART_INF_F
                               : rows.maximum[r] * (kScoreFunction ? 1.0F : p.scale_log2);
    const RowSum row_sum = finish_sum(exponent, sum, p, tile.head);
    factor[r] = row_sum.factor;
    const bool exists = row + 8 * r < tile.num_rows;
    if (p.lse && lane % 4 == 0 && exists) {
      static_cast<float*>(p.lse.data)[tile.lse_offset + (row + 8 * r) * p.lse.row_stride] =
          row_sum.lse_log2 * 0.6931471805599453F;
    }
    float zero = 0.0F;
#pragma unroll
    for (int i = 2 * r; i < kColumns / 2; i += 4) {
      zero = fmaf(o[i], 0.0F, fmaf(o[i + 1], 0.0F, zero));
    }
    const bool is_nan = factor[r] != 0.0F && row_sum.sum == row_sum.sum && zero != 0.0F;
    const bool is_huge = fabsf(exponent) > kHugeExponent && fabsf(exponent) < CUDART_INF_F;
    suspicious[r] = exists && (is_nan || is_huge);
  }
  store_out<kColumns, T>(o, factor, p, static_cast<T*>(p.out.data) + tile.out_offset, row,
                         tile.num_rows);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    std::uint32_t lanes = __ballot_sync(0xffffffffU, suspicious[r]);
    while (lanes != 0) {
      const int quad = (__ffs(static_cast<int>(lanes)) - 1) / 4;
      lanes &= ~(0xfU << (4 * quad));
      __syncwarp();  // after what other lanes have stored of the row
      recompute_row<kColumns, kScoreFunction, T>(p, tile, warp_row + 8 * r + quad);
    }
  }
}

}  // namespace flashgrad::sm90
