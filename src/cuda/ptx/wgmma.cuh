// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products: D (64 x N, f32 registers) += A (64 x 16) * B (16 x N), 16-bit
// operands. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async".
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace flashgrad::ptx {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
#define FG_D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FG_D1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FG_D2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FG_D3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FG_D4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FG_D5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FG_D6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FG_D7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FG_R16(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])

#define FG_D_N16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FG_R_N16(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FG_D_N32 FG_D0
#define FG_R_N32(d) FG_R16(d, 0)
#define FG_D_N48 FG_D0 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FG_R_N48(d) FG_R16(d, 0), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FG_D_N64 FG_D0 ", " FG_D1
#define FG_R_N64(d) FG_R16(d, 0), FG_R16(d, 16)
#define FG_D_N80 FG_D0 ", " FG_D1 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FG_R_N80(d) FG_R16(d, 0), FG_R16(d, 16), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FG_D_N96 FG_D0 ", " FG_D1 ", " FG_D2
#define FG_R_N96(d) FG_R16(d, 0), FG_R16(d, 16), FG_R16(d, 32)
#define FG_D_N128 FG_D0 ", " FG_D1 ", " FG_D2 ", " FG_D3
#define FG_R_N128(d) FG_R16(d, 0), FG_R16(d, 16), FG_R16(d, 32), FG_R16(d, 48)
#define FG_D_N192 FG_D0 ", " FG_D1 ", " FG_D2 ", " FG_D3 ", " FG_D4 ", " FG_D5
#define FG_R_N192(d) FG_R16(d, 0), FG_R16(d, 16), FG_R16(d, 32), FG_R16(d, 48), FG_R16(d, 64), FG_R16(d, 80)
#define FG_D_N256 FG_D0 ", " FG_D1 ", " FG_D2 ", " FG_D3 ", " FG_D4 ", " FG_D5 ", " FG_D6 ", " FG_D7
#define FG_R_N256(d) FG_R16(d, 0), FG_R16(d, 16), FG_R16(d, 32), FG_R16(d, 48), FG_R16(d, 64), FG_R16(d, 80), FG_R16(d, 96), FG_R16(d, 112)

// The accumulators are operands 0 to N/2 - 1; then come A, B, whether D is added to, and the
// transpositions (1: MN-major).
#define FG_WGMMA_SS(n, type, a, b, scale, ta, tb)                                              \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " scale ", 0;\n"            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FG_D_N##n  \
               "}, " a ", " b ", accumulate, 1, 1, " ta ", " tb ";\n}"                         \
               : FG_R_N##n(d)                                                                  \
               : "l"(desc_a), "l"(desc_b), "n"(kAccumulate ? 1 : 0), "n"(kTransA), "n"(kTransB))
#define FG_WGMMA_RS(n, type, a0, a1, a2, a3, b, scale, tb)                                     \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " scale ", 0;\n"            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FG_D_N##n  \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", accumulate, 1, 1, " tb ";\n}"      \
               : FG_R_N##n(d)                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "n"(kAccumulate ? 1 : 0), "n"(kTransB))

