// SPDX-License-Identifier: Apache-2.0
// Implements fwd_launch.hpp: picks the variant, cuts the workspace, fills the parameters and
// launches.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/fwd.cuh"
#include "cuda/sm90/fwd_launch.hpp"
#include "cuda/sm90/fwd_prepare.cuh"
#include "cuda/sm90/fwd_short_launch.hpp"
#include "cuda/sm90/fwd_split_launch.hpp"
#include "cuda/sm90/fwd_stream_launch.hpp"
#include "cuda/sm90/fwd_stream_plan.hpp"
#include "cuda/sm90/fwd_tile_rows.hpp"

namespace flashgrad::sm90 {
namespace {

constexpr int kNumVariants = static_cast<int>(std::size(kFwdConfigs));

// The number of the first variant that is wide enough, or -1.
int find_variant(const Problem& p) {
  for (int i = 0; i < kNumVariants; ++i) {
    if (kFwdConfigs[i].head_dim >= p.head_dim && kFwdConfigs[i].head_dim_v >= p.head_dim_v) {
      return i;
    }
  }
  return -1;
}

// The products take the maximum of scores before they are scaled, which a scale of 0 or less would
// turn around. Nor may a scale vanish in f32: a masked score of -inf times 0 is NaN.
constexpr double kLog2E = 1.4426950408889634;
bool needs_score_function(const Problem& p) {
  return p.softcap > 0 || p.scale * kLog2E < std::numeric_limits<float>::min();
}

std::int64_t num_query_blocks(const Problem& p, int block_m) {
  return p.packed ? p.seqlen_q / block_m + p.batch : (p.seqlen_q + block_m - 1) / block_m;
}

// The pieces of the workspace, as offsets from its aligned start.
constexpr std::size_t kAlignment = 256;
constexpr std::size_t kNextWork = 0;
constexpr std::size_t kNumPackedTiles = 4;
constexpr std::size_t kAnyCut = 8;
constexpr std::size_t kPackedTiles = kAlignment;

constexpr std::size_t round_up(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Where the parts of rows whose keys are cut begin.
std::size_t parts_offset(const Problem& p, int block_m) {
  const std::int64_t tiles = p.packed ? p.heads_q * num_query_blocks(p, block_m) : 0;
  return kPackedTiles + round_up(static_cast<std::size_t>(tiles) * sizeof(PackedTile));
}

// Of k and v for each key.
std::int64_t bytes_per_key(const Problem& p) { return (p.head_dim + p.head_dim_v) * 2; }

// Units whose keys and values are in use at a time.
std::int64_t units_per_section(const Problem& p, int block_m, int l2_bytes) {
  const Band band = Band::of(p.mask, p.seqlen_q, p.seqlen_kv);
  return std::max<std::int64_t>(1, rows_in_l2(fwd_l2_share(l2_bytes), bytes_per_key(p)) /
                                       keys_in_use(band, p.seqlen_kv, block_m)) *
         p.group();
}

PackedPass make_packed_pass(const Problem& p, const FwdConfig& config,
                            const cuda::DeviceProperties& device) {
  return {.of_keys = false,
          .last_block_first = p.mask.right < kUnboundedFrom,
          .tile_rows = static_cast<std::uint32_t>(config.block_m()),
          .heads = static_cast<std::uint32_t>(p.heads_q),
          .heads_per_key = static_cast<std::uint32_t>(p.group()),
          .slots = static_cast<std::uint32_t>(device.num_multiprocessors),
          .l2_rows = rows_in_l2(fwd_l2_share(device.l2_bytes), bytes_per_key(p)),
          .class_shift = class_shift(p.max_seqlen_kv),
          .max_round = 0};
}

FwdParams make_params(const Problem& p, const Args& args, int block_m, int l2_bytes) {
  FwdParams params{};
  params.sequences = make_sequences(p, args);
  params.out = args.out;
  params.lse = args.lse;
  params.sinks = static_cast<const float*>(args.sinks);
  params.head_dim = static_cast<std::int32_t>(p.head_dim);
  params.head_dim_v = static_cast<std::int32_t>(p.head_dim_v);
  params.heads_q = static_cast<std::uint32_t>(p.heads_q);
  params.group = static_cast<std::uint32_t>(p.group());
  params.block_m = static_cast<std::uint32_t>(block_m);
  params.num_m_blocks = static_cast<std::uint32_t>(num_query_blocks(p, block_m));
  params.order =
      make_order((p.packed ? 1 : p.batch) * p.heads_q, units_per_section(p, block_m, l2_bytes));
  params.last_block_first = p.mask.right < kUnboundedFrom;
  params.incomplete_first = sees_more_later(p.mask);
  params.out_vectors =
      reinterpret_cast<std::uintptr_t>(args.out.data) % 16 == 0 && p.head_dim_v % 8 == 0 &&
      (args.out.batch_stride | args.out.row_stride | args.out.head_stride) % 8 == 0;
  params.clear_values = p.packed || p.has_seqused_kv;
  params.scale_log2 = static_cast<float>(p.scale * kLog2E);
  if (p.softcap > 0) {
    params.scale_softcap = static_cast<float>(p.scale / p.softcap);
    params.softcap_log2 = static_cast<float>(p.softcap * kLog2E);
  }
  return params;
}

// Whether it shows, without a look at the device, that no sequence has fewer rows than keys.
bool same_lengths(const Problem& p, const Args& args) {
  return p.packed && args.cu_seqlens_q == args.cu_seqlens_kv && p.seqlen_q >= p.seqlen_kv &&
         !p.has_seqused_q;
}

template <FwdVariant kVariant, class T>
Status launch_main(bool score_function, std::int64_t num_ctas, bool follows_prepare,
                   const FwdMaps& maps, const FwdParams& params, void* stream) {
  constexpr FwdConfig kConfig = fwd_config(kVariant);
  const cuda::LaunchShape shape{.num_ctas = num_ctas,
                                .num_threads = kConfig.threads(),
                                .shared_bytes = kConfig.shared_bytes(),
                                .overlaps_predecessor = follows_prepare};
  return score_function ? cuda::launch("sm90 forward", fwd_main<kVariant, true, T>, shape, stream,
                                       maps, params)
                        : cuda::launch("sm90 forward", fwd_main<kVariant, false, T>, shape, stream,
                                       maps, params);
}

template <class T>
Status launch_main(int variant, bool score_function, std::int64_t num_ctas, bool follows_prepare,
                   const FwdMaps& maps, const FwdParams& params, void* stream) {
  switch (static_cast<FwdVariant>(variant)) {
#define FG_FWD_VARIANT(name, ...)                                                            \
  case FwdVariant::name:                                                                     \
    return launch_main<FwdVariant::name, T>(score_function, num_ctas, follows_prepare, maps, \
                                            params, stream);
#include "cuda/sm90/fwd_variants.def"
#undef FG_FWD_VARIANT
  }
  return {FG_INTERNAL_ERROR, "sm90 forward: no such variant"};
}

}  // namespace

Status supports_forward(const Problem& p) {
  const int block_m = kFwdConfigs[find_variant(p)].block_m();
  const std::int64_t units = (p.packed ? 1 : p.batch) * p.heads_q;
  constexpr std::int64_t kMaxTiles = INT32_MAX;
  const std::int64_t blocks = std::max<std::int64_t>(1, num_query_blocks(p, block_m));
  if (units > kMaxTiles / blocks) {
    return unsupported("q: " + std::to_string(units) + " heads of all sequences, each of " +
                       std::to_string(blocks) + " blocks of " + std::to_string(block_m) +
                       " rows, want fewer than 2^31 blocks");
  }
  return supports_split(p, kFwdConfigs[find_variant(p)].block_n);
}

WorkspaceSize forward_workspace_size(const Problem& p) {
  const int variant = find_variant(p);
  const std::size_t bytes = parts_offset(p, kFwdConfigs[variant].block_m()) +
                            split_workspace_bytes(p, kFwdConfigs[variant].block_n) + kAlignment;
  return {bytes, bytes};
}

Status launch_forward(const Problem& p, const Args& args) {
  const std::int64_t num_rows = (p.packed ? 1 : p.batch) * p.seqlen_q;
  if (num_rows == 0 || p.heads_q == 0) {
    return {};
  }
  const int variant = find_variant(p);
  const FwdConfig& config = kFwdConfigs[variant];
  cuda::DeviceProperties device;
  FG_RETURN_IF_ERROR(cuda::device_properties(p.device_id, &device));
  const std::uintptr_t start =
      (reinterpret_cast<std::uintptr_t>(args.workspace) + kAlignment - 1) / kAlignment * kAlignment;

  // The tiles of a packed batch are listed on the device, where alone their number is known.
  const int block_m = p.packed
                          ? config.block_m()
                          : forward_block_m({.band = Band::of(p.mask, p.seqlen_q, p.seqlen_kv),
                                             .units = p.batch * p.heads_q,
                                             .num_consumers = config.num_consumers,
                                             .block_n = config.block_n,
                                             .last_block_first = p.mask.right < kUnboundedFrom},
                                            device.num_multiprocessors);
  FwdParams params = make_params(p, args, block_m, device.l2_bytes);
  params.q = args.q;
  params.k = args.k;
  params.v = args.v;
  const auto arithmetic = static_cast<FwdVariant>(variant);
  SplitUse use = split_use(p, config.block_n);
  if (use == SplitUse::kCut && same_lengths(p, args)) {
    use = SplitUse::kNone;
  }
  params.leaves_cut = use == SplitUse::kCut;
  if (use == SplitUse::kNone) {
    if (const auto stream_variant = stream_forward_variant(p, arithmetic);
        stream_variant && can_stream_forward(p, params)) {
      return launch_stream_forward(p, *stream_variant, needs_score_function(p), params,
                                   device.num_multiprocessors, args.stream);
    }
  }
  if (use == SplitUse::kNone && is_short_forward(p, arithmetic)) {
    return launch_short_forward(p, arithmetic, needs_score_function(p), params, args.stream);
  }
  params.next_work = reinterpret_cast<std::uint32_t*>(start + kNextWork);
  auto* const num_packed_tiles = reinterpret_cast<std::uint32_t*>(start + kNumPackedTiles);
  // The main kernel's; the split one finds its own.
  auto* const packed_tiles = p.packed && use != SplitUse::kAll
                                 ? reinterpret_cast<PackedTile*>(start + kPackedTiles)
                                 : nullptr;
  params.packed_tiles = packed_tiles;
  params.num_packed_tiles = num_packed_tiles;
  auto* const any_cut =
      use == SplitUse::kCut ? reinterpret_cast<std::uint32_t*>(start + kAnyCut) : nullptr;
  const std::int64_t tiles =
      static_cast<std::int64_t>(params.num_m_blocks) * params.order.num_units;
  const bool has_prepare = p.packed || p.has_seqused_q;
  if (has_prepare) {
    const FwdPrepareParams prepare{.sequences = params.sequences,
                                   .out = args.out,
                                   .lse = args.lse,
                                   .heads_q = p.heads_q,
                                   .head_dim_v = p.head_dim_v,
                                   .num_rows = num_rows,
                                   .pass = make_packed_pass(p, config, device),
                                   .packed_capacity = static_cast<std::uint32_t>(tiles),
                                   .packed_tiles = packed_tiles,
                                   .num_packed_tiles = num_packed_tiles,
                                   .next_work = params.next_work,
                                   .block_n = config.block_n,
                                   .any_cut = any_cut};
    constexpr std::int64_t kWarps = kFwdPrepareThreads / 32;
    const std::int64_t ctas =
        std::min<std::int64_t>((num_rows + kWarps - 1) / kWarps, 2 * device.num_multiprocessors);
    FG_RETURN_IF_ERROR(cuda::launch("sm90 forward prepare", fwd_prepare,
                                    {.num_ctas = 1 + ctas, .num_threads = kFwdPrepareThreads},
                                    args.stream, prepare));
  } else if (use != SplitUse::kAll) {
    FG_RETURN_IF_ERROR(cuda::check(cudaMemsetAsync(params.next_work, 0, sizeof(std::uint32_t),
                                                   static_cast<cudaStream_t>(args.stream)),
                                   "sm90 forward work list"));
  }
  const auto launch_split = [&] {
    return launch_split_forward(
        p, arithmetic, needs_score_function(p), params,
        {.parts = reinterpret_cast<void*>(start + parts_offset(p, config.block_m())),
         .any_cut = any_cut,
         .overlaps_predecessor = has_prepare,
         .num_multiprocessors = device.num_multiprocessors},
        args.stream);
  };
  if (use == SplitUse::kAll) {
    return launch_split();
  }
  FwdMaps maps{};
  if (p.seqlen_kv > 0 && p.batch > 0) {
    const auto map = [&](const Tensor& tensor, const cuda::Extents& extents, int box_rows,
                         std::uint32_t bit, CUtensorMap* to) {
      return cuda::make_map(tensor, extents, box_rows, cuda::MapKind::k4d, bit, to, &params.mapped);
    };
    FG_RETURN_IF_ERROR(map(params.q, cuda::q_extents(p), config.block_m(), kFwdMapQ, &maps.q));
    FG_RETURN_IF_ERROR(map(params.k, cuda::k_extents(p), config.block_n, kFwdMapK, &maps.k));
    FG_RETURN_IF_ERROR(map(params.v, cuda::v_extents(p), config.block_n, kFwdMapV, &maps.v));
    // The copy engine writes whole pieces of 16 bytes, also what lies behind the last column.
    if (p.head_dim_v % 8 == 0) {
      FG_RETURN_IF_ERROR(map(params.out, cuda::out_extents(p), 16, kFwdMapOut, &maps.out));
    }
  }
  const std::int64_t num_ctas = std::min<std::int64_t>(tiles, device.num_multiprocessors);
  FG_RETURN_IF_ERROR(p.dtype == DType::kBF16
                         ? launch_main<__nv_bfloat16>(variant, needs_score_function(p), num_ctas,
                                                      has_prepare, maps, params, args.stream)
                         : launch_main<__half>(variant, needs_score_function(p), num_ctas,
                                               has_prepare, maps, params, args.stream));
  return use == SplitUse::kCut ? launch_split() : Status{};
}

}  // namespace flashgrad::sm90
