// SPDX-License-Identifier: Apache-2.0
// All argument checks: from the C structs to a Problem and its Args. The only place where a tensor is judged.
#pragma once

#include "core/problem.hpp"
#include "core/status.hpp"

namespace flashgrad {

struct Call {
  Problem problem;
  Args args;
};

// With `with_data` false, only shapes, strides, dtypes and devices are read (workspace and support queries, also of traced tensors);
// with true, pointers are checked too, overlaps, and on the CPU the offsets.
Status validate(Pass pass, const fg_tensors* tensors, const fg_options* options, bool with_data, Call* call);

}  // namespace flashgrad
