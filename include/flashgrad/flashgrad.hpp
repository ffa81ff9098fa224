// SPDX-License-Identifier: Apache-2.0
/// @file flashgrad.hpp
/// @brief Header-only C++20 over flashgrad.h: exceptions, tensor views, a workspace that frees
/// itself.
///
/// @code
/// std::vector<float> q(batch * seqlen * heads * head_dim);  // likewise k, v, out, lse
/// flashgrad::TensorView tq(q.data(), {batch, seqlen, heads, head_dim});
/// flashgrad::Tensors t;
/// t.q = tq;  // likewise k, v, out, lse
/// flashgrad::forward(t, flashgrad::Options{}.causal());
/// @endcode
#ifndef FLASHGRAD_FLASHGRAD_HPP_
#define FLASHGRAD_FLASHGRAD_HPP_

#if __cplusplus < 202002L
#error "flashgrad.hpp needs C++20; flashgrad.h does with any C++"
#endif

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "flashgrad/flashgrad.h"

namespace flashgrad {

/// What forward and backward throw: `code()` is the fg_status, `what()` says what was given and
/// what is wanted.
class Error : public std::runtime_error {
 public:
  /// @param code    Not FG_OK.
  /// @param message What was given and what is wanted.
  Error(fg_status code, const std::string& message) : std::runtime_error(message), code_(code) {}
  /// The fg_status of the call.
  [[nodiscard]] fg_status code() const noexcept { return code_; }

 private:
  fg_status code_;
};

/// Throws Error, with the thread's last message, unless `status` is FG_OK.
inline void throw_if_failed(fg_status status) {
  if (status != FG_OK) {
    throw Error(status, fg_last_error());
  }
}

inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};    ///< f64, on the reference backend.
inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};    ///< f32.
inline constexpr DLDataType kFloat16{kDLFloat, 16, 1};    ///< f16.
inline constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};  ///< bf16.
inline constexpr DLDataType kInt32{kDLInt, 32, 1};        ///< i32: cu_seqlens, seqused.
inline constexpr DLDataType kInt64{kDLInt, 64, 1};        ///< i64: q_offset.

/// A DLTensor over memory that somebody else owns, with shape and strides of its own. Converts to
/// `const DLTensor*`.
class TensorView {
 public:
  /// @param data    The first element (host memory unless `device` says otherwise).
  /// @param dtype   For bf16 and f16 pass the 16-bit patterns with kBFloat16 or kFloat16.
  /// @param shape   Up to four sizes.
  /// @param strides In elements; empty: compact, last dimension fastest.
  /// @param device  Where `data` lies.
  TensorView(void* data, DLDataType dtype, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> strides = {}, DLDevice device = {kDLCPU, 0}) {
    if (shape.size() > shape_.size() || (strides.size() != 0 && strides.size() != shape.size())) {
      throw Error(FG_INVALID_ARGUMENT,
                  "TensorView: want up to 4 sizes, and as many strides or none");
    }
    std::size_t n = 0;
    for (const std::int64_t size : shape) {
      shape_[n++] = size;
    }
    n = 0;
    for (const std::int64_t stride : strides) {
      strides_[n++] = stride;
    }
    tensor_.data = data;
    tensor_.device = device;
    tensor_.ndim = static_cast<int>(shape.size());
    tensor_.dtype = dtype;
    has_strides_ = strides.size() != 0;
    point();
  }
  /// Host memory of f32.
  TensorView(float* data, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> strides = {})
      : TensorView(data, kFloat32, shape, strides) {}
  /// Host memory of f64.
  TensorView(double* data, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> strides = {})
      : TensorView(data, kFloat64, shape, strides) {}
  /// Host memory of i32: cu_seqlens, seqused.
  TensorView(std::int32_t* data, std::initializer_list<std::int64_t> shape)
      : TensorView(data, kInt32, shape) {}
  /// Host memory of i64: q_offset.
  TensorView(std::int64_t* data, std::initializer_list<std::int64_t> shape)
      : TensorView(data, kInt64, shape) {}

  /// A copy views the same memory and has shape and strides of its own.
  TensorView(const TensorView& other) noexcept
      : tensor_(other.tensor_),
        shape_(other.shape_),
        strides_(other.strides_),
        has_strides_(other.has_strides_) {
    point();
  }
  /// As the copy constructor.
  TensorView& operator=(const TensorView& other) noexcept {
    tensor_ = other.tensor_;
    shape_ = other.shape_;
    strides_ = other.strides_;
    has_strides_ = other.has_strides_;
    point();
    return *this;
  }
  ~TensorView() = default;

