// SPDX-License-Identifier: Apache-2.0
// What the arithmetic of docs/semantics.md costs each element of a result, to first order.
#pragma once

#include "check/unit.hpp"

namespace flashgrad::check {

// The arguments of a backward, and whether their out and lse are inputs, exact as they are, and not
// what a forward has rounded.
struct Statistics {
  Args args;
  bool given;
};

// The size that the roundings of "Precision" reach in each chosen element of the unit, in the slots
// of Values. `of_rows` is what the oracle's dq was made of, `of_keys` its dk and dv: not given only
// if all rows are chosen. Without `backward` only out and lse get theirs.
Values<double> rounding_errors(const Unit& u, const Statistics& of_rows, const Statistics& of_keys,
                               bool backward, int num_threads);

}  // namespace flashgrad::check
