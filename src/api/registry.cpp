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

std::span<const Backend* const> backends() {
  static constexpr std::array kBackends = {
#if defined(FLASHGRAD_CUDA)
    &sm90_backend,
#endif
    &cpu_backend,
    &reference_backend,
  };
  return kBackends;
}

}  // namespace flashgrad
