// SPDX-License-Identifier: Apache-2.0
// Matrix fragments to and from shared memory, exp2, tanh and packed conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashgrad::ptx {

// PTX ISA, "stmatrix": four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8
// of matrix l / 8.
__device__ __forceinline__ void store_matrix(std::uint32_t address, std::uint32_t a,
                                             std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// PTX ISA, "ldmatrix", addresses as above.
__device__ __forceinline__ void load_matrix(std::uint32_t address, std::uint32_t& a,
                                            std::uint32_t& b, std::uint32_t& c, std::uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrix_transposed(std::uint32_t address, std::uint32_t& a,
                                                       std::uint32_t& b, std::uint32_t& c,
                                                       std::uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_uint(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ std::uint32_t load_shared_uint(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(std::uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

__device__ __forceinline__ float4 load_shared_float4(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_uint4(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t a,
                                             std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// PTX ISA, "ex2": 2^x, 2 ulp; 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "lg2": log2 x, within 2^-22 of it, or of 1 where that is more; -inf for 0.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "rcp": 1 / x, 1 ulp; NaN for NaN.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "cvt": two f32 to packed 16-bit, round to nearest even; `low` in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// PTX ISA, "fma": a * b + c of packed pairs of 16-bit floats.
template <class T>
__device__ __forceinline__ std::uint32_t fma_pairs(std::uint32_t a, std::uint32_t b,
                                                   std::uint32_t c) {
  std::uint32_t result;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  }
  return result;
}

template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000U)};
  } else {
    float2 value;
    asm volatile(
        "{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(value.x), "=f"(value.y)
        : "r"(packed));
    return value;
  }
}

// PTX ISA, "min": packed, NaN propagates.
template <class T>
__device__ __forceinline__ std::uint32_t min_packed(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

}  // namespace flashgrad::ptx
