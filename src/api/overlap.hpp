// SPDX-License-Identifier: Apache-2.0
// Do two strided tensors share a byte? Exact, so that slices of one buffer are told from tensors
// that collide.
#pragma once

#include <array>
#include <cstdint>

namespace flashgrad {

// The bytes of a tensor: base + sum_k index_k * stride_bytes[k] + [0, element_bytes), 0 <= index_k
// < shape[k].
struct ByteLattice {
  std::uintptr_t base = 0;
  int ndim = 0;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> stride_bytes{};
  std::int64_t element_bytes = 1;

  [[nodiscard]] bool empty() const;
};

enum class Overlap : std::uint8_t { kNone, kShared, kUndecided };

// kUndecided only for strides so contrived that the search gives up.
Overlap overlap(const ByteLattice& a, const ByteLattice& b);

// Whether two different indices name the same element.
Overlap self_overlap(const ByteLattice& a);

}  // namespace flashgrad
