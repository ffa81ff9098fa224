// SPDX-License-Identifier: Apache-2.0
// The ordered list of backends, fastest first, reference last: one line each.
#include <array>

#include "core/backend.hpp"
#include "cpu/cpu_backend.hpp"
#include "reference/reference_backend.hpp"
#if defined(FLASHGRAD_CUDA)
#include "cuda/sm90/sm90_backend.hpp"
#endif

namespace flashgrad {

#if !defined(FLASHGRAD_CUDA)
namespace {

// The GPU backend keeps its place in a build without it: whoever names it or brings tensors of a
// GPU is told what is missing, instead of that there is no such thing.
const char* left_out() {
  return "left out of this build; to have it, build with nvcc and -DFLASHGRAD_CUDA=ON";
}

// The null members would be called with supported problems only, and there are none.
const Backend sm90_backend = {"sm90",
                              left_out,
                              [] { return false; },
                              [](const Problem&, Pass) { return unsupported(left_out()); },
                              nullptr,
                              nullptr,
                              nullptr};

}  // namespace
#endif

std::span<const Backend* const> backends() {
  static constexpr std::array kBackends = {
      &sm90_backend,
      &cpu_backend,
      &reference_backend,
  };
  return kBackends;
}

}  // namespace flashgrad
