// SPDX-License-Identifier: Apache-2.0
// AVX-512 (F, BW, DQ, VL) with units of one float, and AVX-512-BF16 with units of two bf16. The
// members: isa/common.hpp.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/dtype.hpp"
#include "cpu/isa/common.hpp"

namespace flashgrad::cpu {
namespace {

struct Avx512Base {
  using Vec = __m512;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;
  // 16 accumulators leave the registers that exp2 needs; 24 do not, and were 4 to 9 % slower on
  // Zen 4.
  static constexpr int kRows = 4;
  static constexpr int kVecs = 4;

  FG_INLINE Vec zero() { return _mm512_setzero_ps(); }
  FG_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
  FG_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  FG_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  FG_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  FG_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  FG_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  FG_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  FG_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  FG_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
  FG_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    const __m512i bit = _mm512_set1_epi32(std::numeric_limits<int>::min());
    // 0xca: bit ? sign : magnitude.
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign),
                                                         _mm512_castps_si512(magnitude), 0xca));
  }
  FG_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  // The second operand is what min returns when one is NaN.
  FG_INLINE Vec min_zero(Vec x) { return _mm512_min_ps(_mm512_setzero_ps(), x); }
  FG_INLINE Vec round(Vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  FG_INLINE Vec fraction(Vec x, Vec /*n*/) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  FG_INLINE Vec scale(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }

  FG_INLINE Mask lane_mask(std::int64_t begin, std::int64_t end) {
    return static_cast<Mask>(first_lanes(end) & ~first_lanes(begin));
  }
  FG_INLINE Mask not_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
  FG_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  FG_INLINE Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  FG_INLINE Vec keep(Mask m, Vec x) { return _mm512_maskz_mov_ps(m, x); }
  FG_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
  FG_INLINE bool any_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
  FG_INLINE float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }

  template <DType kType>
  FG_INLINE Vec load_as(const void* p) {
    if constexpr (kType == DType::kF32) {
      return _mm512_loadu_ps(p);
    } else {
      const __m256i half = _mm256_loadu_si256(static_cast<const __m256i*>(p));
      if constexpr (kType == DType::kBF16) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      } else {
        return _mm512_cvtph_ps(half);
      }
    }
  }
  template <DType kType>
  FG_INLINE void store_as(void* p, Vec v) {
    if constexpr (kType == DType::kF32) {
      _mm512_storeu_ps(p, v);
    } else if constexpr (kType == DType::kBF16) {
      const __m512i u = _mm512_castps_si512(v);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
      const __m512i bits =
          _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
      _mm256_storeu_si256(static_cast<__m256i*>(p),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    } else {
      _mm256_storeu_si256(static_cast<__m256i*>(p),
                          _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }

  // 16 x 16 transpose of 32-bit units: pairs of rows, pairs of pairs, then 128-bit blocks.
  FG_INLINE void transpose(const void* src, std::ptrdiff_t lds, void* dst, std::ptrdiff_t ldd) {
    const auto* s = static_cast<const float*>(src);
    auto* d = static_cast<float*>(dst);
    __m512 r[16];
    __m512 t[16];
    FG_UNROLL
    for (int i = 0; i < 16; ++i) {
      r[i] = _mm512_loadu_ps(s + i * lds);
    }
    FG_UNROLL
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    FG_UNROLL
    for (int i = 0; i < 16; i += 4) {
      r[i] = unpack_lo64(t[i], t[i + 2]);
      r[i + 1] = unpack_hi64(t[i], t[i + 2]);
      r[i + 2] = unpack_lo64(t[i + 1], t[i + 3]);
      r[i + 3] = unpack_hi64(t[i + 1], t[i + 3]);
    }
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512 even_low = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
      const __m512 odd_low = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
      const __m512 even_high = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
      const __m512 odd_high = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
      _mm512_storeu_ps(d + i * ldd, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
      _mm512_storeu_ps(d + (i + 4) * ldd, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
      _mm512_storeu_ps(d + (i + 8) * ldd, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
      _mm512_storeu_ps(d + (i + 12) * ldd, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
    }
  }

 private:
  FG_INLINE std::uint32_t first_lanes(std::int64_t n) {
    return n <= 0 ? 0U : n >= 16 ? 0xffffU : (1U << n) - 1U;
  }
  FG_INLINE __m512 unpack_lo64(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  FG_INLINE __m512 unpack_hi64(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
};

struct Avx512 : Avx512Base {
  using Unit = float;
  using UnitVec = __m512;
  static constexpr int kPair = 1;

  FG_INLINE UnitVec load_units(const Unit* p) { return _mm512_loadu_ps(p); }
  FG_INLINE void store_units(Unit* p, UnitVec v) { _mm512_storeu_ps(p, v); }
  FG_INLINE UnitVec broadcast(Unit u) { return _mm512_set1_ps(u); }
  FG_INLINE Vec multiply_add(Vec acc, UnitVec a, UnitVec b) { return _mm512_fmadd_ps(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct Avx512Bf16 : Avx512Base {
  using Unit = std::uint32_t;
  using UnitVec = __m512i;
  static constexpr int kPair = 2;

  FG_INLINE UnitVec load_units(const Unit* p) { return _mm512_loadu_si512(p); }
  FG_INLINE UnitVec load_bytes(const void* p) { return _mm512_loadu_si512(p); }
  FG_INLINE void store_units(Unit* p, UnitVec v) { _mm512_storeu_si512(p, v); }
  FG_INLINE UnitVec broadcast(Unit u) { return _mm512_set1_epi32(static_cast<int>(u)); }
  FG_INLINE Vec multiply_add(Vec acc, UnitVec a, UnitVec b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
  FG_INLINE UnitVec narrow(Vec lo, Vec hi) { return (__m512i)_mm512_cvtne2ps_pbh(hi, lo); }
  FG_INLINE void interleave(UnitVec a, UnitVec b, UnitVec& lo, UnitVec& hi) {
    // 0, 32, 1, 33, ...: element i of the first operand, then of the second.
    const __m512i index = _mm512_setr_epi32(
        0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007, 0x280008,
        0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
    lo = _mm512_permutex2var_epi16(a, index, b);
    hi = _mm512_permutex2var_epi16(a, _mm512_add_epi16(index, _mm512_set1_epi16(16)), b);
  }
  // True if one of 32 bf16 is an infinity or NaN.
  FG_INLINE bool any_not_finite(UnitVec v) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent) != 0;
  }
};
#endif

}  // namespace
}  // namespace flashgrad::cpu
