// SPDX-License-Identifier: Apache-2.0
// How much operator new has given to anybody in this program, the library included.
#pragma once

#include <cstddef>

namespace flashgrad::check {

std::size_t allocated_bytes();

}  // namespace flashgrad::check
