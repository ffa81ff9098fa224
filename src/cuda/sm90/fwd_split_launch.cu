// SPDX-License-Identifier: Apache-2.0
// Implements fwd_split_launch.hpp.
#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/fwd_merge.cuh"
#include "cuda/sm90/fwd_split.cuh"
#include "cuda/sm90/fwd_split_launch.hpp"

namespace flashgrad::sm90 {
namespace {

template <FwdVariant kVariant, class T>
Status launch_kernel(bool score_function, cuda::LaunchShape shape, const FwdMaps& maps,
                     const FwdSplitParams& params, void* stream) {
  constexpr FwdSplitConfig kConfig{fwd_config(kVariant)};
  shape.num_threads = FwdSplitConfig::kThreads;
  shape.shared_bytes = kConfig.shared_bytes();
  return score_function ? cuda::launch("sm90 forward", fwd_split<kVariant, true, T>, shape, stream,
                                       maps, params)
                        : cuda::launch("sm90 forward", fwd_split<kVariant, false, T>, shape, stream,
                                       maps, params);
}

template <class T>
Status launch_kernel(FwdVariant variant, bool score_function, const cuda::LaunchShape& shape,
                     const FwdMaps& maps, const FwdSplitParams& params, void* stream) {
  switch (variant) {
#define FG_FWD_VARIANT(name, ...) \
  case FwdVariant::name:          \
    return launch_kernel<FwdVariant::name, T>(score_function, shape, maps, params, stream);
#include "cuda/sm90/fwd_variants.def"
#undef FG_FWD_VARIANT
  }
  return {FG_INTERNAL_ERROR, "sm90 forward: no such variant"};
}

template <int kWarps, class T>
Status launch_merge(bool score_function, std::int64_t num_ctas, const FwdMergeParams& params,
                    void* stream) {
  const cuda::LaunchShape shape{
      .num_ctas = num_ctas, .num_threads = kFwdMergeThreads, .overlaps_predecessor = true};
  return score_function
             ? cuda::launch("sm90 forward merge", fwd_merge<kWarps, true, T>, shape, stream, params)
             : cuda::launch("sm90 forward merge", fwd_merge<kWarps, false, T>, shape, stream,
                            params);
}

template <class T>
Status launch_merge(bool score_function, int num_multiprocessors, const FwdMergeParams& params,
                    void* stream) {
  const std::int64_t rows = params.num_rows;
  const std::int64_t most_ctas = kFwdMergeCtas * num_multiprocessors;
  // A CTA a row while they are few.
  return rows <= most_ctas ? launch_merge<4, T>(score_function, rows, params, stream)
                           : launch_merge<1, T>(score_function, std::min((rows + 3) / 4, most_ctas),
                                                params, stream);
}

}  // namespace

Status launch_split_forward(const Problem& p, FwdVariant arithmetic, bool score_function,
                            const FwdParams& base, const SplitLaunch& launch, void* stream) {
  const FwdConfig& config = fwd_config(arithmetic);
  const SplitSlots slots = split_slots(p, config.block_n);
  constexpr std::int64_t kHeadsOfTile = FwdSplitConfig::kBlockM / kSplitRows;
  const std::int64_t tiles_of_group = (p.group() + kHeadsOfTile - 1) / kHeadsOfTile;
  const std::int64_t chunks_of_entry = std::max<std::int64_t>(slots.of_entry, 1);
  const std::int64_t chunks =
      p.packed ? num_blocks(true, p.batch, p.seqlen_kv, slots.keys) : p.batch * chunks_of_entry;
  const std::int64_t tiles = chunks * tiles_of_group * p.heads_kv;
  auto* const o = static_cast<float*>(launch.parts);
  const std::int32_t columns = part_columns(p);
  FwdSplitParams params{.base = base,
                        .parts = {.slots = slots,
                                  .columns = columns,
                                  .o = o,
                                  .statistics = reinterpret_cast<float2*>(
                                      o + slots.all * p.heads_q * slots.rows * columns)},
                        .chunks_of_entry = static_cast<std::uint32_t>(chunks_of_entry),
                        .tiles_of_chunk = static_cast<std::uint32_t>(tiles_of_group * p.heads_kv),
                        .tiles_of_group = static_cast<std::uint32_t>(tiles_of_group),
                        .num_tiles = static_cast<std::uint32_t>(tiles),
                        .any_cut = launch.any_cut};
  FwdParams& b = params.base;
  FwdMaps maps{};
  const auto map = [&](const Tensor& tensor, const cuda::Extents& extents, int rows,
                       std::uint32_t bit, CUtensorMap* to) {
    return cuda::make_map(tensor, extents, rows, cuda::MapKind::k4d, bit, to, &b.mapped);
  };
  FG_RETURN_IF_ERROR(map(b.q, cuda::q_extents(p), kSplitRows, kFwdMapQ, &maps.q));
  FG_RETURN_IF_ERROR(map(b.k, cuda::k_extents(p), config.block_n, kFwdMapK, &maps.k));
  FG_RETURN_IF_ERROR(map(b.v, cuda::v_extents(p), config.block_n, kFwdMapV, &maps.v));
  const int slots_of_machine = FwdSplitConfig{config}.ctas() * launch.num_multiprocessors;
  const cuda::LaunchShape shape{.num_ctas = std::min<std::int64_t>(tiles, slots_of_machine),
                                .overlaps_predecessor = launch.overlaps_predecessor};
  const FwdMergeParams merge{.base = b,
                             .parts = params.parts,
                             .block_n = config.block_n,
                             .num_rows = static_cast<std::uint32_t>(num_merged_rows(p, slots)),
                             .any_cut = launch.any_cut};
  const bool is_bf16 = p.dtype == DType::kBF16;
  FG_RETURN_IF_ERROR(
      is_bf16
          ? launch_kernel<__nv_bfloat16>(arithmetic, score_function, shape, maps, params, stream)
          : launch_kernel<__half>(arithmetic, score_function, shape, maps, params, stream));
  if (!may_be_cut(p, config.block_n)) {
    return {};
  }
  return is_bf16 ? launch_merge<__nv_bfloat16>(score_function, launch.num_multiprocessors, merge,
                                               stream)
                 : launch_merge<__half>(score_function, launch.num_multiprocessors, merge, stream);
}

}  // namespace flashgrad::sm90
