// SPDX-License-Identifier: Apache-2.0
// Asynchronous bulk copies, with and without a tensor map, and vector reductions to global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashgrad::ptx {

// PTX ISA, "cp.async.bulk.tensor": a box of a 4-d tensor into shared memory; its bytes complete on
// `barrier`. Elements outside the tensor arrive as zeros.
__device__ __forceinline__ void tensor_load(std::uint32_t destination, const CUtensorMap* map,
                                            std::uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same of a 5-d tensor.
__device__ __forceinline__ void tensor_load(std::uint32_t destination, const CUtensorMap* map,
                                            std::uint32_t barrier, int c0, int c1, int c2, int c3,
                                            int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same to the same offsets (data and barrier) of every CTA in `cta_mask`.
__device__ __forceinline__ void tensor_load_multicast(std::uint32_t destination,
                                                      const CUtensorMap* map, std::uint32_t barrier,
                                                      int c0, int c1, int c2, int c3,
                                                      std::uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(cta_mask)
      : "memory");
}

// A box of shared memory into a 4-d tensor, without what lies outside of it; completion by bulk
// groups.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, std::uint32_t source, int c0,
                                             int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// PTX ISA, "prefetch.tensormap".
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA, "cp.async.bulk": `bytes` (a multiple of 16) of global memory into shared memory.
__device__ __forceinline__ void bulk_load(std::uint32_t destination, const void* source,
                                          std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Shared memory of this CTA into the shared memory of CTA `cta` of the cluster; completes on the
// barrier at offset `barrier` over there.
__device__ __forceinline__ void bulk_copy_to_cta(std::uint32_t destination, std::uint32_t source,
                                                 std::uint32_t bytes, std::uint32_t barrier,
                                                 std::uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 data, signal;\nmapa.shared::cluster.u32 data, %0, %4;\n"
      "mapa.shared::cluster.u32 signal, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[data], [%1], %2, [signal];\n}" ::"r"(destination),
      "r"(source), "r"(bytes), "r"(barrier), "r"(cta)
      : "memory");
}

// Shared memory into global memory; completion by bulk groups.
__device__ __forceinline__ void bulk_store(void* destination, std::uint32_t source,
                                           std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most `kPending` groups still read their source.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// PTX ISA, "cp.async": 16 bytes of global memory into shared memory, of which `bytes` are read and
// the others become 0. Both addresses are multiples of 16. Completion by wait_async_copies.
__device__ __forceinline__ void async_copy_16(std::uint32_t destination, const void* source,
                                              std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}
// PTX ISA, "cp.async.wait_all": of this thread.
__device__ __forceinline__ void wait_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// In groups, of which at most `kPending` are then under way.
__device__ __forceinline__ void commit_async_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_async_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// PTX ISA, "prefetch": the line into the L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// PTX ISA, "red": four f32 additions, 16-byte aligned, order free.
__device__ __forceinline__ void reduce_add(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// 16 bytes that other threads or this one have added to: past the L1.
__device__ __forceinline__ float4 load_sum(const float* address) {
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_sum(float* address, float a, float b, float c, float d) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

}  // namespace flashgrad::ptx
