// SPDX-License-Identifier: Apache-2.0
// The algorithm for AVX-512 (F, BW, DQ, VL).
#include "cpu/isa/avx512.hpp"

#include "cpu/backward.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/forward.hpp"

namespace flashgrad::cpu {
namespace {

WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  return pass == Pass::kForward ? forward_workspace<Avx512>(p) : backward_workspace<Avx512>(p);
}

}  // namespace

const Kernels kAvx512Kernels = {workspace_size, forward<Avx512>, backward<Avx512>};

}  // namespace flashgrad::cpu
