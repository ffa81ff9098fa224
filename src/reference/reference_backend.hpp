// SPDX-License-Identifier: Apache-2.0
// The backend of last resort: the float64 textbook formulas of reference.hpp, for every problem
// whose tensors the host can read.
#pragma once

#include "core/backend.hpp"

namespace flashgrad {

extern const Backend reference_backend;

}  // namespace flashgrad
