// SPDX-License-Identifier: Apache-2.0
// The tensors of one attention call in host memory, the calls to the C ABI and their cost. `run` fills it from a file, `bench` with
// random numbers.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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

  [[nodiscard]] bool given() const { return !name.empty(); }
};

struct AttentionCall {
  HostTensor q, k, v, out, lse, dout, dlse, dq, dk, dv, dsinks, sinks;
  HostTensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset;

  // The fg_tensors over those that are given. Valid while this object neither moves nor changes.
  fg_tensors bind();
};

// Floating-point operations and memory of a call, counted over the pairs (row, key) that its mask leaves visible.
struct Cost {
  double visible_pairs = 0;         // over batch and query heads
  double forward_flops = 0;         // 2 products
  double backward_flops = 0;        // 5 products
  double standard_bytes = 0;        // S and P (backward: P and dP), each seqlen_q x seqlen_kv per sequence and query head
};
Cost cost_of(AttentionCall& call, const fg_options& options);

// Throws Error with the library's message and the exit status that goes with the code.
void require_ok(fg_status status);

// The DLPack type of a safetensors dtype; throws an Error that names the tensor if attention takes no such elements.
DLDataType dl_dtype(const std::string& tensor_name, std::string_view dtype);

HostTensor make_tensor(std::string name, std::string dtype, std::vector<std::int64_t> shape);

// Bytes of a tensor of that shape; throws if they overflow 63 bits.
std::uint64_t tensor_bytes(const std::string& name, std::string_view dtype,
                           const std::vector<std::int64_t>& shape);

}  // namespace flashgrad::tool
