// SPDX-License-Identifier: Apache-2.0
// What the roles of the backward's main kernel (bwd.cuh) share: the places in shared memory and the
// barriers; and rings of stages.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"

namespace flashgrad::sm90 {

// Shared memory of one CTA: addresses from the offsets in BwdConfig. Barriers are explained in
// bwd.cuh.
template <BwdConfig C>
struct BwdShared {
  static constexpr int kHeadDim = C.head_dim;
  static constexpr int kBlockN = C.block_n();
  static constexpr int kCluster = C.cluster;
  static constexpr int kQStages = C.q_stages;
  static constexpr int kDoStages = C.do_stages;
  static constexpr bool kMayBeRagged = C.cluster == 1;

  std::uint32_t base;

  __device__ std::uint32_t k() const { return base + C.k_offset(); }
  __device__ std::uint32_t v() const { return base + C.v_offset(); }
  __device__ std::uint32_t peer_k() const { return base + C.peer_k_offset(); }
  __device__ std::uint32_t q(int stage) const { return base + C.q_offset() + stage * C.q_bytes(); }
  __device__ std::uint32_t dout(int stage) const {
    return base + C.do_offset() + stage * C.q_bytes();
  }
  __device__ std::uint32_t ds(int stage) const {
    return base + C.ds_offset() + stage * C.ds_bytes();
  }
  __device__ std::uint32_t peer_ds(int stage) const {
    return base + C.peer_ds_offset() + stage * C.ds_bytes();
  }
  __device__ std::uint32_t lse(int stage) const {
    return base + C.lse_offset() + stage * kBlockM * 4;
  }
  __device__ std::uint32_t delta(int stage) const {
    return base + C.delta_offset() + stage * kBlockM * 4;
  }
  // 16-byte piece k (of 4) of a consumer thread's factors; consecutive threads, consecutive pieces.
  __device__ std::uint32_t factor(int consumer, int thread, int k) const {
    return base + C.factor_offset() + ((consumer * 4 + k) * 128 + thread) * 16;
  }

  __device__ std::uint32_t number() const { return base + C.number_offset(); }

  __device__ std::uint32_t barrier(int i) const { return base + C.barrier_offset() + 8 * i; }
  __device__ std::uint32_t k_full() const { return barrier(0); }
  __device__ std::uint32_t v_full() const { return barrier(1); }
  __device__ std::uint32_t done() const { return barrier(2); }
  __device__ std::uint32_t kv_landing() const { return barrier(3); }
  __device__ std::uint32_t q_landing() const { return barrier(4); }
  __device__ std::uint32_t do_landing() const { return barrier(5); }
  __device__ std::uint32_t number_full() const { return barrier(6); }
  static constexpr int kQ = 7;
  static constexpr int kDo = kQ + 2 * C.q_stages;
  static constexpr int kDs = kDo + 2 * C.do_stages;
  static constexpr int kPeerDs = kDs + 2 * C.ds_stages;
  __device__ std::uint32_t q_full(int stage) const { return barrier(kQ + stage); }
  __device__ std::uint32_t q_empty(int stage) const { return barrier(kQ + C.q_stages + stage); }
  __device__ std::uint32_t do_full(int stage) const { return barrier(kDo + stage); }
  __device__ std::uint32_t do_empty(int stage) const { return barrier(kDo + C.do_stages + stage); }
  __device__ std::uint32_t ds_full(int stage) const { return barrier(kDs + stage); }
  __device__ std::uint32_t ds_empty(int stage) const { return barrier(kDs + C.ds_stages + stage); }
  __device__ std::uint32_t peer_ds_full(int stage) const { return barrier(kPeerDs + stage); }
  __device__ std::uint32_t peer_ds_empty(int stage) const {
    return barrier(kPeerDs + C.ds_stages + stage);
  }

  __device__ void init_barriers() const {
    constexpr int kConsumerWarps = 4 * BwdConfig::kConsumers;
    constexpr int kReaders = 32 * kConsumerWarps * C.cluster;
    ptx::mbarrier_init(k_full(), C.cluster);
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(done(), 4);
    ptx::mbarrier_init(kv_landing(), 1);
    ptx::mbarrier_init(q_landing(), 1);
    ptx::mbarrier_init(do_landing(), 1);
    ptx::mbarrier_init(number_full(), 1);
    for (int i = 0; i < C.q_stages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), kReaders);
    }
    for (int i = 0; i < C.do_stages; ++i) {
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(do_empty(i), kReaders);
    }
    for (int i = 0; i < C.ds_stages; ++i) {
      ptx::mbarrier_init(ds_full(i), kConsumerWarps);
      ptx::mbarrier_init(ds_empty(i), C.cluster == 2 ? 5 : 4);
      if constexpr (C.cluster == 2) {
        ptx::mbarrier_init(peer_ds_full(i), 1);
        ptx::mbarrier_init(peer_ds_empty(i), 4);
      }
    }
    ptx::fence_mbarrier_init();
  }
};

// One arrival of each lane in each CTA of the cluster. One lane could arrive for its warp, behind a
// __syncwarp(), but racecheck takes an arrival for its own lane's accesses only, and this costs no
// more (docs/gpu-backward.md, "Every lane arrives").
template <int kCluster>
__device__ __forceinline__ void arrive_in_cluster(std::uint32_t barrier) {
  if constexpr (kCluster == 2) {
    ptx::mbarrier_arrive_cluster(barrier, 0);
    ptx::mbarrier_arrive_cluster(barrier, 1);
  } else {
    ptx::mbarrier_arrive(barrier);
  }
}

// Waits until the barriers of a ring of `stages`, the first at `first_barrier`, have completed as
// often as `num_steps` steps make them.
__device__ __forceinline__ void wait_for_last(std::uint32_t first_barrier, int stages,
                                              int num_steps) {
  for (int stage = 0; stage < stages && stage < num_steps; ++stage) {
    ptx::mbarrier_wait(first_barrier + 8 * stage,
                       static_cast<std::uint32_t>((num_steps - 1 - stage) / stages) & 1U);
  }
}

// A position in a ring of stages and the parity of its current round.
template <int kStages>
class Ring {
 public:
  __device__ int stage() const { return stage_; }
  __device__ std::uint32_t parity() const { return parity_; }
  __device__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int stage_ = 0;
  std::uint32_t parity_ = 0;
};

}  // namespace flashgrad::sm90
