// SPDX-License-Identifier: Apache-2.0
// The instruction set of whatever the compiler targets by default, through its vector extensions:
// SSE2 on x86-64, NEON on 64-bit Arm. The members: isa/common.hpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "core/dtype.hpp"
#include "cpu/isa/common.hpp"

namespace flashgrad::cpu {
namespace {

struct Generic {
  using Vec = float __attribute__((vector_size(16)));
  using Mask = std::int32_t __attribute__((vector_size(16)));
  using Unit = float;
  using UnitVec = Vec;
  static constexpr int kLanes = 4;
  static constexpr int kPair = 1;
  static constexpr int kRows = 4;
#if defined(__aarch64__)
  static constexpr int kVecs = 4;  // 32 registers
#else
  static constexpr int kVecs = 2;  // 16 registers
#endif

  FG_INLINE Vec zero() { return Vec{}; }
  FG_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
  FG_INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  FG_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
  FG_INLINE Vec add(Vec a, Vec b) { return a + b; }
  FG_INLINE Vec sub(Vec a, Vec b) { return a - b; }
  FG_INLINE Vec mul(Vec a, Vec b) { return a * b; }
  FG_INLINE Vec div(Vec a, Vec b) { return a / b; }
  // The compiler is told not to fuse what is written as two operations.
  FG_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }
  FG_INLINE Vec abs(Vec a) { return (Vec)((Mask)a & set1_int(0x7fffffff)); }
  FG_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    return (Vec)(((Mask)magnitude & set1_int(0x7fffffff)) | ((Mask)sign & ~set1_int(0x7fffffff)));
  }
  FG_INLINE Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }
  FG_INLINE Vec min_zero(Vec x) { return select(less(zero(), x), zero(), x); }
  // Adding 1.5 * 2^23 leaves no fraction bits. From 2^22 on x stays as it is, also with a fraction:
  // exp2, the only user, gives 0 or infinity there either way.
  FG_INLINE Vec round(Vec x) {
    const Vec magic = copy_sign(set1(0x1.8p23F), x);
    const Vec sum = x + magic;
    return select(less(abs(x), set1(0x1p22F)), sum - magic, x);
  }
  FG_INLINE Vec fraction(Vec x, Vec n) {
    return select(abs(x) == set1(std::numeric_limits<float>::infinity()), zero(), x - n);
  }
  // The exponent bits of 2^n. Below the normal range the answer is 0; a NaN n leaves p, which is
  // then NaN too.
  FG_INLINE Vec scale(Vec p, Vec n) {
    const Mask below = less(n, set1(-126.F));
    const Mask above = less(set1(127.F), n);
    const Mask usable = ~(below | above) & (n == n);
    // n + 127 + 2^23 has the biased exponent in its low bits.
    const Mask exponent =
        (Mask)(select(usable, n, zero()) + set1(0x1p23F + 127.F)) & set1_int(0xff);
    const Vec power = keep(
        ~below, select(above, set1(std::numeric_limits<float>::infinity()), (Vec)(exponent << 23)));
    return p * power;
  }

  FG_INLINE Mask lane_mask(std::int64_t begin, std::int64_t end) {
    const Mask lanes = {0, 1, 2, 3};
    return (lanes >= set1_int(clamp_lane(begin))) & (lanes < set1_int(clamp_lane(end)));
  }
  FG_INLINE Mask not_equal(Vec a, Vec b) { return a != b; }
  FG_INLINE Mask less(Vec a, Vec b) { return a < b; }
  FG_INLINE Mask both(Mask a, Mask b) { return a & b; }
  FG_INLINE Vec keep(Mask m, Vec x) { return (Vec)(m & (Mask)x); }
  FG_INLINE Vec select(Mask m, Vec a, Vec b) { return (Vec)((m & (Mask)a) | (~m & (Mask)b)); }
  FG_INLINE bool any_nan(Vec x) {
    const Mask nan = x != x;
    return (nan[0] | nan[1] | nan[2] | nan[3]) != 0;
  }
  FG_INLINE float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }

  template <DType kType>
  FG_INLINE Vec load_as(const void* p) {
    if constexpr (kType == DType::kF32) {
      return load(static_cast<const float*>(p));
    } else {
      std::uint16_t half[kLanes];
      std::memcpy(half, p, sizeof half);
      Vec v = {};
      FG_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        v[i] = kType == DType::kBF16 ? bf16_to_f32(half[i]) : f16_to_f32(half[i]);
      }
      return v;
    }
  }
  template <DType kType>
  FG_INLINE void store_as(void* p, Vec v) {
    if constexpr (kType == DType::kF32) {
      store(static_cast<float*>(p), v);
    } else {
      std::uint16_t half[kLanes];
      FG_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        half[i] = kType == DType::kBF16 ? f32_to_bf16(v[i]) : f32_to_f16(v[i]);
      }
      std::memcpy(p, half, sizeof half);
    }
  }

  FG_INLINE UnitVec load_units(const Unit* p) { return load(p); }
  FG_INLINE void store_units(Unit* p, UnitVec v) { store(p, v); }
  FG_INLINE UnitVec broadcast(Unit u) { return set1(u); }
  FG_INLINE Vec multiply_add(Vec acc, UnitVec a, UnitVec b) { return fma(a, b, acc); }
  FG_INLINE void transpose(const Unit* src, std::ptrdiff_t lds, Unit* dst, std::ptrdiff_t ldd) {
    FG_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      store(dst + i * ldd, Vec{src[i], src[lds + i], src[2 * lds + i], src[3 * lds + i]});
    }
  }

 private:
  FG_INLINE Mask set1_int(std::int32_t x) { return Mask{x, x, x, x}; }
  FG_INLINE std::int32_t clamp_lane(std::int64_t n) {
    return static_cast<std::int32_t>(n < 0 ? 0 : n > kLanes ? kLanes : n);
  }
};

}  // namespace
}  // namespace flashgrad::cpu
