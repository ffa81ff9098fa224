// SPDX-License-Identifier: Apache-2.0
// A product of tiles multiplies what the band hides by 0, and 0 * NaN is NaN. So a NaN in a visible
// row of q or dout, or in a key, spreads to rows and keys of its tile that do not see it. Here one
// warp a row, or key, computes such gradients anew, of nothing but what is visible. prepare marks
// the query blocks that hold a NaN at all; one without costs a look at its mark.
//
// What sees a NaN stays NaN, and is told without computing it: by the row statistics, since lse is
// NaN where q or a visible key is, and delta where dout or a visible v is.
#include <math_constants.h>

#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_repair.hpp"
#include "cuda/sm90/bwd_store.cuh"

namespace flashgrad::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumnsOfLane = 256 / 32;  // lane l has columns l, l + 32, ...

__device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

__device__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffU, x, step);
  }
  return x;
}

// A lane's columns of a row; 0 beyond the last and where there is no tensor.
template <class T>
__device__ void load_row(const Tensor& t, std::int64_t offset, std::int64_t columns,
                         float (&x)[kColumnsOfLane]) {
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    const std::int64_t column = lane() + 32 * c;
    x[c] = t && column < columns
               ? static_cast<float>(static_cast<const T*>(t.data)[offset + column * t.dim_stride])
               : 0.0F;
  }
}

__device__ float dot(const float (&x)[kColumnsOfLane], const float (&y)[kColumnsOfLane]) {
  float sum = 0.0F;
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    sum = fmaf(x[c], y[c], sum);
  }
  return warp_sum(sum);
}

__device__ bool any_nan(const float (&x)[kColumnsOfLane]) {
  bool nan = false;
#pragma unroll
  for (const float value : x) {
    nan |= isnan(value);
  }
  return __any_sync(0xffffffffU, nan) != 0;
}

// Whether a gradient's row has a NaN.
template <class T>
__device__ bool gradient_has_nan(const Tensor& t, std::int64_t offset, std::int64_t columns) {
  float x[kColumnsOfLane];
  if (t.dtype == DType::kF32) {
    load_row<float>(t, offset, columns, x);
  } else {
    load_row<T>(t, offset, columns, x);
  }
  return any_nan(x);
}

template <class T>
__device__ void store_gradient(const Tensor& t, std::int64_t offset, std::int64_t columns,
                               const float (&x)[kColumnsOfLane], float factor) {
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    const std::int64_t column = lane() + 32 * c;
    if (column < columns) {
      if (t.dtype == DType::kF32) {
        static_cast<float*>(t.data)[offset + column] = x[c] * factor;
      } else {
        static_cast<T*>(t.data)[offset + column] = static_cast<T>(x[c] * factor);
      }
    }
  }
}

// One key head of one sequence.
struct Part {
  SequenceSpan sequence;
  std::int64_t first_block;  // of its rows
  std::int64_t head_kv;
};

__device__ std::int64_t statistic(const BwdRepairParams& p, const Part& part, std::int64_t head,
                                  std::int64_t row) {
  return (head * p.rows.num_blocks + part.first_block) * kBlockM + row;
}

// p of a pair, and ds.
template <bool kSoftcap>
__device__ float2 probability(const BwdRepairParams& p, float s, float dp, std::int64_t at) {
  float factor = 1.0F;
  const float x = fminf(
      exponentiate<kSoftcap>(s, p.rows.neg_lse_log2[at], p.scales.log2, p.scales.softcap, &factor),
      1.0F);
  return make_float2(x, x * (dp + p.rows.neg_delta[at]) * (kSoftcap ? factor : 1.0F));
}

template <bool kSoftcap, class T>
__device__ __forceinline__ void repair_row(const BwdRepairParams& p, const Part& part,
                                           std::int64_t head, std::int64_t i) {
  const SequenceSpan& s = part.sequence;
  const std::int64_t at = statistic(p, part, head, i);
  const std::int64_t offset = p.dq.offset(s.batch_index, s.q.begin + i, head);
  if (isnan(p.rows.neg_lse_log2[at]) || isnan(p.rows.neg_delta[at]) ||
      !gradient_has_nan<T>(p.dq, offset, p.head_dim)) {
    return;
  }
  float q[kColumnsOfLane];
  float dout[kColumnsOfLane];
  load_row<T>(p.q, p.q.offset(s.batch_index, s.q.begin + i, head), p.head_dim, q);
  load_row<T>(p.dout, p.dout.offset(s.batch_index, s.q.begin + i, head), p.head_dim_v, dout);
  float dq[kColumnsOfLane] = {};
  const Range keys = s.band.kv_range(i, i + 1);
#pragma unroll 1
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    float k[kColumnsOfLane];
    float v[kColumnsOfLane];
    load_row<T>(p.k, p.k.offset(s.batch_index, s.kv.begin + j, part.head_kv), p.head_dim, k);
    load_row<T>(p.v, p.v.offset(s.batch_index, s.kv.begin + j, part.head_kv), p.head_dim_v, v);
    const float ds = probability<kSoftcap>(p, dot(q, k), dot(dout, v), at).y;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      dq[c] = fmaf(ds, k[c], dq[c]);
    }
  }
  store_gradient<T>(p.dq, offset, p.head_dim, dq, p.scales.scale);
}

