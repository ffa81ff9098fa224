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
// 128-byte swizzle (tile/swizzle.hpp), zeros outside; with `rank` 5 a last coordinate is 0.
// Precondition: can_map.
Status encode_map(const Tensor& tensor, const Extents& extents, int box_rows, CUtensorMap* map,
                  int rank = 4);

// A 5-d map of a tensor without a batch whose rows are cut into sequences, with coordinates
// (column, kRaggedRows - end + row, head, end, kRaggedRows), where `end` is the row at which the
// sequence of `row` ends; rows from there on arrive as zeros. The second dimension ends at
// kRaggedRows; the fourth has the stride of the rows, and the fifth one that takes kRaggedRows rows
// away again, modulo 2^64. (The idea is that of Triton's ragged descriptors.) Precondition:
// can_map_ragged.
inline constexpr int kRaggedRows = 1 << 30;
bool can_map_ragged(const Tensor& tensor, const Extents& extents);
Status encode_ragged_map(const Tensor& tensor, const Extents& extents, int box_rows,
                         CUtensorMap* map);

}  // namespace flashgrad::cuda
