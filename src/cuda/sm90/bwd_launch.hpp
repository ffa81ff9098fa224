// SPDX-License-Identifier: Apache-2.0
// The backward on the host: how it cuts the workspace, how it launches.
#pragma once

#include "core/backend.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

WorkspaceSize backward_workspace_size(const Problem& problem, const GradientColumns& columns);
Status launch_backward(const Problem& problem, const Args& args, const GradientColumns& columns);

// How the kernels write 16-bit gradients: dq, and dk and dv.
struct GradientStores {
  bool dq_anywhere;  // rows that begin anywhere, of any width, as fast as others
  bool dk_dv_anywhere;
  std::int64_t dq_columns;  // with as many dq is written fastest
};
GradientStores gradient_stores(const Problem& problem);

}  // namespace flashgrad::sm90
