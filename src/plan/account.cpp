// SPDX-License-Identifier: Apache-2.0
// Implements account.hpp.
#include "plan/account.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace flashgrad::plan {
namespace {

// The tensor cores are called balanced if they are busy this share of the least time.
constexpr double kBalancedShare = 0.9;

bool counts(const Kernel& kernel, Use use) {
  return std::find(kernel.uncounted.begin(), kernel.uncounted.end(), use) == kernel.uncounted.end();
}

Account::Bottleneck find_bottleneck(const Kernel& kernel, const Account& a) {
  using Bottleneck = Account::Bottleneck;
  if (a.busy() >= kBalancedShare) {
    return Bottleneck::kBalanced;
  }
  if (a.hbm > a.mma) {
    return Bottleneck::kHbm;
  }
  if (!kernel.overlaps) {
    return Bottleneck::kIdleTensorCores;
  }
  if (a.l2_reduce > std::max(a.shared, a.exp)) {
    return Bottleneck::kReductions;
  }
  const bool exp = a.exp >= a.mma;
  const bool shared = a.shared >= a.mma;
  return exp && shared ? Bottleneck::kExpAndShared : exp ? Bottleneck::kExp : Bottleneck::kShared;
}

std::string overflow(const std::string& what, double has, double limit) {
  return what + " " + std::to_string(std::llround(has)) + ", the device has " +
         std::to_string(std::llround(limit));
}

void check_fit(const Kernel& kernel, const Device& device, Account& a) {
  for (const Buffer& buffer : kernel.shared_buffers) {
    a.shared_bytes += buffer.size;
  }
  for (const Buffer& buffer : kernel.tensor_buffers) {
    a.tensor_columns += buffer.size;
  }
  if (a.shared_bytes > device.shared_bytes) {
    a.overflows.push_back(overflow("shared memory: bytes", a.shared_bytes, device.shared_bytes));
  }
  if (a.tensor_columns > device.tensor_memory_columns) {
    a.overflows.push_back(
        overflow("tensor memory: columns", a.tensor_columns, device.tensor_memory_columns));
  }
  if (kernel.ctas > 1 && device.dsmem_bytes_per_clk == 0) {
    a.overflows.emplace_back("clusters: the device has no distributed shared memory");
  }
  // Registers are handed out by eights; all threads start with an equal share and may trade it.
  const auto groups = static_cast<double>(kernel.warpgroups.size());
  const double share = std::floor(device.registers / (128 * groups) / 8) * 8;
  double sum = 0;
  for (const Warpgroup& group : kernel.warpgroups) {
    sum += group.registers;
    if (group.registers > device.max_registers_per_thread) {
      a.overflows.push_back(overflow("registers of a thread of " + group.role + ":",
                                     group.registers, device.max_registers_per_thread));
    }
  }
  a.registers = 128 * sum;
  if (sum > share * groups) {
    a.overflows.push_back(overflow("registers of all warpgroups:", sum, share * groups));
  }
}

}  // namespace

const char* name_of(Account::Bottleneck bottleneck) {
  switch (bottleneck) {
    case Account::Bottleneck::kBalanced:
      return "balanced";
    case Account::Bottleneck::kHbm:
      return "HBM traffic";
    case Account::Bottleneck::kIdleTensorCores:
      return "idle tensor cores";
    case Account::Bottleneck::kExpAndShared:
      return "exp and shared memory";
    case Account::Bottleneck::kShared:
      return "shared memory";
    case Account::Bottleneck::kExp:
      return "exp";
    case Account::Bottleneck::kReductions:
      return "reductions into the L2";
  }
  return "";
}

double shared_rate(const SharedTraffic& traffic, const Device& device) {
  return traffic.from_peer && device.dsmem_bytes_per_clk > 0 ? device.dsmem_bytes_per_clk
                                                             : device.shared_bytes_per_clk;
}

