// SPDX-License-Identifier: Apache-2.0
// The forward's warpgroup products, D (64 x N, f32 registers) += A (64 x 16) B (16 x N), one overload per N: the accumulator's size picks
// it. PTX ISA, "wgmma.mma_async". A comes from shared memory (wgmma_ss) or registers (wgmma_rs); B from shared memory, K-major or,
// with kTransB, MN-major. accumulate = 0 overwrites D.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashgrad::cuda {

// clang-format off
#define FG_WGMMA_OUT_64 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FG_WGMMA_REGS_64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " FG_WGMMA_REGS_64 ", %32, %33, p, 1, 1, 0, %35;\n}\n" : FG_WGMMA_OUT_64 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FG_WGMMA_REGS_64 ", %32, %33, p, 1, 1, 0, %35;\n}\n" : FG_WGMMA_OUT_64 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " FG_WGMMA_REGS_64 ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n" : FG_WGMMA_OUT_64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FG_WGMMA_REGS_64 ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n" : FG_WGMMA_OUT_64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_64
#undef FG_WGMMA_REGS_64
#define FG_WGMMA_OUT_80 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FG_WGMMA_REGS_80 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[40], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 " FG_WGMMA_REGS_80 ", %40, %41, p, 1, 1, 0, %43;\n}\n" : FG_WGMMA_OUT_80 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " FG_WGMMA_REGS_80 ", %40, %41, p, 1, 1, 0, %43;\n}\n" : FG_WGMMA_OUT_80 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[40], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 " FG_WGMMA_REGS_80 ", {%40, %41, %42, %43}, %44, p, 1, 1, %46;\n}\n" : FG_WGMMA_OUT_80 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " FG_WGMMA_REGS_80 ", {%40, %41, %42, %43}, %44, p, 1, 1, %46;\n}\n" : FG_WGMMA_OUT_80 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_80
#undef FG_WGMMA_REGS_80
#define FG_WGMMA_OUT_96 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FG_WGMMA_REGS_96 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[48], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " FG_WGMMA_REGS_96 ", %48, %49, p, 1, 1, 0, %51;\n}\n" : FG_WGMMA_OUT_96 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " FG_WGMMA_REGS_96 ", %48, %49, p, 1, 1, 0, %51;\n}\n" : FG_WGMMA_OUT_96 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[48], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " FG_WGMMA_REGS_96 ", {%48, %49, %50, %51}, %52, p, 1, 1, %54;\n}\n" : FG_WGMMA_OUT_96 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " FG_WGMMA_REGS_96 ", {%48, %49, %50, %51}, %52, p, 1, 1, %54;\n}\n" : FG_WGMMA_OUT_96 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_96
#undef FG_WGMMA_REGS_96
#define FG_WGMMA_OUT_112 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FG_WGMMA_REGS_112 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[56], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\nwgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 " FG_WGMMA_REGS_112 ", %56, %57, p, 1, 1, 0, %59;\n}\n" : FG_WGMMA_OUT_112 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\nwgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 " FG_WGMMA_REGS_112 ", %56, %57, p, 1, 1, 0, %59;\n}\n" : FG_WGMMA_OUT_112 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[56], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %61, 0;\nwgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 " FG_WGMMA_REGS_112 ", {%56, %57, %58, %59}, %60, p, 1, 1, %62;\n}\n" : FG_WGMMA_OUT_112 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %61, 0;\nwgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 " FG_WGMMA_REGS_112 ", {%56, %57, %58, %59}, %60, p, 1, 1, %62;\n}\n" : FG_WGMMA_OUT_112 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_112
#undef FG_WGMMA_REGS_112
#define FG_WGMMA_OUT_128 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FG_WGMMA_REGS_128 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " FG_WGMMA_REGS_128 ", %64, %65, p, 1, 1, 0, %67;\n}\n" : FG_WGMMA_OUT_128 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FG_WGMMA_REGS_128 ", %64, %65, p, 1, 1, 0, %67;\n}\n" : FG_WGMMA_OUT_128 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " FG_WGMMA_REGS_128 ", {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n" : FG_WGMMA_OUT_128 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FG_WGMMA_REGS_128 ", {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n" : FG_WGMMA_OUT_128 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_128
#undef FG_WGMMA_REGS_128
#define FG_WGMMA_OUT_144 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FG_WGMMA_REGS_144 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[72], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\nwgmma.mma_async.sync.aligned.m64n144k16.f32.f16.f16 " FG_WGMMA_REGS_144 ", %72, %73, p, 1, 1, 0, %75;\n}\n" : FG_WGMMA_OUT_144 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\nwgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 " FG_WGMMA_REGS_144 ", %72, %73, p, 1, 1, 0, %75;\n}\n" : FG_WGMMA_OUT_144 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[72], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %77, 0;\nwgmma.mma_async.sync.aligned.m64n144k16.f32.f16.f16 " FG_WGMMA_REGS_144 ", {%72, %73, %74, %75}, %76, p, 1, 1, %78;\n}\n" : FG_WGMMA_OUT_144 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %77, 0;\nwgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 " FG_WGMMA_REGS_144 ", {%72, %73, %74, %75}, %76, p, 1, 1, %78;\n}\n" : FG_WGMMA_OUT_144 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_144
#undef FG_WGMMA_REGS_144
#define FG_WGMMA_OUT_160 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FG_WGMMA_REGS_160 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[80], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\nwgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 " FG_WGMMA_REGS_160 ", %80, %81, p, 1, 1, 0, %83;\n}\n" : FG_WGMMA_OUT_160 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\nwgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 " FG_WGMMA_REGS_160 ", %80, %81, p, 1, 1, 0, %83;\n}\n" : FG_WGMMA_OUT_160 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[80], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %85, 0;\nwgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 " FG_WGMMA_REGS_160 ", {%80, %81, %82, %83}, %84, p, 1, 1, %86;\n}\n" : FG_WGMMA_OUT_160 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %85, 0;\nwgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 " FG_WGMMA_REGS_160 ", {%80, %81, %82, %83}, %84, p, 1, 1, %86;\n}\n" : FG_WGMMA_OUT_160 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_160
#undef FG_WGMMA_REGS_160
#define FG_WGMMA_OUT_176 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FG_WGMMA_REGS_176 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[88], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\nwgmma.mma_async.sync.aligned.m64n176k16.f32.f16.f16 " FG_WGMMA_REGS_176 ", %88, %89, p, 1, 1, 0, %91;\n}\n" : FG_WGMMA_OUT_176 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\nwgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 " FG_WGMMA_REGS_176 ", %88, %89, p, 1, 1, 0, %91;\n}\n" : FG_WGMMA_OUT_176 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[88], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %93, 0;\nwgmma.mma_async.sync.aligned.m64n176k16.f32.f16.f16 " FG_WGMMA_REGS_176 ", {%88, %89, %90, %91}, %92, p, 1, 1, %94;\n}\n" : FG_WGMMA_OUT_176 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %93, 0;\nwgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 " FG_WGMMA_REGS_176 ", {%88, %89, %90, %91}, %92, p, 1, 1, %94;\n}\n" : FG_WGMMA_OUT_176 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_176
#undef FG_WGMMA_REGS_176
#define FG_WGMMA_OUT_192 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FG_WGMMA_REGS_192 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[96], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 " FG_WGMMA_REGS_192 ", %96, %97, p, 1, 1, 0, %99;\n}\n" : FG_WGMMA_OUT_192 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " FG_WGMMA_REGS_192 ", %96, %97, p, 1, 1, 0, %99;\n}\n" : FG_WGMMA_OUT_192 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[96], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 " FG_WGMMA_REGS_192 ", {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}\n" : FG_WGMMA_OUT_192 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " FG_WGMMA_REGS_192 ", {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}\n" : FG_WGMMA_OUT_192 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_192
#undef FG_WGMMA_REGS_192
#define FG_WGMMA_OUT_256 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define FG_WGMMA_REGS_256 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[128], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " FG_WGMMA_REGS_256 ", %128, %129, p, 1, 1, 0, %131;\n}\n" : FG_WGMMA_OUT_256 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " FG_WGMMA_REGS_256 ", %128, %129, p, 1, 1, 0, %131;\n}\n" : FG_WGMMA_OUT_256 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
template <class T, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[128], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " FG_WGMMA_REGS_256 ", {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}\n" : FG_WGMMA_OUT_256 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " FG_WGMMA_REGS_256 ", {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}\n" : FG_WGMMA_OUT_256 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }
}
#undef FG_WGMMA_OUT_256
#undef FG_WGMMA_REGS_256
// clang-format on

}  // namespace flashgrad::cuda
