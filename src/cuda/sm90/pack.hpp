// SPDX-License-Identifier: Apache-2.0
// Tensors that the copy engine cannot address (odd strides, columns that are not adjacent): with
// room in the workspace a call works on copies whose vectors are aligned and, where that is faster,
// padded with zeros. Inputs are copied before the kernels run, outputs after them, each side in one
// launch. Without that room the kernels read and write such tensors element by element.
#pragma once

#include "core/problem.hpp"

namespace flashgrad::sm90 {

// What the kernels are asked where a call works on copies: nothing is unaligned.
Problem packed_problem(const Problem& problem, Pass pass);

// What a call with the most workspace takes for copies, by what the problem says of shapes and
// strides. 0: nothing needs any.
std::size_t pack_bytes(const Problem& problem, Pass pass);

// Copies the inputs that need it into the last pack_bytes of the workspace, and makes *args name
// all copies and the rest of the workspace.
Status pack_inputs(const Problem& problem, Pass pass, Args* args);

// Copies the outputs that need it to where the caller wants them. `packed` comes from pack_inputs.
Status unpack_outputs(const Problem& problem, Pass pass, const Args& packed, const Args& args);

}  // namespace flashgrad::sm90
