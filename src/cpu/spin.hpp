// SPDX-License-Identifier: Apache-2.0
// Waiting for another thread of the same call. Waits here are short (the other thread is at work on
// what is waited for), but the machine may run more threads than it has cores: after a while the
// waiter yields.
#pragma once

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashgrad::cpu {
namespace {

[[gnu::always_inline]] static inline void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `ready()` is true; `ready` loads with acquire.
template <class Ready>
[[gnu::always_inline]] static inline void spin_until(Ready&& ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins < 2000) {
      spin_pause();
    } else {
      sched_yield();
    }
  }
}

}  // namespace
}  // namespace flashgrad::cpu