// What the rows that see a key say of NaN.
struct VisibleNan {
  bool lse = false;
  bool delta = false;
  bool dout = false;
};

template <class T>
__device__ __forceinline__ VisibleNan visible_nan(const BwdRepairParams& p, const Part& part,
                                                  const Range& rows) {
  VisibleNan found;
#pragma unroll 1
  for (std::int64_t h = 0; h < p.group; ++h) {
    const std::int64_t head = part.head_kv * p.group + h;
#pragma unroll 1
    for (std::int64_t first = rows.begin; first < rows.end && !(found.lse || found.dout);
         first += 32) {
      const std::int64_t i = first + lane();
      const std::int64_t at = statistic(p, part, head, i);
      const bool exists = i < rows.end;
      found.lse |= __any_sync(0xffffffffU, exists && isnan(p.rows.neg_lse_log2[at])) != 0;
      std::uint32_t deltas = __ballot_sync(0xffffffffU, exists && isnan(p.rows.neg_delta[at]));
      found.delta |= deltas != 0;
      while (deltas != 0 && !found.dout) {
        const std::int64_t row = first + __ffs(static_cast<int>(deltas)) - 1;
        deltas &= deltas - 1;
        float dout[kColumnsOfLane];
        load_row<T>(p.dout,
                    p.dout.offset(part.sequence.batch_index, part.sequence.q.begin + row, head),
                    p.head_dim_v, dout);
        found.dout = any_nan(dout);
      }
    }
  }
  return found;
}

template <bool kSoftcap, class T>
__device__ __forceinline__ void repair_key(const BwdRepairParams& p, const Part& part,
                                           std::int64_t j) {
  const SequenceSpan& s = part.sequence;
  const std::int64_t dk_offset = p.dk.offset(s.batch_index, s.kv.begin + j, part.head_kv);
  const std::int64_t dv_offset = p.dv.offset(s.batch_index, s.kv.begin + j, part.head_kv);
  bool wrong_dk = p.dk && gradient_has_nan<T>(p.dk, dk_offset, p.head_dim);
  bool wrong_dv = p.dv && gradient_has_nan<T>(p.dv, dv_offset, p.head_dim_v);
  if (!wrong_dk && !wrong_dv) {
    return;
  }
  const Range rows = s.band.q_range(j, j + 1);
  const VisibleNan nan = visible_nan<T>(p, part, rows);
  wrong_dk = wrong_dk && !nan.lse && !nan.delta;
  wrong_dv = wrong_dv && !nan.lse && !nan.dout;
  if (!wrong_dk && !wrong_dv) {
    return;
  }
  float k[kColumnsOfLane];
  float v[kColumnsOfLane];
  load_row<T>(p.k, p.k.offset(s.batch_index, s.kv.begin + j, part.head_kv), p.head_dim, k);
  load_row<T>(p.v, p.v.offset(s.batch_index, s.kv.begin + j, part.head_kv), p.head_dim_v, v);
  float dk[kColumnsOfLane] = {};
  float dv[kColumnsOfLane] = {};
#pragma unroll 1
  for (std::int64_t n = 0; n < p.group * rows.size(); ++n) {
    const std::int64_t head = part.head_kv * p.group + n / rows.size();
    const std::int64_t i = rows.begin + n % rows.size();
    const std::int64_t at = statistic(p, part, head, i);
    if (p.rows.neg_lse_log2[at] == -CUDART_INF_F) {
      continue;  // a row that must not be read
    }
    float q[kColumnsOfLane];
    float dout[kColumnsOfLane];
    load_row<T>(p.q, p.q.offset(s.batch_index, s.q.begin + i, head), p.head_dim, q);
    load_row<T>(p.dout, p.dout.offset(s.batch_index, s.q.begin + i, head), p.head_dim_v, dout);
    const float2 p_and_ds = probability<kSoftcap>(p, dot(q, k), dot(dout, v), at);
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      dk[c] = fmaf(p_and_ds.y, q[c], dk[c]);
      dv[c] = fmaf(p_and_ds.x, dout[c], dv[c]);
    }
  }
  if (wrong_dk) {
    store_gradient<T>(p.dk, dk_offset, p.head_dim, dk, p.scales.scale);
  }
  if (wrong_dv) {
    store_gradient<T>(p.dv, dv_offset, p.head_dim_v, dv, 1.0F);
  }
}

