// SPDX-License-Identifier: Apache-2.0
// Runs tile programs with real numbers: warps, tensor cores and copy engines of one or two CTAs,
// their shared memory, tensor memory and registers, and the barriers between them. A program is
// what a kernel does without the instructions' encodings.
//
// Time is an order, not a number: whatever is not ordered by barriers runs in an order that a seed
// picks. Every access is checked, whatever the order was: each agent (a role, a tensor pipe, a
// single copy) has a vector clock, barriers carry clocks from those who arrive to those who wait,
// and an access is faulty unless the clocks put it after those it depends on (FastTrack, PLDI
// 2009). Every access also names the value it means, "dP of step 3", and what is stored knows its
// name.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/mask.hpp"
#include "plan/kernel.hpp"

namespace flashgrad::plan {

struct Matrix {
  int rows = 0;
  int columns = 0;
  std::vector<float> values;  // row by row

  Matrix() = default;
  Matrix(int num_rows, int num_columns)
      : rows(num_rows),
        columns(num_columns),
        values(static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(num_columns)) {}
  [[nodiscard]] float at(int row, int column) const { return values[index(row, column)]; }
  float& at(int row, int column) { return values[index(row, column)]; }

 private:
  [[nodiscard]] std::size_t index(int row, int column) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns) +
           static_cast<std::size_t>(column);
  }
};

enum class Store : std::uint8_t { kShared, kTensor, kRegisters, kGlobal };
enum class Element : std::uint8_t { kBf16, kF32 };

constexpr int size_of(Element element) { return element == Element::kBf16 ? 2 : 4; }

inline constexpr int kSharedBytes = 227 * 1024;  // that a CTA may have
inline constexpr int kTensorLanes = 128;
inline constexpr int kTensorColumns = 512;
inline constexpr int kTensorRowBytes = kTensorColumns * 4;

// A rectangle of numbers in some memory. In tensor memory a row is a lane; with `fold`, columns
// from `fold` on lie in the lanes below the rows, so that 64 rows fill 128 lanes.
struct View {
  std::string place;  // for messages: "sQ[0]", "columns 256.."
  Store store = Store::kShared;
  int owner = 0;  // CTA; role of registers; tensor in global memory
  int offset = 0;
  int stride = 0;  // bytes from row to row
  int rows = 0;
  int columns = 0;
  Element element = Element::kBf16;
  int fold = 0;

  // Rows [row, row + num_rows) and columns likewise.
  [[nodiscard]] View part(int row, int num_rows, int column, int num_columns) const;
  [[nodiscard]] double bytes() const {
    return static_cast<double>(rows) * columns * size_of(element);
  }
};

// A view, the value that it holds (or is to hold) there, and what its traffic counts as.
struct Access {
  View view;
  std::string value;
  int step = 0;
  int use = -1;       // a Use, or -1: not counted
  bool adds = false;  // an atomic addition to global memory: any order of such is fine
};

struct Barrier {
  std::string name;
  int cta = 0;
  int count = 1;  // arrivals that complete a phase
};

struct Operation {
  enum class Kind : std::uint8_t {
    kCompute,       // by the role itself
    kProduct,       // by the tensor pipe, in the order of issue
    kCopy,          // by a copy engine, in any order; arrives at `barriers` when done
    kCommit,        // arrive at `barriers` once all products issued before are done
    kWaitProducts,  // until at most `number` groups of products, each ended by a commit, are left
    kWaitCopies,    // until at most `number` of the role's copies are left
    kArrive,        // at `barriers`
    kWait,          // for phase `number` of barriers[0]; negative: nothing to wait for
  } kind;
  std::string name;
  int step = 0;
  std::vector<Access> reads;
  std::vector<Access> writes;
  std::function<std::vector<Matrix>(const std::vector<Matrix>&)> function;
  std::vector<int> barriers;
  int number = 0;
};

struct Role {
  std::string name;
  int cta = 0;
  int pipe = 0;  // its tensor pipe
  std::vector<Operation> operations;
};

struct Region {
  std::string name;
  int offset;
  int size;
};

