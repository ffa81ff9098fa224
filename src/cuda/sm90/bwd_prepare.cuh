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

__device__ __forceinline__ bool is_wide(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.dim_stride == 1 &&
         t.row_stride % 8 == 0 && t.head_stride % 8 == 0 && t.batch_stride % 8 == 0;
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

template <class T>
__global__ __launch_bounds__(kPrepareThreads,
                             3) void bwd_prepare(const __grid_constant__ BwdPrepareParams p) {
  ptx::grid_dependency_launch();
  const auto heads = static_cast<unsigned>(p.heads_q);
  const std::int64_t block = blockIdx.x / heads;
  const std::int64_t head = blockIdx.x % heads;
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
  if (p.order.ticket != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *p.order.ticket = 0;
  }
  if (p.dq_accumulator != nullptr) {
    // Slot u is unit u's at first.
    const auto group = static_cast<unsigned>(p.group);
    const auto head_kv = static_cast<unsigned>(head) / group;
    const std::int64_t unit = s.packed() ? head_kv : span * (heads / group) + head_kv;
    const std::int64_t in_head = s.packed() ? block : block - first;
    if (unit < p.dq_ring.slots) {
      float4* accumulator = reinterpret_cast<float4*>(
          p.dq_accumulator +
          ((unit * group + static_cast<unsigned>(head) % group) * p.dq_ring.head_blocks + in_head) *
              p.block_floats);
      for (int i = static_cast<int>(threadIdx.x); i < p.block_floats / 4; i += kPrepareThreads) {
        accumulator[i] = make_float4(0, 0, 0, 0);
      }
    }
    if (p.dq_ring.counters != nullptr && in_head == 0 &&
        static_cast<unsigned>(head) == head_kv * group && threadIdx.x < 2) {
      p.dq_ring.counters[2 * unit + threadIdx.x] = 0;
    }
  }

  const bool wide = p.dout && is_wide(p.out) && is_wide(p.dout) && p.head_dim_v % 8 == 0;
  const int lane = static_cast<int>(threadIdx.x) % 16;
  const float sink = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
  float dsink = 0;
  int marks = 0;
  // The loads of four rows are issued together, also of rows of the tensors that turn out not to
  // count: waiting for lse first would double the latency.
  constexpr int kRows = kBlockM * 16 / kPrepareThreads;
  float lse[kRows];
  float dlse[kRows];
  bool readable[kRows];
  float delta[kRows];
  const std::int64_t b = sequence.batch_index;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t row =
        row_begin + static_cast<int>(threadIdx.x) / 16 + i * (kPrepareThreads / 16);
    const std::int64_t tensor_row = sequence.q.begin + row;
    const bool exists = row < sequence.band.seqlen_q;
    lse[i] = exists ? static_cast<const float*>(p.lse.data)[p.lse.offset(b, tensor_row, head)]
                    : INFINITY;
    dlse[i] = exists && p.dlse
                  ? static_cast<const float*>(p.dlse.data)[p.dlse.offset(b, tensor_row, head)]
                  : 0.0F;
    readable[i] = exists && !sequence.band.kv_range(row, row + 1).empty();
    delta[i] = 0;
  }
  const auto element = [&](const Tensor& t, int i) {
    const std::int64_t row = sequence.q.begin + row_begin + static_cast<int>(threadIdx.x) / 16 +
                             i * (kPrepareThreads / 16);
    return static_cast<const T*>(t.data) + t.offset(b, row, head);
  };
  if (wide && p.head_dim_v <= 8 * 16) {
    uint4 out[kRows];
    uint4 dout[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      out[i] = dout[i] = make_uint4(0, 0, 0, 0);
      if (readable[i] && 8 * lane < p.head_dim_v) {
        out[i] = *reinterpret_cast<const uint4*>(element(p.out, i) + 8 * lane);
        dout[i] = *reinterpret_cast<const uint4*>(element(p.dout, i) + 8 * lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      delta[i] = dot_8<T>(out[i], dout[i]);
    }
  } else if (p.dout) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (readable[i]) {
        delta[i] = partial_dot<T>(element(p.out, i), element(p.dout, i), p.dout.dim_stride,
                                  p.head_dim_v, lane, wide);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = static_cast<int>(threadIdx.x) / 16 + i * (kPrepareThreads / 16);
    readable[i] = readable[i] && !isinf(lse[i]);
    delta[i] = readable[i] ? delta[i] : 0.0F;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
      delta[i] += __shfl_xor_sync(0xffffffffU, delta[i], step);
    }
    if (lane == 0) {
      constexpr float kLog2E = 1.4426950408889634F;
      p.rows.neg_lse_log2[slot * kBlockM + r] = readable[i] ? -lse[i] * kLog2E : -INFINITY;
      p.rows.neg_delta[slot * kBlockM + r] = readable[i] ? dlse[i] - delta[i] : 0.0F;
      if (!isinf(lse[i]) && sink != -INFINITY) {
        dsink += expf(sink - lse[i]) * (dlse[i] - delta[i]);
      }
      // Rows past the end of the tensor come as zeros from the copy engine.
      const bool unreadable = !readable[i] && sequence.q.begin + row_begin + r < s.rows_q;
      const bool is_nan = readable[i] && isnan(lse[i] + dlse[i] - delta[i]);
      marks |= unreadable ? 1 : is_nan ? kHasNan : 0;
    }
  }
  const bool any_unreadable = __syncthreads_or(marks & 1) != 0;
  const bool any_nan = __syncthreads_or(marks & kHasNan) != 0;
  if (threadIdx.x == 0) {
    p.rows.unreadable[slot] = (any_unreadable ? 1 : 0) + (any_nan ? kHasNan : 0);
  }
  if (p.rows.dsink_partial != nullptr) {
    __shared__ float partial[kPrepareThreads / 16];
    if (lane == 0) {
      partial[threadIdx.x / 16] = dsink;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0;
      for (const float x : partial) {
        sum += x;
      }
      p.rows.dsink_partial[slot] = sum;
    }
  }
}

}  // namespace flashgrad::sm90
