// SPDX-License-Identifier: Apache-2.0
// Element types and their scalar conversions (round to nearest even).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace flashgrad {

enum class DType : std::uint8_t { kF64, kF32, kBF16, kF16 };

constexpr int size_bytes(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "f64";
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
  }
  return "?";
}

inline float bf16_to_f32(std::uint16_t x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
}

inline std::uint16_t f32_to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffU) > 0x7f800000U) {  // NaN: keep it one, quiet
    return static_cast<std::uint16_t>((u >> 16) | 0x40U);
  }
  return static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
}

inline float f16_to_f32(std::uint16_t x) {
  const std::uint32_t sign = (x & 0x8000U) << 16;
  const std::uint32_t exponent = (x >> 10) & 0x1fU;
  const std::uint32_t mantissa = x & 0x3ffU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in f32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) {
    return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

inline std::uint16_t f32_to_f16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000U);
  const std::uint32_t magnitude = u & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U);
  }
  if (magnitude >= 0x477ff000U) {  // rounds to 2^16 or more
    return static_cast<std::uint16_t>(sign | 0x7c00U);
  }
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 leaves the subnormal, rounded, in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

// x in f32, rounded to odd: a second rounding, to bf16 or f16, then gives what one rounding of x
// would.
inline float f64_to_f32_odd(double x) {
  const auto f = static_cast<float>(x);
  if (!std::isfinite(f) || static_cast<double>(f) == x) {
    return f;
  }
  const auto u = std::bit_cast<std::uint32_t>(f);
  if ((u & 1U) != 0) {
    return f;
  }
  const bool above = std::abs(static_cast<double>(f)) > std::abs(x);
  return std::bit_cast<float>(above ? u - 1U : u + 1U);
}

// Reads element `index` of an array of `dtype`.
inline double load_f64(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<const double*>(data)[index];
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kBF16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kF16:
      return f16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
  }
  return 0;
}

// Writes `value`, rounded once, to element `index` of an array of `dtype`.
inline void store_f64(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::kF32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::kBF16:
      static_cast<std::uint16_t*>(data)[index] = f32_to_bf16(f64_to_f32_odd(value));
      break;
    case DType::kF16:
      static_cast<std::uint16_t*>(data)[index] = f32_to_f16(f64_to_f32_odd(value));
      break;
  }
}

}  // namespace flashgrad
