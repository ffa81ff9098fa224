// SPDX-License-Identifier: Apache-2.0
// XLA's way into the C interface: one FFI handler for the CPU and one for CUDA, for both passes.
//
// flashgrad/jax/_ffi.py registers them and calls them. The attributes say which member of
// fg_tensors each operand and result is (by its slot), and hold fg_options as bytes. On the CPU,
// where XLA lends no scratch memory, the last result is the workspace; on CUDA the workspace comes
// from XLA's allocator.
#include <flashgrad/flashgrad.h>
#include <xla/ffi/api/ffi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

namespace {

namespace ffi = xla::ffi;
using Slots = ffi::Span<const std::int64_t>;
using OptionBytes = ffi::Span<const std::uint8_t>;

// By slot: the order of TENSOR_NAMES in flashgrad/_library.py.
constexpr const DLTensor* fg_tensors::*kMembers[] = {&fg_tensors::q,
                                                     &fg_tensors::k,
                                                     &fg_tensors::v,
                                                     &fg_tensors::out,
                                                     &fg_tensors::lse,
                                                     &fg_tensors::dout,
                                                     &fg_tensors::dlse,
                                                     &fg_tensors::dq,
                                                     &fg_tensors::dk,
                                                     &fg_tensors::dv,
                                                     &fg_tensors::dsinks,
                                                     &fg_tensors::sinks,
                                                     &fg_tensors::cu_seqlens_q,
                                                     &fg_tensors::cu_seqlens_kv,
                                                     &fg_tensors::seqused_q,
                                                     &fg_tensors::seqused_kv,
                                                     &fg_tensors::q_offset};
constexpr std::size_t kNumSlots = std::size(kMembers);
constexpr std::int64_t kQOffsetSlot = 16;
static_assert(kMembers[kQOffsetSlot] == &fg_tensors::q_offset);

std::optional<DLDataType> dlpack_dtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F16:
      return DLDataType{kDLFloat, 16, 1};
    case ffi::DataType::BF16:
      return DLDataType{kDLBfloat, 16, 1};
    case ffi::DataType::F32:
      return DLDataType{kDLFloat, 32, 1};
    case ffi::DataType::F64:
      return DLDataType{kDLFloat, 64, 1};
    case ffi::DataType::S32:
      return DLDataType{kDLInt, 32, 1};
    default:
      return std::nullopt;
  }
}

// A call that flashgrad.jax does not make: the files of two versions are mixed.
ffi::Error foreign_call(const char* what) {
  return ffi::Error::Internal(std::string("flashgrad: ") + what +
                              ": not as this version of flashgrad.jax passes it");
}

ffi::Error error_of(fg_status status) {
  const auto code = status == FG_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                    : status == FG_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                  : ffi::ErrorCode::kInternal;
  return {code, std::string("flashgrad: ") + fg_last_error()};
}

// A call's buffers as fg_tensors, whose pointers lead into this object, and its options.
class Call {
 public:
  Call(std::int32_t which, DLDevice device)
      : which_(which == 0 ? FG_FORWARD : FG_BACKWARD), device_(device) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ffi::Error set(const ffi::RemainingArgs& arguments, Slots argument_slots,
                 const ffi::RemainingRets& results, Slots result_slots, OptionBytes options) {
    for (std::size_t i = 0; i < argument_slots.size(); ++i) {
      const auto buffer = arguments.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (ffi::Error error = set(argument_slots[i], *buffer); error.failure()) return error;
    }
    for (std::size_t i = 0; i < result_slots.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (ffi::Error error = set(result_slots[i], **buffer); error.failure()) return error;
    }
    if (options.size() != sizeof(options_)) return foreign_call("options");
    std::memcpy(&options_, options.begin(), sizeof(options_));
    return ffi::Error::Success();
  }

  [[nodiscard]] fg_status workspace_size(std::size_t* preferred) const {
    return fg_workspace_size(which_, &tensors_, &options_, nullptr, preferred);
  }

