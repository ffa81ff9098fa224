// SPDX-License-Identifier: Apache-2.0
// Threads: OpenMP's, whose pool persists (starting threads for each call costs milliseconds).
#pragma once

#include <omp.h>

namespace flashgrad::cpu {

// Calls f(thread, threads) on at most `num_threads` threads at once; OpenMP may give fewer.
template <class F>
[[gnu::always_inline]] static inline void run_threads(int num_threads, F&& f) {
  if (num_threads <= 1) {
    f(0, 1);
    return;
  }
#pragma omp parallel num_threads(num_threads)
  f(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace flashgrad::cpu