// The part that query block number `block` of the row statistics belongs to.
__device__ __forceinline__ Part part_of_block(const BwdRepairParams& p, std::int64_t head,
                                              std::int64_t block) {
  const Sequences& s = p.sequences;
  const std::int64_t span = span_of_block(s.cu_seqlens_q, s.batch, s.rows_q, block, kBlockM);
  return {.sequence = sequence_span(s, span),
          .first_block = first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM),
          .head_kv = head / p.group};
}

__device__ __forceinline__ bool has_nan(const BwdRepairParams& p, std::int64_t mark) {
  return (__ldcg(p.rows.unreadable + mark) & kHasNan) != 0;
}

// Whether `mark` is the first of its part's marks that says NaN. The whole CTA.
__device__ __forceinline__ bool is_first(const BwdRepairParams& p, const Part& part,
                                         std::int64_t mark) {
  const std::int64_t num_blocks = (part.sequence.band.seqlen_q + kBlockM - 1) / kBlockM;
  bool earlier = false;
  for (std::int64_t i = threadIdx.x; i < p.group * num_blocks; i += kThreads) {
    const std::int64_t head = part.head_kv * p.group + i / num_blocks;
    const std::int64_t at = head * p.rows.num_blocks + part.first_block + i % num_blocks;
    earlier |= at < mark && has_nan(p, at);
  }
  return __syncthreads_or(static_cast<int>(earlier)) == 0;
}

// A CTA looks at 32 marks at a time, each warp at all of them, and repairs the parts whose first
// mark it finds. Mostly it finds none.
template <bool kSoftcap, class T>
__global__ void __launch_bounds__(kThreads, 1)
    bwd_repair(const __grid_constant__ BwdRepairParams p) {
  bool waited = !p.looks_early;
  if (waited) {
    ptx::grid_dependency_wait();
  }
  const std::int64_t warp = threadIdx.x / 32;
  const std::int64_t num_marks = p.heads_kv * p.group * p.rows.num_blocks;
#pragma unroll 1
  for (std::int64_t first = blockIdx.x * 32; first < num_marks; first += gridDim.x * 32) {
    std::uint32_t marked =
        __ballot_sync(0xffffffffU, first + lane() < num_marks && has_nan(p, first + lane()));
#pragma unroll 1
    for (; marked != 0; marked &= marked - 1) {
      if (!waited) {
        ptx::grid_dependency_wait();
        waited = true;
      }
      const std::int64_t mark = first + __ffs(static_cast<int>(marked)) - 1;
      const Part part = part_of_block(p, mark / p.rows.num_blocks, mark % p.rows.num_blocks);
      if (!is_first(p, part, mark)) {
        continue;
      }
      const Band& band = part.sequence.band;
#pragma unroll 1
      for (std::int64_t j = warp; j < band.seqlen_kv; j += kWarps) {
        repair_key<kSoftcap, T>(p, part, j);
      }
#pragma unroll 1
      for (std::int64_t i = warp; p.dq && i < p.group * band.seqlen_q; i += kWarps) {
        repair_row<kSoftcap, T>(p, part, part.head_kv * p.group + i / band.seqlen_q,
                                i % band.seqlen_q);
      }
    }
  }
  if (!waited) {
    ptx::grid_dependency_wait();  // whoever follows in the stream may count on what came before
  }
}

}  // namespace

Status launch_bwd_repair(bool softcap, DType dtype, int num_multiprocessors,
                         const BwdRepairParams& params, void* stream) {
  const cuda::LaunchShape shape{
      .num_ctas = std::min<std::int64_t>(
          (params.heads_kv * params.group * params.rows.num_blocks + 31) / 32,
          4 * num_multiprocessors),
      .num_threads = kThreads,
      .overlaps_predecessor = true};
  const auto launch = [&](auto* kernel) {
    return cuda::launch("sm90 backward repair", kernel, shape, stream, params);
  };
  if (dtype == DType::kBF16) {
    return softcap ? launch(bwd_repair<true, __nv_bfloat16>)
                   : launch(bwd_repair<false, __nv_bfloat16>);
  }
  return softcap ? launch(bwd_repair<true, __half>) : launch(bwd_repair<false, __half>);
}

}  // namespace flashgrad::sm90
