// SPDX-License-Identifier: Apache-2.0
// The algorithm for AVX2, FMA and F16C.
#include "cpu/isa/avx2.hpp"

#include "cpu/isa/kernels.hpp"

namespace flashgrad::cpu {

const Kernels kAvx2Kernels = make_kernels<Avx2>();

}  // namespace flashgrad::cpu
