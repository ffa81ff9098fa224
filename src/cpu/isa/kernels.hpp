// SPDX-License-Identifier: Apache-2.0
// What each translation unit of isa/ defines: the algorithm over its Isa structs, as a table.
#pragma once

#include "cpu/backward.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/forward.hpp"

namespace flashgrad::cpu {

template <class ForwardIsa, class BackwardIsa>
static WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  return pass == Pass::kForward ? forward_workspace<ForwardIsa>(p)
                                : backward_workspace<BackwardIsa>(p);
}

// The passes may differ in the register tile.
template <class ForwardIsa, class BackwardIsa = ForwardIsa>
static constexpr Kernels make_kernels() {
  return {workspace_size<ForwardIsa, BackwardIsa>, forward<ForwardIsa>, backward<BackwardIsa>};
}

}  // namespace flashgrad::cpu
