// SPDX-License-Identifier: Apache-2.0
// The algorithm for bf16 tensors on AVX-512-BF16.
#include "cpu/isa/avx512.hpp"
#include "cpu/isa/kernels.hpp"

namespace flashgrad::cpu {

const Kernels kAvx512Bf16Kernels = make_kernels<Avx512Bf16>();

}  // namespace flashgrad::cpu
