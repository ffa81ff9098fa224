// SPDX-License-Identifier: Apache-2.0
// The backward on the host: how it cuts the workspace, how it launches.
#pragma once

#include "core/backend.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

WorkspaceSize backward_workspace_size(const Problem& problem);
Status launch_backward(const Problem& problem, const Args& args, const GradientColumns& columns);

// Whether the kernels write rows of 16-bit gradients that begin anywhere, of any width, as fast as
// others: dq, and dk and dv.
struct WritesAnywhere {
  bool dq;
  bool dk_dv;
};
WritesAnywhere backward_writes_anywhere(const Problem& problem);

}  // namespace flashgrad::sm90
