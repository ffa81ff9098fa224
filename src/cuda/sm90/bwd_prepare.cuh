// SPDX-License-Identifier: Apache-2.0
// Backward, pass 1 of 3. Per row i of every query head:
//   (1) delta_i = <dout_i, out_i>
//   (2) neg_lse_log2_i = -lse_i * log2(e), neg_delta_i = dlse_i - delta_i
//   (3) dsink_h += exp(sink_h - lse_i) * (dlse_i - delta_i), here summed over a block of 64 rows
// and the block's dq accumulators are zeroed, or the counters of an ordered main kernel are set.
// Rows that see nothing, and rows with an infinite lse, get -inf and 0, whatever their out and
// dout; a block with such a row is marked, so that the main kernel keeps its NaN away from the
// others.
//
// One CTA per (query block, head): 16 lanes read a row, 16 bytes each where strides allow it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

inline constexpr int kPrepareThreads = 256;

template <class T>
__device__ __forceinline__ float dot_8(uint4 a, uint4 b) {
  const T* x = reinterpret_cast<const T*>(&a);
  const T* y = reinterpret_cast<const T*>(&b);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  }
  return sum;
}

// <out, dout> of one row, the part of lane `lane` of 16. `wide`: 16-byte loads are legal.
template <class T>
__device__ __forceinline__ float partial_dot(const T* out, const T* dout, std::int64_t dout_stride,
                                             std::int64_t columns, int lane, bool wide) {
  float sum = 0;
  if (wide) {
    for (std::int64_t c = 8 * lane; c < columns; c += 8 * 16) {
      sum += dot_8<T>(*reinterpret_cast<const uint4*>(out + c),
                      *reinterpret_cast<const uint4*>(dout + c));
    }
  } else {
    // In the same order, so that delta's bits do not depend on strides.
    for (std::int64_t first = 8 * lane; first < columns; first += 8 * 16) {
      float part = 0;
      for (std::int64_t c = first; c < first + 8 && c < columns; ++c) {
        part = fmaf(static_cast<float>(out[c]), static_cast<float>(dout[c * dout_stride]), part);
      }
      sum += part;
    }
  }
  return sum;
}

FG_HOST_DEVICE inline bool is_wide(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.dim_stride == 1 &&
         t.row_stride % 8 == 0 && t.head_stride % 8 == 0 && t.batch_stride % 8 == 0;
}

// Whether out and dout can be read 16 bytes at a time.
FG_HOST_DEVICE inline bool all_wide(const RowInputs& p) {
  return p.dout && is_wide(p.out) && is_wide(p.dout) && p.head_dim_v % 8 == 0;
}

// dq = 0 in the rows of a block that no key reaches.
__device__ __forceinline__ void clear_dq(const BwdPrepareParams& p, const SequenceSpan& sequence,
                                         std::int64_t row_begin, std::int64_t head) {
  const std::int64_t left = sequence.q.end - sequence.q.begin - row_begin;
  const std::int64_t total = (left < kBlockM ? left : kBlockM) * p.head_dim;
  for (std::int64_t i = threadIdx.x; i < total; i += kPrepareThreads) {
    const std::int64_t row = sequence.q.begin + row_begin + i / p.head_dim;
    const std::int64_t at = p.dq.offset(sequence.batch_index, row, head) + i % p.head_dim;
    if (p.dq.dtype == DType::kF32) {
      static_cast<float*>(p.dq.data)[at] = 0;
    } else {
      static_cast<std::uint16_t*>(p.dq.data)[at] = 0;
    }
  }
}

// The main kernel's tiles. Made here, since there each CTA would wait for a single thread.
__device__ __forceinline__ void list_tiles(const BwdPrepareParams& p, const BwdParams& main) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x;
  if (i >= p.num_tiles) {
    return;
  }
  switch (static_cast<BwdVariant>(p.variant)) {
#define FG_BWD_VARIANT(name, ...)                                                        \
  case BwdVariant::name: {                                                               \
    constexpr BwdConfig kConfig = kBwdConfigs[static_cast<int>(BwdVariant::name)]; \
    main.tiles[i] = key_tile<kConfig.block_n(), kConfig.cluster, kConfig.ordered>(main, i); \
    break;                                                                               \
  }
#include "cuda/sm90/variants.def"
#undef FG_BWD_VARIANT
  }
}

