// SPDX-License-Identifier: Apache-2.0
// The kernels of a call, each with its time.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

namespace flashgrad::bench {

struct KernelTime {
  std::string name;
  double milliseconds = 0;
};

// Captures what `enqueue` puts on the stream into a graph, runs its nodes one after the other with
// an event between each two, and returns the shortest of some runs of each. The kernels start on
// what those before them left, as in the call, but never overlap. Throws std::runtime_error.
std::vector<KernelTime> kernel_times(cudaStream_t stream, const std::function<void()>& enqueue);

}  // namespace flashgrad::bench
