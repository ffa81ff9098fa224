// SPDX-License-Identifier: Apache-2.0
// This library's kernels for Hopper as data, from their own configurations.
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/sm90/config.hpp"
#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/wide_config.hpp"
#include "cuda/sm90/wide_tile.cuh"
#include "plan/kernel.hpp"

namespace flashgrad::plan {
namespace {

// Bytes of a tile of 16-bit numbers.
double half(double rows, double columns) { return rows * columns * 2; }

constexpr const char* kBackwardNames[] = {
#define FG_BWD_VARIANT(name, ...) #name,
#include "cuda/sm90/variants.def"
#undef FG_BWD_VARIANT
};

std::string backward_name(const char* variant) {
  return std::string("sm90-backward-") + (variant + 1);  // without the k
}

// Lanes of an instruction a clock that a logit of the backward takes besides its exponential,
// counted in bwd_consumer.cuh: a multiply-add, an addition and a product at the full rate of 128;
// half a minimum; two roundings of pairs and two bits of unpacking at half that rate.
constexpr double kSoftmaxLanes = 7.5;

// Until a CTA of the backward has set up; fitted on benchmarks/results/2026-11-29-h200-peers.json,
// backward of 1k.
constexpr double kStartCycles = 2000;

// bwd_wide.cuh: 64 queries x 64 keys; one warpgroup makes S, P and dV, the other dP, dS and dK, and
// P crosses over. Some columns of K and V stay in registers. A pair shares the loads.
Kernel wide_backward(int d, int dv) {
  constexpr int kRows = sm90::kBlockM;
  constexpr int kKeys = sm90::kWideKeys;
  const sm90::WideConfig c{d, dv, 2, false};
  const int resident = c.resident();
  const auto shared = Space::kShared;
  const auto registers = Space::kRegisters;
  Kernel kernel{
      .name =
          "sm90-backward-wide-D" + std::to_string(d) + (dv == d ? "" : "V" + std::to_string(dv)),
      .description = "64x64, a warpgroup for S and dV, one for dP and dK, dS to global memory",
      .queries = kRows,
      .keys = kKeys,
      .head_dim = d,
      .ctas = c.cluster};
  kernel.products = {{"S, resident", kKeys, kRows, resident, registers, shared, registers},
                     {"S", kKeys, kRows, d - resident, shared, shared, registers},
                     {"dP, resident", kKeys, kRows, resident, registers, shared, registers},
                     {"dP", kKeys, kRows, dv - resident, shared, shared, registers},
                     {"dV", kKeys, dv, kRows, registers, shared, registers},
                     {"dK", kKeys, d, kRows, registers, shared, registers}};
  std::erase_if(kernel.products, [](const Product& p) { return p.depth == 0; });
  const double ds = half(kRows, kKeys);
  const double landing = half(kRows, d) + half(kRows, dv);
  kernel.shared_traffic = {{"P written for the other warpgroup", Use::kWritten, ds},
                           {"P read there", Use::kWritten, ds},
                           {"dS written", Use::kStaged, ds},
                           {"dS read on its way to global memory", Use::kStaged, ds},
                           {"Q and dO land", Use::kLanding, landing}};
  kernel.global_traffic = {{"Q and dO", Level::kL2Load, landing / kernel.ctas},
                           {"dS", Level::kHbm, ds}};
  kernel.fp32_operations = kSoftmaxLanes * kernel.pairs();
  const auto bytes = [](int size) { return static_cast<double>(size); };
  kernel.shared_buffers = {
      {"K and V, not resident", bytes(c.k_bytes() + c.v_bytes())},
      {"Q", bytes(c.q_stages() * c.q_bytes())},
      {"dO", bytes(c.do_stages() * c.do_bytes())},
      {"P, then dS, " + std::to_string(c.slots()) + " slots", bytes(c.slots() * c.slot_bytes())},
      {"lse, delta", bytes(c.barrier_offset() - c.lse_offset())},
      {"barriers and the tile", bytes(c.shared_bytes() - c.barrier_offset())}};
  kernel.warpgroups = {{"S and dV", sm90::kWideRegisters},
                       {"dP and dK", sm90::kWideRegisters},
                       {"loads", sm90::kWideLoaderRegisters}};
  kernel.workers = 1;  // what one makes the other waits for
  kernel.tile_bytes = 2 * half(kKeys, d + dv);
  kernel.start_cycles = kStartCycles;
  return kernel;
}

// bwd_wide_dq.cuh: dQ += dS K, 128 queries x 64 keys.
Kernel wide_dq(int d) {
  constexpr int kRows = sm90::kWideDqRows;
  constexpr int kKeys = sm90::kWideKeys;
  const sm90::WideDqConfig c{d, 2};
  Kernel kernel{.name = "sm90-backward-wide-dq-D" + std::to_string(d),
                .description = "128x64, dq out of the dS in global memory",
                .queries = kRows,
                .keys = kKeys,
                .head_dim = d,
                .ctas = c.cluster};
  kernel.products = {
      {"dQ", kRows, d, kKeys, Space::kShared, Space::kShared, Space::kRegisters, 1, kRows / 64}};
  const double ds = half(kRows, kKeys);
  const double k = half(kKeys, d);
  kernel.shared_traffic = {{"dS and K land", Use::kLanding, ds + k}};
  kernel.global_traffic = {{"dS", Level::kHbm, ds}, {"K", Level::kL2Load, k / kernel.ctas}};
  kernel.shared_buffers = {{"dS and K, " + std::to_string(c.stages()) + " stages",
                            static_cast<double>(c.staging_offset())},
                           {"dq on its way out, barriers and two tiles",
                            static_cast<double>(c.shared_bytes() - c.staging_offset())}};
  kernel.warpgroups = {{"consumer 0", sm90::kWideDqRegisters},
                       {"consumer 1", sm90::kWideDqRegisters},
                       {"loads", sm90::kWideDqLoaderRegisters}};
  kernel.has_softmax = false;
  kernel.workers = 2;
  kernel.tile_bytes = half(kRows, d);
  kernel.start_cycles = kStartCycles;
  return kernel;
}

}  // namespace

std::vector<Kernel> sm90_kernels() {
  std::vector<Kernel> all;
  const char* const forward_names[] = {
#define FG_FWD_VARIANT(name, ...) #name,
#include "cuda/sm90/fwd_variants.def"
#undef FG_FWD_VARIANT
  };
  const auto bytes = [](int size) { return static_cast<double>(size); };
  const char* const* name = kBackwardNames;
  for (const sm90::BwdConfig& c : sm90::kBwdConfigs) {
    // Without a cluster dq is made in pieces (bwd_dq.cuh).
    Kernel kernel = hopper_backward({.queries = sm90::kBlockM,
                                     .keys = c.block_n(),
                                     .head_dim = c.head_dim,
                                     .consumers = sm90::BwdConfig::kConsumers,
                                     .dq_passes = c.cluster == 2 ? 1 : c.dq_pieces(),
                                     .cluster = c.cluster});
    kernel.name = backward_name(*name++);
    kernel.shared_buffers = {{"as BwdConfig lays it out", bytes(c.shared_bytes())}};
    kernel.warpgroups = {{"consumer 0", c.consumer_registers},
                         {"consumer 1", c.consumer_registers},
                         {"dq and loads", c.dq_registers}};
    kernel.fp32_operations = kSoftmaxLanes * kernel.pairs();
    kernel.workers = sm90::BwdConfig::kConsumers;
    kernel.tile_bytes = 4 * half(c.block_n(), c.head_dim);
    kernel.start_cycles = kStartCycles;
    all.push_back(std::move(kernel));
  }
  name = forward_names;
  for (const sm90::FwdConfig& c : sm90::kFwdConfigs) {
    Kernel kernel = hopper_forward({.consumers = c.num_consumers,
                                    .keys = c.block_n,
                                    .head_dim = c.head_dim,
                                    .head_dim_v = c.head_dim_v});
    kernel.name = std::string("sm90-forward-") + (*name++ + 1);
    kernel.shared_buffers = {{"as FwdConfig lays it out", bytes(c.shared_bytes())}};
    kernel.warpgroups.assign(static_cast<std::size_t>(c.num_consumers),
                             {"consumer", c.consumer_registers()});
    kernel.warpgroups.push_back({"loads", c.producer_registers()});
    // O is rescaled only where the maximum has grown a lot.
    kernel.fp32_operations = 3.5 * kernel.pairs();
    kernel.workers = c.num_consumers;
    kernel.tile_bytes = half(c.block_m(), c.head_dim + c.head_dim_v);
    all.push_back(std::move(kernel));
  }
  for (Kernel kernel : {wide_backward(192, 128), wide_backward(192, 192), wide_backward(256, 256),
                        wide_dq(192), wide_dq(256)}) {
    all.push_back(std::move(kernel));
  }
  return all;
}

const Kernel& sm90_forward_kernel(std::int64_t head_dim, std::int64_t head_dim_v) {
  for (const sm90::FwdConfig& c : sm90::kFwdConfigs) {
    if (c.head_dim >= head_dim && c.head_dim_v >= head_dim_v) {
      return find_kernel("sm90-forward-D" + std::to_string(c.head_dim) +
                         (c.head_dim_v == c.head_dim ? "" : "V" + std::to_string(c.head_dim_v)));
    }
  }
  throw std::invalid_argument("no sm90 forward above head_dim 256");
}

const Kernel& sm90_backward_kernel(std::int64_t head_dim, bool ordered, bool cluster) {
  if (head_dim > 128) {
    throw std::invalid_argument("no single sm90 backward kernel above head_dim 128");
  }
  if (head_dim <= 96 && cluster) {
    throw std::invalid_argument("the sm90 backward up to head_dim 96 has no cluster");
  }
  return find_kernel(std::string("sm90-backward-") +
                     (head_dim <= 64   ? "D64"
                      : head_dim <= 96 ? "D96"
                                       : "D128") +
                     (ordered   ? "Ordered"
                      : cluster ? "Cluster"
                                : ""));
}

const Kernel& sm90_backward_variant(int variant) {
  return find_kernel(backward_name(kBackwardNames[variant]));
}

}  // namespace flashgrad::plan
