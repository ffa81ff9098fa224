// SPDX-License-Identifier: Apache-2.0
// The algorithm for AVX2, FMA and F16C.
#include "cpu/isa/avx2.hpp"

#include "cpu/backward.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/forward.hpp"

namespace flashgrad::cpu {
namespace {

WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  return pass == Pass::kForward ? forward_workspace<Avx2>(p) : backward_workspace<Avx2>(p);
}

}  // namespace

const Kernels kAvx2Kernels = {workspace_size, forward<Avx2>, backward<Avx2>};

}  // namespace flashgrad::cpu
