// SPDX-License-Identifier: Apache-2.0
// The end of a forward tile: out and lse of a warp's 16 rows. What can be copied as it is goes
// through shared memory and the copy engine, whose work the next tile hides; rows at the end of a
// sequence, tensors that it can't address, and rows that are computed anew are written directly.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/fwd_shared.cuh"
#include "cuda/sm90/fwd_softmax.cuh"
#include "cuda/sm90/fwd_tile.cuh"

namespace flashgrad::sm90 {

// O times `factor`, rounded: pairs[2 j + r] holds the thread's two columns of group j of 8, of its
// row r. Says whether what the thread holds of its two rows is finite.
template <int kColumns, class T>
__device__ __forceinline__ void pack_out(float (&o)[kColumns / 2], const float (&factor)[2],
                                         std::uint32_t (&pairs)[kColumns / 4],
                                         bool (&is_finite)[2]) {
  // A row that sees nothing is 0, whatever V holds.
  if (__any_sync(0xffffffffU, factor[0] == 0.0F || factor[1] == 0.0F)) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      o[i] = factor[i / 2 % 2] == 0.0F ? 0.0F : o[i];
    }
  }
  std::uint32_t zero[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    pairs[i] = ptx::pack<T>(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2]);
    zero[i % 2] = ptx::fma_pairs<T>(pairs[i], 0, zero[i % 2]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // 0 x is +0 or -0 of every finite x.
    is_finite[r] = (zero[r] & 0x7fff7fffU) == 0;
  }
}

// Writes the rows of a warp that exist. Lanes 2 i and 2 i + 1 of a quad first exchange half of
// their columns, so that each holds 4 neighbours and a quad writes 32 bytes of a row.
template <int kColumns, class T>
__device__ __forceinline__ void store_out(const std::uint32_t (&pairs)[kColumns / 4],
                                          const FwdParams& p, T* out, int row, int num_rows) {
  const int lane_of_quad = ptx::thread_index() % 4;
  const bool odd = lane_of_quad % 2 != 0;
  const int first_column = lane_of_quad % 2 * 8 + lane_of_quad / 2 * 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // The thread's columns, in order: first_column + 16 c to first_column + 16 c + 3 for each c.
    uint2 columns[kColumns / 16];
#pragma unroll
    for (int c = 0; c < kColumns / 16; ++c) {
      const std::uint32_t even_group = pairs[4 * c + r];
      const std::uint32_t odd_group = pairs[4 * c + 2 + r];
      const std::uint32_t received = __shfl_xor_sync(0xffffffffU, odd ? even_group : odd_group, 1);
      columns[c] = odd ? make_uint2(received, odd_group) : make_uint2(even_group, received);
    }
    if (row + 8 * r >= num_rows) {
      continue;
    }
    T* const row_out = out + (row + 8 * r) * p.out.row_stride + first_column;
    const int count = p.head_dim_v - first_column;
    if (p.out_vectors) {
#pragma unroll
      for (int c = 0; c < kColumns / 16; ++c) {
        if (16 * c < count) {
          *reinterpret_cast<uint2*>(row_out + 16 * c) = columns[c];
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns / 16; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (16 * c + e < count) {
            const std::uint32_t pair = e < 2 ? columns[c].x : columns[c].y;
            reinterpret_cast<std::uint16_t*>(row_out)[16 * c + e] =
                static_cast<std::uint16_t>(pair >> (e % 2 * 16));
          }
        }
      }
    }
  }
}

