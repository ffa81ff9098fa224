// SPDX-License-Identifier: Apache-2.0
// Rows of the caller's tensors, read and written in any dtype and stride: the only code that
// touches them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/problem.hpp"
#include "cpu/isa/common.hpp"

namespace flashgrad::cpu {

// Calls f.template operator()<DType>() with the dtype as a constant.
template <class F>
FG_INLINE auto with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kF32) {
    return f.template operator()<DType::kF32>();
  }
  if (dtype == DType::kBF16) {
    return f.template operator()<DType::kBF16>();
  }
  return f.template operator()<DType::kF16>();
}

FG_INLINE const char* row_at(const Tensor& t, std::int64_t offset) {
  return static_cast<const char*>(t.data) + offset * (t.dtype == DType::kF32 ? 4 : 2);
}
FG_INLINE char* mutable_row_at(const Tensor& t, std::int64_t offset) {
  return static_cast<char*>(t.data) + offset * (t.dtype == DType::kF32 ? 4 : 2);
}

// Asks for the row's cache lines. Rows of the caller's tensors often lie a page apart, where
// hardware prefetchers do not follow. kWrite: the row will be written.
template <bool kWrite = false>
FG_INLINE void prefetch_row(const Tensor& t, std::int64_t offset, std::int64_t n) {
  const char* row = row_at(t, offset);
  const std::int64_t bytes = n * (t.dtype == DType::kF32 ? 4 : 2);
  for (std::int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(row + at, kWrite ? 1 : 0);
  }
}

// How many rows ahead of the one at work rows are prefetched.
inline constexpr std::int64_t kPrefetchRows = 8;

// The pointer to kCount elements of kBytes at elements [c, c + kCount) of a row of n: in place, or
// gathered into `buffer` with zeros past the row's end.
template <int kCount, int kBytes>
FG_INLINE const char* contiguous(const char* row, std::int64_t dim_stride, std::int64_t c,
                                 std::int64_t n, char (&buffer)[64]) {
  static_assert(kCount * kBytes <= 64);
  if (dim_stride == 1 && c + kCount <= n) {
    return row + c * kBytes;
  }
  std::memset(buffer, 0, sizeof buffer);
  for (std::int64_t i = 0; i < kCount && c + i < n; ++i) {
    std::memcpy(buffer + i * kBytes, row + (c + i) * dim_stride * kBytes, kBytes);
  }
  return buffer;
}

// Elements [c, c + kLanes) of a row of n as floats, 0 past its end.
template <class Isa, DType kType>
FG_INLINE typename Isa::Vec load_chunk(const char* row, std::int64_t dim_stride, std::int64_t c,
                                       std::int64_t n) {
  alignas(64) char buffer[64];
  return Isa::template load_as<kType>(
      contiguous < Isa::kLanes, kType == DType::kF32 ? 4 : 2 > (row, dim_stride, c, n, buffer));
}

// dst (units, a multiple of kLanes) = the n elements of the row at `offset`, as units along the
// row, then zeros. Returns whether all are finite. Units of bf16 pairs take bf16 tensors only.
template <class Isa>
[[gnu::noinline]] static bool stage_row(const Tensor& t, std::int64_t offset, std::int64_t n,
                                        typename Isa::Unit* dst, std::int64_t units) {
  const char* row = row_at(t, offset);
  if constexpr (Isa::kPair == 2) {
    bool bad = false;
    for (std::int64_t u = 0; u < units; u += Isa::kLanes) {
      alignas(64) char buffer[64];
      const typename Isa::UnitVec v =
          Isa::load_bytes(contiguous<2 * Isa::kLanes, 2>(row, t.dim_stride, 2 * u, n, buffer));
      bad |= Isa::any_not_finite(v);
      Isa::store_units(dst + u, v);
    }
    return !bad;
  } else {
    return with_dtype(
        t.dtype, [&]<DType kType>() __attribute__((always_inline)) {
          typename Isa::Vec marks = Isa::zero();  // x * 0 is NaN for an infinity or NaN
          for (std::int64_t c = 0; c < units; c += Isa::kLanes) {
            const typename Isa::Vec x = load_chunk<Isa, kType>(row, t.dim_stride, c, n);
            marks = Isa::fma(x, Isa::zero(), marks);
            Isa::store(dst + c, x);
          }
          return !Isa::any_nan(marks);
        });
  }
}

// <a, b> of two rows of n elements, in f32, always added in the same order.
template <class Isa>
[[gnu::noinline]] static float dot_rows(const Tensor& a, std::int64_t offset_a, const Tensor& b,
                                        std::int64_t offset_b, std::int64_t n) {
  const char* row_a = row_at(a, offset_a);
  const char* row_b = row_at(b, offset_b);
  return with_dtype(
      a.dtype, [&]<DType kType>() __attribute__((always_inline)) {
        typename Isa::Vec sum = Isa::zero();
        for (std::int64_t c = 0; c < n; c += Isa::kLanes) {
          sum = Isa::fma(load_chunk<Isa, kType>(row_a, a.dim_stride, c, n),
                         load_chunk<Isa, kType>(row_b, b.dim_stride, c, n), sum);
        }
        return Isa::reduce_add(sum);
      });
}

// The n elements of the row at `offset` = scale * src, rounded once. src is readable up to a
// multiple of kLanes.
template <class Isa>
[[gnu::noinline]] static void write_row(const float* src, float scale, const Tensor& t,
                                        std::int64_t offset, std::int64_t n) {
  char* row = mutable_row_at(t, offset);
  with_dtype(
      t.dtype, [&]<DType kType>() __attribute__((always_inline)) {
        constexpr std::int64_t kBytes = kType == DType::kF32 ? 4 : 2;
        const typename Isa::Vec factor = Isa::set1(scale);
        std::int64_t c = 0;
        for (; c + Isa::kLanes <= n; c += Isa::kLanes) {
          Isa::template store_as<kType>(row + c * kBytes, Isa::mul(Isa::load(src + c), factor));
        }
        if (c < n) {
          alignas(64) char buffer[64];
          Isa::template store_as<kType>(buffer, Isa::mul(Isa::load(src + c), factor));
          std::memcpy(row + c * kBytes, buffer, static_cast<std::size_t>((n - c) * kBytes));
        }
      });
}

// Rows [begin, end) of one batch entry and head = 0.
FG_INLINE void zero_rows(const Tensor& t, std::int64_t batch_index, std::int64_t begin,
                         std::int64_t end, std::int64_t head, std::int64_t n) {
  const std::size_t bytes = static_cast<std::size_t>(n) * (t.dtype == DType::kF32 ? 4 : 2);
  for (std::int64_t i = begin; i < end; ++i) {
    std::memset(mutable_row_at(t, t.offset(batch_index, i, head)), 0, bytes);
  }
}

}  // namespace flashgrad::cpu
