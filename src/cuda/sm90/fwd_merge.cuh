// SPDX-License-Identifier: Apache-2.0
// Adds the parts of the rows whose keys were cut (fwd_split.hpp), with c = scale * log2(e):
//
//   m = max m_i, O = sum_i exp2(c (m_i - m)) O_i, l likewise, out = O / l, lse = ln(2) (c m + log2
//   l)
//
// over the row's chunks i. Each fourth chunk goes to one of four sums, which are added at the end:
// so one warp or four give the same bits, and the host may choose.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/fwd_split.cuh"
#include "cuda/sm90/fwd_store.cuh"
#include "cuda/sm90/fwd_tile.cuh"

namespace flashgrad::sm90 {

struct FwdMergeParams {
  FwdParams base;
  FwdParts parts;
  std::int32_t block_n;          // of the kernel that made the parts
  std::uint32_t num_rows;        // of all spans and heads, as many as a sequence has at most
  const std::uint32_t* any_cut;  // as in FwdSplitParams
};

inline constexpr int kFwdMergeThreads = 128;
inline constexpr int kFwdMergeCtas = 5;  // on a multiprocessor
inline constexpr int kFwdMergeSums = 4;

// What a row's parts give together.
struct MergedRow {
  float exponent;  // c m
  float sum;       // l
};

// By a warp: writes the weight of each of a row's chunks.
template <bool kScoreFunction>
__device__ __forceinline__ MergedRow weigh_parts(const FwdParams& p, const float2* statistics,
                                                 std::int64_t next_chunk, int num_chunks,
                                                 float* weights, int lane) {
  constexpr int kOfLane = kMaxChunks / 32;
  const float scale = kScoreFunction ? 1.0F : p.scale_log2;
  float2 own[kOfLane];
  float maximum = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int chunk = 32 * i + lane;
    own[i] = chunk < num_chunks ? statistics[chunk * next_chunk] : make_float2(-CUDART_INF_F, 0.0F);
    maximum = fmaxf(maximum, own[i].x);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, step));
  }
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    // A chunk of which nothing is visible has l = 0; where all logits are NaN, l is NaN and m not.
    const float weight = own[i].y == 0.0F      ? 0.0F
                         : own[i].x == maximum ? 1.0F
                                               : ptx::exp2_approx((own[i].x - maximum) * scale);
    sum += own[i].y == 0.0F ? 0.0F : weight * own[i].y;
    weights[32 * i + lane] = weight;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, step);
  }
  __syncwarp();
  return {maximum == -CUDART_INF_F ? -CUDART_INF_F : maximum * scale, sum};
}

// By a warp: sums [first, first + kSums) of four columns of a row, of which the lane's part of the
// first chunk is `o`.
template <int kSums>
__device__ __forceinline__ void add_parts(float4 (&sums)[kSums], const float* weights,
                                          const float4* o, std::int64_t next_chunk, int num_chunks,
                                          int first) {
#pragma unroll
  for (float4& sum : sums) {
    sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  }
  int chunk = first;
#pragma unroll(8 / kSums)
  do {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const float weight = chunk + s < num_chunks ? weights[chunk + s] : 0.0F;
      // What has no weight may hold NaN.
      if (weight != 0.0F) {
        const float4 x = o[(chunk + s) * next_chunk];
        sums[s].x = fmaf(weight, x.x, sums[s].x);
        sums[s].y = fmaf(weight, x.y, sums[s].y);
        sums[s].z = fmaf(weight, x.z, sums[s].z);
        sums[s].w = fmaf(weight, x.w, sums[s].w);
      }
    }
    chunk += kFwdMergeSums;
  } while (chunk < num_chunks);
}

// By a thread: four columns of out. Returns whether they are finite.
template <class T>
__device__ __forceinline__ bool store_merged(const FwdParams& p, T* out, int column, int columns,
                                             const float4 (&sums)[kFwdMergeSums], float factor) {
  float values[4] = {};
#pragma unroll
  for (const float4& x : sums) {
    values[0] += x.x;
    values[1] += x.y;
    values[2] += x.z;
    values[3] += x.w;
  }
  bool is_finite = true;
  T rounded[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    rounded[e] = static_cast<T>(factor == 0.0F ? 0.0F : values[e] * factor);
    is_finite = is_finite && isfinite(static_cast<float>(rounded[e]));
  }
  if (p.out_vectors) {
    if (column < columns) {
      *reinterpret_cast<uint2*>(out + column) = *reinterpret_cast<const uint2*>(rounded);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + e < columns) {
        out[column + e] = rounded[e];
      }
    }
  }
  return is_finite;
}

