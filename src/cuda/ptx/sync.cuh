// SPDX-License-Identifier: Apache-2.0
// Barriers among threads, fences between proxies, election, register reallocation and programmatic
// dependent launch. Each wrapper names its PTX ISA section.
#pragma once

#include <cstdint>
#include <type_traits>

namespace flashgrad::ptx {

// PTX ISA, "barrier{.cta}": waits until `kThreads` threads have arrived at named barrier `id`.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// As above, without waiting.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// PTX ISA, "barrier.cluster": all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Its two halves, by whole warps, between which other work may lie; but they order no memory before
// them, so that nobody waits for stores under way.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// PTX ISA, "%cluster_ctarank".
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA, "membar/fence": orders generic shared-memory accesses before asynchronous-proxy ones
// (wgmma operands, bulk copies).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// threadIdx.x, read where it is used: keeping it in a register may cost a spill in roles that have
// few.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// PTX ISA, "elect.sync": true in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t elected;
  asm volatile(
      "{\n.reg .pred is_elected;\nelect.sync _|is_elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, is_elected;\n}"
      : "=r"(elected));
  return elected != 0;
}

// PTX ISA, "setmaxnreg". Takes effect only with __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA, "griddepcontrol": waits for the preceding kernels of the stream and sees their memory,
// or lets the next one start its prologue.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// PTX ISA, "ld", "st": 32-bit values by which CTAs signal to each other through global memory.
__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void reduce_release(std::uint32_t* address, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// PTX ISA, "atom": adds, and returns what was there; orders memory both ways.
__device__ __forceinline__ std::uint32_t add_acquire_release(std::uint32_t* address,
                                                             std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// The same object, of which the compiler computes nothing ahead: what it would keep, and spill.
template <class T>
__device__ __forceinline__ const T& opaque(const T& object) {
  const T* address = &object;
  asm volatile("" : "+l"(address));
  return *address;
}

// Keeps registers where they are: the compiler may not move their computation across this point.
template <class T, int kCount>
__device__ __forceinline__ void pin(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

}  // namespace flashgrad::ptx
