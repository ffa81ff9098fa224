// SPDX-License-Identifier: Apache-2.0
// The timing half of sm90_backward.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"

namespace flashgrad {

// Whole calls on 16384 tokens (or one longer sequence), cool and sustained: a line on standard
// output. `mask`: "0" full, "1" causal, "w1024" a window to the left.
void bench_backward(int d, int dv_columns, std::int64_t seqlen, const char* mask,
                    std::int64_t heads, std::int64_t heads_kv, DType dtype, bool deterministic);

}  // namespace flashgrad
