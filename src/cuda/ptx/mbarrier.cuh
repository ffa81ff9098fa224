// SPDX-License-Identifier: Apache-2.0
// Shared-memory barriers (mbarrier). PTX ISA, "Parallel Synchronization and Communication
// Instructions: mbarrier". Addresses are 32-bit shared-window addresses.
#pragma once

#include <cstdint>

namespace flashgrad::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarrier.init: a phase completes after `count` arrivals (and all expected bytes).
__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// fence.mbarrier_init: makes initialised barriers visible to the cluster and the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier at the same offset in CTA `cta` of the cluster. Without .release.cluster
// on purpose: that form becomes MEMBAR.ALL.GPU and waits for every outstanding reduction (H200,
// d128: 341 instead of 595 TFLOP/s). The default .release semantics at CTA scope suffice for
// releasing a stage that was only read.
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t barrier, std::uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

// mbarrier.arrive.expect_tx: one arrival that also announces `bytes` of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.expect_tx: announces `bytes` of asynchronous copies without arriving.
__device__ __forceinline__ void mbarrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity in a loop: returns once the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra wait_loop;\nfinished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// PTX ISA, "st.async": a 32-bit value to the same offset `address` in the shared memory of CTA
// `cta` of the cluster; its four bytes count for the barrier at `barrier` there.
__device__ __forceinline__ void store_to_cta(std::uint32_t address, std::uint32_t value,
                                             std::uint32_t barrier, std::uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote, remote_barrier;\nmapa.shared::cluster.u32 remote, %0, %3;\n"
      "mapa.shared::cluster.u32 remote_barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [remote], %1, "
      "[remote_barrier];\n}" ::"r"(address),
      "r"(value), "r"(barrier), "r"(cta)
      : "memory");
}

}  // namespace flashgrad::ptx
