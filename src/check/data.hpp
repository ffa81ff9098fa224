// SPDX-License-Identifier: Apache-2.0
// What the tensors of a case hold.
#pragma once

#include <cstdint>
#include <string>

#include "check/call.hpp"

namespace flashgrad::check {

// Well mixed bits (splitmix64): element n of a tensor is the same whoever computes it.
std::uint64_t mix(std::uint64_t x);

// Fills a tensor as Case's `q`, `k`, ... say. `stream` tells the tensors of a case apart. Throws
// std::invalid_argument if the pattern is none.
void fill(const HostTensor& t, const std::string& pattern, std::uint64_t stream);

// Fills (heads_q) sinks as Case::sinks says.
void fill_sinks(const Case& c, const HostTensor& sinks, std::uint64_t stream);

// Makes NaN what no visible position reads: rows and keys of no sequence, rows that see nothing,
// keys that no row sees.
void hide_unread(const Case& c, const CallTensors& t);

}  // namespace flashgrad::check
