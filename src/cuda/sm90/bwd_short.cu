// SPDX-License-Identifier: Apache-2.0
// Implements bwd_short.hpp: the kernel, whose work is in bwd_short.cuh, and its launch.
#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd_arguments.hpp"
#include "cuda/sm90/bwd_short.cuh"
#include "cuda/sm90/bwd_short.hpp"

namespace flashgrad::sm90 {

// Zeros for the gradients of a span's rows from `row` and `key` on, of the heads of one key head
// or, head_kv = -1, of all.
__device__ __forceinline__ void clear_span(const BwdShortParams& p, const SequenceSpan& s,
                                           std::int64_t row, std::int64_t key, std::int64_t head_kv,
                                           std::int64_t warp, std::int64_t num_warps) {
  const std::int64_t first = head_kv < 0 ? 0 : head_kv;
  const std::int64_t last = head_kv < 0 ? p.heads_kv : head_kv + 1;
  clear_short_rows(p.tensors[kDq], s.batch_index, s.q.begin + row, s.q.end, first * p.group,
                   last * p.group, p.head_dim, warp, num_warps);
  clear_short_rows(p.tensors[kDk], s.batch_index, s.kv.begin + key, s.kv.end, first, last,
                   p.head_dim, warp, num_warps);
  clear_short_rows(p.tensors[kDv], s.batch_index, s.kv.begin + key, s.kv.end, first, last,
                   p.head_dim_v, warp, num_warps);
}

// One CTA per key head of a sequence, and of a packed batch kOutsideCtas more.
template <class T, int kHeadDim, int kKeys>
__global__ void __launch_bounds__(BwdShortShape<kHeadDim, kKeys>::kThreads,
                                  BwdShortShape<kHeadDim, kKeys>::kResident)
    bwd_short(const __grid_constant__ BwdShortParams p) {
  using Shape = BwdShortShape<kHeadDim, kKeys>;
  extern __shared__ __align__(16) std::uint8_t shared[];
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const auto heads_kv = static_cast<std::uint32_t>(p.heads_kv);
  const std::int64_t number = blockIdx.x / heads_kv;
  const auto head_kv = static_cast<int>(blockIdx.x % heads_kv);
  if (number >= p.sequences.batch) {
    const std::int64_t cta = blockIdx.x - p.sequences.batch * p.heads_kv;
#pragma unroll 1
    for (std::int64_t span = 0; span <= p.sequences.batch + 1; span += p.sequences.batch + 1) {
      clear_span(p, sequence_span(p.sequences, span), 0, 0, -1, cta * Shape::kWarps + warp,
                 kOutsideCtas * Shape::kWarps);
    }
    return;
  }
  auto& sequence = *reinterpret_cast<ShortSequence*>(shared + Shape::kSequenceAt);
  const std::int64_t span = number + (p.sequences.packed() ? 1 : 0);
  if (warp < 2) {
    find_sequence<kKeys>(p, sequence_span(p.sequences, span), head_kv, &sequence);
  }
  __syncthreads();
  if (!sequence.served) {
    return;
  }
  BwdShort<T, Shape> cta{
      {.p = p,
       .sequence = sequence,
       .first_head = head_kv * p.group,
       .shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)),
       .rows = reinterpret_cast<ShortRowStatistics<Shape::kQueries>*>(shared + Shape::kRowsAt)},
      {},
      {}};
  cta.run(number);
  const int done = (sequence.rows + Shape::kQueries - 1) / Shape::kQueries * Shape::kQueries;
  if (done < sequence.all_rows || kKeys < sequence.all_keys) {
    clear_span(p, sequence_span(p.sequences, span), done, kKeys, head_kv, warp, Shape::kWarps);
  }
}

namespace {

// Whether the columns of a tensor can be read, or of a gradient written, 16 bytes at a time.
bool is_wide(const Tensor& t, std::int64_t columns, bool written) {
  return t && t.dtype != DType::kF32 && has_aligned_rows(t) && t.dim_stride == 1 &&
         (!written || columns % 8 == 0);
}

std::uint32_t wide_tensors(const Problem& p, const BwdShortParams& params) {
  std::uint32_t wide = 0;
  for (const int t : {kK, kV, kQ, kDout, kOut, kDk, kDv, kDq}) {
    const bool of_v = t == kV || t == kOut || t == kDout || t == kDv;
    wide |= is_wide(params.tensors[t], of_v ? p.head_dim_v : p.head_dim, t >= kDk) ? 1U << t : 0;
  }
  return wide;
}

template <class T, int kHeadDim, int kKeys>
Status launch_kernel(const BwdShortParams& params, void* stream) {
  using Shape = BwdShortShape<kHeadDim, kKeys>;
  const std::int64_t outside = params.sequences.packed() && params.heads_kv > 0 ? kOutsideCtas : 0;
  return cuda::launch("sm90 backward, short", bwd_short<T, kHeadDim, kKeys>,
                      {.num_ctas = params.sequences.batch * params.heads_kv + outside,
                       .num_threads = Shape::kThreads,
                       .shared_bytes = Shape::kSharedBytes},
                      stream, params);
}

template <class T>
Status launch_size(const ShortSize& size, const BwdShortParams& params, void* stream) {
#define FG_BWD_SHORT_VARIANT(...)                         \
  if (size == ShortSize{__VA_ARGS__}) {                   \
    return launch_kernel<T, __VA_ARGS__>(params, stream); \
  }
#include "cuda/sm90/bwd_short_variants.def"
#undef FG_BWD_SHORT_VARIANT
  return {FG_INTERNAL_ERROR, "sm90 backward, short: no such variant"};
}

}  // namespace

Status launch_bwd_short(const Problem& p, const Args& args, float* dsink_partial) {
  BwdShortParams params{.sequences = make_sequences(p, args),
                        .heads_kv = p.heads_kv,
                        .group = static_cast<int>(p.group()),
                        .head_dim = static_cast<int>(p.head_dim),
                        .head_dim_v = static_cast<int>(p.head_dim_v),
                        .tensors = {},
                        .wide = 0,
                        .sinks = static_cast<const float*>(args.sinks),
                        .dsink_partial = dsink_partial,
                        .scales = make_scales(p),
                        .softcap = p.softcap > 0,
                        .most_rows = kShortRows,
                        .most_keys = short_keys(p)};
  params.tensors[kK] = args.k;
  params.tensors[kV] = args.v;
  params.tensors[kQ] = args.q;
  params.tensors[kDout] = args.dout;
  // Only delta, out * dout, needs it: without dout nobody looks at what it holds.
  params.tensors[kOut] = p.has_dout ? args.out : Tensor{};
  params.tensors[kDk] = p.wants_dk ? args.dk : Tensor{};
  params.tensors[kDv] = p.wants_dv ? args.dv : Tensor{};
  params.tensors[kDq] = p.wants_dq ? args.dq : Tensor{};
  params.tensors[kLse] = args.lse;
  params.tensors[kDlse] = args.dlse;
  params.wide = wide_tensors(p, params);
  return p.dtype == DType::kBF16 ? launch_size<__nv_bfloat16>(short_size(p), params, args.stream)
                                 : launch_size<__half>(short_size(p), params, args.stream);
}

}  // namespace flashgrad::sm90
