// SPDX-License-Identifier: Apache-2.0
// Why a backend does not serve a problem, in the words that all of them use.
#pragma once

#include <initializer_list>

#include "core/problem.hpp"

namespace flashgrad {

// Refuses tensors that do not lie on such a device, or whose dtype is not one of `served`.
Status want_device(const Problem& problem, DeviceType device);
Status want_dtype(const Problem& problem, std::initializer_list<DType> served);

}  // namespace flashgrad
