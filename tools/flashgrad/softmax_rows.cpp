// SPDX-License-Identifier: Apache-2.0
// Compiled with fast-math, so that the compiler vectorises the sums and exp: a baseline with a slow
// softmax would flatter flashgrad. Nothing here is infinite: what the mask hides is left out, not
// set to -inf.
#include "softmax_rows.hpp"

#include <algorithm>
#include <cmath>

#include "core/dtype.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FG_CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define FG_CLONES
#endif

namespace flashgrad::tool {
namespace {

inline float to_f32(float x) { return x; }
inline float to_f32(std::uint16_t x) { return bf16_to_f32(x); }
inline void from_f32(float x, float& y) { y = x; }
// Rounds to nearest even; there are no NaNs to keep.
inline void from_f32(float x, std::uint16_t& y) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  y = static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
}

template <class T>
[[gnu::always_inline]] inline void softmax(const T* s, T* p, std::int64_t size, std::int64_t begin,
                                           std::int64_t end, float scale) {
  float max = begin < end ? scale * to_f32(s[begin]) : 0;
  for (std::int64_t j = begin; j < end; ++j) {
    max = std::max(max, scale * to_f32(s[j]));
  }
  float sum = 0;
  for (std::int64_t j = begin; j < end; ++j) {
    sum += std::exp(scale * to_f32(s[j]) - max);
  }
  const float factor = begin < end ? 1 / sum : 0;
  std::fill(p, p + begin, T{0});
  for (std::int64_t j = begin; j < end; ++j) {
    from_f32(std::exp(scale * to_f32(s[j]) - max) * factor, p[j]);
  }
  std::fill(p + std::max(begin, end), p + size, T{0});
}

template <class T>
[[gnu::always_inline]] inline void softmax_backward(const T* p, T* dp, std::int64_t size,
                                                    float scale) {
  float delta = 0;
  for (std::int64_t j = 0; j < size; ++j) {
    delta += to_f32(p[j]) * to_f32(dp[j]);
  }
  for (std::int64_t j = 0; j < size; ++j) {
    from_f32(scale * to_f32(p[j]) * (to_f32(dp[j]) - delta), dp[j]);
  }
}

template <class T>
[[gnu::always_inline]] inline void sum(const T* rows, std::int64_t num_rows, std::int64_t size,
                                       T* result) {
  for (std::int64_t c = 0; c < size; ++c) {
    float total = 0;
    for (std::int64_t r = 0; r < num_rows; ++r) {
      total += to_f32(rows[r * size + c]);
    }
    from_f32(total, result[c]);
  }
}

}  // namespace

FG_CLONES void softmax_row(const float* s, float* p, std::int64_t size, std::int64_t begin,
                           std::int64_t end, float scale) {
  softmax(s, p, size, begin, end, scale);
}

FG_CLONES void softmax_row(const std::uint16_t* s, std::uint16_t* p, std::int64_t size,
                           std::int64_t begin, std::int64_t end, float scale) {
  softmax(s, p, size, begin, end, scale);
}

FG_CLONES void softmax_backward_row(const float* p, float* dp, std::int64_t size, float scale) {
  softmax_backward(p, dp, size, scale);
}

FG_CLONES void softmax_backward_row(const std::uint16_t* p, std::uint16_t* dp, std::int64_t size,
                                    float scale) {
  softmax_backward(p, dp, size, scale);
}

FG_CLONES void sum_rows(const float* rows, std::int64_t num_rows, std::int64_t size, float* total) {
  sum(rows, num_rows, size, total);
}

FG_CLONES void sum_rows(const std::uint16_t* rows, std::int64_t num_rows, std::int64_t size,
                        std::uint16_t* total) {
  sum(rows, num_rows, size, total);
}

}  // namespace flashgrad::tool
