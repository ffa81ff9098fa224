// SPDX-License-Identifier: Apache-2.0
// The forward of a few rows that see many keys, on the host.
#pragma once

#include <cstdint>

#include "core/backend.hpp"
#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_split_use.hpp"

namespace flashgrad::sm90 {

struct SplitLaunch {
  void* parts;
  const std::uint32_t* any_cut;  // with SplitUse::kCut: 0 if no sequence is cut
  bool overlaps_predecessor;     // the stream's last kernel is one of this call's
  int num_multiprocessors;
};

// `base` as for fwd.cuh, with q, k and v, without maps.
Status launch_split_forward(const Problem& problem, FwdVariant arithmetic, bool score_function,
                            const FwdParams& base, const SplitLaunch& launch, void* stream);

}  // namespace flashgrad::sm90
