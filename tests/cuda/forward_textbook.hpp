// SPDX-License-Identifier: Apache-2.0
// The textbook forward in float64 on the host: what sm90_forward compares with.
#pragma once

#include "forward_call.hpp"

namespace flashgrad {

struct ForwardErrors {
  double out = 0;          // relative, Frobenius
  double lse = 0;          // the largest |got - want| / (1 + |want|)
  bool misplaced = false;  // a NaN, an Inf or a 0 where it should not be
};

// Of what `call` has computed; on all cores.
ForwardErrors compare_with_textbook(const ForwardCall& call);

}  // namespace flashgrad