  /// The view must outlive the call that reads this pointer.
  operator const DLTensor*() const& noexcept { return &tensor_; }
  operator const DLTensor*() const&& = delete;

 private:
  void point() noexcept {
    tensor_.shape = shape_.data();
    tensor_.strides = has_strides_ ? strides_.data() : nullptr;
  }

  DLTensor tensor_{};
  std::array<std::int64_t, 4> shape_{};
  std::array<std::int64_t, 4> strides_{};
  bool has_strides_ = false;
};

/// The tensors of a call, all null to begin with. See fg_tensors for shapes and dtypes.
struct Tensors : fg_tensors {
  Tensors() : fg_tensors FG_TENSORS_INIT {}
};

/// The options of a call, with the defaults of FG_OPTIONS_INIT.
struct Options : fg_options {
  Options() : fg_options FG_OPTIONS_INIT {}
  /// Row i sees the keys up to i + shift.
  Options& causal() {
    window_left = FG_UNBOUNDED;
    window_right = 0;
    return *this;
  }
  /// Row i sees keys i + shift - left to i + shift + right. FG_UNBOUNDED opens a side; sides may be
  /// negative.
  Options& window(std::int64_t left, std::int64_t right) {
    window_left = left;
    window_right = right;
    return *this;
  }
};

/// How much workspace a call needs.
struct WorkspaceBytes {
  std::size_t minimum = 0;    ///< With less, the call is refused.
  std::size_t preferred = 0;  ///< More brings nothing.
};

/// Asks how much workspace a call needs. Reads no data. Throws Error. See fg_workspace_size.
inline WorkspaceBytes workspace_bytes(fg_pass pass, const Tensors& tensors,
                                      const Options& options = {}) {
  WorkspaceBytes bytes;
  throw_if_failed(fg_workspace_size(pass, &tensors, &options, &bytes.minimum, &bytes.preferred));
  return bytes;
}

/// Host memory for workspaces that grows to the largest request and is kept between calls.
class Workspace {
 public:
  /// At least `bytes` of uninitialised memory, valid until the next call.
  std::span<std::byte> at_least(std::size_t bytes) {
    // Without data size_ means nothing: it was moved from, or an allocation failed.
    if (data_ == nullptr || bytes > size_) {
      data_.reset();
      data_.reset(new std::byte[bytes]);
      size_ = bytes;
    }
    return {data_.get(), size_};
  }

 private:
  std::unique_ptr<std::byte[]> data_;
  std::size_t size_ = 0;
};

/// Computes out and lse in a workspace of the caller, on the tensors' device. Throws Error. See
/// fg_forward.
inline void forward(const Tensors& tensors, const Options& options, std::span<std::byte> workspace,
                    void* stream = nullptr) {
  throw_if_failed(fg_forward(&tensors, &options, workspace.data(), workspace.size(), stream));
}

/// Computes dq, dk, dv and dsinks in a workspace of the caller, on the tensors' device. Throws
/// Error. See fg_backward.
inline void backward(const Tensors& tensors, const Options& options, std::span<std::byte> workspace,
                     void* stream = nullptr) {
  throw_if_failed(fg_backward(&tensors, &options, workspace.data(), workspace.size(), stream));
}

/// Computes out and lse of host tensors; the workspace grows as needed.
inline void forward(const Tensors& tensors, const Options& options, Workspace& workspace) {
  forward(tensors, options,
          workspace.at_least(workspace_bytes(FG_FORWARD, tensors, options).preferred));
}

/// Computes the gradients of host tensors; the workspace grows as needed.
inline void backward(const Tensors& tensors, const Options& options, Workspace& workspace) {
  backward(tensors, options,
           workspace.at_least(workspace_bytes(FG_BACKWARD, tensors, options).preferred));
}

/// The same with a workspace for this one call.
inline void forward(const Tensors& tensors, const Options& options = {}) {
  Workspace workspace;
  forward(tensors, options, workspace);
}

/// The same with a workspace for this one call.
inline void backward(const Tensors& tensors, const Options& options = {}) {
  Workspace workspace;
  backward(tensors, options, workspace);
}

}  // namespace flashgrad

#endif  // FLASHGRAD_FLASHGRAD_HPP_
