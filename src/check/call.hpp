// SPDX-License-Identifier: Apache-2.0
// The tensors of a case in guarded host memory, and the calls of the C interface on them: in place,
// or on copies of them on the device that the backend takes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "check/host_tensor.hpp"
#include "check/workspace_memory.hpp"
#include "core/problem.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad::check {

// How much workspace a call gets: the least, the most it can use, or a size between.
enum class Workspace : std::uint8_t { kMinimum, kBetween, kPreferred };

struct CallTensors {
  HostTensor q, k, v, out, lse, dout, dlse, dq, dk, dv, dsinks, sinks;
  HostTensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset;

  // Valid until a tensor is moved or destroyed.
  [[nodiscard]] fg_tensors c_tensors(Place place = Place::kHost);
  [[nodiscard]] std::vector<NamedTensor> all() const;
  [[nodiscard]] std::vector<NamedTensor> inputs() const;
  [[nodiscard]] std::vector<NamedTensor> outputs(fg_pass pass) const;
  // Those that a call of the pass takes.
  [[nodiscard]] std::vector<NamedTensor> taken_by(fg_pass pass) const;
  void download_inputs() const;
};

// The inputs, filled as the case says; the outputs are poison.
CallTensors make_tensors(const Case& c);

fg_options make_options(const Case& c);

// Sequences of a case, in order: where their rows and keys lie and which of them meet.
std::vector<Sequence> sequences(const Case& c);

// Floating-point operations of forward and backward: two and five products over the visible pairs.
double flops(const Case& c);

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

// What goes to the device and back beside the outputs of a pass. Tens of gigabytes take long, so a
// caller that makes several calls leaves out what is there already, or looks at it only in the end
// (CallTensors::download_inputs).
struct Transfers {
  bool upload_forward = true;  // what a forward takes; false: an earlier call has left it there
  bool download_inputs = true;
};

// One call, by the backend that `options` name, on tensors and a workspace where it takes them.
// Outputs of the pass are poisoned first. What goes wrong on the device is an FG_DEVICE_ERROR, and
// from then on every call may be.
PassResult run_pass(fg_pass pass, CallTensors& tensors, const fg_options& options,
                    Workspace workspace, WorkspaceMemory& memory, const Transfers& transfers = {});

}  // namespace flashgrad::check
