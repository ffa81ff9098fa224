// SPDX-License-Identifier: Apache-2.0
#include "core/refusals.hpp"

#include <string>

namespace flashgrad {
namespace {

std::string place(const Problem& p) {
  return p.device_type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(p.device_id);
}

}  // namespace

Status want_device(const Problem& problem, DeviceType device) {
  if (problem.device_type == device) {
    return {};
  }
  return unsupported("q: is on " + place(problem) + ", want " +
                     (device == DeviceType::kCpu ? "cpu" : "a CUDA device"));
}

Status want_dtype(const Problem& problem, std::initializer_list<DType> served) {
  std::string names;
  for (const DType* dtype = served.begin(); dtype != served.end(); ++dtype) {
    if (*dtype == problem.dtype) {
      return {};
    }
    names += dtype == served.begin() ? "" : dtype + 1 == served.end() ? " or " : ", ";
    names += name(*dtype);
  }
  return unsupported(std::string("q: dtype ") + name(problem.dtype) + " on " + place(problem) +
                     ", want " + names);
}

}  // namespace flashgrad
