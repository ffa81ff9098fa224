// SPDX-License-Identifier: Apache-2.0
// How long a step takes when warpgroups go to and fro between the tensor cores and their softmax:
// more than the busiest resource, less than the sum.
#pragma once

#include "plan/device.hpp"
#include "plan/kernel.hpp"

namespace flashgrad::plan {

// Cycles in which a step's products hold the tensor cores. What else passes through shared memory
// is spread evenly over the products; each takes as long as its multiply-adds, or as its operands
// and its share of the rest.
double product_cycles(const Kernel& kernel, const Device& device);

// Two servers, the tensor cores and the units for exponentials and f32, and `kernel.workers`
// customers that need both in turns, for times that vary: the throughput of a closed queueing
// network (Buzen's convolution). With one worker (the fewest) this is the sum, with very many the
// maximum.
double step_cycles(const Kernel& kernel, const Device& device);

}  // namespace flashgrad::plan
