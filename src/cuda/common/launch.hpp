// SPDX-License-Identifier: Apache-2.0
// Launches a kernel with dynamic shared memory, a cluster and programmatic dependence.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/device.hpp"

namespace flashgrad::cuda {

struct LaunchShape {
  std::int64_t num_ctas = 0;  // a multiple of cluster_size
  int num_threads = 0;
  int shared_bytes = 0;
  int cluster_size = 1;
  // The kernel starts before its predecessor in the stream has ended; it must call
  // ptx::grid_dependency_wait before it reads what that one wrote.
  bool overlaps_predecessor = false;
};

template <class... Parameters, class... Arguments>
Status launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
              void* stream, const Arguments&... arguments) {
  if (shape.num_ctas == 0) {
    return {};
  }
  if (shape.num_ctas > INT32_MAX) {
    return {FG_INVALID_ARGUMENT, std::string(name) + ": more than 2^31 - 1 tiles"};
  }
  if (shape.shared_bytes > 48 * 1024) {
    FG_RETURN_IF_ERROR(
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
              name));
  }
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (shape.cluster_size > 1) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes].val.clusterDim = {static_cast<unsigned>(shape.cluster_size), 1, 1};
    ++num_attributes;
  }
  if (shape.overlaps_predecessor) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes].val.programmaticStreamSerializationAllowed = 1;
    ++num_attributes;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.num_ctas));
  config.blockDim = dim3(static_cast<unsigned>(shape.num_threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  return check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

}  // namespace flashgrad::cuda
