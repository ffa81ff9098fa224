// SPDX-License-Identifier: Apache-2.0
// The speed of this machine's multiply-add units, measured: what a kernel's GFLOP/s are a fraction
// of.
#pragma once

#include <string>

namespace flashgrad::tool {

struct Peak {
  std::string instruction;  // "f32 FMA, avx512"
  double gflops = 0;
};

// f32 fused multiply-adds, on `num_threads` threads at once.
Peak measure_f32_peak(int num_threads);

// bf16 dot products into f32; where the machine has none, bf16 tensors are multiplied as f32 and so
// is this peak.
Peak measure_bf16_peak(int num_threads);

}  // namespace flashgrad::tool
