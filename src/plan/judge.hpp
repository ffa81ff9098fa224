// SPDX-License-Identifier: Apache-2.0
// The oracle's judgement of a simulated backward.
#pragma once

#include <vector>

#include "check/expected.hpp"
#include "plan/simulator.hpp"

namespace flashgrad::plan {

// dq, dk and dv by the acceptance rule of docs/semantics.md.
std::vector<check::OutputResult> judge_gradients(HeadData& data);

}  // namespace flashgrad::plan
