// SPDX-License-Identifier: Apache-2.0
// Inputs that the copy engine cannot address (odd strides, columns that are not adjacent) are
// copied into the workspace before the kernels run, if there is room; without it the kernels load
// them element by element.
#pragma once

#include "core/problem.hpp"

namespace flashgrad::sm90 {

// What a call with the most workspace takes for copies, by what the problem says of the strides.
std::size_t pack_bytes(const Problem& problem, Pass pass);

// Copies, if the workspace ends `pack_bytes` after `used_bytes` or later, what needs it of q, k, v
// and, for a backward, dout, and makes *args name the copies and the rest of the workspace.
Status pack_inputs(const Problem& problem, Pass pass, std::size_t used_bytes, Args* args);

}  // namespace flashgrad::sm90
