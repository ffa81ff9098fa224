// SPDX-License-Identifier: Apache-2.0
// From host tensors to calls of the C ABI.
#include "attention_call.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "core/mask.hpp"
#include "memory.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

// Throws if the tensor has neither the 4 dimensions of a batch nor the 3 of packed sequences.
void require_rank(const HostTensor& tensor, std::size_t rank) {
  if (tensor.shape.size() != rank || (rank != 3 && rank != 4)) {
    throw Error(fmt::format("{}: shape {}, want 4 dimensions, or 3 if packed (as q)", tensor.name,
                            format_shape(tensor.shape)));
  }
}

std::int64_t value_at(const HostTensor& tensor, std::int64_t index) {
  std::int32_t value = 0;
  std::memcpy(&value, tensor.buffer.data() + index * std::int64_t{sizeof(value)}, sizeof(value));
  return value;
}

// The length of sequence `b` on one side of the call.
std::int64_t sequence_length(const HostTensor& rows, const HostTensor& cu_seqlens,
                             const HostTensor& seqused, std::int64_t b) {
  if (seqused.given()) {
    return value_at(seqused, b);
  }
  return cu_seqlens.given() ? value_at(cu_seqlens, b + 1) - value_at(cu_seqlens, b) : rows.shape[1];
}

check::Rows whole(const HostTensor& tensor) { return {tensor.buffer.size(), tensor.buffer.size()}; }

}  // namespace

DLDataType dl_dtype(const std::string& tensor_name, std::string_view dtype) {
  const bool wants_integers = tensor_name.starts_with("cu_") ||
                              tensor_name.starts_with("seqused_") || tensor_name == "q_offset";
  const auto bits = static_cast<std::uint8_t>(element_bits(dtype));
  if (wants_integers && (dtype == "I32" || dtype == "I64")) {
    return {kDLInt, bits, 1};
  }
  if (!wants_integers && dtype == "BF16") {
    return {kDLBfloat, bits, 1};
  }
  if (!wants_integers && (dtype == "F16" || dtype == "F32" || dtype == "F64")) {
    return {kDLFloat, bits, 1};
  }
  throw Error(fmt::format("{}: dtype {}, want {}", tensor_name, dtype,
                          wants_integers ? "I32 (q_offset: I64)" : "BF16, F16, F32 or F64"),
              !wants_integers && dtype.starts_with("F") ? kExitUnsupported : kExitBadInput);
}

HostTensor make_tensor(std::string name, std::string dtype, std::vector<std::int64_t> shape) {
  std::int64_t bytes = element_bytes(dtype);
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      throw Error(fmt::format("{}: the bytes of shape {} overflow", name, format_shape(shape)));
    }
  }
  Buffer buffer(static_cast<std::uint64_t>(bytes));
  return {std::move(name), std::move(dtype), std::move(shape), std::move(buffer), {}};
}

fg_tensors AttentionCall::bind(check::Place place) {
  const auto view = [place](HostTensor& tensor) -> const DLTensor* {
    if (!tensor.given()) {
      return nullptr;
    }
    tensor.dl.data = place == check::Place::kCuda ? tensor.device.data() : tensor.buffer.data();
    tensor.dl.device = check::dl_device(place);
    tensor.dl.ndim = static_cast<int>(tensor.shape.size());
    tensor.dl.dtype = dl_dtype(tensor.name, tensor.dtype);
    tensor.dl.shape = tensor.shape.data();
    tensor.dl.strides = nullptr;
    tensor.dl.byte_offset = 0;
    return &tensor.dl;
  };
  fg_tensors tensors = FG_TENSORS_INIT;
  tensors.q = view(q);
  tensors.k = view(k);
  tensors.v = view(v);
  tensors.out = view(out);
  tensors.lse = view(lse);
  tensors.dout = view(dout);
  tensors.dlse = view(dlse);
  tensors.dq = view(dq);
  tensors.dk = view(dk);
  tensors.dv = view(dv);
  tensors.dsinks = view(dsinks);
  tensors.sinks = view(sinks);
  tensors.cu_seqlens_q = view(cu_seqlens_q);
  tensors.cu_seqlens_kv = view(cu_seqlens_kv);
  tensors.seqused_q = view(seqused_q);
  tensors.seqused_kv = view(seqused_kv);
  tensors.q_offset = view(q_offset);
  return tensors;
}

void AttentionCall::upload() {
  for (HostTensor* tensor : all()) {
    if (tensor->given()) {
      tensor->device = check::DeviceMemory(tensor->buffer.size());
      check::upload(tensor->buffer.data(), tensor->device.data(), whole(*tensor));
    }
  }
}

void AttentionCall::download() {
  for (HostTensor* tensor : all()) {
    if (tensor->given()) {
      check::download(tensor->device.data(), tensor->buffer.data(), whole(*tensor));
    }
  }
}

std::uint64_t AttentionCall::device_bytes() {
  std::uint64_t bytes = 0;
  for (const HostTensor* tensor : all()) {
    bytes += tensor->device.size_bytes();
  }
  return bytes;
}

