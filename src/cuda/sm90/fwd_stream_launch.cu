// SPDX-License-Identifier: Apache-2.0
// Implements fwd_stream_launch.hpp.
#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/fwd_stream.cuh"
#include "cuda/sm90/fwd_stream_launch.hpp"
#include "cuda/sm90/fwd_stream_plan.hpp"

namespace flashgrad::sm90 {
namespace {

template <FwdStreamVariant kVariant, class T>
Status launch_kernel(bool score_function, std::int64_t ctas, const FwdStreamMaps& maps,
                     const FwdStreamParams& params, void* stream) {
  const cuda::LaunchShape shape{.num_ctas = ctas,
                                .num_threads = FwdStreamConfig::kThreads,
                                .shared_bytes = FwdConfig::kSharedBytes};
  return score_function ? cuda::launch("sm90 forward", fwd_stream<kVariant, true, T>, shape, stream,
                                       maps, params)
                        : cuda::launch("sm90 forward", fwd_stream<kVariant, false, T>, shape,
                                       stream, maps, params);
}

template <FwdStreamVariant kVariant>
void describe_blocks(FwdStreamParams* params) {
  constexpr FwdStreamConfig kConfig = fwd_stream_config(kVariant);
  constexpr int kBlockN = kConfig.block_n();
  const Band& band = params->band;
  params->blocks = key_blocks<kBlockN>(band, 0, band.seqlen_q);
  constexpr std::int64_t kFar = std::int64_t{1} << 29;
  params->lo = static_cast<std::int32_t>(std::clamp(band.lo, -kFar, kFar));
  params->hi = static_cast<std::int32_t>(std::clamp(band.hi, -kFar, kFar));
  params->num_keys = static_cast<std::int32_t>(band.seqlen_kv);
  if (band.kv_range_full(0, band.seqlen_q) == Range{0, band.seqlen_kv}) {
    params->num_tables = 1;
    params->tables[0] = params->blocks;
  } else if (params->base.num_m_blocks > 1 &&
             params->base.num_m_blocks <= FwdStreamConfig::kMaxTables) {
    params->num_tables = params->base.num_m_blocks;
    for (std::uint32_t i = 0; i < params->num_tables; ++i) {
      params->tables[i] = key_blocks<kBlockN>(band, 64 * i, 64 * i + 64);
    }
  }
  params->layout = stream_layout(kConfig, params->blocks, static_cast<int>(band.seqlen_kv));
}

template <class T>
Status launch_kernel(FwdStreamVariant variant, bool score_function, std::int64_t ctas,
                     const FwdStreamMaps& maps, const FwdStreamParams& params, void* stream) {
  switch (variant) {
#define FG_FWD_STREAM_VARIANT(name, ...) \
  case FwdStreamVariant::name:           \
    return launch_kernel<FwdStreamVariant::name, T>(score_function, ctas, maps, params, stream);
#include "cuda/sm90/fwd_stream_variants.def"
#undef FG_FWD_STREAM_VARIANT
  }
  return {FG_INTERNAL_ERROR, "sm90 forward: no such variant"};
}

}  // namespace

bool can_stream_forward(const Problem& p, const FwdParams& base) {
  return cuda::can_map(base.q, cuda::q_extents(p)) && cuda::can_map(base.k, cuda::k_extents(p)) &&
         cuda::can_map(base.v, cuda::v_extents(p));
}

Status launch_stream_forward(const Problem& p, FwdStreamVariant variant, bool score_function,
                             const FwdParams& base, std::int64_t slots, void* stream) {
  const FwdStreamConfig& config = fwd_stream_config(variant);
  const StreamChunks chunks = stream_chunks(p, slots);
  FwdStreamParams params{
      .base = base,
      .group = cuda::Divisor(static_cast<std::uint32_t>(p.group())),
      .heads_kv = cuda::Divisor(static_cast<std::uint32_t>(p.heads_kv)),
      .of_sequence = cuda::Divisor(static_cast<std::uint32_t>(p.heads_kv * chunks.of_head)),
      .num_chunks = static_cast<std::uint32_t>(chunks.count),
      .num_tiles = static_cast<std::uint32_t>(chunks.num_tiles),
      .tiles_per_chunk = static_cast<std::uint32_t>(chunks.tiles),
      .band = Band::of(p.mask, p.seqlen_q, p.seqlen_kv),
      .blocks = {},
      .lo = 0,
      .hi = 0,
      .num_keys = 0,
      .layout = {},
      .num_tables = 0,
      .tables = {}};
  FwdParams& b = params.base;
  b.block_m = 64;
  b.num_m_blocks = static_cast<std::uint32_t>((p.seqlen_q + 63) / 64);
  switch (variant) {
#define FG_FWD_STREAM_VARIANT(name, ...)              \
  case FwdStreamVariant::name:                        \
    describe_blocks<FwdStreamVariant::name>(&params); \
    break;
#include "cuda/sm90/fwd_stream_variants.def"
#undef FG_FWD_STREAM_VARIANT
  }
  FwdStreamMaps maps{};
  const auto map = [&](const Tensor& tensor, const cuda::Extents& extents, int rows,
                       std::uint32_t bit, CUtensorMap* to) {
    return cuda::make_map(tensor, extents, rows, cuda::MapKind::k4d, bit, to, &b.mapped);
  };
  FwdMaps& whole = maps.whole;
  FG_RETURN_IF_ERROR(map(b.q, cuda::q_extents(p), 64, kFwdMapQ, &whole.q));
  FG_RETURN_IF_ERROR(map(b.k, cuda::k_extents(p), config.block_n(), kFwdMapK, &whole.k));
  FG_RETURN_IF_ERROR(map(b.v, cuda::v_extents(p), config.block_n(), kFwdMapV, &whole.v));
  if (params.layout.last_pairs > 0) {
    FG_RETURN_IF_ERROR(
        map(b.k, cuda::k_extents(p), params.layout.last_keys, kFwdMapK, &maps.last_k));
    FG_RETURN_IF_ERROR(
        map(b.v, cuda::v_extents(p), params.layout.last_keys, kFwdMapV, &maps.last_v));
  }
  const std::int64_t ctas = std::min(chunks.count, slots);
  return p.dtype == DType::kBF16
             ? launch_kernel<__nv_bfloat16>(variant, score_function, ctas, maps, params, stream)
             : launch_kernel<__half>(variant, score_function, ctas, maps, params, stream);
}

}  // namespace flashgrad::sm90
