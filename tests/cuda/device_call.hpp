// SPDX-License-Identifier: Apache-2.0
// A case whose tensors stay on the device, to be called again and again without the host in
// between, and a comparison of bits there.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "check/call.hpp"

namespace flashgrad::check {

// Adds the number of 16-bit words in which the two differ to *count. In compare.cu.
void count_differences(const void* a, const void* b, std::size_t num_words,
                       unsigned long long* count, cudaStream_t stream);

inline void require_cuda(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// Workspace for both passes of any number of calls that run one after the other.
class SharedWorkspace {
 public:
  void reserve(std::size_t size_bytes) {
    if (memory_.size_bytes() < size_bytes) {
      memory_ = {};
      memory_ = DeviceMemory(size_bytes);
    }
  }
  [[nodiscard]] std::byte* data() const { return memory_.data(); }
  [[nodiscard]] std::size_t size_bytes() const { return memory_.size_bytes(); }

 private:
  DeviceMemory memory_;
};

struct NamedBytes {
  std::string name;
  std::byte* data;
  std::size_t size_bytes;
};

class DeviceCall {
 public:
  DeviceCall(Case c, const std::string& backend)
      : case_(std::move(c)), backend_(backend), tensors_(make_tensors(case_)) {
    for (const auto& [name, tensor] : tensors_.all()) {
      if (tensor->given()) {
        tensor->upload();
      }
    }
    options_ = make_options(case_);
    options_.backend = backend_.c_str();
    c_tensors_ = tensors_.c_tensors(Place::kCuda);
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  [[nodiscard]] const Case& spec() const { return case_; }

  [[nodiscard]] std::size_t workspace_bytes() const {
    std::size_t most = 0;
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      std::size_t preferred = 0;
      EXPECT_EQ(fg_workspace_size(pass, &c_tensors_, &options_, nullptr, &preferred), FG_OK)
          << fg_last_error();
      most = std::max(most, preferred);
    }
    return most;
  }

  // out, lse and the gradients that are wanted, with the gaps between their elements.
  [[nodiscard]] std::vector<NamedBytes> outputs() const {
    std::vector<NamedBytes> result;
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      for (const auto& [name, tensor] : tensors_.outputs(pass)) {
        if (tensor->given()) {
          result.push_back({name, tensor->buffer()->device_data(), tensor->buffer()->size_bytes()});
        }
      }
    }
    return result;
  }

  // Enqueues NaN into all outputs, forward and backward.
  void enqueue(const SharedWorkspace& workspace, cudaStream_t stream) const {
    for (const NamedBytes& output : outputs()) {
      require_cuda(cudaMemsetAsync(output.data, 0xff, output.size_bytes, stream));
    }
    ASSERT_EQ(fg_forward(&c_tensors_, &options_, workspace.data(), workspace.size_bytes(), stream),
              FG_OK)
        << fg_last_error();
    ASSERT_EQ(fg_backward(&c_tensors_, &options_, workspace.data(), workspace.size_bytes(), stream),
              FG_OK)
        << fg_last_error();
  }

 private:
  Case case_;
  std::string backend_;
  CallTensors tensors_;
  fg_options options_{};
  fg_tensors c_tensors_{};
};

// What the outputs of a call were, and whether they are so again.
class Snapshot {
 public:
  explicit Snapshot(const DeviceCall& call) : outputs_(call.outputs()), count_(sizeof(Count)) {
    for (const NamedBytes& output : outputs_) {
      copies_.emplace_back(output.size_bytes);
      require_cuda(cudaMemcpy(copies_.back().data(), output.data, output.size_bytes,
                              cudaMemcpyDeviceToDevice));
    }
    require_cuda(cudaMemset(count_.data(), 0, sizeof(Count)));
    // The streams of these tests do not wait for the default one.
    require_cuda(cudaStreamSynchronize(nullptr));
  }

  // Enqueues the comparison of outputs whose names `skip` does not hold.
  void compare(const std::vector<std::string>& skip, cudaStream_t stream) const {
    for (std::size_t n = 0; n < outputs_.size(); ++n) {
      if (std::find(skip.begin(), skip.end(), outputs_[n].name) == skip.end()) {
        count_differences(outputs_[n].data, copies_[n].data(), outputs_[n].size_bytes / 2,
                          reinterpret_cast<Count*>(count_.data()), stream);
      }
    }
  }

  // The words that differed so far, in all comparisons. Waits for the device.
  [[nodiscard]] unsigned long long num_differences() const {
    Count count = 0;
    require_cuda(cudaMemcpy(&count, count_.data(), sizeof(count), cudaMemcpyDeviceToHost));
    return count;
  }

 private:
  using Count = unsigned long long;
  std::vector<NamedBytes> outputs_;
  std::vector<DeviceMemory> copies_;
  DeviceMemory count_;
};

}  // namespace flashgrad::check
