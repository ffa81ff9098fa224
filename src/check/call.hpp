// SPDX-License-Identifier: Apache-2.0
// The tensors of a case in guarded host memory, and the calls of the C interface on them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "check/host_tensor.hpp"
#include "core/problem.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad::check {

// How much workspace a call gets: the least, the most it can use, or a size between.
enum class Workspace : std::uint8_t { kMinimum, kBetween, kPreferred };

struct CallTensors {
  HostTensor q, k, v, out, lse, dout, dlse, dq, dk, dv, dsinks, sinks;
  HostTensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset;

  // Valid until a tensor is moved or destroyed.
  [[nodiscard]] fg_tensors c_tensors();
  [[nodiscard]] std::vector<NamedTensor> all() const;
  [[nodiscard]] std::vector<NamedTensor> inputs() const;
  [[nodiscard]] std::vector<NamedTensor> outputs(fg_pass pass) const;
};

// The inputs, filled as the case says; the outputs are poison.
CallTensors make_tensors(const Case& c);

fg_options make_options(const Case& c);

// Sequences of a case, in order: where their rows and keys lie and which of them meet.
std::vector<Sequence> sequences(const Case& c);

// Floating-point operations of forward and backward: two and five products over the visible pairs.
double flops(const Case& c);

// A workspace that keeps what earlier calls left in it.
class WorkspaceMemory {
 public:
  // Room for `bytes`, all of it poison or older scratch. It ends where reading traps or, if `odd`,
  // a byte before.
  void* resize(std::size_t bytes, bool odd);
  // Whether nothing was written just before it.
  [[nodiscard]] bool guards_intact() const;

 private:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr unsigned char kGuard = 0xa7;
  std::shared_ptr<Buffer> buffer_;
  std::byte* begin_ = nullptr;
};

// What a backend asks for, without any data: any size may be asked about. Indexed by fg_pass.
struct WorkspaceQuery {
  fg_status status = FG_OK;
  std::string message;
  std::array<std::size_t, 2> minimum{};
  std::array<std::size_t, 2> preferred{};
};
WorkspaceQuery query_workspace(const Case& c, const std::string& backend);

struct PassResult {
  fg_status status = FG_OK;
  std::string message;
  double seconds = 0;
  std::size_t minimum_bytes = 0;  // of workspace
  std::size_t preferred_bytes = 0;
};

// One call. Outputs of the pass are poisoned first.
PassResult run_pass(fg_pass pass, CallTensors& tensors, const fg_options& options,
                    Workspace workspace, WorkspaceMemory& memory);

}  // namespace flashgrad::check
