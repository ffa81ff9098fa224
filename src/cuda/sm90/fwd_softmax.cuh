// SPDX-License-Identifier: Apache-2.0
// The forward's online softmax over one block of keys, on a consumer thread's part of S: columns 0,
// 1, 8, 9, 16, 17, ... counted from the thread's own first one, of rows g and g + 8 of its
// warp's 16.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/sm90/fwd_params.hpp"

namespace flashgrad::sm90 {

// 2 to the power of this is the most by which P may exceed 1 before O is rescaled
// (FlashAttention-4's idea). f16 holds up to 2^15.
inline constexpr float kRescaleThreshold = 8.0F;

// The running maximum (of scores as they are, not yet times c) and sum of a thread's two rows.
struct SoftmaxRows {
  float maximum[2];
  float sum[2];
};

// A raw score as an exponent of 2: softcap, or a scale that is not positive.
__device__ __forceinline__ float score_function(float x, const FwdParams& p) {
  const bool softcap = p.softcap_log2 != 0.0F;
  x *= softcap ? p.scale_softcap : p.scale_log2;
  // tanh x = 1 - 2 / (1 + e^2x): within 2e-7, where tanh.approx is within 5e-4, too much for lse.
  const float tanh_x = 1.0F - __fdividef(2.0F, 1.0F + ptx::exp2_approx(x * 2.885390081777927F));
  return softcap ? tanh_x * p.softcap_log2 : x;
}

// A bit for each of the thread's kColumns / 4 columns, set if it lies before `end`.
template <int kColumns>
__device__ __forceinline__ std::uint32_t columns_before(int end) {
  const int count = min(max(2 * (end >> 3) + min(end & 7, 2), 0), kColumns / 4);
  return ~__funnelshift_lc(0U, 0xffffffffU, static_cast<unsigned>(count));
}

// S becomes P, unnormalised, in place. `row_keys[0]` says which keys the thread's first row sees
// (begin and end), `row_keys[8]` the second; `first_key` is the key of its first column. Returns
// whether this warp must multiply O by `rescale`.
template <int kColumns, bool kScoreFunction, bool kMasked, class RowKeys>
__device__ __forceinline__ bool softmax_block(float (&s)[kColumns / 2], SoftmaxRows* rows,
                                              float (&rescale)[2], const RowKeys& row_keys,
                                              int first_key, const FwdParams& p) {
  const float scale = kScoreFunction ? 1.0F : p.scale_log2;
  if constexpr (kScoreFunction) {
#pragma unroll
    for (float& x : s) {
      x = score_function(x, p);
    }
  }
  if constexpr (kMasked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 keys = row_keys[8 * r];
      const std::uint32_t visible = columns_before<kColumns>(keys.y - first_key) &
                                    ~columns_before<kColumns>(keys.x - first_key);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = (visible & (1U << (2 * j + e))) != 0 ? x : -CUDART_INF_F;
        }
      }
    }
  }
  float maximum[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = rows->maximum[r];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      x = fmaxf(x, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    }
    x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
    maximum[r] = x;
    grown |= (x - rows->maximum[r]) * scale > kRescaleThreshold;
  }
  grown = __any_sync(0xffffffffU, grown);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = rows->maximum[r];
    const float now = grown ? maximum[r] : before;
    // Both may be -inf where nothing was visible yet, and +inf in rows that do not exist.
    rescale[r] = now == before ? 1.0F : ptx::exp2_approx((before - now) * scale);
    rows->maximum[r] = now;
    const float shift = now == -CUDART_INF_F ? 0.0F : now * scale;
    float sum = rows->sum[r] * rescale[r];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = ptx::exp2_approx(fmaf(x, scale, -shift));
        sum += x;
      }
    }
    rows->sum[r] = sum;
  }
  return grown;
}

}  // namespace flashgrad::sm90
