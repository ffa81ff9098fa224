// SPDX-License-Identifier: Apache-2.0
// The algorithm for the compiler's default target.
#include "cpu/isa/generic.hpp"

#include "cpu/backward.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/forward.hpp"

namespace flashgrad::cpu {
namespace {

WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  return pass == Pass::kForward ? forward_workspace<Generic>(p) : backward_workspace<Generic>(p);
}

}  // namespace

const Kernels kGenericKernels = {workspace_size, forward<Generic>, backward<Generic>};

}  // namespace flashgrad::cpu
