// SPDX-License-Identifier: Apache-2.0
// All argument checks: from the C structs to a Problem and its Args. The only place where a tensor
// is judged.
#pragma once

#include "core/problem.hpp"
#include "core/status.hpp"

namespace flashgrad {

struct Call {
  Problem problem;
  Args args;
  const char* backend = nullptr;  // that the options name
};

// The caller's workspace.
struct Scratch {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

// With a null `workspace`, only shapes, strides, dtypes and devices are read (workspace and support
// queries, also of traced tensors). Otherwise the pointers are checked too, that nothing written
// overlaps anything else, and the offsets of host tensors.
Status validate(Pass pass, const fg_tensors* tensors, const fg_options* options,
                const Scratch* workspace, Call* call);

}  // namespace flashgrad
