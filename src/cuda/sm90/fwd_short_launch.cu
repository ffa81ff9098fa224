// SPDX-License-Identifier: Apache-2.0
// Implements fwd_short_launch.hpp.
#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/sm90/fwd_short.cuh"
#include "cuda/sm90/fwd_short_launch.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {
namespace {

// The number of the first variant that is wide enough, or -1.
int find_variant(const Problem& p) {
  for (int i = 0; i < static_cast<int>(std::size(kFwdShortConfigs)); ++i) {
    const FwdShortConfig& c = kFwdShortConfigs[i];
    if (c.widths().head_dim >= p.head_dim && c.widths().head_dim_v >= p.head_dim_v &&
        (c.block_n == c.widths().block_n || c.block_n >= p.max_seqlen_kv)) {
      return i;
    }
  }
  return -1;
}

std::int64_t num_ctas(const Problem& p) {
  const std::int64_t blocks =
      (p.max_seqlen_q + FwdShortConfig::kBlockM - 1) / FwdShortConfig::kBlockM;
  return p.batch * p.heads_q * blocks + (p.packed ? kFwdShortOutside : 0);
}

template <FwdShortVariant kVariant, class T>
Status launch_kernel(bool score_function, std::int64_t ctas, const FwdShortParams& params,
                     void* stream) {
  const cuda::LaunchShape shape{.num_ctas = ctas,
                                .num_threads = FwdShortConfig::kThreads,
                                .shared_bytes = fwd_short_config(kVariant).shared_bytes()};
  return score_function
             ? cuda::launch("sm90 forward", fwd_short<kVariant, true, T>, shape, stream, params)
             : cuda::launch("sm90 forward", fwd_short<kVariant, false, T>, shape, stream, params);
}

template <class T>
Status launch_kernel(int variant, bool score_function, std::int64_t ctas,
                     const FwdShortParams& params, void* stream) {
  switch (static_cast<FwdShortVariant>(variant)) {
    case FwdShortVariant::kD64Keys64:
      return launch_kernel<FwdShortVariant::kD64Keys64, T>(score_function, ctas, params, stream);
    case FwdShortVariant::kD64:
      return launch_kernel<FwdShortVariant::kD64, T>(score_function, ctas, params, stream);
    case FwdShortVariant::kD96:
      return launch_kernel<FwdShortVariant::kD96, T>(score_function, ctas, params, stream);
    case FwdShortVariant::kD128:
      return launch_kernel<FwdShortVariant::kD128, T>(score_function, ctas, params, stream);
  }
  return {FG_INTERNAL_ERROR, "sm90 forward: no such variant"};
}

}  // namespace

bool is_short_forward(const Problem& p) {
  constexpr std::int64_t kMost = 64;
  return find_variant(p) >= 0 && p.max_seqlen_q <= kMost && p.max_seqlen_kv <= kMost &&
         num_ctas(p) <= INT32_MAX;
}

Status launch_short_forward(const Problem& p, bool score_function, const FwdParams& base,
                            void* stream) {
  FwdShortParams params{
      .base = base,
      .band = Band::of(p.mask, p.seqlen_q, p.seqlen_kv),
      .same_band = !p.packed && !p.has_seqused_q && !p.has_seqused_kv && !p.has_q_offset};
  FwdParams& b = params.base;
  b.num_m_blocks = static_cast<std::uint32_t>((p.max_seqlen_q + FwdShortConfig::kBlockM - 1) /
                                              FwdShortConfig::kBlockM);
  b.mapped = 0;
  for (const auto& [tensor, bit] :
       {std::pair{&b.q, kFwdMapQ}, std::pair{&b.k, kFwdMapK}, std::pair{&b.v, kFwdMapV}}) {
    b.mapped |= tensor->dim_stride == 1 && has_aligned_rows(*tensor) ? bit : 0;
  }
  return p.dtype == DType::kBF16
             ? launch_kernel<__nv_bfloat16>(find_variant(p), score_function, num_ctas(p), params,
                                            stream)
             : launch_kernel<__half>(find_variant(p), score_function, num_ctas(p), params, stream);
}

}  // namespace flashgrad::sm90
