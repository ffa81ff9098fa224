// SPDX-License-Identifier: Apache-2.0
// Reads the structs by their size, q, k and v for the shapes, then everything else against these.
#include "api/validate.hpp"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "api/describe.hpp"
#include "api/lengths.hpp"
#include "api/tensor_check.hpp"

namespace flashgrad {
namespace {

constexpr int kMaxThreads = 4096;

// Rows of all heads, in one batch entry or all packed sequences. A workspace for them, some hundred
// bytes each, still has a size in 64 bits.
constexpr std::int64_t kMaxHeadRows = std::int64_t{1} << 52;

// Copies a versioned C struct. An older caller's shorter struct leaves the newer fields as in
// `init`; a newer caller's longer one is taken if what this library does not know is zero.
template <class T>
Status copy_versioned(const T* from, const char* what, T init, T* to) {
  *to = init;
  if (from == nullptr) {
    return {};
  }
  std::size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  // No version of a struct ends inside a field, so half of a pointer can't be taken for one.
  if (size < 2 * sizeof(std::size_t) || size > 4096 || size % alignof(T) != 0) {
    return invalid(std::string(what) + ": struct_size " + std::to_string(size) + ", want " +
                   std::to_string(sizeof(T)) + " (initialise with the FG_..._INIT macro)");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return unsupported(std::string(what) + ": sets a field that this version of the library (" +
                         FLASHGRAD_VERSION + ") does not know");
    }
  }
  std::memcpy(to, from, std::min(size, sizeof(T)));
  return {};
}

std::string number_text(double x) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", x);
  return text.data();
}

class Validator {
 public:
  Validator(Pass pass, bool with_data, Call* call)
      : pass_(pass),
        with_data_(with_data),
        p_(call->problem),
        a_(call->args),
        tensors_(with_data) {}

  Status run(const fg_tensors& t, const fg_options& o, const Scratch& workspace) {
    p_ = {};
    a_ = {};
    FG_RETURN_IF_ERROR(check_required(t));
    FG_RETURN_IF_ERROR(take_shapes(t));
    FG_RETURN_IF_ERROR(take_options(o));
    FG_RETURN_IF_ERROR(take_tensors(t));
    if (with_data_) {
      tensors_.add_workspace(workspace.data, workspace.bytes);
      FG_RETURN_IF_ERROR(tensors_.check_overlaps());
      if (p_.device_type == DeviceType::kCpu) {
        FG_RETURN_IF_ERROR(check_lengths(
            {"q", p_.seqlen_q, p_.batch, a_.cu_seqlens_q, a_.seqused_q, max_seqlen_q_}));
        FG_RETURN_IF_ERROR(check_lengths(
            {"kv", p_.seqlen_kv, p_.batch, a_.cu_seqlens_kv, a_.seqused_kv, max_seqlen_kv_}));
      }
    }
    return {};
  }

