// SPDX-License-Identifier: Apache-2.0
// Goes through the driver's interface to graphs: the kernels belong to the CUDA runtime inside
// libflashgrad, and this program's own does not know them.
#include "kernel_times.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>

namespace flashgrad::bench {
namespace {

void require(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("kernel times: ") + cudaGetErrorString(error));
  }
}
void require(CUresult result) {
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("kernel times: driver error " + std::to_string(result));
  }
}

template <class F>
F driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  require(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("kernel times: the driver has no ") + name);
  }
  return reinterpret_cast<F>(function);
}

// "bwd_main<...>" of a mangled name.
std::string readable(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  std::string name = status == 0 ? text.get() : mangled;
  name = name.substr(0, name.rfind('('));
  for (const char* part : {"void ", "flashgrad::sm90::", "(anonymous namespace)::"}) {
    for (std::size_t at = name.find(part); at != std::string::npos; at = name.find(part)) {
      name.erase(at, std::string(part).size());
    }
  }
  return name;
}

// Copies a node into another graph, after `before`.
CUgraphNode copy_node(CUgraphNode node, CUgraph graph, CUgraphNode before, std::string* name) {
  CUgraphNodeType type{};
  require(driver_function<PFN_cuGraphNodeGetType_v10000>("cuGraphNodeGetType", 10000)(node, &type));
  CUgraphNode copy = nullptr;
  if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
    CUDA_KERNEL_NODE_PARAMS_v2 params{};
    require(driver_function<PFN_cuGraphKernelNodeGetParams_v12000>("cuGraphKernelNodeGetParams",
                                                                   12000)(node, &params));
    require(driver_function<PFN_cuGraphAddKernelNode_v12000>("cuGraphAddKernelNode", 12000)(
        &copy, graph, &before, 1, &params));
    require(driver_function<PFN_cuGraphKernelNodeCopyAttributes_v11000>(
        "cuGraphKernelNodeCopyAttributes", 11000)(copy, node));
    const char* mangled = "kernel";
    if (params.func != nullptr) {
      require(
          driver_function<PFN_cuFuncGetName_v12030>("cuFuncGetName", 12030)(&mangled, params.func));
    } else if (params.kern != nullptr) {
      require(driver_function<PFN_cuKernelGetName_v12030>("cuKernelGetName", 12030)(&mangled,
                                                                                    params.kern));
    }
    *name = readable(mangled);
  } else if (type == CU_GRAPH_NODE_TYPE_MEMSET) {
    CUDA_MEMSET_NODE_PARAMS params{};
    CUcontext context = nullptr;
    require(driver_function<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000)(&context));
    require(driver_function<PFN_cuGraphMemsetNodeGetParams_v10000>("cuGraphMemsetNodeGetParams",
                                                                   10000)(node, &params));
    require(driver_function<PFN_cuGraphAddMemsetNode_v10000>("cuGraphAddMemsetNode", 10000)(
        &copy, graph, &before, 1, &params, context));
    *name = "memset";
  } else {
    throw std::runtime_error("kernel times: a node of type " + std::to_string(type));
  }
  return copy;
}

}  // namespace

std::vector<KernelTime> kernel_times(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t captured = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  require(cudaStreamEndCapture(stream, &captured));
  // A capture of one stream adds its nodes in the order of the calls.
  std::size_t count = 0;
  require(cudaGraphGetNodes(captured, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  require(cudaGraphGetNodes(captured, nodes.data(), &count));

  cudaGraph_t timed = nullptr;
  require(cudaGraphCreate(&timed, 0));
  std::vector<cudaEvent_t> events(count + 1);
  std::vector<KernelTime> times(count);
  cudaGraphNode_t last = nullptr;
  for (std::size_t n = 0; n <= count; ++n) {
    require(cudaEventCreate(&events[n]));
    cudaGraphNode_t event = nullptr;
    require(cudaGraphAddEventRecordNode(&event, timed, &last, n == 0 ? 0 : 1, events[n]));
    if (n < count) {
      last = copy_node(nodes[n], timed, event, &times[n].name);
      times[n].milliseconds = std::numeric_limits<double>::infinity();
    }
  }
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, timed, 0));
  constexpr int kRuns = 5;
  for (int run = 0; run < kRuns; ++run) {
    require(cudaGraphLaunch(executable, stream));
    require(cudaStreamSynchronize(stream));
    for (std::size_t n = 0; n < count; ++n) {
      float milliseconds = 0;
      require(cudaEventElapsedTime(&milliseconds, events[n], events[n + 1]));
      times[n].milliseconds = std::min<double>(times[n].milliseconds, milliseconds);
    }
  }
  for (cudaEvent_t event : events) {
    require(cudaEventDestroy(event));
  }
  require(cudaGraphExecDestroy(executable));
  require(cudaGraphDestroy(timed));
  require(cudaGraphDestroy(captured));
  return times;
}

}  // namespace flashgrad::bench
