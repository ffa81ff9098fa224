// SPDX-License-Identifier: Apache-2.0
// Compares gradients with the textbook's, on the host.
#pragma once

#include <string>
#include <vector>

#include "backward_layout.hpp"

namespace flashgrad {

// A gradient as it came back: `tensor` says where in `bytes` its elements lie, `lines` what its
// rows meet.
struct Gradient {
  const char* name;
  const std::vector<unsigned char>& bytes;
  const Tensor& tensor;
  const Layout& layout;
  const std::vector<Line>& lines;
};

// Compares it with `want` (rows, heads, columns), looks for traces outside its elements, and adds
// its errors to *report. Returns "" or what is wrong.
std::string compare(const Gradient& gradient, const std::vector<double>& want, double bar,
                    std::string* report);

// Compares the gradients of sinks with sum over rows of exp(sink - lse) * delta, where lse and
// delta, which is dlse less the sum of out * dout, are (rows, heads).
std::string compare_dsinks(const std::vector<float>& dsinks, const std::vector<float>& sinks,
                           const std::vector<double>& lse, const std::vector<double>& delta);

}  // namespace flashgrad