// A query block whose rows are prepared.
struct PrepareBlock {
  SequenceSpan sequence;
  std::int64_t row_begin;  // in the sequence
  std::int64_t head;
  std::int64_t slot;  // in the row statistics
};

// (1) to (3) for kBlocks query blocks at once, of which `count` exist, by kPrepareThreads threads
// that meet at named barrier `barrier`.
//
// kAhead: in the main kernel, for inputs that are all_wide(), without sinks' gradients.
//
// The loads of all rows are issued together, also of rows of the tensors that turn out not to
// count: waiting for lse first would double the latency.
template <class T, int kBlocks, bool kAhead>
__device__ __forceinline__ void prepare_rows(const RowInputs& p, const RowStatistics& rows,
                                             std::int64_t rows_q,
                                             const PrepareBlock (&blocks)[kBlocks], int count,
                                             int thread, int barrier) {
  const bool wide = kAhead || all_wide(p);
  const int lane = thread % 16;
  constexpr int kRows = kBlockM * 16 / kPrepareThreads;
  float lse[kBlocks][kRows];
  float dlse[kBlocks][kRows];
  bool readable[kBlocks][kRows];
  float delta[kBlocks][kRows];
  const auto row_of = [&](int i) { return thread / 16 + i * (kPrepareThreads / 16); };
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const PrepareBlock& block = blocks[k];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t row = block.row_begin + row_of(i);
      const std::int64_t tensor_row = block.sequence.q.begin + row;
      const std::int64_t b = block.sequence.batch_index;
      const bool exists = k < count && row < block.sequence.band.seqlen_q;
      lse[k][i] =
          exists ? static_cast<const float*>(p.lse.data)[p.lse.offset(b, tensor_row, block.head)]
                 : INFINITY;
      dlse[k][i] = exists && p.dlse ? static_cast<const float*>(
                                          p.dlse.data)[p.dlse.offset(b, tensor_row, block.head)]
                                    : 0.0F;
      readable[k][i] = exists && !block.sequence.band.kv_range(row, row + 1).empty();
      delta[k][i] = 0;
    }
  }
  const auto element = [&](const Tensor& t, const PrepareBlock& block, int i) {
    return static_cast<const T*>(t.data) +
           t.offset(block.sequence.batch_index, block.sequence.q.begin + block.row_begin + row_of(i),
                    block.head);
  };
  if (kAhead || (wide && p.head_dim_v <= 8 * 16)) {
    uint4 out[kBlocks][kRows];
    uint4 dout[kBlocks][kRows];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        out[k][i] = dout[k][i] = make_uint4(0, 0, 0, 0);
        if (readable[k][i] && 8 * lane < p.head_dim_v) {
          out[k][i] = *reinterpret_cast<const uint4*>(element(p.out, blocks[k], i) + 8 * lane);
          dout[k][i] = *reinterpret_cast<const uint4*>(element(p.dout, blocks[k], i) + 8 * lane);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        delta[k][i] = dot_8<T>(out[k][i], dout[k][i]);
      }
    }
  } else if (p.dout) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (readable[k][i]) {
          delta[k][i] = partial_dot<T>(element(p.out, blocks[k], i), element(p.dout, blocks[k], i),
                                       p.dout.dim_stride, p.head_dim_v, lane, wide);
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const PrepareBlock& block = blocks[k];
    int marks = 0;
    float dsink = 0;
    const float sink = !kAhead && p.sinks != nullptr ? p.sinks[block.head] : -INFINITY;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool read = readable[k][i] && !isinf(lse[k][i]);
      float sum = read ? delta[k][i] : 0.0F;
#pragma unroll
      for (int step = 8; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffU, sum, step);
      }
      if (lane == 0 && k < count) {
        constexpr float kLog2E = 1.4426950408889634F;
        const std::int64_t at = block.slot * kBlockM + row_of(i);
        rows.neg_lse_log2[at] = read ? -lse[k][i] * kLog2E : -INFINITY;
        rows.neg_delta[at] = read ? dlse[k][i] - sum : 0.0F;
        if (!kAhead && !isinf(lse[k][i]) && sink != -INFINITY) {
          dsink += expf(sink - lse[k][i]) * (dlse[k][i] - sum);
        }
        // Rows past the end of the tensor come as zeros from the copy engine.
        const bool unreadable =
            !read && block.sequence.q.begin + block.row_begin + row_of(i) < rows_q;
        const bool is_nan = read && isnan(lse[k][i] + dlse[k][i] - sum);
        marks |= unreadable ? 1 : is_nan ? kHasNan : 0;
      }
    }
    const bool any_unreadable = ptx::named_barrier_or<kPrepareThreads>(barrier, (marks & 1) != 0);
    const bool any_nan = ptx::named_barrier_or<kPrepareThreads>(barrier, (marks & kHasNan) != 0);
    if (thread == 0 && k < count) {
      rows.unreadable[block.slot] = (any_unreadable ? 1 : 0) + (any_nan ? kHasNan : 0);
    }
    if constexpr (!kAhead) {
      if (rows.dsink_partial != nullptr) {
        __shared__ float partial[kPrepareThreads / 16];
        if (lane == 0) {
          partial[thread / 16] = dsink;
        }
        ptx::named_barrier_sync<kPrepareThreads>(barrier);
        if (thread == 0) {
          float sum = 0;
          for (const float x : partial) {
            sum += x;
          }
          rows.dsink_partial[block.slot] = sum;
        }
      }
    }
  }
}

