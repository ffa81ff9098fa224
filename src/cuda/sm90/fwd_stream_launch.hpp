// SPDX-License-Identifier: Apache-2.0
// The forward with all keys in shared memory, on the host.
#pragma once

#include "core/backend.hpp"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_stream_config.hpp"

namespace flashgrad::sm90 {

// Whether the copy engine can address q, k and v.
bool can_stream_forward(const Problem& problem, const FwdParams& base);

// `base` as for fwd.cuh, with q, k and v, without maps, where can_stream_forward().
// `slots` multiprocessors.
Status launch_stream_forward(const Problem& problem, FwdStreamVariant variant, bool score_function,
                             const FwdParams& base, std::int64_t slots, void* stream);

}  // namespace flashgrad::sm90
