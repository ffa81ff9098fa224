// SPDX-License-Identifier: Apache-2.0
// The forward of short sequences on the host.
#pragma once

#include "core/backend.hpp"
#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/fwd_params.hpp"

namespace flashgrad::sm90 {

// Whether fwd_short.cuh serves this problem, and faster than the kernel of fwd.cuh with this
// arithmetic, whose bits it has.
bool is_short_forward(const Problem& problem, FwdVariant arithmetic);

// `base` as for fwd.cuh, with q, k and v, without maps.
Status launch_short_forward(const Problem& problem, FwdVariant arithmetic, bool score_function,
                            const FwdParams& base, void* stream);

}  // namespace flashgrad::sm90
