// SPDX-License-Identifier: Apache-2.0
// Masks of S^T, and gradients from registers to the caller's tensors: what several of the
// backward's kernels do alike.
#pragma once

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// Puts `hidden`, for which (2) gives 0, where the band hides an element of S^T. `key` is the
// tile-relative key of the lane's first row, `query` the query of its first column.
__device__ __forceinline__ void mask_s(float (&s)[32], const KeyTile& tile, int key, int query,
                                       float hidden) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int distance = key + 8 * half - query;
    const int last = key + 8 * half < tile.keys_end ? distance - tile.lo : -1;
    const int first = distance - tile.hi;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c < first || 8 * j + c > last) {
          s[4 * j + 2 * half + c] = hidden;
        }
      }
    }
  }
}

// 64 rows of an output: those from `row` on of (batch, head), of which `count` exist.
struct OutputRows {
  const Tensor& out;
  int batch;
  std::int64_t row;
  int head;
  int count;
  int columns;
};

// The rows of dk or dv for the 64 keys of the tile from `key` on.
__device__ __forceinline__ OutputRows gradient_rows(const Tensor& out, const KeyTile& tile, int key,
                                                    std::int64_t columns) {
  return {out,          tile.batch_index,         tile.kv_row + key,
          tile.head_kv, tile.rows_to_write - key, static_cast<int>(columns)};
}

// Whole 16-byte pieces of 64 rows from rows `staging_row` on of a swizzled tile to 16-bit tensors:
// columns [kFirst, kColumns), as many as divide 1024 at a time, for then all pieces of a thread
// have the same column, and their rows the same swizzle.
template <int kColumns, int kFirst, int kTileRows>
__device__ __forceinline__ void copy_rows(const OutputRows& rows, std::uint32_t staging,
                                          int staging_row, int thread) {
  constexpr int kLeft = kColumns - kFirst;
  constexpr int kWidth = kLeft >= 128 ? 128 : kLeft >= 64 ? 64 : kLeft;
  constexpr int kPieces = kWidth / 8;   // of 16 bytes in a row
  constexpr int kStep = 128 / kPieces;  // rows
  static_assert(128 % kPieces == 0 && kStep % 8 == 0);
  const int first = thread / kPieces;
  const int column = kFirst + thread % kPieces * 8;
  const std::uint32_t from =
      staging + static_cast<std::uint32_t>(
                    tile::SwizzledTile<kTileRows>::offset(staging_row + first, column));
  std::uint16_t* const to = static_cast<std::uint16_t*>(rows.out.data) +
                            rows.out.offset(rows.batch, rows.row + first, rows.head) + column;
#pragma unroll
  for (int k = 0; k < 64 / kStep; ++k) {
    if (first + k * kStep < rows.count) {
      __stcs(reinterpret_cast<uint4*>(to + k * kStep * rows.out.row_stride),
             ptx::load_shared_uint4(from +
                                    static_cast<std::uint32_t>(k * kStep * tile::kBoxRowBytes)));
    }
  }
  if constexpr (kFirst + kWidth < kColumns) {
    copy_rows<kColumns, kFirst + kWidth, kTileRows>(rows, staging, staging_row, thread);
  }
}

// Writes `factor` times a warpgroup's 64 x kColumns product as f32, two columns at a time where
// that is possible.
template <int kColumns>
__device__ __forceinline__ void store_f32(const float (&d)[kColumns / 2], float factor,
                                          const OutputRows& rows, int thread) {
  const auto strides = static_cast<std::uintptr_t>(rows.out.row_stride | rows.out.head_stride |
                                                   rows.out.batch_stride);
  const bool pairs = rows.columns % 2 == 0 &&
                     (reinterpret_cast<std::uintptr_t>(rows.out.data) | 4 * strides) % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
    if (r >= rows.count) {
      continue;
    }
    float* const to = static_cast<float*>(rows.out.data) +
                      rows.out.offset(rows.batch, rows.row + r, rows.head) + thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int left = rows.columns - (8 * j + thread % 4 * 2);
      const float2 x = make_float2(d[4 * j + 2 * half] * factor, d[4 * j + 2 * half + 1] * factor);
      if (pairs) {
        if (left > 0) {
          *reinterpret_cast<float2*>(to + 8 * j) = x;
        }
      } else {
        if (left > 0) {
          to[8 * j] = x.x;
        }
        if (left > 1) {
          to[8 * j + 1] = x.y;
        }
      }
    }
  }
}

// Writes `factor` times a warpgroup's 64 x kColumns product, directly from registers if f32, else
// through rows `staging_row` on of the swizzled tile at `staging`, which only this warpgroup uses
// by then.
template <int kColumns, int kTileRows, class T>
__device__ __forceinline__ void store_rows(const float (&d)[kColumns / 2], float factor,
                                           const OutputRows& rows, std::uint32_t staging,
                                           int staging_row, int named_barrier, int thread) {
  using Tile = tile::SwizzledTile<kTileRows>;
  const int lane = thread % 32;
  const int warp = thread / 32;
  if (rows.out.dtype == DType::kF32) {
    store_f32<kColumns>(d, factor, rows, thread);
    return;
  }
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    const auto at = static_cast<std::uint32_t>(
        Tile::offset(staging_row + warp * 16 + lane % 16, 16 * k + lane / 16 * 8));
    ptx::store_matrix(staging + at, ptx::pack<T>(d[8 * k] * factor, d[8 * k + 1] * factor),
                      ptx::pack<T>(d[8 * k + 2] * factor, d[8 * k + 3] * factor),
                      ptx::pack<T>(d[8 * k + 4] * factor, d[8 * k + 5] * factor),
                      ptx::pack<T>(d[8 * k + 6] * factor, d[8 * k + 7] * factor));
  }
  ptx::named_barrier_sync<128>(named_barrier);
  const bool wide = has_aligned_rows(rows.out);
  auto* base = static_cast<std::uint16_t*>(rows.out.data);
  if (wide && rows.columns == kColumns) {
    copy_rows<kColumns, 0, kTileRows>(rows, staging, staging_row, thread);
    return;
  }
