// SPDX-License-Identifier: Apache-2.0
// A case of sm90_backward as a call: its tensors on the GPU, the textbook's answer, and what came
// out.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "backward_layout.hpp"
#include "device_array.hpp"

namespace flashgrad {

// Bytes of dq, dk and dv, with what lies between their elements.
using Gradients = std::array<std::vector<unsigned char>, 3>;

class BackwardCall {
 public:
  // Fills the inputs and computes the textbook's answer. `c` has been completed by make_lines.
  BackwardCall(const Case& c, const HostLines& lines);

  // Calls the backward with `room` percent of what the workspace is between minimum and preferred,
  // if it is deterministic again and again. Returns "" or what is wrong: a refusal, an error of the
  // device (then nothing else can be called), or bits that differ.
  std::string run(int room);

  // Compares what came out with the textbook. Returns "" or what is wrong; *report has the errors.
  std::string compare_with_textbook(std::string* report) const;

  [[nodiscard]] const Gradients& gradients() const { return gradients_; }

 private:
  void make_args();
  void fill_inputs();
  void compute_textbook();
  std::string repeat(DeviceArray<unsigned char>* workspace);
  [[nodiscard]] Gradients download() const;

  const Case& case_;
  const HostLines& lines_;
  const Problem& p_;
  Layout q_layout_, out_layout_, k_layout_, v_layout_;
  std::size_t num_statistics_;  // of lse and what is like it
  DeviceArray<Line> q_lines_, kv_lines_;
  DeviceArray<std::uint16_t> q_, k_, v_, out_, dout_;
  DeviceArray<float> lse_, dlse_, sinks_, dsinks_;
  DeviceArray<unsigned char> dq_, dk_, dv_;
  DeviceArray<std::int32_t> cu_q_, cu_kv_, used_q_, used_kv_;
  DeviceArray<std::int64_t> offset_;
  // The textbook's.
  DeviceArray<double> out64_, lse64_, delta64_, dq64_, dk64_, dv64_;
  std::vector<float> host_sinks_;
  Args args_{};
  Gradients gradients_;
};

}  // namespace flashgrad
