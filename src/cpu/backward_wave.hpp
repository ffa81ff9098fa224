// SPDX-License-Identifier: Apache-2.0
// A set of jobs of the backward pass whose tasks all threads share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu/arena.hpp"
#include "cpu/backward_plan.hpp"
#include "cpu/spin.hpp"

namespace flashgrad::cpu {

// Jobs of a wave at most.
inline constexpr std::int64_t kMaxWaveJobs = 64;

// Filled by one thread, before `ready`.
template <class Isa>
struct Wave {
  // The number of the wave that it holds, or is being filled with.
  alignas(Arena::kAlignment) std::atomic<std::int64_t> claimed;
  std::atomic<std::int64_t> ready;  // likewise, once it is filled
  std::atomic<int> left;            // threads that are done with it
  std::byte* memory;
  std::size_t bytes;
  Job<Isa>* jobs;  // (kMaxWaveJobs)
  std::int64_t num_jobs;
  std::int64_t num_packs;
  alignas(Arena::kAlignment) std::atomic<std::int64_t> packs_done;

  // To be called with the jobs in place, `num_key_blocks` in all.
  void start(std::int64_t num_key_blocks) {
    packs_done.store(0, std::memory_order_relaxed);
    left.store(0, std::memory_order_relaxed);
    pack_job_ = 0;
    pack_index_ = 0;
    kv_job_ = 0;
    kv_block_ = 0;
    kv_left_ = num_key_blocks;
  }

  // Takes the next block of query rows to pack; false if none is left.
  bool next_pack(std::int64_t& job, std::int64_t& task) {
    lock();
    const bool found = pack_job_ < num_jobs;
    if (found) {
      job = pack_job_;
      task = pack_index_;
      if (++pack_index_ == jobs[job].num_packs()) {
        pack_index_ = 0;
        ++pack_job_;
      }
    }
    unlock();
    return found;
  }

  // Takes the next key block. They ascend within each job; jobs go fastest, so that threads work on
  // different heads and seldom wait for a turn at dq.
  bool next_key_block(std::int64_t& job, std::int64_t& kv_block) {
    lock();
    const bool found = kv_left_ > 0;
    if (found) {
      while (kv_block_ >= jobs[kv_job_].blocks.num_kv) {
        advance();
      }
      job = kv_job_;
      kv_block = kv_block_;
      advance();
      --kv_left_;
    }
    unlock();
    return found;
  }

 private:
  void lock() {
    spin_until([&] { return !lock_.exchange(true, std::memory_order_acquire); });
  }
  void unlock() { lock_.store(false, std::memory_order_release); }

  void advance() {
    if (++kv_job_ == num_jobs) {
      kv_job_ = 0;
      ++kv_block_;
    }
  }

  alignas(Arena::kAlignment) std::atomic<bool> lock_;
  // The next tasks; `lock_` guards them.
  std::int64_t pack_job_;
  std::int64_t pack_index_;
  std::int64_t kv_job_;
  std::int64_t kv_block_;
  std::int64_t kv_left_;
};

}  // namespace flashgrad::cpu