// A warp a row, or (kWarps 4) a CTA.
//
// While the parts are still being made, a first pass over a row of no chunks writes nothing: it
// brings the code, which takes longer than to run it.
template <int kWarps, bool kScoreFunction, class T>
__global__ void __launch_bounds__(kFwdMergeThreads, kFwdMergeCtas)
    fwd_merge(const __grid_constant__ FwdMergeParams params) {
  static_assert(kWarps == 1 || 32 * kWarps == kFwdMergeThreads);
  constexpr int kSums = kFwdMergeSums / kWarps;
  constexpr int kTeams = kFwdMergeThreads / 32 / kWarps;
  __shared__ float all_weights[kFwdMergeThreads / 32][kMaxChunks];
  __shared__ float4 shared_sums[kWarps == 1 ? 1 : kFwdMergeSums][32];
  const FwdParams& p = params.base;
  const FwdParts& parts = params.parts;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const weights = all_weights[warp];
  const bool is_empty = params.any_cut != nullptr && ptx::load_relaxed(params.any_cut) == 0;
  const auto max_rows = static_cast<std::uint32_t>(parts.slots.rows);
  bool is_first_pass = true;
  std::uint32_t i = blockIdx.x * kTeams + (kWarps == 1 ? warp : 0);
#pragma unroll 1
  while (i < params.num_rows && !is_empty) {
    const auto row = static_cast<int>(i % max_rows);
    const std::uint32_t unit = i / max_rows;
    const auto head = static_cast<int>(unit % p.heads_q);
    const std::uint32_t span = unit / p.heads_q;
    const SequenceSpan s = sequence_span(p.sequences, span);
    int num_chunks = key_chunks(s.band, params.block_n).count;
    int columns = p.head_dim_v;
    if (is_first_pass) {
      num_chunks = 0;
      columns = 0;
    } else {
      ptx::grid_dependency_wait();
      i += gridDim.x * kTeams;
      if (row >= s.band.seqlen_q || s.band.seqlen_q > parts.slots.rows || num_chunks == 1) {
        continue;
      }
    }
    const std::int64_t at = parts.at(p.sequences, span, s, p.heads_q, head, row, 0);
    const std::int64_t next_chunk = std::int64_t{p.heads_q} * parts.slots.rows;
    const MergedRow merged = weigh_parts<kScoreFunction>(p, parts.statistics + at, next_chunk,
                                                         num_chunks, weights, lane);
    const RowSum sum = finish_sum(merged.exponent, merged.sum, p, head);
    T* const out = static_cast<T*>(p.out.data) + p.out.offset(s.batch_index, s.q.begin + row, head);
    bool is_finite = true;
#pragma unroll 1
    for (int first = 0; first < parts.columns; first += 128) {
      const int column = first + 4 * lane;
      // Lanes behind the last column read the first ones and write nothing.
      const auto* const o = reinterpret_cast<const float4*>(parts.o + at * parts.columns +
                                                            (column < parts.columns ? column : 0));
      float4 sums[kSums];
      add_parts<kSums>(sums, weights, o, next_chunk * (parts.columns / 4), num_chunks,
                       kWarps == 1 ? 0 : warp);
      if constexpr (kWarps == 1) {
        is_finite &= store_merged<T>(p, out, column, columns, sums, sum.factor);
      } else {
        shared_sums[warp][lane] = sums[0];
        __syncthreads();
        if (warp == 0) {
          float4 all[kFwdMergeSums];
#pragma unroll
          for (int n = 0; n < kFwdMergeSums; ++n) {
            all[n] = shared_sums[n][lane];
          }
          is_finite &= store_merged<T>(p, out, column, columns, all, sum.factor);
        }
        __syncthreads();
      }
    }
    if (is_first_pass) {
      is_first_pass = false;
      continue;
    }
    if (kWarps > 1 && warp != 0) {
      continue;
    }
    if (p.lse && lane == 0) {
      static_cast<float*>(p.lse.data)[p.lse.offset(s.batch_index, s.q.begin + row, head)] =
          sum.lse_log2 * 0.6931471805599453F;
    }
    const bool is_nan = sum.sum != sum.sum;
    const bool is_huge =
        fabsf(merged.exponent) > kHugeExponent && fabsf(merged.exponent) < CUDART_INF_F;
    if (__any_sync(0xffffffffU, (!is_finite && !is_nan) || is_huge)) {
      FwdTile tile;
      place_tile(p, s, {0, static_cast<std::int32_t>(s.band.seqlen_q)}, head, &tile);
      __syncwarp();  // after what other lanes have stored of the row
      recompute_row<kMaxHeadDim, kScoreFunction, T>(p, tile, row);
    }
  }
  ptx::grid_dependency_wait();
}

}  // namespace flashgrad::sm90
