// SPDX-License-Identifier: Apache-2.0
// The tensors of a case in guarded host memory, and the calls of the C interface on them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "check/case.hpp"
#include "check/host_tensor.hpp"
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
  [[nodiscard]] std::vector<NamedTensor> outputs() const;
};

// The inputs, filled as the case says; the outputs are poison.
CallTensors make_tensors(const Case& c);

fg_options make_options(const Case& c);

// A workspace that keeps what earlier calls left in it.
class Scratch {
 public:
  // Room for `bytes` between guards, at an odd address. New room is poison.
  void* resize(std::size_t bytes);
  [[nodiscard]] bool guards_intact() const;

 private:
  std::shared_ptr<Buffer> buffer_;
  std::size_t bytes_ = 0;
};

struct PassResult {
  fg_status status = FG_OK;
  std::string message;
  double seconds = 0;
  std::size_t workspace_bytes = 0;
};

// One call. Outputs of the pass are poisoned first.
PassResult run_pass(fg_pass pass, CallTensors& tensors, const fg_options& options,
                    Workspace workspace, Scratch& scratch);

}  // namespace flashgrad::check