struct Program {
  std::string name;
  int ctas = 1;
  int pipes = 1;
  int steps = 0;  // query tiles
  std::vector<Barrier> barriers;
  std::vector<Role> roles;
  std::vector<Region> shared_regions;  // of each CTA
  std::vector<Region> tensor_regions;  // in columns; they may overlap
  std::vector<int> register_bytes;     // of each role
};

// The tensors of one head in global memory.
struct HeadData {
  int queries = 0;
  int keys = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  float scale = 0;
  bool causal = false;                       // bottom-right, or no mask
  std::vector<std::uint16_t> q, k, v, dout;  // bf16 bits
  std::vector<std::uint16_t> out;
  std::vector<float> lse;              // natural, a number a row
  std::vector<float> lse_log2, delta;  // as the kernels read them
  std::vector<float> dq, dk, dv;
  // Above head dim 128: bf16 images of dS, 64 keys x 64 queries, from one kernel to the next
  // (wide_pass.hpp).
  std::vector<std::uint16_t> ds;

  [[nodiscard]] Band band() const;
};

// Random normals from `seed`, and what the forward gives for them; the gradients are zeros.
// `head_dim_v` 0: as head_dim.
HeadData random_head(int queries, int keys, int head_dim, bool causal, std::uint64_t seed,
                     int head_dim_v = 0);

struct Fault {
  enum class Kind : std::uint8_t {
    kReadBeforeWrite,  // nothing, or an older value, is there
    kOverwritten,      // another value is there, which came after
    kUnordered,        // no barrier says that the other access is over
    kDeadlock,
    kDoesNotFit,
  } kind;
  std::string message;
};

// Something done: by role `lane`, by a copy of role lane - roles, or by pipe lane - 2 * roles.
struct TraceEvent {
  int lane;
  std::string name;
  int step;
};

struct SimulationResult {
  std::vector<Fault> faults;                               // the first few
  std::vector<TraceEvent> trace;                           // in the order in which it happened
  std::vector<std::array<double, kNumUses>> shared_bytes;  // counted, of each CTA
};

SimulationResult run(const Program& program, HeadData& data, std::uint64_t seed = 1);

// The waits of a program, as it is written: a role and the barrier it waits for.
struct WaitSite {
  std::string role;
  int cta;
  std::string barrier;
};
std::vector<WaitSite> wait_sites(const Program& program);
Program without(const Program& program, const WaitSite& site);

// The order of HeadData's tensors as owners of global views.
enum GlobalTensor : std::uint8_t {
  kGlobalQ,
  kGlobalK,
  kGlobalV,
  kGlobalDout,
  kGlobalLse,
  kGlobalDelta,
  kGlobalDq,
  kGlobalDk,
  kGlobalDv,
  kGlobalDs,
};

// FlashAttention-4's backward for the keys from `first_key` on: 128 of them, or 256 by a pair of
// CTAs. dq is added up without the factor `scale`.
Program fa4_program(const HeadData& data, int first_key, int ctas);

// The sm90 backward's main kernel, a variant without softcap of variants.def by its number.
Program sm90_program(const HeadData& data, int first_key, int variant);

// The backward above head dim 128 for 128 keys, by a pair of CTAs (bwd_wide.cuh): dk, dv and dS;
// and dq out of all dS by a pair that takes tiles of 256 queries in rounds (bwd_wide_dq.cuh).
Program sm90_wide_program(const HeadData& data, int first_key);
Program sm90_wide_dq_program(const HeadData& data);

// The programs by name, and how many keys one run of each covers.
struct ProgramChoice {
  const char* name;
  const char* kernel;  // whose account it must match
  int keys;            // 0: all, in one run
  int head_dim;
  Program (*make)(const HeadData& data, int first_key);
  int head_dim_v = 0;            // 0: head_dim
  const char* before = nullptr;  // the program whose dS it reads
  const char* after = nullptr;   // the program that reads its dS
};
const std::vector<ProgramChoice>& programs();
const ProgramChoice& find_program(const std::string& name);

// The whole backward of a head: the program for all keys, one after the other, with the one before
// or after it; the results are summed up, and dq is scaled at the end unless a program does so. The
// trace is that of the first keys, trace and bytes those of `program` alone.
SimulationResult run_backward(const ProgramChoice& program, HeadData& data, std::uint64_t seed = 1);

}  // namespace flashgrad::plan
