// SPDX-License-Identifier: Apache-2.0
// The backend for Hopper GPUs (compute capability 9.0).
#pragma once

#include "core/backend.hpp"

namespace flashgrad {

extern const Backend sm90_backend;

}  // namespace flashgrad
