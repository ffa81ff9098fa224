// SPDX-License-Identifier: Apache-2.0
// The promise that the bits of a sequence's out and lse depend on nothing around it.
#pragma once

#include "forward_call.hpp"

namespace flashgrad {

// Runs sequences of many lengths alone, in padded batches and in packed ones, with masks and
// features, which takes kernels and tiles of every kind. Prints a line for each mask; returns
// whether all bits agree.
bool forward_is_invariant(const Kernel& kernel);

}  // namespace flashgrad
