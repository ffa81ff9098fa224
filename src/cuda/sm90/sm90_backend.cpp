// SPDX-License-Identifier: Apache-2.0
// The Backend struct of sm90: what both passes need of the machine and the problem, and the way to
// them.
#include "cuda/sm90/sm90_backend.hpp"

#include <algorithm>

#include "core/refusals.hpp"
#include "cuda/common/device.hpp"
#include "cuda/sm90/bwd_launch.hpp"
#include "cuda/sm90/fwd_launch.hpp"
#include "cuda/sm90/pack.hpp"

namespace flashgrad {
namespace {

std::string compute_capability(const cuda::DeviceProperties& properties) {
  return std::to_string(properties.compute_capability / 10) + "." +
         std::to_string(properties.compute_capability % 10);
}

// "cuda:0: NVIDIA H200, 132 multiprocessors", one for each device that serves, or why none does.
std::string describe_machine() {
  std::string reason;
  const int count = cuda::device_count(&reason);
  std::string hopper;
  std::string others;
  for (int i = 0; i < count; ++i) {
    cuda::DeviceProperties properties;
    if (!cuda::device_properties(i, &properties).ok()) {
      continue;
    }
    const bool serves = properties.compute_capability == 90;
    std::string& text = serves ? hopper : others;
    text += (text.empty() ? "cuda:" : "; cuda:") + std::to_string(i) + ": " + cuda::device_name(i) +
            ", " +
            (serves ? std::to_string(properties.num_multiprocessors) + " multiprocessors"
                    : "compute capability " + compute_capability(properties) + ", want 9.0");
  }
  return count == 0 ? reason : hopper.empty() ? others : hopper;
}

const char* detail() {
  static const std::string text = describe_machine();
  return text.c_str();
}

bool available() {
  const int count = cuda::device_count(nullptr);
  for (int i = 0; i < count; ++i) {
    cuda::DeviceProperties properties;
    if (cuda::device_properties(i, &properties).ok() && properties.compute_capability == 90) {
      return true;
    }
  }
  return false;
}

Status supports(const Problem& p, Pass pass) {
  FG_RETURN_IF_ERROR(want_device(p, DeviceType::kCuda));
  FG_RETURN_IF_ERROR(want_dtype(p, {DType::kBF16, DType::kF16}));
  cuda::DeviceProperties device;
  FG_RETURN_IF_ERROR(cuda::device_properties(p.device_id, &device));
  if (device.compute_capability != 90) {
    return unsupported("q: is on cuda:" + std::to_string(p.device_id) + " of compute capability " +
                       compute_capability(device) + ", want 9.0");
  }
  constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;
  for (const auto& [rows, name] : {std::pair{p.seqlen_q, "q: "}, {p.seqlen_kv, "k: "}}) {
    if (rows >= kMaxRows) {
      return unsupported(name + std::to_string(rows) + " rows, want fewer than 2^30");
    }
  }
  return pass == Pass::kForward ? sm90::supports_forward(p) : Status{};
}

WorkspaceSize kernel_workspace_size(const Problem& p, Pass pass) {
  return pass == Pass::kForward ? sm90::forward_workspace_size(p)
                                : sm90::backward_workspace_size(p);
}

// What a call on copies takes, or 0 where there is nothing to copy.
std::size_t packed_bytes(const Problem& p, Pass pass) {
  const std::size_t copies = sm90::pack_bytes(p, pass);
  return copies == 0
             ? 0
             : copies + kernel_workspace_size(sm90::packed_problem(p, pass), pass).preferred;
}

WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  const WorkspaceSize size = kernel_workspace_size(p, pass);
  return {size.minimum, std::max(size.preferred, packed_bytes(p, pass))};
}

Status run_kernels(const Problem& p, Pass pass, const Args& args) {
  return pass == Pass::kForward ? sm90::launch_forward(p, args) : sm90::launch_backward(p, args);
}

Status run(const Problem& p, Pass pass, const Args& args) {
  const cuda::DeviceGuard guard(p.device_id);
  FG_RETURN_IF_ERROR(guard.status());
  const std::size_t bytes = packed_bytes(p, pass);
  if (bytes == 0 || args.workspace_bytes < bytes) {
    return run_kernels(p, pass, args);
  }
  Args packed = args;
  FG_RETURN_IF_ERROR(sm90::pack_inputs(p, pass, &packed));
  FG_RETURN_IF_ERROR(run_kernels(sm90::packed_problem(p, pass), pass, packed));
  return sm90::unpack_outputs(p, pass, packed, args);
}

Status forward(const Problem& p, const Args& args) { return run(p, Pass::kForward, args); }
Status backward(const Problem& p, const Args& args) { return run(p, Pass::kBackward, args); }

}  // namespace

const Backend sm90_backend = {"sm90",         detail,  available, supports,
                              workspace_size, forward, backward};

}  // namespace flashgrad