// A and B from shared memory, by descriptors (tile/swizzle.hpp). kTransA, kTransB 1: the operand is MN-major.
template <int kN, class T, bool kAccumulate, int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], std::uint64_t desc_a, std::uint64_t desc_b) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 80 || kN == 96 || kN == 128 || kN == 192 || kN == 256, "no wrapper for this N yet");
  if constexpr (kN == 16 && kBf16) {
    FG_WGMMA_SS(16, "bf16", "%8", "%9", "%10", "%11", "%12");
  } else if constexpr (kN == 16 && !kBf16) {
    FG_WGMMA_SS(16, "f16", "%8", "%9", "%10", "%11", "%12");
  } else if constexpr (kN == 32 && kBf16) {
    FG_WGMMA_SS(32, "bf16", "%16", "%17", "%18", "%19", "%20");
  } else if constexpr (kN == 32 && !kBf16) {
    FG_WGMMA_SS(32, "f16", "%16", "%17", "%18", "%19", "%20");
  } else if constexpr (kN == 48 && kBf16) {
    FG_WGMMA_SS(48, "bf16", "%24", "%25", "%26", "%27", "%28");
  } else if constexpr (kN == 48 && !kBf16) {
    FG_WGMMA_SS(48, "f16", "%24", "%25", "%26", "%27", "%28");
  } else if constexpr (kN == 64 && kBf16) {
    FG_WGMMA_SS(64, "bf16", "%32", "%33", "%34", "%35", "%36");
  } else if constexpr (kN == 64 && !kBf16) {
    FG_WGMMA_SS(64, "f16", "%32", "%33", "%34", "%35", "%36");
  } else if constexpr (kN == 80 && kBf16) {
    FG_WGMMA_SS(80, "bf16", "%40", "%41", "%42", "%43", "%44");
  } else if constexpr (kN == 80 && !kBf16) {
    FG_WGMMA_SS(80, "f16", "%40", "%41", "%42", "%43", "%44");
  } else if constexpr (kN == 96 && kBf16) {
    FG_WGMMA_SS(96, "bf16", "%48", "%49", "%50", "%51", "%52");
  } else if constexpr (kN == 96 && !kBf16) {
    FG_WGMMA_SS(96, "f16", "%48", "%49", "%50", "%51", "%52");
  } else if constexpr (kN == 128 && kBf16) {
    FG_WGMMA_SS(128, "bf16", "%64", "%65", "%66", "%67", "%68");
  } else if constexpr (kN == 128 && !kBf16) {
    FG_WGMMA_SS(128, "f16", "%64", "%65", "%66", "%67", "%68");
  } else if constexpr (kN == 192 && kBf16) {
    FG_WGMMA_SS(192, "bf16", "%96", "%97", "%98", "%99", "%100");
  } else if constexpr (kN == 192 && !kBf16) {
    FG_WGMMA_SS(192, "f16", "%96", "%97", "%98", "%99", "%100");
  } else if constexpr (kN == 256 && kBf16) {
    FG_WGMMA_SS(256, "bf16", "%128", "%129", "%130", "%131", "%132");
  } else if constexpr (kN == 256 && !kBf16) {
    FG_WGMMA_SS(256, "f16", "%128", "%129", "%130", "%131", "%132");
  }
}

// A from registers: the packed accumulator pairs of 16 columns, in order.
template <int kN, class T, bool kAccumulate, int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], const std::uint32_t* a, std::uint64_t desc_b) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kN == 64 || kN == 80 || kN == 96 || kN == 128 || kN == 192 || kN == 256, "no wrapper for this N yet");
  if constexpr (kN == 64 && kBf16) {
    FG_WGMMA_RS(64, "bf16", "%32", "%33", "%34", "%35", "%36", "%37", "%38");
  } else if constexpr (kN == 64 && !kBf16) {
    FG_WGMMA_RS(64, "f16", "%32", "%33", "%34", "%35", "%36", "%37", "%38");
  } else if constexpr (kN == 96 && kBf16) {
    FG_WGMMA_RS(96, "bf16", "%48", "%49", "%50", "%51", "%52", "%53", "%54");
  } else if constexpr (kN == 96 && !kBf16) {
    FG_WGMMA_RS(96, "f16", "%48", "%49", "%50", "%51", "%52", "%53", "%54");
  } else if constexpr (kN == 128 && kBf16) {
    FG_WGMMA_RS(128, "bf16", "%64", "%65", "%66", "%67", "%68", "%69", "%70");
  } else if constexpr (kN == 128 && !kBf16) {
    FG_WGMMA_RS(128, "f16", "%64", "%65", "%66", "%67", "%68", "%69", "%70");
  } else if constexpr (kN == 192 && kBf16) {
    FG_WGMMA_RS(192, "bf16", "%96", "%97", "%98", "%99", "%100", "%101", "%102");
  } else if constexpr (kN == 192 && !kBf16) {
    FG_WGMMA_RS(192, "f16", "%96", "%97", "%98", "%99", "%100", "%101", "%102");
  } else if constexpr (kN == 256 && kBf16) {
    FG_WGMMA_RS(256, "bf16", "%128", "%129", "%130", "%131", "%132", "%133", "%134");
  } else if constexpr (kN == 256 && !kBf16) {
    FG_WGMMA_RS(256, "f16", "%128", "%129", "%130", "%131", "%132", "%133", "%134");
  }
}
// clang-format on

#undef FG_D0
#undef FG_D1
#undef FG_D2
#undef FG_D3
#undef FG_D4
#undef FG_D5
#undef FG_D6
#undef FG_D7
#undef FG_R16
#undef FG_D_N48
#undef FG_R_N48
#undef FG_D_N64
#undef FG_R_N64
#undef FG_D_N80
#undef FG_R_N80
#undef FG_D_N96
#undef FG_R_N96
#undef FG_D_N128
#undef FG_R_N128
#undef FG_D_N192
#undef FG_R_N192
#undef FG_D_N256
#undef FG_R_N256
#undef FG_WGMMA_SS
#undef FG_WGMMA_RS

}  // namespace flashgrad::ptx
