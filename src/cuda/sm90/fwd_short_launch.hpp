// SPDX-License-Identifier: Apache-2.0
// The forward of short sequences on the host.
#pragma once

#include "core/backend.hpp"
#include "cuda/sm90/fwd_params.hpp"

namespace flashgrad::sm90 {

// Whether fwd_short.cuh serves this problem, and faster than fwd.cuh. The bits are the same.
bool is_short_forward(const Problem& problem);

// `base` as for fwd.cuh, with k, v and q, without maps.
Status launch_short_forward(const Problem& problem, bool score_function, const FwdParams& base,
                            void* stream);

}  // namespace flashgrad::sm90
