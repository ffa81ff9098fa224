// SPDX-License-Identifier: Apache-2.0
// The promise that the bits of a sequence's out and lse depend on nothing around it.
#pragma once

#include "core/dtype.hpp"

namespace flashgrad {

// Runs sequences of many lengths alone, in a padded batch and in packed batches, with masks and
// features, which takes kernels and tiles of every kind. Prints a line for each mask; returns
// whether all bits agree.
bool forward_is_invariant(const char* name, DType dtype, int head_dim, int head_dim_v);

}  // namespace flashgrad
