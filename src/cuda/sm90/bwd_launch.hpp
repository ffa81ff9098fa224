// SPDX-License-Identifier: Apache-2.0
// The backward on the host: how it cuts the workspace, how it launches.
#pragma once

#include "core/backend.hpp"

namespace flashgrad::sm90 {

WorkspaceSize backward_workspace_size(const Problem& problem);
Status launch_backward(const Problem& problem, const Args& args);

}  // namespace flashgrad::sm90
