// SPDX-License-Identifier: Apache-2.0
// Implements fwd_short_launch.hpp.
#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/fwd_short.cuh"
#include "cuda/sm90/fwd_short_launch.hpp"

namespace flashgrad::sm90 {
namespace {

// The number of the variant with this arithmetic that has the fewest keys in a step, or -1.
int find_variant(const Problem& p, FwdVariant arithmetic) {
  for (int i = 0; i < static_cast<int>(std::size(kFwdShortConfigs)); ++i) {
    const FwdShortConfig& c = kFwdShortConfigs[i];
    if (c.arithmetic == arithmetic &&
        (c.block_n == c.widths().block_n || c.block_n >= p.max_seqlen_kv)) {
      return i;
    }
  }
  return -1;
}

std::int64_t num_m_blocks(const Problem& p) {
  return (p.max_seqlen_q + FwdShortConfig::kBlockM - 1) / FwdShortConfig::kBlockM;
}

std::int64_t num_tiles(const Problem& p) { return p.batch * p.heads_q * num_m_blocks(p); }

// CTAs that clear the rows which belong to no sequence of a packed batch.
constexpr std::int64_t kOutside = 256;

template <FwdShortVariant kVariant, class T>
Status launch_kernel(bool score_function, std::int64_t ctas, const FwdMaps& maps,
                     FwdShortParams params, void* stream) {
  constexpr FwdShortConfig kConfig = fwd_short_config(kVariant);
  for (std::uint32_t i = 0; params.all_equal && i < params.base.num_m_blocks; ++i) {
    const std::int64_t m_begin = std::int64_t{FwdShortConfig::kBlockM} * i;
    params.blocks[i] =
        key_blocks<kConfig.block_n>(params.band, m_begin, m_begin + FwdShortConfig::kBlockM);
  }
  const cuda::LaunchShape shape{.num_ctas = ctas,
                                .num_threads = FwdShortConfig::kThreads,
                                .shared_bytes = kConfig.shared_bytes()};
  return score_function ? cuda::launch("sm90 forward", fwd_short<kVariant, true, T>, shape, stream,
                                       maps, params)
                        : cuda::launch("sm90 forward", fwd_short<kVariant, false, T>, shape, stream,
                                       maps, params);
}

template <class T>
Status launch_kernel(int variant, bool score_function, std::int64_t ctas, const FwdMaps& maps,
                     const FwdShortParams& params, void* stream) {
  switch (static_cast<FwdShortVariant>(variant)) {
#define FG_FWD_SHORT_VARIANT(name, ...) \
  case FwdShortVariant::name:           \
    return launch_kernel<FwdShortVariant::name, T>(score_function, ctas, maps, params, stream);
#include "cuda/sm90/fwd_short_variants.def"
#undef FG_FWD_SHORT_VARIANT
  }
  return {FG_INTERNAL_ERROR, "sm90 forward: no such variant"};
}

}  // namespace

// H200, us of fwd.cuh / here, 16k tokens, 16 heads: head_dim 64, full, sequences of 64 95 / 44, of
// 256 87 / 69, of 384 89 / 97; head_dim 80, of 197, full 128 / 135, causal 108 / 97; head_dim 128,
// full, of 64 101 / 75, of 128 86 / 91, packed 114 / 90.
bool is_short_forward(const Problem& p, FwdVariant arithmetic) {
  const int variant = find_variant(p, arithmetic);
  if (variant < 0) {
    return false;
  }
  const int width = kFwdShortConfigs[variant].widths().head_dim;
  const bool hides_keys = p.mask.right < kUnboundedFrom;
  const std::int64_t most = p.packed || width <= 64 || (width <= 96 && hides_keys) ? 256 : 64;
  return p.max_seqlen_q <= most && p.max_seqlen_kv <= most && num_tiles(p) <= INT32_MAX - kOutside;
}

Status launch_short_forward(const Problem& p, FwdVariant arithmetic, bool score_function,
                            const FwdParams& base, void* stream) {
  const int variant = find_variant(p, arithmetic);
  const FwdShortConfig& config = kFwdShortConfigs[variant];
  const auto blocks = static_cast<std::uint32_t>(num_m_blocks(p));
  FwdShortParams params{
      .base = base,
      .num_tiles = static_cast<std::uint32_t>(num_tiles(p)),
      .heads = cuda::Divisor(static_cast<std::uint32_t>(p.heads_q)),
      .of_sequence = cuda::Divisor(static_cast<std::uint32_t>(p.heads_q) * blocks),
      .few_rows =
          p.packed && std::max(p.max_seqlen_q, p.max_seqlen_kv) <= 2 * FwdShortConfig::kFewRows,
      .all_equal = !p.packed && !p.has_seqused_q && !p.has_seqused_kv && !p.has_q_offset &&
                   blocks <= FwdShortConfig::kMaxBlocks,
      .band = Band::of(p.mask, p.seqlen_q, p.seqlen_kv),
      .blocks = {}};
  FwdParams& b = params.base;
  b.block_m = FwdShortConfig::kBlockM;
  b.num_m_blocks = blocks;
  FwdMaps maps{};
  if (p.seqlen_kv > 0 && p.batch > 0) {
    const auto map = [&](const Tensor& tensor, const cuda::Extents& extents, int rows,
                         std::uint32_t bit, CUtensorMap* to) {
      return cuda::make_map(tensor, extents, params.few_rows ? FwdShortConfig::kFewRows : rows,
                            cuda::MapKind::k4d, bit, to, &b.mapped);
    };
    FG_RETURN_IF_ERROR(map(b.q, cuda::q_extents(p), FwdShortConfig::kBlockM, kFwdMapQ, &maps.q));
    FG_RETURN_IF_ERROR(map(b.k, cuda::k_extents(p), config.block_n, kFwdMapK, &maps.k));
    FG_RETURN_IF_ERROR(map(b.v, cuda::v_extents(p), config.block_n, kFwdMapV, &maps.v));
  }
  return p.dtype == DType::kBF16
             ? launch_kernel<__nv_bfloat16>(variant, score_function,
                                            num_tiles(p) + (p.packed ? kOutside : 0), maps, params,
                                            stream)
             : launch_kernel<__half>(variant, score_function,
                                     num_tiles(p) + (p.packed ? kOutside : 0), maps, params,
                                     stream);
}

}  // namespace flashgrad::sm90
