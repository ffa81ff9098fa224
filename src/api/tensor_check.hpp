// SPDX-License-Identifier: Apache-2.0
// What every tensor of a call must be, whatever it is for: sizes and strides that fit 64 bits, q's
// device, memory of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "api/overlap.hpp"
#include "core/status.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad {

// What one tensor must be.
struct Want {
  const char* name;
  int ndim;
  std::array<std::int64_t, 4> shape;
  const char* shape_names;
  bool zero_stride_ok = false;  // stride 0 anywhere, the last dimension included
  bool is_output = false;
};

// What can be said of a tensor before its shape is compared: dimensions and sizes.
Status check_form(const DLTensor& t, const char* name);

// The tensors of one call, checked one by one and then against each other.
class TensorCheck {
 public:
  // Without data, pointers are not looked at: the call only asks.
  explicit TensorCheck(bool with_data) : with_data_(with_data) {}

  void want_device(const DLDevice& device) { device_ = device; }

  // `stride` gets the strides in elements, 0 for dimensions of size 0 or 1; `data` the address of
  // the first element, not null unless the call only asks.
  Status check(const DLTensor& t, const Want& want, std::array<std::int64_t, 4>* stride,
               void** data);

  // Joins the tensors that must not overlap.
  void add_workspace(const void* data, std::size_t bytes);

  // No output may share memory with any other tensor or with itself.
  [[nodiscard]] Status check_overlaps() const;

 private:
  struct NamedLattice {
    ByteLattice bytes;
    const char* name = "";
    bool is_output = false;
  };

  bool with_data_;
  DLDevice device_{};
  std::array<NamedLattice, 20> lattices_;
  int num_lattices_ = 0;
};

}  // namespace flashgrad
