// SPDX-License-Identifier: Apache-2.0
// A tensor against what it must be, and all tensors of a call against each other.
#include "api/tensor_check.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "api/describe.hpp"

namespace flashgrad {
namespace {

// No tensor spans more bytes, and none has more elements: sums and products of two such numbers'
// parts stay in 64 bits.
constexpr std::int64_t kMaxSpanBytes = std::int64_t{1} << 59;

// Pinned memory is the host's as well.
bool on_host(const DLDevice& device) {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
}

}  // namespace

Status check_form(const DLTensor& t, const char* name) {
  if (t.ndim < 0 || t.ndim > 4 || (t.ndim > 0 && t.shape == nullptr)) {
    return invalid(std::string(name) + ": " +
                   (t.shape == nullptr && t.ndim > 0
                        ? "null shape"
                        : std::to_string(t.ndim) + " dimensions, want 1 to 4"));
  }
  for (int k = 0; k < t.ndim; ++k) {
    if (t.shape[k] < 0 || t.shape[k] > kMaxSpanBytes) {
      return invalid(std::string(name) + ": shape " + shape_text(t.shape, t.ndim) +
                     ", want sizes from 0 to 2^59");
    }
  }
  return {};
}

Status TensorCheck::check(const DLTensor& t, const Want& want, std::array<std::int64_t, 4>* stride,
                          void** data) {
  const std::string name = want.name;
  FG_RETURN_IF_ERROR(check_form(t, want.name));
  if (t.ndim != want.ndim || !std::equal(t.shape, t.shape + t.ndim, want.shape.begin())) {
    return invalid(name + ": shape " + shape_text(t.shape, t.ndim) + ", want " +
                   shape_text(want.shape.data(), want.ndim) + " " + want.shape_names);
  }
  const bool same_device = on_host(device_) ? on_host(t.device)
                                            : t.device.device_type == device_.device_type &&
                                                  t.device.device_id == device_.device_id;
  if (!same_device) {
    return invalid(name + ": is on " + device_name(t.device) + ", want " + device_name(device_) +
                   " (q's)");
  }
  // Without elements strides say nothing: NumPy's are then all 0.
  const bool empty = std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim;
  const std::int64_t width = t.dtype.bits / 8;
  std::int64_t elements = 1;
  std::int64_t compact = 1;
  std::int64_t span = width;
  for (int k = want.ndim - 1; k >= 0; --k) {
    const std::int64_t n = t.shape[k];
    std::int64_t s = t.strides != nullptr ? t.strides[k] : compact;
    if (n <= 1 || empty) {
      s = 0;
    }
    if (k == want.ndim - 1 && n > 1 && !empty && s != 1 && !(want.zero_stride_ok && s == 0)) {
      return invalid(name + ": last stride " + std::to_string(s) + ", want 1" +
                     (want.zero_stride_ok ? " or 0" : ""));
    }
    std::int64_t extent = 0;
    const bool overflows =
        __builtin_mul_overflow(elements, std::max<std::int64_t>(n, 1), &elements) ||
        elements > kMaxSpanBytes ||
        __builtin_mul_overflow(std::max<std::int64_t>(n - 1, 0), s, &extent) ||
        extent > kMaxSpanBytes / width || extent < -kMaxSpanBytes / width;
    if (overflows || (span += std::abs(extent) * width) > kMaxSpanBytes) {
      return invalid(name + ": shape " + shape_text(t.shape, t.ndim) +
                     " with these strides spans more than 2^59 bytes");
    }
    (*stride)[static_cast<std::size_t>(k)] = s;
    compact = t.strides == nullptr ? elements : compact;
  }
  ByteLattice bytes{0, want.ndim, {}, {}, width};
  for (std::size_t k = 0; k < static_cast<std::size_t>(want.ndim); ++k) {
    bytes.shape[k] = t.shape[k];
    bytes.stride_bytes[k] = (*stride)[k] * width;
  }
  *data = nullptr;
  if (!with_data_) {
    return {};
  }
  const auto base = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  if (t.data == nullptr) {
    if (!bytes.empty()) {
      return invalid(name + ": null data, but its shape is " + shape_text(t.shape, t.ndim));
    }
    // An empty tensor needs no memory; any aligned address says that it was given.
    *data = reinterpret_cast<void*>(alignof(double));  // NOLINT(performance-no-int-to-ptr)
  } else {
    if (base % static_cast<std::uintptr_t>(width) != 0) {
      return invalid(name + ": data is not aligned to its dtype (" + std::to_string(width) +
                     " bytes)");
    }
    *data = reinterpret_cast<void*>(base);  // NOLINT(performance-no-int-to-ptr)
  }
  bytes.base = base;
  lattices_[num_lattices_++] = {bytes, want.name, want.is_output};
  return {};
}

void TensorCheck::add_workspace(const void* data, std::size_t bytes) {
  if (data == nullptr || bytes == 0) {
    return;
  }
  const auto size = static_cast<std::int64_t>(std::min<std::size_t>(bytes, kMaxSpanBytes));
  lattices_[num_lattices_++] = {
      {reinterpret_cast<std::uintptr_t>(data), 1, {size}, {1}, 1}, "workspace", true};
}

Status TensorCheck::check_overlaps() const {
  for (int i = 0; i < num_lattices_; ++i) {
    if (!lattices_[i].is_output) {
      continue;
    }
    const std::string name = lattices_[i].name;
    if (self_overlap(lattices_[i].bytes) != Overlap::kNone) {
      return invalid(
          name + ": two of its elements share memory; an output's strides must keep them apart");
    }
    for (int j = 0; j < num_lattices_; ++j) {
      if (j == i || (lattices_[j].is_output && j < i)) {
        continue;
      }
      const Overlap found = overlap(lattices_[i].bytes, lattices_[j].bytes);
      if (found != Overlap::kNone) {
        return invalid(
            name + ": overlaps " + lattices_[j].name +
            (found == Overlap::kUndecided ? " as far as can be told from these strides" : "") +
            "; an output must not share memory with another tensor");
      }
    }
  }
  return {};
}

}  // namespace flashgrad