// Writes the 16 rows of a warp by the copy engine, from rows [first_row, first_row + 16) of
// `staged`, a tile of (kRows, kColumns), which belong to the warp.
template <int kColumns, int kRows>
__device__ __forceinline__ void copy_out(const std::uint32_t (&pairs)[kColumns / 4],
                                         std::uint32_t staged, int first_row,
                                         const CUtensorMap& map, int row, int head, int batch) {
  using Tile = tile::SwizzledTile<kRows>;
  const int lane = ptx::thread_index() % 32;
  staged += first_row * tile::kBoxRowBytes;
  if (lane == 0) {
    ptx::bulk_wait_read<0>();  // for the copy of the tile before
  }
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kColumns / 16; ++c) {
    ptx::store_matrix(
        staged + static_cast<std::uint32_t>(Tile::offset(lane % 16, 16 * c + lane / 16 * 8)),
        pairs[4 * c], pairs[4 * c + 1], pairs[4 * c + 2], pairs[4 * c + 3]);
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int box = 0; box < FwdConfig::boxes(kColumns); ++box) {
      ptx::tensor_store(&map, staged + box * Tile::kBoxBytes, box * tile::kBoxColumns, row, head,
                        batch);
    }
    ptx::bulk_commit();
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
  float factor = sum == 0.0F ? 0.0F : ptx::reciprocal_approx(sum);
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * 1.4426950408889634F;
    const float top = fmaxf(exponent, sink);
    if (top != -CUDART_INF_F) {
      const float weight = ptx::exp2_approx(exponent - top);
      sum = sum * weight + ptx::exp2_approx(sink - top);
      factor = factor == 0.0F ? 0.0F : weight * ptx::reciprocal_approx(sum);
      exponent = top;
    }
  }
  return {sum, factor, sum == 0.0F ? -CUDART_INF_F : exponent + ptx::log2_approx(sum)};
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
  const T* const q =
      static_cast<const T*>(p.q.data) + p.q.offset(tile.batch, tile.q_row + row_in_tile, tile.head);
  const float scale = kScoreFunction ? 1.0F : p.scale_log2;
  const auto score_of = [&](std::int64_t key) {
    const T* const k =
        static_cast<const T*>(p.k.data) + p.k.offset(tile.batch, tile.kv_row + key, tile.head_kv);
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
      const T* const v = static_cast<const T*>(p.v.data) +
                         p.v.offset(tile.batch, tile.kv_row + first + j, tile.head_kv);
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

// For finish_rows(): all rows are written directly.
struct NoCopy {
  static constexpr bool kCopies = false;
};

// For finish_rows(): rows of a warp go through copy_out() where they all exist.
template <FwdVariant kVariant>
struct CopyOfRows {
  static constexpr bool kCopies = fwd_config(kVariant).stages_out();
  const FwdShared<kVariant>& shared;
  const FwdMaps& maps;

  template <int kColumns>
  __device__ __forceinline__ void copy(const std::uint32_t (&pairs)[kColumns / 4],
                                       const FwdTile& tile, int warp) const {
    copy_out<kColumns, 16>(pairs, shared.out(warp), 0, maps.out, tile.q_row + 16 * warp, tile.head,
                           tile.batch);
  }
};

// out = O / l, lse = ln(2) (c m + log2 l), with the sink's share in l and lse. `warp` counts the
// consumers' warps; each has 16 rows of the tile, which `copier` writes if it can.
template <int kColumns, bool kScoreFunction, class T, class Copier>
__device__ __forceinline__ void finish_rows(const FwdParams& p, const FwdTile& tile,
                                            const SoftmaxRows& rows, float (&o)[kColumns / 2],
                                            int warp, const Copier& copier) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = 16 * warp + lane / 4;
  float factor[2];
  bool is_nan[2];  // of the sum: no other computation would help
  bool is_huge[2];
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
    is_nan[r] = row_sum.sum != row_sum.sum;
    is_huge[r] = fabsf(exponent) > kHugeExponent && fabsf(exponent) < CUDART_INF_F;
    if (p.lse && lane % 4 == 0 && row + 8 * r < tile.num_rows) {
      static_cast<float*>(p.lse.data)[tile.lse_offset + (row + 8 * r) * p.lse.row_stride] =
          row_sum.lse_log2 * 0.6931471805599453F;
    }
  }
  std::uint32_t pairs[kColumns / 4];
  bool is_finite[2];
  pack_out<kColumns, T>(o, factor, pairs, is_finite);
  bool suspicious[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    suspicious[r] = row + 8 * r < tile.num_rows && (is_huge[r] || (!is_finite[r] && !is_nan[r]));
  }
  const bool recomputes = __any_sync(0xffffffffU, suspicious[0] || suspicious[1]);
  // What is recomputed is written after the rest of its rows, and nobody waits for a copy.
  if constexpr (Copier::kCopies) {
    if ((p.mapped & kFwdMapOut) != 0 && 16 * (warp + 1) <= tile.num_rows && !recomputes) {
      copier.template copy<kColumns>(pairs, tile, warp);
      return;
    }
  }
  store_out<kColumns, T>(pairs, p, static_cast<T*>(p.out.data) + tile.out_offset, row,
                         tile.num_rows);
  if (!recomputes) {
    return;
  }
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    std::uint32_t lanes = __ballot_sync(0xffffffffU, r == 0 ? suspicious[0] : suspicious[1]);
    while (lanes != 0) {
      const int quad = (__ffs(static_cast<int>(lanes)) - 1) / 4;
      lanes &= ~(0xfU << (4 * quad));
      __syncwarp();  // after what other lanes have stored of the row
      recompute_row<kColumns, kScoreFunction, T>(p, tile, 16 * warp + 8 * r + quad);
    }
  }
}

}  // namespace flashgrad::sm90
