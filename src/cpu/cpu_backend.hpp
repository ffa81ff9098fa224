// SPDX-License-Identifier: Apache-2.0
// The CPU backend: tiled attention on every core, for f32, bf16 and f16.
#pragma once

#include "core/backend.hpp"

namespace flashgrad {

extern const Backend cpu_backend;

}  // namespace flashgrad
