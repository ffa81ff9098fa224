// SPDX-License-Identifier: Apache-2.0
// The tensors of one attention call in host memory, for a GPU backend with copies on the device,
// the calls to the C ABI and their cost. `run` fills it from a file, `bench` with random numbers.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check/device_memory.hpp"
#include "flashgrad/flashgrad.h"
#include "safetensors.hpp"

namespace flashgrad::tool {

// A compact tensor that owns its memory. An absent one has no name.
struct HostTensor {
  std::string name;
  std::string dtype;  // as safetensors spells it
  std::vector<std::int64_t> shape;
  Buffer buffer;
  DLTensor dl{};  // describes the above; its shape pointer is set by AttentionCall::bind
  check::DeviceMemory device{};  // its copy, after AttentionCall::upload

  [[nodiscard]] bool given() const { return !name.empty(); }
};

struct AttentionCall {
  HostTensor q, k, v, out, lse, dout, dlse, dq, dk, dv, dsinks, sinks;
  HostTensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset;

  // The fg_tensors over those that are given, there; on the device they have no data before
  // `upload`. Valid while this object neither moves nor changes.
  fg_tensors bind(check::Place place = check::Place::kHost);

  // Copies all that is given to the device, and from there.
  void upload();
  void download();
  [[nodiscard]] std::uint64_t device_bytes();

  // Makes out and lse, or the gradients, in the shapes and dtypes that go with the inputs. Throws
  // if q and v have no such shape.
  void make_outputs();
  void make_gradients(bool grad_f32);

 private:
  std::array<HostTensor*, 17> all();
};

// Floating-point operations and memory of a call, counted over the pairs (row, key) that its mask
// leaves visible.
struct Cost {
  double visible_pairs = 0;   // over sequences and query heads
  double forward_flops = 0;   // 2 products
  double backward_flops = 0;  // 5 products
  // S and P (backward: P and dP) in q's dtype, seqlen_q x seqlen_kv per sequence and query head.
  double standard_bytes = 0;
};
// Of a call whose arguments the library has accepted.
Cost cost_of(const AttentionCall& call, const fg_options& options);

// Scratch memory, where the tensors are, that keeps its size between calls. Runs a pass in it and
// returns the seconds it took, on a GPU to the end of its work.
class Runner {
 public:
  explicit Runner(check::Place place) : place_(place) {}

  // Asks the library for the size and makes the workspace: the preferred size if the machine has
  // it, else the minimum.
  void prepare(fg_pass pass, const fg_tensors& tensors, const fg_options& options);
  double run(fg_pass pass, const fg_tensors& tensors, const fg_options& options);
  [[nodiscard]] std::uint64_t workspace_bytes() const {
    return place_ == check::Place::kCuda ? device_workspace_.size_bytes() : workspace_.size();
  }

 private:
  check::Place place_;
  Buffer workspace_;
  check::DeviceMemory device_workspace_;
};

// Throws Error with the library's message and the exit status that goes with the code.
void require_ok(fg_status status);

// The DLPack type of a safetensors dtype. Throws an Error that names the tensor if it holds numbers
// of another kind than attention takes there: floating-point numbers, or integers in the offsets
// and lengths.
DLDataType dl_dtype(const std::string& tensor_name, std::string_view dtype);

// A tensor whose memory is not yet written. Throws if its bytes overflow or the machine can't hold
// them.
HostTensor make_tensor(std::string name, std::string dtype, std::vector<std::int64_t> shape);

}  // namespace flashgrad::tool
