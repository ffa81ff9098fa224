// SPDX-License-Identifier: Apache-2.0
// What runs before the forward's main kernel: the order of a packed batch's tiles, and the fill of
// rows that belong to no sequence.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_split.hpp"
#include "cuda/sm90/packed_order.cuh"

namespace flashgrad::sm90 {

inline constexpr int kFwdPrepareThreads = 1024;

// Whether row `row` of batch entry `batch_index` (0 if packed) belongs to a sequence and is one of
// its rows that count.
__device__ __forceinline__ bool row_is_used(const Sequences& s, std::int64_t batch_index,
                                            std::int64_t row) {
  std::int64_t b = batch_index;
  std::int64_t begin = 0;
  if (s.packed()) {
    std::int64_t low = 0;
    std::int64_t high = s.batch + 1;
    while (low < high) {  // the first offset above `row`
      const std::int64_t middle = (low + high) / 2;
      if (s.cu_seqlens_q[middle] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    b = low - 1;
    if (b < 0 || b >= s.batch) {
      return false;
    }
    begin = s.cu_seqlens_q[b];
  }
  return s.seqused_q == nullptr || row - begin < s.seqused_q[b];
}

struct FwdPrepareParams {
  Sequences sequences;
  Tensor out;
  Tensor lse;  // null: not wanted
  std::int64_t heads_q;
  std::int64_t head_dim_v;
  std::int64_t num_rows;  // of all batch entries
  PackedPass pass;        // of the main kernel
  std::uint32_t packed_capacity;
  PackedTile* packed_tiles;         // (packed_capacity), to be made; null: fixed length
  std::uint32_t* num_packed_tiles;  // likewise
  std::uint32_t* next_work;         // becomes 0
  std::int32_t block_n;             // of the main kernel
  std::uint32_t* any_cut;  // becomes whether the keys of a sequence are cut; null: not asked
};

// CTA 0 makes the order of the tiles; the others, a warp a row, write out = 0 and lse = -inf where
// a row is not used. CTA 1 also looks for sequences that are cut.
static __global__ void __launch_bounds__(kFwdPrepareThreads, 1)
    fwd_prepare(const __grid_constant__ FwdPrepareParams p) {
  ptx::grid_dependency_launch();
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      *p.next_work = 0;
    }
    if (p.packed_tiles != nullptr) {
      make_packed_order<kFwdPrepareThreads>(p.pass, p.sequences, p.packed_capacity, p.packed_tiles,
                                            p.num_packed_tiles);
    }
    return;
  }
  if (blockIdx.x == 1 && p.any_cut != nullptr) {
    const std::int64_t num_spans = p.sequences.batch + (p.sequences.packed() ? 2 : 0);
    bool cut = false;
    for (std::int64_t span = threadIdx.x; span < num_spans; span += kFwdPrepareThreads) {
      cut = cut || key_chunks(sequence_span(p.sequences, span).band, p.block_n).count > 1;
    }
    cut = __syncthreads_or(cut ? 1 : 0) != 0;
    if (threadIdx.x == 0) {
      *p.any_cut = cut ? 1 : 0;
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr std::int64_t kWarps = kFwdPrepareThreads / 32;
  const std::int64_t stride = (gridDim.x - 1) * kWarps;
  for (std::int64_t i = (blockIdx.x - 1) * kWarps + threadIdx.x / 32; i < p.num_rows; i += stride) {
    const std::int64_t batch_index = i / p.sequences.rows_q;
    const std::int64_t row = i % p.sequences.rows_q;
    if (row_is_used(p.sequences, batch_index, row)) {
      continue;
    }
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      auto* const out = static_cast<std::uint16_t*>(p.out.data) + p.out.offset(batch_index, row, h);
      for (std::int64_t c = lane; c < p.head_dim_v; c += 32) {
        out[c] = 0;
      }
      if (p.lse && lane == 0) {
        static_cast<float*>(p.lse.data)[p.lse.offset(batch_index, row, h)] = -CUDART_INF_F;
      }
    }
  }
}

}  // namespace flashgrad::sm90
