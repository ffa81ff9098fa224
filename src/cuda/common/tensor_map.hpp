// SPDX-License-Identifier: Apache-2.0
// Tensor maps for the copy engine (TMA) over flashgrad's tensors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/problem.hpp"

namespace flashgrad::cuda {

// The extents of a Tensor, which itself only knows its strides.
struct Extents {
  std::int64_t batch = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t columns = 0;
};

// Whether the copy engine can address it: 16-bit elements, contiguous columns, base and strides
// multiples of 16 bytes, strides positive and below 2^40 bytes, extents within 32 bits.
bool can_map(const Tensor& tensor, const Extents& extents);

// A 4-d map with coordinates (column, row, head, batch) and boxes of 64 columns x `box_rows` rows,
// 128-byte swizzle (tile/swizzle.hpp), zeros outside. Precondition: can_map.
Status encode_map(const Tensor& tensor, const Extents& extents, int box_rows, CUtensorMap* map);

}  // namespace flashgrad::cuda