std::array<HostTensor*, 17> AttentionCall::all() {
  return {&q,         &k,          &v,       &out,    &lse,   &dout,         &dlse,
          &dq,        &dk,         &dv,      &dsinks, &sinks, &cu_seqlens_q, &cu_seqlens_kv,
          &seqused_q, &seqused_kv, &q_offset};
}

void AttentionCall::make_outputs() {
  const std::size_t rank = q.shape.size();
  require_rank(q, rank);
  require_rank(v, rank);
  std::vector<std::int64_t> shape = q.shape;
  shape.back() = v.shape.back();
  out = make_tensor("out", q.dtype, shape);
  // (batch, seqlen_q, heads_q, head_dim) gives (batch, heads_q, seqlen_q); without the batch if
  // packed.
  shape.pop_back();
  std::swap(shape[rank - 3], shape[rank - 2]);
  lse = make_tensor("lse", q.dtype == "F64" ? "F64" : "F32", shape);
}

void AttentionCall::make_gradients(bool grad_f32) {
  const std::string dtype = grad_f32 ? "F32" : q.dtype;
  dq = make_tensor("dq", dtype, q.shape);
  dk = make_tensor("dk", dtype, k.shape);
  dv = make_tensor("dv", dtype, v.shape);
  if (sinks.given()) {
    dsinks = make_tensor("dsinks", sinks.dtype, sinks.shape);
  }
}

Cost cost_of(const AttentionCall& call, const fg_options& options) {
  const bool packed = call.q.shape.size() == 3;
  const std::int64_t batch = packed ? call.cu_seqlens_q.shape[0] - 1 : call.q.shape[0];
  const BandMask mask{
      options.window_left, options.window_right,
      options.alignment == FG_TOP_LEFT ? Alignment::kTopLeft : Alignment::kBottomRight};
  double pairs = 0;
  double all_pairs = 0;
  // Without rows there is nothing to count, whatever a file claims the batch to be.
  for (std::int64_t b = 0; b < batch && call.out.buffer.size() > 0; ++b) {
    const std::int64_t seqlen_q = sequence_length(call.q, call.cu_seqlens_q, call.seqused_q, b);
    const std::int64_t seqlen_kv = sequence_length(call.k, call.cu_seqlens_kv, call.seqused_kv, b);
    std::int64_t q_offset = 0;
    if (call.q_offset.given()) {
      std::memcpy(&q_offset, call.q_offset.buffer.data() + b * std::int64_t{sizeof(q_offset)},
                  sizeof(q_offset));
    }
    const Band band =
        Band::of(mask, seqlen_q, seqlen_kv, call.q_offset.given() ? &q_offset : nullptr);
    for (std::int64_t i = 0; i < seqlen_q; ++i) {
      pairs += static_cast<double>(band.kv_range(i, i + 1).size());
    }
    all_pairs += static_cast<double>(seqlen_q) * static_cast<double>(seqlen_kv);
  }
  const auto heads_q = static_cast<double>(call.q.shape[packed ? 1 : 2]);
  const auto head_dim = static_cast<double>(call.q.shape.back());
  const auto head_dim_v = static_cast<double>(call.v.shape.back());
  Cost cost;
  cost.visible_pairs = pairs * heads_q;
  cost.forward_flops = 2 * cost.visible_pairs * (head_dim + head_dim_v);
  cost.backward_flops = 2 * cost.visible_pairs * (3 * head_dim + 2 * head_dim_v);
  cost.standard_bytes = 2 * all_pairs * heads_q * element_bytes(call.q.dtype);
  return cost;
}

void Runner::prepare(fg_pass pass, const fg_tensors& tensors, const fg_options& options) {
  std::size_t minimum = 0;
  std::size_t preferred = 0;
  require_ok(fg_workspace_size(pass, &tensors, &options, &minimum, &preferred));
  const bool on_device = place_ == check::Place::kCuda;
  const std::size_t available = on_device
                                    ? check::free_device_bytes() + device_workspace_.size_bytes()
                                    : available_memory_bytes();
  const std::size_t bytes = preferred <= available ? preferred : minimum;
  if (bytes <= workspace_bytes()) {
    return;
  }
  if (on_device) {
    device_workspace_ = {};
    device_workspace_ = check::DeviceMemory(bytes);
  } else {
    workspace_ = Buffer();
    workspace_ = Buffer(bytes);
  }
}

double Runner::run(fg_pass pass, const fg_tensors& tensors, const fg_options& options) {
  const auto call = pass == FG_FORWARD ? fg_forward : fg_backward;
  const bool on_device = place_ == check::Place::kCuda;
  std::byte* workspace = on_device ? device_workspace_.data() : workspace_.data();
  const auto begin = std::chrono::steady_clock::now();
  const fg_status status = call(&tensors, &options, workspace, workspace_bytes(), nullptr);
  if (on_device && status == FG_OK) {
    check::synchronize_device();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  require_ok(status);
  return elapsed.count();
}

void require_ok(fg_status status) {
  if (status != FG_OK) {
    throw Error(printable(fg_last_error(), 4000),
                status == FG_UNSUPPORTED ? kExitUnsupported : kExitBadInput);
  }
}

}  // namespace flashgrad::tool
