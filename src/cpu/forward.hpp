// SPDX-License-Identifier: Apache-2.0
// The forward pass for one instruction set: its kernels, run by the common scheduler.
#pragma once

#include "core/backend.hpp"
#include "cpu/forward_item.hpp"
#include "cpu/forward_schedule.hpp"

namespace flashgrad::cpu {

template <class Isa>
static WorkspaceSize forward_workspace(const Problem& p) {
  return forward_workspace(p, kForwardKernels<Isa>);
}

template <class Isa>
static void forward(const Problem& p, const Args& args) {
  schedule_forward(p, args, kForwardKernels<Isa>);
}

}  // namespace flashgrad::cpu