 private:
  Status check_required(const fg_tensors& t) {
    const auto require = [](const DLTensor* tensor, const char* name) {
      return tensor != nullptr ? Status{}
                               : invalid(std::string(name) + ": null, but it is required");
    };
    FG_RETURN_IF_ERROR(require(t.q, "q"));
    FG_RETURN_IF_ERROR(require(t.k, "k"));
    FG_RETURN_IF_ERROR(require(t.v, "v"));
    FG_RETURN_IF_ERROR(require(t.out, "out"));
    if (pass_ == Pass::kBackward) {
      FG_RETURN_IF_ERROR(require(t.lse, "lse"));
      if (t.dout == nullptr && t.dlse == nullptr) {
        return invalid("dout: null, and so is dlse; backward needs one of them");
      }
      if (t.dsinks != nullptr && t.sinks == nullptr) {
        return invalid("dsinks: given without sinks");
      }
    }
    if ((t.cu_seqlens_q == nullptr) != (t.cu_seqlens_kv == nullptr)) {
      return invalid(std::string(t.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_kv") +
                     ": null, but its counterpart is given; a packed call needs both");
    }
    p_.packed = t.cu_seqlens_q != nullptr;
    return {};
  }

  // Reads dims, dtype and device of q, k, v; the other tensors are then compared with what follows
  // from these.
  Status take_shapes(const fg_tensors& t) {
    const int ndim = p_.packed ? 3 : 4;
    for (const auto& [tensor, name] : {std::pair{t.q, "q"}, {t.k, "k"}, {t.v, "v"}}) {
      FG_RETURN_IF_ERROR(check_form(*tensor, name));
      if (tensor->ndim != ndim) {
        return invalid(std::string(name) + ": " + std::to_string(tensor->ndim) +
                       " dimensions, want " +
                       (p_.packed ? "3 (total, heads, head_dim), since cu_seqlens are given"
                                  : "4 (batch, seqlen, heads, head_dim); packed tensors need "
                                    "cu_seqlens_q and cu_seqlens_kv"));
      }
    }
    const int row = p_.packed ? 0 : 1;  // then heads, then the head's dim
    p_.seqlen_q = t.q->shape[row];
    p_.seqlen_kv = t.k->shape[row];
    p_.heads_q = t.q->shape[row + 1];
    p_.heads_kv = t.k->shape[row + 1];
    p_.head_dim = t.q->shape[row + 2];
    p_.head_dim_v = t.v->shape[row + 2];
    if (p_.packed) {
      FG_RETURN_IF_ERROR(check_form(*t.cu_seqlens_q, "cu_seqlens_q"));
      if (t.cu_seqlens_q->ndim != 1 || t.cu_seqlens_q->shape[0] < 1) {
        return invalid("cu_seqlens_q: shape " +
                       shape_text(t.cu_seqlens_q->shape, t.cu_seqlens_q->ndim) +
                       ", want (batch + 1)");
      }
      p_.batch = t.cu_seqlens_q->shape[0] - 1;
    } else {
      p_.batch = t.q->shape[0];
    }
    if (p_.heads_q < 1 || p_.heads_kv < 1) {
      return invalid(std::string(p_.heads_q < 1 ? "q: heads_q " : "k: heads_kv ") +
                     "0, want 1 or more");
    }
    if (p_.heads_q % p_.heads_kv != 0) {
      return invalid("q: heads_q " + std::to_string(p_.heads_q) + ", want a multiple of " +
                     std::to_string(p_.heads_kv) + " (k's heads)");
    }
    for (const auto& [rows, heads, name] :
         {std::tuple{p_.seqlen_q, p_.heads_q, "q"}, {p_.seqlen_kv, p_.heads_kv, "k"}}) {
      if (p_.batch + (p_.packed ? 1 : 0) > 0 && rows > kMaxHeadRows / heads) {
        return unsupported(std::string(name) + ": " + std::to_string(rows) + " rows of " +
                           std::to_string(heads) + " heads, supported are 2^52 of all heads");
      }
    }
    for (const auto& [dim, name] :
         {std::pair{p_.head_dim, "q: head_dim "}, {p_.head_dim_v, "v: head_dim_v "}}) {
      if (dim < 1) {
        return invalid(name + std::to_string(dim) + ", want 1 to " + std::to_string(kMaxHeadDim));
      }
      if (dim > kMaxHeadDim) {
        return unsupported(name + std::to_string(dim) + ", supported are 1 to " +
                           std::to_string(kMaxHeadDim));
      }
    }
    const std::optional<DType> dtype = float_dtype(t.q->dtype);
    if (!dtype) {
      return unsupported("q: dtype " + dtype_name(t.q->dtype) +
                         ", supported are f32, bf16, f16, and f64 on the reference backend");
    }
    p_.dtype = *dtype;
    const DLDevice device = t.q->device;
    tensors_.want_device(device);
    switch (device.device_type) {
      case kDLCPU:
      case kDLCUDAHost:
        p_.device_type = DeviceType::kCpu;
        break;
      case kDLCUDA:
        p_.device_type = DeviceType::kCuda;
        p_.device_id = device.device_id;
        break;
      default:
        return unsupported("q: is on " + device_name(device) +
                           "; flashgrad serves tensors of the CPU and of CUDA devices");
    }
    return {};
  }

  Status take_options(const fg_options& o) {
    if (o.alignment != FG_BOTTOM_RIGHT && o.alignment != FG_TOP_LEFT) {
      return invalid("alignment: " + std::to_string(static_cast<int>(o.alignment)) +
                     ", want FG_BOTTOM_RIGHT or FG_TOP_LEFT");
    }
    if (std::isinf(o.scale)) {
      return invalid("scale: infinite, want a finite number, or NaN for 1 / sqrt(head_dim)");
    }
    if (!std::isfinite(o.softcap) || o.softcap < 0) {
      return invalid("softcap: " + number_text(o.softcap) +
                     ", want a positive number, or 0 for none");
    }
    if (o.num_threads < 0 || o.num_threads > kMaxThreads) {
      return invalid("num_threads: " + std::to_string(o.num_threads) + ", want 1 to " +
                     std::to_string(kMaxThreads) + ", or 0 for OpenMP's own number");
    }
    if (o.max_seqlen_q < 0 || o.max_seqlen_kv < 0) {
      return invalid((o.max_seqlen_q < 0 ? "max_seqlen_q: " + std::to_string(o.max_seqlen_q)
                                         : "max_seqlen_kv: " + std::to_string(o.max_seqlen_kv)) +
                     ", want an upper bound of the lengths, or 0 for none");
    }
    p_.mask.left = o.window_left >= kUnboundedFrom ? kUnbounded : o.window_left;
    p_.mask.right = o.window_right >= kUnboundedFrom ? kUnbounded : o.window_right;
    p_.mask.alignment = o.alignment == FG_TOP_LEFT ? Alignment::kTopLeft : Alignment::kBottomRight;
    p_.scale = std::isnan(o.scale) ? 1.0 / std::sqrt(static_cast<double>(p_.head_dim)) : o.scale;
    if (p_.dtype != DType::kF64 && std::abs(p_.scale) > std::numeric_limits<float>::max()) {
      return invalid("scale: " + number_text(p_.scale) + ", want a number in the range of f32");
    }
    p_.softcap = o.softcap;
    // |s| / softcap is then below 1e-4 for every |<q, k>| below 1e34: in f32 the cap is the
    // identity, but the factor that carries the scale into it would be 0.
    if (p_.dtype != DType::kF64 &&
        std::abs(p_.scale) < p_.softcap * std::numeric_limits<float>::min()) {
      p_.softcap = 0;
    }
    p_.deterministic = o.deterministic != 0;
    if (p_.device_type == DeviceType::kCpu) {
      p_.num_threads =
          o.num_threads > 0 ? o.num_threads : std::clamp(omp_get_max_threads(), 1, kMaxThreads);
    }
    max_seqlen_q_ = o.max_seqlen_q;
    max_seqlen_kv_ = o.max_seqlen_kv;
    const auto bound = [&](std::int64_t rows, std::int64_t max_seqlen) {
      return p_.packed && max_seqlen > 0 ? std::min(rows, max_seqlen) : rows;
    };
    p_.max_seqlen_q = bound(p_.seqlen_q, max_seqlen_q_);
    p_.max_seqlen_kv = bound(p_.seqlen_kv, max_seqlen_kv_);
    return {};
  }

  Status take_tensors(const fg_tensors& t) {
    const auto rows = [&](std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
      return p_.packed ? std::array<std::int64_t, 4>{seqlen, heads, dim, 0}
                       : std::array<std::int64_t, 4>{p_.batch, seqlen, heads, dim};
    };
    const int ndim = p_.packed ? 3 : 4;
    const bool backward = pass_ == Pass::kBackward;
    const auto of_q = rows(p_.seqlen_q, p_.heads_q, p_.head_dim);
    const auto of_k = rows(p_.seqlen_kv, p_.heads_kv, p_.head_dim);
    const auto of_v = rows(p_.seqlen_kv, p_.heads_kv, p_.head_dim_v);
    const auto of_out = rows(p_.seqlen_q, p_.heads_q, p_.head_dim_v);
    const char* q_names =
        p_.packed ? "(total_q, heads_q, head_dim)" : "(batch, seqlen_q, heads_q, head_dim)";
    const char* k_names =
        p_.packed ? "(total_kv, heads_kv, head_dim)" : "(batch, seqlen_kv, heads_kv, head_dim)";
    const char* v_names =
        p_.packed ? "(total_kv, heads_kv, head_dim_v)" : "(batch, seqlen_kv, heads_kv, head_dim_v)";
    const char* out_names =
        p_.packed ? "(total_q, heads_q, head_dim_v)" : "(batch, seqlen_q, heads_q, head_dim_v)";
    FG_RETURN_IF_ERROR(take(t.q, {"q", ndim, of_q, q_names}, &a_.q));
    FG_RETURN_IF_ERROR(take(t.k, {"k", ndim, of_k, k_names}, &a_.k));
    FG_RETURN_IF_ERROR(take(t.v, {"v", ndim, of_v, v_names}, &a_.v));
    FG_RETURN_IF_ERROR(take(t.out, {"out", ndim, of_out, out_names, false, !backward}, &a_.out));
    FG_RETURN_IF_ERROR(take_lse(t.lse, {"lse", 0, {}, "", false, !backward}, &a_.lse));
    p_.wants_lse = t.lse != nullptr;
    FG_RETURN_IF_ERROR(take_sinks(t.sinks, "sinks", false, &a_.sinks, &p_.has_sinks));
    if (backward) {
      FG_RETURN_IF_ERROR(take(t.dout, {"dout", ndim, of_out, out_names, true}, &a_.dout));
      FG_RETURN_IF_ERROR(take_lse(t.dlse, {"dlse", 0, {}, "", true}, &a_.dlse));
      FG_RETURN_IF_ERROR(take(t.dq, {"dq", ndim, of_q, q_names, false, true}, &a_.dq));
      FG_RETURN_IF_ERROR(take(t.dk, {"dk", ndim, of_k, k_names, false, true}, &a_.dk));
      FG_RETURN_IF_ERROR(take(t.dv, {"dv", ndim, of_v, v_names, false, true}, &a_.dv));
      FG_RETURN_IF_ERROR(take_sinks(t.dsinks, "dsinks", true, &a_.dsinks, &p_.wants_dsinks));
      p_.has_dout = t.dout != nullptr;
      p_.has_dlse = t.dlse != nullptr;
      p_.wants_dq = t.dq != nullptr;
      p_.wants_dk = t.dk != nullptr;
      p_.wants_dv = t.dv != nullptr;
      p_.dq_dtype = p_.wants_dq ? a_.dq.dtype : p_.dtype;
      p_.dk_dtype = p_.wants_dk ? a_.dk.dtype : p_.dtype;
      p_.dv_dtype = p_.wants_dv ? a_.dv.dtype : p_.dtype;
    } else {
      p_.dq_dtype = p_.dk_dtype = p_.dv_dtype = p_.dtype;
    }
    p_.unaligned_q = is_unaligned(a_.q, t.q);
    p_.unaligned_k = is_unaligned(a_.k, t.k);
    p_.unaligned_v = is_unaligned(a_.v, t.v);
    p_.unaligned_out = is_unaligned(a_.out, t.out);
    p_.unaligned_dout = p_.has_dout && is_unaligned(a_.dout, t.dout);
    p_.unaligned_dq = p_.wants_dq && is_unaligned(a_.dq, t.dq);
    p_.unaligned_dk = p_.wants_dk && is_unaligned(a_.dk, t.dk);
    p_.unaligned_dv = p_.wants_dv && is_unaligned(a_.dv, t.dv);
    FG_RETURN_IF_ERROR(take_integers(t.cu_seqlens_q, "cu_seqlens_q", "(batch + 1)", p_.batch + 1,
                                     &a_.cu_seqlens_q, &p_.packed));
    FG_RETURN_IF_ERROR(take_integers(t.cu_seqlens_kv, "cu_seqlens_kv", "(batch + 1)", p_.batch + 1,
                                     &a_.cu_seqlens_kv, &p_.packed));
    FG_RETURN_IF_ERROR(take_integers(t.seqused_q, "seqused_q", "(batch)", p_.batch, &a_.seqused_q,
                                     &p_.has_seqused_q));
    FG_RETURN_IF_ERROR(take_integers(t.seqused_kv, "seqused_kv", "(batch)", p_.batch,
                                     &a_.seqused_kv, &p_.has_seqused_kv));
    return take_integers(t.q_offset, "q_offset", "(batch)", p_.batch, &a_.q_offset,
                         &p_.has_q_offset);
  }

  Status take(const DLTensor* t, const Want& want, Tensor* tensor) {
    if (t == nullptr) {
      return {};
    }
    const std::optional<DType> dtype = float_dtype(t->dtype);
    const bool gradient = want.is_output && pass_ == Pass::kBackward;
    if (!dtype || (*dtype != p_.dtype && !(gradient && *dtype == DType::kF32))) {
      return invalid(std::string(want.name) + ": dtype " + dtype_name(t->dtype) + ", want " +
                     name(p_.dtype) + " (q's)" + (gradient ? " or f32" : ""));
    }
    std::array<std::int64_t, 4> s{};
    FG_RETURN_IF_ERROR(tensors_.check(*t, want, &s, &tensor->data));
    tensor->dtype = *dtype;
    const std::size_t k = p_.packed ? 0 : 1;
    tensor->batch_stride = p_.packed ? 0 : s[0];
    tensor->row_stride = s[k];
    tensor->head_stride = s[k + 1];
    tensor->dim_stride = want.shape[k + 2] > 1 ? s[k + 2] : 1;
    return {};
  }

  // `given`: what t was made of.
  static bool is_unaligned(const Tensor& t, const DLTensor* given) {
    const auto address = reinterpret_cast<std::uintptr_t>(given->data) + given->byte_offset;
    const std::int64_t elements = 16 / size_bytes(t.dtype);
    const auto starts_anywhere = [elements](std::int64_t stride) {
      return stride < 0 || stride % elements != 0;
    };
    return address % 16 != 0 || t.dim_stride != 1 || starts_anywhere(t.batch_stride) ||
           starts_anywhere(t.row_stride) || starts_anywhere(t.head_stride);
  }

  Status take_lse(const DLTensor* t, Want want, Tensor* tensor) {
    if (t == nullptr) {
      return {};
    }
    const DType dtype = statistics_dtype(p_.dtype);
    if (float_dtype(t->dtype) != dtype) {
      return invalid(std::string(want.name) + ": dtype " + dtype_name(t->dtype) + ", want " +
                     name(dtype));
    }
    want.ndim = p_.packed ? 2 : 3;
    want.shape = p_.packed ? std::array<std::int64_t, 4>{p_.heads_q, p_.seqlen_q, 0, 0}
                           : std::array<std::int64_t, 4>{p_.batch, p_.heads_q, p_.seqlen_q, 0};
    want.shape_names = p_.packed ? "(heads_q, total_q)" : "(batch, heads_q, seqlen_q)";
    std::array<std::int64_t, 4> s{};
    FG_RETURN_IF_ERROR(tensors_.check(*t, want, &s, &tensor->data));
    tensor->dtype = dtype;
    const std::size_t k = p_.packed ? 0 : 1;
    tensor->batch_stride = p_.packed ? 0 : s[0];
    tensor->head_stride = s[k];
    tensor->row_stride = s[k + 1];
    return {};
  }

  // Elements per head, f32 or f64.
  template <class Data>
  Status take_sinks(const DLTensor* t, const char* name, bool is_output, Data** data, bool* given) {
    const DLDataType dtype{
        kDLFloat, static_cast<std::uint8_t>(8 * size_bytes(statistics_dtype(p_.dtype))), 1};
    return take_vector(t, {name, 1, {p_.heads_q}, "(heads_q)", false, is_output}, dtype, data,
                       given);
  }

  template <class Int>
  Status take_integers(const DLTensor* t, const char* name, const char* shape_names, std::int64_t n,
                       const Int** data, bool* given) {
    return take_vector(t, {name, 1, {n}, shape_names}, {kDLInt, 8 * sizeof(Int), 1}, data, given);
  }

  template <class Data>
  Status take_vector(const DLTensor* t, const Want& want, DLDataType dtype, Data** data,
                     bool* given) {
    *given = t != nullptr;
    *data = nullptr;
    if (t == nullptr) {
      return {};
    }
    if (t->dtype.code != dtype.code || t->dtype.bits != dtype.bits || t->dtype.lanes != 1) {
      return invalid(std::string(want.name) + ": dtype " + dtype_name(t->dtype) + ", want " +
                     dtype_name(dtype));
    }
    std::array<std::int64_t, 4> s{};
    void* address = nullptr;
    FG_RETURN_IF_ERROR(tensors_.check(*t, want, &s, &address));
    *data = static_cast<Data*>(address);
    return {};
  }

  Pass pass_;
  bool with_data_;
  Problem& p_;
  Args& a_;
  std::int64_t max_seqlen_q_ = 0;  // as given
  std::int64_t max_seqlen_kv_ = 0;
  TensorCheck tensors_;
};

}  // namespace

Status validate(Pass pass, const fg_tensors* tensors, const fg_options* options,
                const Scratch* workspace, Call* call) {
  if (tensors == nullptr) {
    return invalid("tensors: null");
  }
  fg_tensors t;
  fg_options o;
  FG_RETURN_IF_ERROR(copy_versioned(tensors, "tensors", fg_tensors FG_TENSORS_INIT, &t));
  FG_RETURN_IF_ERROR(copy_versioned(options, "options", fg_options FG_OPTIONS_INIT, &o));
  call->backend = o.backend;
  return Validator(pass, workspace != nullptr, call)
      .run(t, o, workspace != nullptr ? *workspace : Scratch{});
}

}  // namespace flashgrad