  [[nodiscard]] ffi::Error run(void* workspace, std::size_t workspace_bytes, void* stream) const {
    const auto function = which_ == FG_FORWARD ? fg_forward : fg_backward;
    const fg_status status = function(&tensors_, &options_, workspace, workspace_bytes, stream);
    return status == FG_OK ? ffi::Error::Success() : error_of(status);
  }

 private:
  ffi::Error set(std::int64_t slot, const ffi::AnyBuffer& buffer) {
    if (slot < 0 || slot >= static_cast<std::int64_t>(kNumSlots)) return foreign_call("slot");
    std::optional<DLDataType> dtype = dlpack_dtype(buffer.element_type());
    if (!dtype) return foreign_call("dtype");
    auto ndim = static_cast<int>(buffer.dimensions().size());
    if (slot == kQOffsetSlot) {  // i64 as (batch, 2) words of 32 bits: JAX has no i64 by default
      dtype->bits = 64;
      --ndim;
    }
    DLTensor& tensor = storage_[static_cast<std::size_t>(slot)];
    tensor.data = buffer.untyped_data();
    tensor.device = device_;
    tensor.ndim = ndim;
    tensor.dtype = *dtype;
    // DLPack has no const; the library does not write to a shape.
    tensor.shape = const_cast<std::int64_t*>(buffer.dimensions().begin());
    tensors_.*kMembers[slot] = &tensor;
    return ffi::Error::Success();
  }

  fg_pass which_;
  DLDevice device_;
  std::array<DLTensor, kNumSlots> storage_{};
  fg_tensors tensors_ = FG_TENSORS_INIT;
  fg_options options_ = FG_OPTIONS_INIT;
};

ffi::Error run_on_cpu(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      Slots argument_slots, Slots result_slots, std::int32_t which,
                      OptionBytes options) {
  Call call(which, {kDLCPU, 0});
  ffi::Error error = call.set(arguments, argument_slots, results, result_slots, options);
  if (error.failure()) return error;
  auto workspace = results.get<ffi::AnyBuffer>(result_slots.size());
  if (!workspace) return workspace.error();
  return call.run((*workspace)->untyped_data(), (*workspace)->size_bytes(), nullptr);
}

ffi::Error run_on_cuda(void* stream, std::int32_t device, ffi::ScratchAllocator allocator,
                       ffi::RemainingArgs arguments, ffi::RemainingRets results,
                       Slots argument_slots, Slots result_slots, std::int32_t which,
                       OptionBytes options) {
  Call call(which, {kDLCUDA, device});
  ffi::Error error = call.set(arguments, argument_slots, results, result_slots, options);
  if (error.failure()) return error;
  std::size_t workspace_bytes = 0;
  if (const fg_status status = call.workspace_size(&workspace_bytes); status != FG_OK) {
    return error_of(status);
  }
  if (workspace_bytes == 0) return call.run(nullptr, 0, stream);
  const std::optional<void*> workspace = allocator.Allocate(workspace_bytes);
  if (!workspace) {
    return {ffi::ErrorCode::kResourceExhausted, "flashgrad: no memory for a workspace of " +
                                                    std::to_string(workspace_bytes) + " bytes"};
  }
  return call.run(*workspace, workspace_bytes, stream);
}

template <typename Binding>
auto with_buffers_and_attributes(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Slots>("argument_slots")
      .template Attr<Slots>("result_slots")
      .template Attr<std::int32_t>("which")
      .template Attr<OptionBytes>("options");
}

}  // namespace

// The two symbols that the library exports.
#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashgrad_xla_cpu, run_on_cpu,
                              with_buffers_and_attributes(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashgrad_xla_cuda, run_on_cuda,
                              with_buffers_and_attributes(ffi::Ffi::Bind()
                                                              .Ctx<ffi::PlatformStream<void*>>()
                                                              .Ctx<ffi::DeviceOrdinal>()
                                                              .Ctx<ffi::ScratchAllocator>()));
#pragma GCC visibility pop
