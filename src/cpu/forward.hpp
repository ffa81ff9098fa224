// SPDX-License-Identifier: Apache-2.0
// The forward pass (filled by branch cpufwd; this placeholder only lets branch cpu build).
#pragma once

#include "core/backend.hpp"

namespace flashgrad::cpu {

template <class Isa>
static WorkspaceSize forward_workspace(const Problem& /*p*/) {
  return {};
}

template <class Isa>
static void forward(const Problem& /*p*/, const Args& /*args*/) {}

}  // namespace flashgrad::cpu
