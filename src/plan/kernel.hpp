// SPDX-License-Identifier: Apache-2.0
// A kernel as data: what one thread block (CTA) does to one pair of a query tile and a key tile,
// and what it holds meanwhile. account.hpp turns it into cycles.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashgrad::plan {

enum class Space : std::uint8_t { kShared, kRegisters, kTensorMemory };

// accumulator (rows x columns) += A (rows x depth) B (depth x columns), 16-bit operands.
struct Product {
  std::string name;
  int rows;
  int columns;
  int depth;
  Space a;
  Space b;
  Space accumulator;
  int a_reads = 1;  // A is read once for each group of columns that different warps take
  int b_reads = 1;  // B is read once for each group of rows of an instruction
  int b_share = 1;  // CTAs that work as a pair hold and read half of B each

  [[nodiscard]] double flop() const { return 2.0 * rows * columns * depth; }
  // Bytes of 16-bit operands that come out of shared memory.
  [[nodiscard]] double shared_bytes() const;
};

// Why shared memory is read or written.
enum class Use : std::uint8_t {
  kOperands,   // read by products
  kWritten,    // P and dS, written for products
  kExchanged,  // sent to or received from the other CTA of a pair
  kStaged,     // on its way to global memory: written, then read
  kLanding,    // tiles that come from global memory
};
inline constexpr int kNumUses = 5;
const char* name_of(Use use);

struct SharedTraffic {
  std::string name;
  Use use;
  double bytes;
  bool from_peer = false;  // comes over the network between SMs, at its rate
};

enum class Level : std::uint8_t { kL2Load, kL2Reduce, kHbm };

struct GlobalTraffic {
  std::string name;
  Level level;
  double bytes;
};

struct Buffer {
  std::string name;
  double size;  // bytes of shared memory, or columns of tensor memory
};

// A group of 128 threads and the registers that each of them needs.
struct Warpgroup {
  std::string role;
  int registers;
};

struct Kernel {
  std::string name;
  std::string description;
  int queries;  // of a tile
  int keys;
  int head_dim;
  int ctas = 1;  // that work together
  std::vector<Product> products{};
  std::vector<SharedTraffic> shared_traffic{};  // besides the products' operands
  std::vector<GlobalTraffic> global_traffic{};
  double fp32_operations = 0;  // of the softmax, on the lanes for f32
  std::vector<Buffer> shared_buffers{};
  std::vector<Buffer> tensor_buffers{};
  std::vector<Warpgroup> warpgroups{};
  // False: the same warps do products and softmax in turns, and the tensor cores idle meanwhile.
  bool overlaps = true;
  // Traffic of shared memory that the published account of this kernel leaves out. It is shown, but
  // is not part of the total.
  std::vector<Use> uncounted{};
  bool counts_sending = true;  // likewise, what the pair's other CTA reads from here

  // For predictions (pipeline.hpp): warpgroups that each go from products to softmax and back, 0:
  // not known; and bytes that a CTA moves once for all its pairs.
  int workers = 0;
  double tile_bytes = 0;
  double start_cycles = 0;  // until a CTA has set up
  bool has_softmax = true;

  [[nodiscard]] double pairs() const { return static_cast<double>(queries) * keys; }
  [[nodiscard]] double exponentials() const { return has_softmax ? pairs() : 0; }
};

// FlashAttention-3's family on Hopper (wgmma). S^T and P^T have keys as rows unless `swapped`.
struct HopperBackward {
  int queries = 64;
  int keys = 128;
  int head_dim = 128;
  int consumers = 2;  // warpgroups that make S, dP, dV and dK
  bool swapped =
      false;  // S has queries as rows; dV^T = dO^T P and dK^T = Q^T dS, from shared memory
  enum class Dq : std::uint8_t {
    kConsumers,  // each consumer makes some of dq's columns
    kWarpgroup,  // a warpgroup of its own
    kWorkspace,  // dS is written to global memory, another kernel makes dq
  } dq = Dq::kWarpgroup;
  int dq_passes = 1;           // over dS, each for some of dq, which saves registers
  bool dq_transposed = false;  // dQ^T = K^T dS^T
  bool staged = false;         // dq goes through shared memory, not straight from registers
  int cluster = 1;             // 2: a pair of CTAs shares Q and dO, and each makes half of dq
  bool split_rows = false;     // that half is half of the query rows, not of the columns
  int q_stages = 2;
  int do_stages = 2;
  int ds_stages = 1;
};

Kernel hopper_backward(const HopperBackward& c);

struct HopperForward {
  int rows_per_consumer = 64;
  int consumers = 2;
  int keys = 128;
  int head_dim = 128;
  int head_dim_v = 128;
  int stages = 2;
};

Kernel hopper_forward(const HopperForward& c);

// FlashAttention-4's on Blackwell (tcgen05): tiles of 128 x 128, accumulators in tensor memory.
Kernel fa4_forward(int head_dim);
Kernel fa4_backward(int head_dim, int ctas);

// FlashAttention-2's forward, FlashAttention-1's, and attention that stores S and P (mma.sync).
Kernel fa2_forward(int head_dim);
Kernel fa1_forward(int head_dim);
Kernel standard_forward(int head_dim);

// This library's kernels for Hopper, in their real configurations (src/cuda/sm90/*.def, and for
// head dims above 128 wide_config.hpp).
std::vector<Kernel> sm90_kernels();

// The forward's for these head dims, and the backward's main kernel up to head dim 128: the ordered
// one, or with a cluster, which head dims up to 96 don't have (fwd_launch.cu, bwd_launch.cu). Throw
// std::invalid_argument beyond them.
const Kernel& sm90_forward_kernel(std::int64_t head_dim, std::int64_t head_dim_v);
const Kernel& sm90_backward_kernel(std::int64_t head_dim, bool ordered, bool cluster);
// By its number in variants.def.
const Kernel& sm90_backward_variant(int variant);

// The configurations that were weighed for the Hopper backward: docs/model.md's table.
std::vector<Kernel> weighed_kernels();

// All of the above by name, at head_dim 128 where they have a choice.
const std::vector<Kernel>& kernels();
const Kernel& find_kernel(const std::string& name);

}  // namespace flashgrad::plan
