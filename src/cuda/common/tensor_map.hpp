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

// Those of a problem's tensors; out and dout have the same.
Extents q_extents(const Problem& problem);
Extents k_extents(const Problem& problem);
Extents v_extents(const Problem& problem);
Extents out_extents(const Problem& problem);

// What a map's coordinates are. All have boxes of 64 columns x some rows, 128-byte swizzle
// (tile/swizzle.hpp), and zeros outside.
enum class MapKind {
  k4d,  // (column, row, head, batch)
  k5d,  // the same and 0: so that one instruction loads from this kind or the next
  // Of a tensor without a batch whose rows are cut into sequences: (column, kRaggedRows - end +
  // row, head, end, kRaggedRows), where `end` is the row at which the sequence of `row` ends; rows
  // from there on arrive as zeros. The second dimension ends at kRaggedRows; the fourth has the
  // stride of the rows, and the fifth one that takes kRaggedRows rows away again, modulo 2^64. (The
  // idea is that of Triton's ragged descriptors.)
  kRagged,
};
inline constexpr int kRaggedRows = 1 << 30;

// Whether the copy engine can address the tensor: 16-bit elements, contiguous columns, base and
// strides multiples of 16 bytes, strides from 0 to below 2^40 bytes, extents within 32 bits.
bool can_map(const Tensor& tensor, const Extents& extents);

// Encodes a map of the tensor, and adds `bit` to *mapped, if can_map(); a ragged tensor's rows have
// strides below 2^34 bytes.
Status make_map(const Tensor& tensor, const Extents& extents, int box_rows, MapKind kind,
                std::uint32_t bit, CUtensorMap* map, std::uint32_t* mapped);

}  // namespace flashgrad::cuda
