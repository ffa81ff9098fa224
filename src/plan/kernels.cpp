// SPDX-License-Identifier: Apache-2.0
// The kernels that are known, from their tiles: what each product reads, what else passes through
// shared and global memory, what is held.
#include <algorithm>
#include <stdexcept>

#include "plan/kernel.hpp"

namespace flashgrad::plan {
namespace {

constexpr int kWgmmaRows = 64;      // of an instruction, per warpgroup
constexpr int kUmmaRows = 128;      // of a tcgen05.mma, per CTA
constexpr int kBaseRegisters = 24;  // of a thread, before accumulators (measured on Hopper)
constexpr int kLoaderRegisters = 24;

// Bytes of a tile of 16-bit or f32 numbers.
double half(double rows, double columns) { return rows * columns * 2; }
double single(double rows, double columns) { return rows * columns * 4; }

int round_up_to_8(double registers) { return (static_cast<int>(registers) + 7) / 8 * 8; }

std::string tile_name(int queries, int keys) {
  return std::to_string(queries) + "x" + std::to_string(keys);
}

// Softmax in f32: the forward scales and subtracts, compares, sums and converts each logit and
// rescales the output; the backward has two multiply-adds, a product and two conversions.
double forward_fp32(double queries, double keys, double head_dim) {
  return queries * keys * 3.5 + queries * head_dim;
}
double backward_fp32(double queries, double keys) { return queries * keys * 4; }

std::string describe(const HopperBackward& c) {
  using Dq = HopperBackward::Dq;
  std::string text =
      tile_name(c.queries, c.keys) + ", " + std::to_string(c.consumers) + " consumers";
  text += c.swapped ? ", P and dS through shared memory" : "";
  text += c.cluster == 2 ? ", 2-CTA cluster" : "";
  if (c.dq == Dq::kWorkspace) {
    return text + ", dS to global memory";
  }
  text += c.dq_transposed ? ", dq^T by " : ", dq by ";
  text += c.dq == Dq::kConsumers ? "the consumers" : "a third warpgroup";
  text += c.dq_passes > 1 ? " in " + std::to_string(c.dq_passes) + " passes" : "";
  if (c.cluster == 2) {
    text += c.split_rows ? ", each CTA half of its rows" : ", each CTA half of its columns";
  }
  return text + (c.staged ? ", staged" : "");
}

// Of dq, what a CTA of the cluster makes: half of its rows or of its columns, for the keys of both.
int dq_rows(const HopperBackward& c) {
  return c.queries / (c.cluster == 2 && c.split_rows ? 2 : 1);
}
int dq_columns(const HopperBackward& c) {
  return c.head_dim / (c.cluster == 2 && !c.split_rows ? 2 : 1);
}

// dS that comes from the peer.
double peer_ds(const HopperBackward& c) {
  return c.cluster == 2 ? half(c.queries, c.keys) * (c.split_rows ? 0.5 : 1) : 0;
}

std::vector<Product> hopper_products(const HopperBackward& c) {
  using Dq = HopperBackward::Dq;
  const int m = c.queries;
  const int n = c.keys;
  const int d = c.head_dim;
  std::vector<Product> products;
  // (1), (3): S^T = K Q^T and dP^T = V dO^T, or S and dP with the consumers side by side.
  for (const char* name : {"S", "dP"}) {
    products.push_back(c.swapped ? Product{name, m, n, d, Space::kShared, Space::kShared,
                                           Space::kRegisters, c.consumers, m / kWgmmaRows}
                                 : Product{name, n, m, d, Space::kShared, Space::kShared,
                                           Space::kRegisters, 1, n / kWgmmaRows});
  }
  // (5), (6): dV = P^T dO and dK = dS^T Q from registers, or their transposes from shared memory.
  for (const char* name : {"dV", "dK"}) {
    products.push_back(c.swapped ? Product{name, d, n, m, Space::kShared, Space::kShared,
                                           Space::kRegisters, 1, d / kWgmmaRows}
                                 : Product{name, n, d, m, Space::kRegisters, Space::kShared,
                                           Space::kRegisters, 1, n / kWgmmaRows});
  }
  // (7): dQ = dS K over the keys of the cluster, for this CTA's part of dq.
  const int depth = n * c.cluster;
  if (c.dq != Dq::kWorkspace) {
    products.push_back(
        c.dq_transposed
            ? Product{"dQ", dq_columns(c), dq_rows(c), depth, Space::kShared, Space::kShared,
                      Space::kRegisters, 1, dq_columns(c) / kWgmmaRows}
            : Product{"dQ", dq_rows(c), dq_columns(c), depth, Space::kShared, Space::kShared,
                      Space::kRegisters, c.dq_passes * (c.dq == Dq::kConsumers ? c.consumers : 1),
                      dq_rows(c) / kWgmmaRows});
  }
  return products;
}

std::vector<SharedTraffic> hopper_shared_traffic(const HopperBackward& c) {
  const double ds = half(c.queries, c.keys);
  std::vector<SharedTraffic> traffic;
  if (c.swapped) {
    traffic.push_back({"P written", Use::kWritten, ds});
  }
  traffic.push_back({"dS written", Use::kWritten, ds});
  if (c.dq == HopperBackward::Dq::kWorkspace) {
    traffic.push_back({"dS read on its way to global memory", Use::kStaged, ds});
  } else if (c.cluster == 2) {
    traffic.push_back({"dS read for the peer", Use::kExchanged, peer_ds(c)});
    traffic.push_back({"peer's dS lands", Use::kExchanged, peer_ds(c), true});
  }
  if (c.staged) {
    const double dq = single(dq_rows(c), dq_columns(c));
    traffic.push_back({"dQ written", Use::kStaged, dq});
    traffic.push_back({"dQ read on its way to global memory", Use::kStaged, dq});
  }
  traffic.push_back({"Q and dO land", Use::kLanding, 2 * half(c.queries, c.head_dim)});
  return traffic;
}

std::vector<Buffer> hopper_shared_buffers(const HopperBackward& c) {
  const int m = c.queries;
  const int n = c.keys;
  const int d = c.head_dim;
  const double ds = half(m, n);
  std::vector<Buffer> buffers = {{"K", half(n, d)},
                                 {"V", half(n, d)},
                                 {"Q", c.q_stages * half(m, d)},
                                 {"dO", c.do_stages * half(m, d)},
                                 {"dS", c.ds_stages * ds},
                                 {"lse, delta", (c.q_stages + c.do_stages) * single(m, 1)},
                                 {"barriers", 256}};
  if (c.swapped) {
    buffers.push_back({"P", ds});
  }
  if (c.cluster == 2 && c.dq != HopperBackward::Dq::kWorkspace) {
    buffers.push_back({"peer's K", half(n, dq_columns(c))});
    buffers.push_back({"peer's dS", c.ds_stages * peer_ds(c)});
  }
  if (c.staged) {
    buffers.push_back({"dQ", single(dq_rows(c), dq_columns(c))});
  }
  return buffers;
}

// A consumer keeps dK, dV, S and dP; its dq takes the registers of S and dP, which are done with.
std::vector<Warpgroup> hopper_warpgroups(const HopperBackward& c) {
  using Dq = HopperBackward::Dq;
  const double consumer_threads = 128.0 * c.consumers;
  const double dq_part = static_cast<double>(dq_rows(c)) * dq_columns(c) / c.dq_passes;
  const double own_dq = c.dq == Dq::kConsumers ? dq_part / consumer_threads : 0;
  const double accumulators = 2.0 * c.keys * c.head_dim / consumer_threads +
                              std::max(2.0 * c.queries * c.keys / consumer_threads, own_dq);
  std::vector<Warpgroup> warpgroups;
  for (int i = 0; i < c.consumers; ++i) {
    warpgroups.push_back(
        {"consumer " + std::to_string(i), round_up_to_8(kBaseRegisters + accumulators)});
  }
  warpgroups.push_back(
      c.dq == Dq::kWarpgroup
          ? Warpgroup{"dq and loads", round_up_to_8(kBaseRegisters + dq_part / 128)}
          : Warpgroup{"loads", kLoaderRegisters});
  return warpgroups;
}

}  // namespace

double Product::shared_bytes() const {
  double bytes = 0;
  if (a == Space::kShared) {
    bytes += half(rows, depth) * a_reads;
  }
  if (b == Space::kShared) {
    bytes += half(depth, columns) * b_reads / b_share;
  }
  return bytes;
}

const char* name_of(Use use) {
  switch (use) {
    case Use::kOperands:
      return "operands";
    case Use::kWritten:
      return "written";
    case Use::kExchanged:
      return "exchanged";
    case Use::kStaged:
      return "staged";
    case Use::kLanding:
      return "landing";
  }
  return "";
}

Kernel hopper_backward(const HopperBackward& c) {
  Kernel kernel{.name = "hopper-backward",
                .description = describe(c),
                .queries = c.queries,
                .keys = c.keys,
                .head_dim = c.head_dim,
                .ctas = c.cluster};
  kernel.products = hopper_products(c);
  kernel.shared_traffic = hopper_shared_traffic(c);
  kernel.counts_sending = false;
  kernel.global_traffic = {
      {"Q and dO", Level::kL2Load, 2 * half(c.queries, c.head_dim) / c.cluster}};
  if (c.dq != HopperBackward::Dq::kWorkspace) {
    kernel.global_traffic.push_back({"dQ", Level::kL2Reduce, single(dq_rows(c), dq_columns(c))});
  }
  kernel.fp32_operations = backward_fp32(c.queries, c.keys);
  kernel.shared_buffers = hopper_shared_buffers(c);
  kernel.warpgroups = hopper_warpgroups(c);
  return kernel;
}

Kernel hopper_forward(const HopperForward& c) {
  const int m = c.rows_per_consumer * c.consumers;
  const int n = c.keys;
  Kernel kernel{.name = "hopper-forward",
                .description = tile_name(m, n) + ", " + std::to_string(c.consumers) + " consumers",
                .queries = m,
                .keys = n,
                .head_dim = c.head_dim};
  kernel.products = {
      {"S", m, n, c.head_dim, Space::kShared, Space::kShared, Space::kRegisters, 1, m / kWgmmaRows},
      {"O", m, c.head_dim_v, n, Space::kRegisters, Space::kShared, Space::kRegisters, 1,
       m / kWgmmaRows}};
  const double kv = half(n, c.head_dim) + half(n, c.head_dim_v);
  kernel.shared_traffic = {{"K and V land", Use::kLanding, kv}};
  kernel.global_traffic = {{"K and V", Level::kL2Load, kv}};
  kernel.fp32_operations = forward_fp32(m, n, c.head_dim_v);
  kernel.shared_buffers = {
      {"Q", half(m, c.head_dim)}, {"K and V", c.stages * kv}, {"barriers", 256}};
  const double row = c.rows_per_consumer / 128.0;
  const double registers = kBaseRegisters + row * (n + n / 2.0 + c.head_dim_v);
  for (int i = 0; i < c.consumers; ++i) {
    kernel.warpgroups.push_back({"consumer " + std::to_string(i), round_up_to_8(registers)});
  }
  kernel.warpgroups.push_back({"loads", kLoaderRegisters});
  return kernel;
}

Kernel fa4_forward(int head_dim) {
  constexpr int kTile = kUmmaRows;
  const int d = head_dim;
  Kernel kernel{.name = "fa4-forward",
                .description = "FlashAttention-4: 128x128, two such tiles of queries at a time",
                .queries = kTile,
                .keys = kTile,
                .head_dim = d};
  kernel.products = {
      {"S", kTile, kTile, d, Space::kShared, Space::kShared, Space::kTensorMemory},
      {"O", kTile, d, kTile, Space::kTensorMemory, Space::kShared, Space::kTensorMemory}};
  // Both tiles of queries read the K and V that landed once.
  const double kv = 2 * half(kTile, d);
  kernel.shared_traffic = {{"K and V land", Use::kLanding, kv / 2}};
  kernel.uncounted = {Use::kLanding};
  kernel.global_traffic = {{"K and V", Level::kL2Load, kv / 2}};
  kernel.fp32_operations = forward_fp32(kTile, kTile, d);
  kernel.shared_buffers = {{"Q", 2 * half(kTile, d)}, {"K and V", 2 * kv}, {"barriers", 256}};
  kernel.tensor_buffers = {{"S and P", 2.0 * kTile}, {"O", 2.0 * d}};
  const int softmax = round_up_to_8(kBaseRegisters + kTile);
  kernel.warpgroups = {{"softmax 0", softmax},
                       {"softmax 1", softmax},
                       {"rescale", round_up_to_8(kBaseRegisters + kTile / 2.0)},
                       {"products and loads", kLoaderRegisters}};
  return kernel;
}

Kernel fa4_backward(int head_dim, int ctas) {
  constexpr int kTile = kUmmaRows;
  const int d = head_dim;
  const int rows = kTile / ctas;  // of dq that a CTA makes
  Kernel kernel{.name = ctas == 2 ? "fa4-backward-2cta" : "fa4-backward",
                .description = ctas == 2 ? "FlashAttention-4: 128x128 per CTA, products over a pair"
                                         : "FlashAttention-4: 128x128",
                .queries = kTile,
                .keys = kTile,
                .head_dim = d,
                .ctas = ctas};
  const auto shared = Space::kShared;
  const auto tensor = Space::kTensorMemory;
  kernel.products = {{"S", kTile, kTile, d, shared, shared, tensor, 1, 1, ctas},
                     {"dP", kTile, kTile, d, shared, shared, tensor, 1, 1, ctas},
                     {"dV", kTile, d, kTile, tensor, shared, tensor, 1, 1, ctas},
                     {"dK", kTile, d, kTile, tensor, shared, tensor, 1, 1, ctas},
                     {"dQ", rows, d, kTile * ctas, shared, shared, tensor, 1, 1, ctas}};
  const double ds = half(kTile, kTile);
  const double dq = single(rows, d);
  kernel.shared_traffic = {{"dS written", Use::kWritten, ds}};
  if (ctas == 2) {
    kernel.shared_traffic.push_back({"half of dS read for the peer", Use::kExchanged, ds / 2});
    kernel.shared_traffic.push_back({"peer's half of dS lands", Use::kExchanged, ds / 2, true});
  }
  kernel.shared_traffic.push_back({"dQ written", Use::kStaged, dq});
  kernel.shared_traffic.push_back({"dQ read on its way to global memory", Use::kStaged, dq});
  // With a pair: half the rows, for S and dP, and half the columns, for dV and dK, of each.
  kernel.shared_traffic.push_back({"Q and dO land", Use::kLanding, 2 * half(kTile, d)});
  kernel.uncounted = {Use::kLanding};
  kernel.global_traffic = {{"Q and dO", Level::kL2Load, 2 * half(kTile, d)},
                           {"dQ", Level::kL2Reduce, dq}};
  kernel.fp32_operations = backward_fp32(kTile, kTile);
  kernel.shared_buffers = {{"K", half(kTile, d)}, {"V", half(kTile, d)}};
  if (ctas == 2) {
    kernel.shared_buffers.push_back({"K of both, half the columns", half(kTile, d)});
    kernel.shared_buffers.push_back({"dS for the peer", ds / 2});
    kernel.shared_buffers.push_back({"Q, rows and columns", half(kTile, d)});
    kernel.shared_buffers.push_back({"dO, rows and columns", half(kTile, d)});
    kernel.shared_buffers.push_back({"dQ, 2 stages of 16 columns", 2 * single(kTile, 16)});
  } else {
    kernel.shared_buffers.push_back({"Q, 2 stages", 2 * half(kTile, d)});
    kernel.shared_buffers.push_back({"dO", half(kTile, d)});
    kernel.shared_buffers.push_back({"dQ, 2 stages of 32 columns", 2 * single(kTile, 32)});
  }
  kernel.shared_buffers.push_back({"dS", ds});
  kernel.shared_buffers.push_back({"lse, delta", 3 * single(kTile, 1)});
  kernel.shared_buffers.push_back({"barriers", 256});
  kernel.tensor_buffers = {{"S and P", kTile},
                           {"dP, dS and dQ", kTile},
                           {"dV", static_cast<double>(d)},
                           {"dK", static_cast<double>(d)}};
  // Half a row of S, packed P, a quarter of a row of dP.
  const int softmax = round_up_to_8(kBaseRegisters + kTile / 2.0 + kTile / 4.0 + kTile / 4.0);
  kernel.warpgroups = {{"softmax 0", softmax},
                       {"softmax 1", softmax},
                       {"dq", round_up_to_8(kBaseRegisters + kTile / 4.0)},
                       {"products and loads", kLoaderRegisters}};
  return kernel;
}

Kernel fa2_forward(int head_dim) {
  constexpr int kQueries = 128;
  constexpr int kKeys = 64;
  constexpr int kWarps = 4;
  const int d = head_dim;
  Kernel kernel{.name = "fa2-forward",
                .description = "FlashAttention-2: 128x64, warps do products and softmax in turns",
                .queries = kQueries,
                .keys = kKeys,
                .head_dim = d};
  kernel.products = {
      {"S", kQueries, kKeys, d, Space::kShared, Space::kShared, Space::kRegisters, 1, kWarps},
      {"O", kQueries, d, kKeys, Space::kRegisters, Space::kShared, Space::kRegisters, 1, kWarps}};
  const double kv = 2 * half(kKeys, d);
  kernel.shared_traffic = {{"K and V land", Use::kLanding, kv}};
  kernel.global_traffic = {{"K and V", Level::kL2Load, kv}};
  kernel.fp32_operations = forward_fp32(kQueries, kKeys, d);
  kernel.overlaps = false;
  kernel.shared_buffers = {{"Q", half(kQueries, d)}, {"K and V, 2 stages", 2 * kv}};
  kernel.warpgroups = {{"all", round_up_to_8(kBaseRegisters + d + kKeys + kKeys / 2.0)}};
  return kernel;
}

Kernel fa1_forward(int head_dim) {
  constexpr int kTile = 128;
  Kernel kernel = fa2_forward(head_dim);
  kernel.name = "fa1-forward";
  kernel.description =
      "FlashAttention-1: 128x128, keys outside, so out passes through HBM each time";
  kernel.keys = kTile;
  kernel.products[0].columns = kTile;
  kernel.products[1].depth = kTile;
  kernel.shared_traffic = {{"Q lands", Use::kLanding, half(kTile, head_dim)}};
  kernel.global_traffic = {{"Q", Level::kHbm, half(kTile, head_dim)},
                           {"out read", Level::kHbm, single(kTile, head_dim)},
                           {"out written", Level::kHbm, single(kTile, head_dim)}};
  kernel.fp32_operations = forward_fp32(kTile, kTile, head_dim);
  kernel.shared_buffers = {{"Q", half(kTile, head_dim)}, {"K and V", 2 * half(kTile, head_dim)}};
  const double accumulators = (2.0 * kTile * kTile + kTile * head_dim) / 256;
  kernel.warpgroups = {{"warps 0 to 3", round_up_to_8(kBaseRegisters + accumulators)},
                       {"warps 4 to 7", round_up_to_8(kBaseRegisters + accumulators)}};
  return kernel;
}

Kernel standard_forward(int head_dim) {
  constexpr int kTile = 128;
  Kernel kernel = fa1_forward(head_dim);
  kernel.name = "standard-forward";
  kernel.description = "standard attention: S and P are stored, a kernel for each step";
  const double tile = half(kTile, kTile);
  kernel.global_traffic = {{"S written", Level::kHbm, tile},
                           {"S read", Level::kHbm, tile},
                           {"P written", Level::kHbm, tile},
                           {"P read", Level::kHbm, tile}};
  return kernel;
}

std::vector<Kernel> weighed_kernels() {
  using Dq = HopperBackward::Dq;
  std::vector<Kernel> all;
  const auto add = [&all](const char* name, const HopperBackward& c) {
    Kernel kernel = hopper_backward(c);
    kernel.name = name;
    all.push_back(std::move(kernel));
  };
  const HopperBackward d64{.queries = 128, .head_dim = 64, .staged = true, .do_stages = 1};
  HopperBackward c = d64;
  c.dq = Dq::kConsumers;
  add("hopper-d64", c);
  add("hopper-d64-dq-warpgroup", d64);
  c = d64;
  c.cluster = 2;
  c.split_rows = true;
  add("hopper-d64-cluster", c);
  c = d64;
  c.staged = false;
  add("hopper-d64-direct", c);
  c.dq_transposed = true;
  add("hopper-d64-direct-transposed", c);

  const HopperBackward d128{};
  c = d128;
  c.dq = Dq::kConsumers;
  c.staged = true;
  add("fa3-backward", c);
  add("hopper-d128-dq-warpgroup", d128);
  c = d128;
  c.cluster = 2;
  add("hopper-d128-cluster", c);
  c = d128;
  c.dq = Dq::kWorkspace;
  add("hopper-d128-workspace", c);

  const HopperBackward d256{.queries = 64,
                            .keys = 80,
                            .head_dim = 256,
                            .swapped = true,
                            .dq = Dq::kConsumers,
                            .dq_passes = 2,
                            .dq_transposed = true,
                            .do_stages = 1};
  add("fa3-backward-d256", d256);
  c = d256;
  c.cluster = 2;
  c.q_stages = 1;
  add("hopper-d256-cluster", c);
  c = d256;
  c.dq = Dq::kWorkspace;
  add("hopper-d256-workspace", c);
  return all;
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> kKernels = [] {
    constexpr int kHeadDim = 128;
    std::vector<Kernel> list = {standard_forward(kHeadDim), fa1_forward(kHeadDim),
                                fa2_forward(kHeadDim),      hopper_forward({}),
                                fa4_forward(kHeadDim),      fa4_backward(kHeadDim, 1),
                                fa4_backward(kHeadDim, 2)};
    list[3].name = "fa3-forward";
    for (const std::vector<Kernel>& more : {weighed_kernels(), sm90_kernels()}) {
      list.insert(list.end(), more.begin(), more.end());
    }
    return list;
  }();
  return kKernels;
}

const Kernel& find_kernel(const std::string& name) {
  std::string names;
  for (const Kernel& kernel : kernels()) {
    if (kernel.name == name) {
      return kernel;
    }
    names += (names.empty() ? "" : ", ") + kernel.name;
  }
  throw std::invalid_argument("no kernel '" + name + "', want one of: " + names);
}

}  // namespace flashgrad::plan
