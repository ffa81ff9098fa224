// SPDX-License-Identifier: Apache-2.0
// AVX2 with FMA and F16C. The members: isa/common.hpp.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/dtype.hpp"
#include "cpu/isa/common.hpp"

namespace flashgrad::cpu {
namespace {

struct Avx2 {
  using Vec = __m256;
  using Mask = __m256;
  using Unit = float;
  using UnitVec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kPair = 1;
  // 8 accumulators of 16 registers.
  static constexpr int kRows = 4;
  static constexpr int kVecs = 2;

  FG_INLINE Vec zero() { return _mm256_setzero_ps(); }
  FG_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
  FG_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  FG_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  FG_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  FG_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  FG_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  FG_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  FG_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  FG_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(sign_bit(), a); }
  FG_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    return _mm256_or_ps(_mm256_andnot_ps(sign_bit(), magnitude), _mm256_and_ps(sign_bit(), sign));
  }
  FG_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  // The second operand is what min returns when one is NaN.
  FG_INLINE Vec min_zero(Vec x) { return _mm256_min_ps(_mm256_setzero_ps(), x); }
  FG_INLINE Vec round(Vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  FG_INLINE Vec fraction(Vec x, Vec n) {
    return _mm256_blendv_ps(_mm256_sub_ps(x, n), _mm256_setzero_ps(),
                            _mm256_cmp_ps(abs(x), infinity(), _CMP_EQ_OQ));
  }
  // The exponent bits of 2^n. Below the normal range the answer is 0; a NaN n leaves p, which is
  // then NaN too.
  FG_INLINE Vec scale(Vec p, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    const __m256 below = _mm256_cmp_ps(n, _mm256_set1_ps(-126.F), _CMP_LT_OQ);
    const __m256 above = _mm256_cmp_ps(n, _mm256_set1_ps(127.F), _CMP_GT_OQ);
    return _mm256_mul_ps(p, _mm256_blendv_ps(_mm256_andnot_ps(below, power), infinity(), above));
  }

  FG_INLINE Mask lane_mask(std::int64_t begin, std::int64_t end) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i below_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(clamp_lane(end)), lanes);
    const __m256i below_begin = _mm256_cmpgt_epi32(_mm256_set1_epi32(clamp_lane(begin)), lanes);
    return _mm256_castsi256_ps(_mm256_andnot_si256(below_begin, below_end));
  }
  FG_INLINE Mask not_equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
  FG_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  FG_INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  FG_INLINE Vec keep(Mask m, Vec x) { return _mm256_and_ps(m, x); }
  FG_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }
  FG_INLINE bool any_nan(Vec x) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0;
  }
  FG_INLINE float reduce_add(Vec x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  template <DType kType>
  FG_INLINE Vec load_as(const void* p) {
    if constexpr (kType == DType::kF32) {
      return _mm256_loadu_ps(static_cast<const float*>(p));
    } else {
      const __m128i half = _mm_loadu_si128(static_cast<const __m128i*>(p));
      if constexpr (kType == DType::kBF16) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
      } else {
        return _mm256_cvtph_ps(half);
      }
    }
  }
  template <DType kType>
  FG_INLINE void store_as(void* p, Vec v) {
    if constexpr (kType == DType::kF32) {
      _mm256_storeu_ps(static_cast<float*>(p), v);
    } else if constexpr (kType == DType::kBF16) {
      const __m256i u = _mm256_castps_si256(v);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
      const __m256i bits = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
      _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    } else {
      _mm_storeu_si128(static_cast<__m128i*>(p),
                       _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }

  FG_INLINE UnitVec load_units(const Unit* p) { return _mm256_loadu_ps(p); }
  FG_INLINE void store_units(Unit* p, UnitVec v) { _mm256_storeu_ps(p, v); }
  FG_INLINE UnitVec broadcast(Unit u) { return _mm256_set1_ps(u); }
  FG_INLINE Vec multiply_add(Vec acc, UnitVec a, UnitVec b) { return _mm256_fmadd_ps(a, b, acc); }

  // 8 x 8: pairs of rows, pairs of pairs, then 128-bit halves.
  FG_INLINE void transpose(const Unit* src, std::ptrdiff_t lds, Unit* dst, std::ptrdiff_t ldd) {
    __m256 r[8];
    __m256 t[8];
    FG_UNROLL
    for (int i = 0; i < 8; ++i) {
      r[i] = _mm256_loadu_ps(src + i * lds);
    }
    FG_UNROLL
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    FG_UNROLL
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(dst + i * ldd, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
      _mm256_storeu_ps(dst + (i + 4) * ldd, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
  }

 private:
  FG_INLINE __m256 sign_bit() { return _mm256_set1_ps(-0.F); }
  FG_INLINE __m256 infinity() { return _mm256_set1_ps(std::numeric_limits<float>::infinity()); }
  FG_INLINE int clamp_lane(std::int64_t n) {
    return static_cast<int>(n < 0 ? 0 : n > kLanes ? kLanes : n);
  }
};

}  // namespace
}  // namespace flashgrad::cpu
