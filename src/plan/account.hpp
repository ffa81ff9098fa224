// SPDX-License-Identifier: Apache-2.0
// Where the cycles of a kernel go on a device, what binds it, and whether it fits.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "plan/device.hpp"
#include "plan/kernel.hpp"

namespace flashgrad::plan {

struct Line {
  std::string what;
  double cycles;
};

// Cycles of one CTA for one pair of tiles.
struct Account {
  double mma = 0;
  double exp = 0;
  double fp32 = 0;
  double hbm = 0;
  double l2_reduce = 0;                   // 0 where the device's rate is unknown
  double shared = 0;                      // what the kernel's published account counts
  std::array<double, kNumUses> by_use{};  // all of it
  std::vector<Line> shared_lines;         // all of it, in the order of the kernel
  double l2_bytes_per_clk = 0;            // loads and reductions, over the cycles of the products
  double l2_load_bytes = 0;
  double l2_reduce_bytes = 0;

  // The least time: the busiest resource, or the sum of products and softmax if they take turns.
  double bound = 0;
  // What keeps the tensor cores from being busy all the time. `kBalanced`: nothing does, but for a
  // tenth.
  enum class Bottleneck : std::uint8_t {
    kBalanced,
    kHbm,
    kIdleTensorCores,
    kExpAndShared,
    kShared,
    kExp,
    kReductions,
  };
  Bottleneck bottleneck = Bottleneck::kBalanced;

  double shared_bytes = 0;  // held
  double tensor_columns = 0;
  double registers = 0;                // of the CTA
  std::vector<std::string> overflows;  // why it does not fit; empty: it does

  [[nodiscard]] double busy() const { return mma / bound; }  // share of the tensor cores
};

const char* name_of(Account::Bottleneck bottleneck);

// Bytes a clock at which it passes; where nobody has measured the network between SMs, a peer's
// tile lands like any other write.
double shared_rate(const SharedTraffic& traffic, const Device& device);

Account account(const Kernel& kernel, const Device& device);

// Bytes of shared memory traffic for one pair of tiles, by use.
std::array<double, kNumUses> shared_bytes_by_use(const Kernel& kernel);

// Throws std::invalid_argument with what overflows if the kernel does not fit.
void require_fit(const Kernel& kernel, const Device& device);

// Kernels of one family at a head dim, each tile size that fits, least bound per query x key first.
std::vector<Kernel> search_hopper_backward(const Device& device, int head_dim, int cluster);

}  // namespace flashgrad::plan
