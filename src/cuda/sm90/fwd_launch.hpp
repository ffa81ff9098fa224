// SPDX-License-Identifier: Apache-2.0
// The forward on the host: what it serves, how it cuts the workspace, how it launches.
#pragma once

#include "core/backend.hpp"

namespace flashgrad::sm90 {

// Beyond what sm90_backend.cpp checks for both passes.
Status supports_forward(const Problem& problem);
WorkspaceSize forward_workspace_size(const Problem& problem);
Status launch_forward(const Problem& problem, const Args& args);

}  // namespace flashgrad::sm90