#pragma unroll 4
  for (int i = thread; i < 64 * (kColumns / 8); i += 128) {
    const int r = i / (kColumns / 8);
    const int column = i % (kColumns / 8) * 8;
    if (r < rows.count && column < rows.columns) {
      const uint4 loaded = ptx::load_shared_uint4(
          staging + static_cast<std::uint32_t>(Tile::offset(staging_row + r, column)));
      const std::uint32_t values[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      std::uint16_t* destination =
          base + rows.out.offset(rows.batch, rows.row + r, rows.head) + column;
      if (wide && column + 8 <= rows.columns) {
        *reinterpret_cast<uint4*>(destination) = loaded;
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          if (column + c < rows.columns) {
            destination[c] = static_cast<std::uint16_t>(values[c / 2] >> (c % 2 * 16));
          }
        }
      }
    }
  }
}

// Transposes a 4 x 4 matrix of which lane q of four holds row q: afterwards it holds column q.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&x)[4], int q) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const bool odd = (q & 1) != 0;
    const std::uint32_t got = __shfl_xor_sync(0xffffffffU, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool high = (q & 2) != 0;
    const std::uint32_t got = __shfl_xor_sync(0xffffffffU, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = got;
  }
}

// As store_rows, but through no shared memory, whatever the dtype: lanes exchange what makes 16
// bytes of a row, and nobody is waited for.
template <int kColumns, class T>
__device__ __forceinline__ void store_registers(const float (&d)[kColumns / 2], float factor,
                                                const OutputRows& rows, int thread) {
  if (rows.out.dtype == DType::kF32) {
    store_f32<kColumns>(d, factor, rows, thread);
    return;
  }
  const int lane = thread % 32;
  const int q = lane % 4;
  const int r = thread / 32 * 16 + lane / 4;
  const bool wide = has_aligned_rows(rows.out) && rows.columns % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = r + 8 * half < rows.count;
    const std::int64_t at = rows.out.offset(rows.batch, rows.row + r + 8 * half, rows.head);
    if (wide) {
      auto* const to = static_cast<std::uint16_t*>(rows.out.data) + at + 8 * q;
#pragma unroll
      for (int k = 0; k < kColumns / 32; ++k) {
        std::uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 4 * (4 * k + i) + 2 * half;
          x[i] = ptx::pack<T>(d[j] * factor, d[j + 1] * factor);
        }
        transpose_quad(x, q);
        if (exists && 32 * k + 8 * q < rows.columns) {
          __stcs(reinterpret_cast<uint4*>(to + 32 * k), make_uint4(x[0], x[1], x[2], x[3]));
        }
      }
    } else if (exists) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * j + 2 * q + c;
          if (column < rows.columns) {
            static_cast<T*>(rows.out.data)[at + column] =
                static_cast<T>(d[4 * j + 2 * half + c] * factor);
          }
        }
      }
    }
  }
}

// dk = dv = 0 for keys that no query sees.
__device__ __forceinline__ void store_zeros(const Tensor& out, const KeyTile& tile, int columns,
                                            int thread, int num_threads) {
  const auto total = static_cast<std::int64_t>(tile.rows_to_write) * columns;
  for (std::int64_t i = thread; i < total; i += num_threads) {
    const std::int64_t at =
        out.offset(tile.batch_index, tile.kv_row + i / columns, tile.head_kv) + i % columns;
    if (out.dtype == DType::kF32) {
      static_cast<float*>(out.data)[at] = 0;
    } else {
      static_cast<std::uint16_t*>(out.data)[at] = 0;
    }
  }
}

// The exponent of (2) in bwd.cuh and, with softcap, the factor of (4).
template <bool kSoftcap>
__device__ __forceinline__ float exponent(float s, float neg_lse_log2, float scale_log2,
                                          float scale_softcap, float* factor) {
  if constexpr (kSoftcap) {
    // tanh(a) = 1 - 2 / (1 + exp(2 a)). A masked logit is told by its value, since it would be
    // capped.
    constexpr float kTwoLog2E = 2.8853900817779268F;
    const float t =
        1.0F - __fdividef(2.0F, 1.0F + ptx::exp2_approx(s * (scale_softcap * kTwoLog2E)));
    *factor = 1.0F - t * t;
    s = s == -INFINITY ? s : t;
  }
  return fmaf(s, scale_log2, neg_lse_log2);
}

// 2^exponent.
template <bool kSoftcap>
__device__ __forceinline__ float exponentiate(float s, float neg_lse_log2, float scale_log2,
                                              float scale_softcap, float* factor) {
  return ptx::exp2_approx(exponent<kSoftcap>(s, neg_lse_log2, scale_log2, scale_softcap, factor));
}

// What mask_s puts where nothing is visible.
template <bool kSoftcap>
__device__ __forceinline__ float hidden_logit(float scale_log2) {
  return kSoftcap ? -INFINITY : copysignf(INFINITY, -scale_log2);
}

}  // namespace flashgrad::sm90
