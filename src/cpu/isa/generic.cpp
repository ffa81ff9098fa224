// SPDX-License-Identifier: Apache-2.0
// The algorithm for the compiler's default target.
#include "cpu/isa/generic.hpp"

#include "cpu/isa/kernels.hpp"

namespace flashgrad::cpu {

const Kernels kGenericKernels = make_kernels<Generic>();

}  // namespace flashgrad::cpu
