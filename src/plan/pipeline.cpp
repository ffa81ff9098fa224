// SPDX-License-Identifier: Apache-2.0
// Implements pipeline.hpp.
#include "plan/pipeline.hpp"

#include <algorithm>
#include <cmath>

#include "plan/account.hpp"

namespace flashgrad::plan {

double product_cycles(const Kernel& kernel, const Device& device) {
  double mma = 0;
  for (const Product& product : kernel.products) {
    mma += product.flop() / device.mma_flop_per_clk;
  }
  double other = 0;
  for (const SharedTraffic& traffic : kernel.shared_traffic) {
    other += traffic.bytes / shared_rate(traffic, device);
  }
  double cycles = 0;
  for (const Product& product : kernel.products) {
    const double alone = product.flop() / device.mma_flop_per_clk;
    cycles +=
        std::max(alone, product.shared_bytes() / device.shared_bytes_per_clk + other * alone / mma);
  }
  return cycles;
}

double step_cycles(const Kernel& kernel, const Device& device) {
  const double workers = kernel.workers;
  const double tensor = product_cycles(kernel, device) / workers;
  const double softmax =
      (kernel.exponentials() / device.exp_per_clk + kernel.fp32_operations / device.fp32_per_clk) /
      workers;
  // G(n) sums tensor^i softmax^(n - i); n customers leave at the rate G(n - 1) / G(n).
  const auto sum = [&](int n) {
    double g = 0;
    for (int i = 0; i <= n; ++i) {
      g += std::pow(tensor, i) * std::pow(softmax, n - i);
    }
    return g;
  };
  return workers * sum(kernel.workers) / sum(kernel.workers - 1);
}

}  // namespace flashgrad::plan
