// SPDX-License-Identifier: Apache-2.0
// Loops of independent multiply-adds that never leave the registers. Traps that these loops avoid:
// fresh threads, cold clocks and busy machines (the best of several tries counts), accumulators
// that the compiler keeps in memory, and products that it could compute once (no fast-math here:
// each addition depends on the one before).
#include "peak.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashgrad::tool {
namespace {

// Runs `iterations` rounds of multiply-adds and returns a value that depends on all of them.
using Loop = float (*)(std::int64_t iterations, float a, float b);

struct Kernel {
  const char* name;
  double flops_per_iteration;
  Loop loop;
};

// c = c * kFactor + kAddend converges; sums of kFactor * kAddend stay small: finite and normal.
constexpr float kFactor = 0.999F;
constexpr float kAddend = 1e-3F;

// 12 accumulators hide a latency of 4 or 5 cycles on two units; with a and b they fit into 16
// registers. The loops over them are unrolled, so that the array becomes registers.
constexpr int kAccumulators = 12;

#if defined(__x86_64__)

__attribute__((target("avx512f"))) float fma_avx512(std::int64_t iterations, float a, float b) {
  const __m512 va = _mm512_set1_ps(a);
  const __m512 vb = _mm512_set1_ps(b);
  __m512 c[kAccumulators];
#pragma GCC unroll 12
  for (int n = 0; n < kAccumulators; ++n) {
    c[n] = _mm512_set1_ps(a + static_cast<float>(n));
  }
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (__m512& x : c) {
      x = _mm512_fmadd_ps(x, va, vb);
    }
  }
#pragma GCC unroll 12
  for (int n = 1; n < kAccumulators; ++n) {
    c[0] = _mm512_add_ps(c[0], c[n]);
  }
  return c[0][0];
}

__attribute__((target("avx512f,avx512bf16"))) float dot_avx512_bf16(std::int64_t iterations,
                                                                    float a, float b) {
  const __m512bh va = _mm512_cvtne2ps_pbh(_mm512_set1_ps(a), _mm512_set1_ps(a));
  const __m512bh vb = _mm512_cvtne2ps_pbh(_mm512_set1_ps(b), _mm512_set1_ps(b));
  __m512 c[kAccumulators];
#pragma GCC unroll 12
  for (int n = 0; n < kAccumulators; ++n) {
    c[n] = _mm512_set1_ps(a + static_cast<float>(n));
  }
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (__m512& x : c) {
      x = _mm512_dpbf16_ps(x, va, vb);
    }
  }
#pragma GCC unroll 12
  for (int n = 1; n < kAccumulators; ++n) {
    c[0] = _mm512_add_ps(c[0], c[n]);
  }
  return c[0][0];
}

__attribute__((target("avx2,fma"))) float fma_avx2(std::int64_t iterations, float a, float b) {
  const __m256 va = _mm256_set1_ps(a);
  const __m256 vb = _mm256_set1_ps(b);
  __m256 c[kAccumulators];
#pragma GCC unroll 12
  for (int n = 0; n < kAccumulators; ++n) {
    c[n] = _mm256_set1_ps(a + static_cast<float>(n));
  }
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (__m256& x : c) {
      x = _mm256_fmadd_ps(x, va, vb);
    }
  }
#pragma GCC unroll 12
  for (int n = 1; n < kAccumulators; ++n) {
    c[0] = _mm256_add_ps(c[0], c[n]);
  }
  return c[0][0];
}

#endif

// In the compiler's own notation: the vectors of 4 that any machine has, fused multiply-adds where
// it has them.
float multiply_add_generic(std::int64_t iterations, float a, float b) {
  using Vector = float __attribute__((vector_size(16)));
  const Vector va = {a, a, a, a};
  const Vector vb = {b, b, b, b};
  Vector c[kAccumulators];
#pragma GCC unroll 12
  for (int n = 0; n < kAccumulators; ++n) {
    c[n] = va + static_cast<float>(n);
  }
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (Vector& x : c) {
      x = x * va + vb;
    }
  }
#pragma GCC unroll 12
  for (int n = 1; n < kAccumulators; ++n) {
    c[0] += c[n];
  }
  return c[0][0];
}

Kernel f32_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    return {"f32 FMA, avx512", kAccumulators * 16 * 2, fma_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {"f32 FMA, avx2", kAccumulators * 8 * 2, fma_avx2};
  }
#endif
  return {"f32 multiply-add, generic", kAccumulators * 4 * 2, multiply_add_generic};
}

Kernel bf16_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16")) {
    return {"bf16 dot product, avx512_bf16", kAccumulators * 32 * 2, dot_avx512_bf16};
  }
#endif
  return f32_kernel();
}

// Seconds that all threads need for `iterations` each, from a common start to the last end.
double time_loop(const Kernel& kernel, int num_threads, std::int64_t iterations) {
  double seconds = 0;
  float total = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : total)
  {
#pragma omp barrier
    const double begin = omp_get_wtime();
    total += kernel.loop(iterations, kFactor, kAddend);
#pragma omp barrier
#pragma omp master
    seconds = omp_get_wtime() - begin;
  }
  // The sum is finite; without this use of it the loops could go.
  return std::isfinite(total) ? seconds : HUGE_VAL;
}

// Seconds that the calling thread has computed, which other programs do not lengthen.
double thread_seconds() {
  std::timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Iterations that take one thread about `seconds`.
std::int64_t calibrate(const Kernel& kernel, double seconds) {
  for (std::int64_t iterations = 1 << 14;; iterations *= 2) {
    const double begin = thread_seconds();
    const float sum = kernel.loop(iterations, kFactor, kAddend);
    if (thread_seconds() - begin >= seconds || !std::isfinite(sum)) {
      return iterations;
    }
  }
}

Peak measure(const Kernel& kernel, int num_threads) {
  constexpr double kSeconds = 0.01;
  constexpr int kTries = 10;
  const std::int64_t iterations = calibrate(kernel, kSeconds);
  double best = HUGE_VAL;
  for (int i = 0; i < kTries; ++i) {
    best = std::min(best, time_loop(kernel, num_threads, iterations));
  }
  const double flops = kernel.flops_per_iteration * static_cast<double>(iterations) * num_threads;
  return {kernel.name, flops / best * 1e-9};
}

}  // namespace

Peak measure_f32_peak(int num_threads) { return measure(f32_kernel(), num_threads); }

Peak measure_bf16_peak(int num_threads) { return measure(bf16_kernel(), num_threads); }

}  // namespace flashgrad::tool