Account account(const Kernel& kernel, const Device& device) {
  Account a;
  const auto add_shared = [&](const std::string& what, Use use, double cycles, bool counted) {
    a.shared_lines.push_back({what, cycles});
    a.by_use[static_cast<std::size_t>(use)] += cycles;
    a.shared += counted ? cycles : 0;
  };
  for (const Product& product : kernel.products) {
    a.mma += product.flop() / device.mma_flop_per_clk;
    add_shared(product.name + ", operands", Use::kOperands,
               product.shared_bytes() / device.shared_bytes_per_clk, true);
  }
  for (const SharedTraffic& traffic : kernel.shared_traffic) {
    const double rate = shared_rate(traffic, device);
    const bool sending = traffic.use == Use::kExchanged && !traffic.from_peer;
    add_shared(traffic.name, traffic.use, traffic.bytes / rate,
               counts(kernel, traffic.use) && (kernel.counts_sending || !sending));
  }
  for (const GlobalTraffic& traffic : kernel.global_traffic) {
    switch (traffic.level) {
      case Level::kL2Load:
        a.l2_load_bytes += traffic.bytes;
        break;
      case Level::kL2Reduce:
        a.l2_reduce_bytes += traffic.bytes;
        break;
      case Level::kHbm:
        a.hbm += traffic.bytes / device.hbm_bytes_per_clk();
        break;
    }
  }
  a.exp = kernel.exponentials() / device.exp_per_clk;
  a.fp32 = kernel.fp32_operations / device.fp32_per_clk;
  a.l2_bytes_per_clk = (a.l2_load_bytes + a.l2_reduce_bytes) / a.mma;
  if (!std::isnan(device.l2_reduce_bytes_per_clk)) {
    a.l2_reduce = a.l2_reduce_bytes / device.l2_reduce_bytes_per_clk;
  }
  const double compute =
      kernel.overlaps ? std::max({a.mma, a.exp, a.fp32}) : a.mma + a.exp + a.fp32;
  a.bound = std::max({compute, a.shared, a.hbm, a.l2_reduce});
  a.bottleneck = find_bottleneck(kernel, a);
  check_fit(kernel, device, a);
  return a;
}

std::array<double, kNumUses> shared_bytes_by_use(const Kernel& kernel) {
  std::array<double, kNumUses> bytes{};
  for (const Product& product : kernel.products) {
    bytes[static_cast<std::size_t>(Use::kOperands)] += product.shared_bytes();
  }
  for (const SharedTraffic& traffic : kernel.shared_traffic) {
    bytes[static_cast<std::size_t>(traffic.use)] += traffic.bytes;
  }
  return bytes;
}

void require_fit(const Kernel& kernel, const Device& device) {
  const Account a = account(kernel, device);
  if (!a.overflows.empty()) {
    std::string text = kernel.name + " does not fit " + device.name;
    for (const std::string& overflow : a.overflows) {
      text += "; " + overflow;
    }
    throw std::invalid_argument(text);
  }
}

std::vector<Kernel> search_hopper_backward(const Device& device, int head_dim, int cluster) {
  std::vector<Kernel> found;
  const auto consider = [&](const HopperBackward& c) {
    Kernel kernel = hopper_backward(c);
    if (account(kernel, device).overflows.empty()) {
      found.push_back(std::move(kernel));
    }
  };
  using Dq = HopperBackward::Dq;
  HopperBackward c{.head_dim = head_dim, .cluster = cluster, .q_stages = 2, .do_stages = 1};
  for (c.queries = 64; c.queries <= 128; c.queries += 64) {
    for (const bool split_rows : {false, true}) {
      c.split_rows = split_rows;
      if (split_rows && (cluster == 1 || c.queries == 64)) {
        continue;  // a product has at least 64 rows
      }
      const int dq_columns = head_dim / (cluster == 2 && !split_rows ? 2 : 1);
      for (const Dq dq : {Dq::kConsumers, Dq::kWarpgroup}) {
        c.dq = dq;
        for (c.dq_passes = 1; c.dq_passes <= 2; ++c.dq_passes) {
          // P and dS from registers: 64 keys a consumer, or twice that.
          c.swapped = false;
          c.dq_transposed = false;
          c.consumers = 2;
          for (c.keys = 128; c.keys <= 256; c.keys += 128) {
            consider(c);
          }
          // Through shared memory: any number of keys, and dK^T's rows are cut among consumers.
          c.swapped = true;
          for (c.consumers = 2; c.consumers <= 3; ++c.consumers) {
            for (const bool transposed : {false, true}) {
              c.dq_transposed = transposed;
              const int part = transposed ? 64 : 8 * (dq == Dq::kConsumers ? c.consumers : 1);
              if (head_dim % (64 * c.consumers) != 0 || dq_columns % (part * c.dq_passes) != 0) {
                continue;
              }
              for (c.keys = 16; c.keys <= 256; c.keys += 16) {
                if (c.keys % (8 * c.consumers) == 0) {
                  consider(c);
                }
              }
            }
          }
        }
      }
    }
  }
  const auto cost = [&](const Kernel& kernel) {
    const Account a = account(kernel, device);
    // Of two that take as long, the one that loads less.
    return a.bound / kernel.pairs() * (1 + 1e-6 * a.l2_bytes_per_clk);
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const Kernel& x, const Kernel& y) { return cost(x) < cost(y); });
  return found;
}

}  // namespace flashgrad::plan