template <class T>
__global__ __launch_bounds__(kPrepareThreads,
                             3) void bwd_prepare(const __grid_constant__ BwdPrepareParams p,
                                                 const __grid_constant__ BwdParams main) {
  ptx::grid_dependency_launch();
  if (blockIdx.x < p.tile_ctas) {
    list_tiles(p, main);
    return;
  }
  const unsigned cta = blockIdx.x - static_cast<unsigned>(p.tile_ctas);
  const auto heads = static_cast<unsigned>(p.heads_q);
  const std::int64_t block = cta / heads;
  const std::int64_t head = cta % heads;
  const Sequences& s = p.sequences;
  const std::int64_t span = span_of_block(s.cu_seqlens_q, s.batch, s.rows_q, block, kBlockM);
  const std::int64_t first = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM);
  const SequenceSpan sequence = sequence_span(s, span);
  const std::int64_t row_begin = (block - first) * kBlockM;
  const std::int64_t slot = head * p.rows.num_blocks + block;

  if (p.order.counters != nullptr) {
    const Range keys = sequence.band.kv_range(row_begin, row_begin + kBlockM);
    if (threadIdx.x < 2) {
      p.order.counters[2 * slot + threadIdx.x] =
          kNothingYet | static_cast<std::uint32_t>(keys.begin / p.keys_per_turn);
    }
    if (keys.empty()) {
      clear_dq(p, sequence, row_begin, head);
    }
  }
  if (p.order.ticket != nullptr && cta == 0 && threadIdx.x == 0) {
    *p.order.ticket = 0;
  }
  const auto group = static_cast<unsigned>(p.group);
  const auto head_kv = static_cast<unsigned>(head) / group;
  const std::int64_t unit = s.packed() ? head_kv : span * (heads / group) + head_kv;
  if (p.dq_accumulator != nullptr) {
    // Slot u is unit u's at first.
    if (unit < p.dq_ring.slots) {
      const std::int64_t in_head = s.packed() ? block : block - first;
      float4* accumulator = reinterpret_cast<float4*>(
          p.dq_accumulator +
          ((unit * group + static_cast<unsigned>(head) % group) * p.dq_ring.head_blocks + in_head) *
              p.block_floats);
      for (int i = static_cast<int>(threadIdx.x); i < p.block_floats / 4; i += kPrepareThreads) {
        accumulator[i] = make_float4(0, 0, 0, 0);
      }
    }
  }
  if (p.dq_ring.counters != nullptr) {
    const std::int64_t count = p.num_units * DqRing::kNumCounts;
    for (std::int64_t i = std::int64_t{cta} * kPrepareThreads + threadIdx.x; i < count;
         i += (gridDim.x - p.tile_ctas) * kPrepareThreads) {
      p.dq_ring.counters[i] = 0;
    }
  }
  if (p.dq_ring.ahead > 0 && unit >= p.dq_ring.ahead) {
    return;
  }

  const PrepareBlock blocks[1] = {{sequence, row_begin, head, slot}};
  prepare_rows<T, 1, false>(p.inputs, p.rows, s.rows_q, blocks, 1, static_cast<int>(threadIdx.x), 0);
}

}  // namespace flashgrad::sm90
