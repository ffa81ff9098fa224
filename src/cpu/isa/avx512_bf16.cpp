// SPDX-License-Identifier: Apache-2.0
// The algorithm for bf16 tensors on AVX-512-BF16.
#include "cpu/backward.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/forward.hpp"
#include "cpu/isa/avx512.hpp"

namespace flashgrad::cpu {
namespace {

WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  return pass == Pass::kForward ? forward_workspace<Avx512Bf16>(p)
                                : backward_workspace<Avx512Bf16>(p);
}

}  // namespace

const Kernels kAvx512Bf16Kernels = {workspace_size, forward<Avx512Bf16>, backward<Avx512Bf16>};

}  // namespace flashgrad::cpu
