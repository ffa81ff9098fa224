// SPDX-License-Identifier: Apache-2.0
// The case that `--shape`, `--dtype`, `--seed` and the options of a call describe.
#pragma once

#include <cstdint>
#include <string>

#include "check/case.hpp"
#include "options.hpp"

namespace flashgrad::tool {

// Throws Error if a text does not parse or the case's tensors can't fit into memory.
check::Case shape_case(const std::string& shape, const std::string& dtype, std::uint64_t seed,
                       const CallOptions& call_options);

}  // namespace flashgrad::tool
