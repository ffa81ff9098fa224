// SPDX-License-Identifier: Apache-2.0
// Where a query block lies among the sequences, for kernels with a CTA per block.
#pragma once

#include "cuda/sm90/config.hpp"
#include "cuda/sm90/sequences.cuh"

namespace flashgrad::sm90 {

// Query block number `block`, whose rows are those of `sequence` from row_begin on.
struct QueryBlock {
  std::int64_t span;
  std::int64_t in_span;  // number in its span
  SequenceSpan sequence;

  [[nodiscard]] __device__ std::int64_t row_begin() const { return in_span * kBlockM; }
};

// By a converged warp. The search among packed sequences reads 32 offsets at a time, since each
// load that depends on the one before costs a trip to the L2.
__device__ __forceinline__ QueryBlock find_query_block(const Sequences& s, std::int64_t block) {
  std::int64_t span = 0;
  if (s.packed()) {
    // The span is one of `count` from `span` on, and `span` begins at or before the block.
    std::int64_t count = s.batch + 2;
    while (count > 1) {
      const std::int64_t step = (count + 31) / 32;
      const std::int64_t offset = step * (threadIdx.x % 32);
      const unsigned before = __ballot_sync(
          0xffffffffU, offset < count && first_block(s.cu_seqlens_q, s.batch, s.rows_q,
                                                     span + offset, kBlockM) <= block);
      const std::int64_t last = step * (31 - __clz(static_cast<int>(before)));
      span += last;
      count = count - last < step ? count - last : step;
    }
  } else {
    span = span_of_block(nullptr, s.batch, s.rows_q, block, kBlockM);
  }
  const std::int64_t first = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM);
  return {span, block - first, sequence_span(s, span)};
}

}  // namespace flashgrad::sm90
