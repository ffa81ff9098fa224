// SPDX-License-Identifier: Apache-2.0
// Implements bwd_launch.hpp: cuts the workspace, fills the parameters and launches prepare, main
// and finish, chained by programmatic dependent launch.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd_arguments.hpp"
#include "cuda/sm90/bwd_finish.cuh"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/bwd_launch.hpp"
#include "cuda/sm90/bwd_plan.hpp"
#include "cuda/sm90/bwd_prepare.cuh"
#include "cuda/sm90/bwd_repair.hpp"
#include "cuda/sm90/bwd_short.hpp"
#include "cuda/sm90/bwd_wide_launch.hpp"
#include "cuda/sm90/key_tile.cuh"

namespace flashgrad::sm90 {
namespace {

// The pieces of the workspace, as offsets from its aligned start.
struct Layout {
  std::int64_t num_q_blocks = 0;
  std::size_t neg_lse_log2 = 0;
  std::size_t neg_delta = 0;
  std::size_t unreadable = 0;
  std::size_t dsink_partial = 0;
  std::size_t dq_accumulator = 0;
  std::size_t unit_counters = 0;
  std::size_t counters = 0;
  std::size_t ticket = 0;
  std::size_t tiles = 0;
  std::size_t packed_tiles = 0;
  std::size_t num_packed_tiles = 0;
  std::size_t bytes = 0;  // alignment of the start included
};

constexpr std::size_t kAlignment = 256;

Layout make_layout(const Problem& p, const BwdPlan& plan) {
  Layout layout;
  layout.num_q_blocks = num_blocks(p.packed, p.batch, p.seqlen_q, kBlockM);
  std::size_t end = 0;
  const auto take = [&end](std::int64_t bytes) {
    const std::size_t begin = end;
    end += (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  const std::int64_t blocks = p.heads_q * layout.num_q_blocks;
  layout.neg_lse_log2 = take(blocks * kBlockM * 4);
  layout.neg_delta = take(blocks * kBlockM * 4);
  layout.unreadable = take(blocks * 4);
  layout.dsink_partial = p.wants_dsinks ? take(blocks * 4) : 0;
  const std::int64_t accumulated =
      plan.ordered() ? blocks : plan.units.slots * p.group() * head_blocks(p);
  layout.dq_accumulator =
      plan.accumulates_dq(p) ? take(accumulated * kBlockM * plan.padded_head_dim * 4) : 0;
  layout.unit_counters = plan.units.lag > 0 ? take(num_units(p) * UnitPipeline::kNumCounts * 4) : 0;
  layout.counters = plan.ordered() ? take(blocks * 2 * 4) : 0;
  layout.ticket = plan.ordered() || plan.variant < 0 ? take(4) : 0;
  if (plan.has_main(p)) {
    const std::int64_t tiles = num_clusters(p, plan, plan.units);
    layout.tiles = take(tiles * kBwdConfigs[plan.variant].cluster * std::int64_t{sizeof(KeyTile)});
    layout.packed_tiles = p.packed ? take(tiles * std::int64_t{sizeof(PackedTile)}) : 0;
    layout.num_packed_tiles = p.packed ? take(4) : 0;
  }
  layout.bytes = end > 0 ? end + kAlignment : 0;
  return layout;
}

// The largest round of rotating tiles: all its clusters run at the same time, on at most half of
// the device.
int max_round(const Problem& p, int cluster, const cuda::DeviceProperties& device) {
  return hides_nothing(p.mask) ? std::clamp(device.num_multiprocessors / (2 * cluster), 1, 32) : 0;
}

// Bytes of q, dout and the sums of dq of a key head's group, for each query.
std::int64_t bytes_per_query(const Problem& p) {
  return p.group() * (6 * p.head_dim + 2 * p.head_dim_v);
}

PackedPass make_packed_pass(const Problem& p, const BwdPlan& plan,
                            const cuda::DeviceProperties& device) {
  const int cluster = kBwdConfigs[plan.variant].cluster;
  return {.of_keys = true,
          .last_block_first = false,
          .tile_rows = static_cast<std::uint32_t>(keys_per_tile(plan)),
          .heads = static_cast<std::uint32_t>(p.heads_kv),
          .heads_per_key = 1,
          .slots = static_cast<std::uint32_t>(device.num_multiprocessors / cluster),
          .l2_rows = rows_in_l2(bwd_l2_share(device.l2_bytes), bytes_per_query(p)),
          .class_shift = class_shift(p.max_seqlen_q),
          .max_round = plan.ordered() ? max_round(p, cluster, device) : 0};
}

template <class T>
Status launch_finish(int head_dim, const cuda::LaunchShape& shape, void* stream,
                     const BwdFinishParams& params) {
  switch (head_dim) {
    case 64:
      return cuda::launch("sm90 backward finish", bwd_finish<T, 64>, shape, stream, params);
    case 96:
      return cuda::launch("sm90 backward finish", bwd_finish<T, 96>, shape, stream, params);
    case 128:
      return cuda::launch("sm90 backward finish", bwd_finish<T, 128>, shape, stream, params);
    default:
      return {FG_INTERNAL_ERROR, "sm90 backward: no finish for this head_dim"};
  }
}

RowInputs row_inputs(const Problem& p, const Args& args) {
  return {.head_dim_v = p.head_dim_v,
          .out = args.out,
          .dout = args.dout,
          .lse = args.lse,
          .dlse = args.dlse,
          .sinks = static_cast<const float*>(args.sinks)};
}

BwdParams make_main_params(const Problem& p, const Args& args, const BwdPlan& plan,
                           const RowStatistics& rows, float* dq_accumulator,
                           const UnitPipeline& pipeline, const DqOrder& order, KeyTile* tiles,
                           const cuda::DeviceProperties& device) {
  const int cluster = kBwdConfigs[plan.variant].cluster;
  BwdParams params = key_params(p, args, rows);
  params.num_kv_blocks = key_tiles_per_unit(p, plan);
  params.num_units = num_units(p);
  params.num_ctas = num_clusters(p, plan, pipeline) * kBwdConfigs[plan.variant].cluster;
  params.inputs = row_inputs(p, args);
  params.dq_accumulator = dq_accumulator;
  params.pipeline = pipeline;
  params.dq = p.wants_dq ? args.dq : Tensor{};
  params.tiles = tiles;
  params.ragged_rows = p.packed && cluster == 1 ? cuda::kRaggedRows : 0;
  if (plan.ordered()) {
    params.order = order;
    params.max_round = max_round(p, cluster, device);
    if (params.max_round > 0) {
      // A round whose size only the device knows lies inside of a unit's tiles.
      params.round = p.has_seqused_q || p.has_seqused_kv
                         ? std::max<std::int64_t>(params.num_kv_blocks, 1)
                         : rotation((p.seqlen_q + kBlockM - 1) / kBlockM, params.num_kv_blocks,
                                    params.max_round)
                               .round;
    }
  }
  if (plan.section > 0) {
    params.section = plan.section;
    return params;
  }
  const auto num_units = static_cast<std::uint32_t>(params.num_units);
  const auto slots = static_cast<std::uint32_t>(device.num_multiprocessors / cluster);
  const auto of_unit =
      static_cast<std::uint32_t>(params.round > 1 ? params.round : params.num_kv_blocks);
  const auto in_l2 = rows_in_l2(bwd_l2_share(device.l2_bytes), bytes_per_query(p)) /
                     static_cast<std::uint32_t>(std::max<std::int64_t>(p.seqlen_q, 1));
  params.section = units_together(num_units, in_l2, units_that_fill(slots, of_unit));
  if (params.max_round > 0) {
    params.section =
        units_at_a_time(num_units, slots, of_unit, static_cast<std::uint32_t>(params.section));
  }
  return params;
}

Status run_main(const Problem& p, const Args& args, const BwdPlan& plan, BwdParams params) {
  const BwdConfig& config = kBwdConfigs[plan.variant];
  const cuda::MapKind kind = config.cluster > 1        ? cuda::MapKind::k4d
                             : params.ragged_rows != 0 ? cuda::MapKind::kRagged
                                                       : cuda::MapKind::k5d;
  BwdMaps maps{};
  FG_RETURN_IF_ERROR(make_maps(p, args, kBlockM, config.block_n(), kind, &maps, &params.mapped));
  return launch_bwd_main(plan.variant, p.dtype, maps, params, args.stream);
}

Status run_query(const Problem& p, const Args& args, const BwdPlan& plan, const RowStatistics& rows,
                 int l2_bytes) {
  BwdQueryParams params = query_params(p, args, rows, 128);
  // Heads whose keys and values stay in the L2 together.
  const std::int64_t key_head_bytes = p.seqlen_kv * 2 * (p.head_dim + p.head_dim_v);
  params.section = p.group() * std::max<std::int64_t>(
                                   1, l2_bytes / 2 / std::max<std::int64_t>(1, key_head_bytes));
  BwdMaps maps{};
  FG_RETURN_IF_ERROR(make_maps(p, args, kBlockM, 64, cuda::MapKind::k4d, &maps, &params.mapped));
  return launch_bwd_query(plan.padded_head_dim, p.softcap > 0, p.dtype, maps, params, args.stream);
}

Status run_repair(const Problem& p, const Args& args, const RowStatistics& rows, bool looks_early,
                  int num_multiprocessors) {
  // Without a band every row sees every key of its sequence: there is nothing to keep apart.
  if (hides_nothing(p.mask) || !(p.wants_dq || p.wants_dk || p.wants_dv)) {
    return {};
  }
  const BwdRepairParams params{.sequences = make_sequences(p, args),
                               .heads_kv = p.heads_kv,
                               .group = p.group(),
                               .head_dim = p.head_dim,
                               .head_dim_v = p.head_dim_v,
                               .q = args.q,
                               .k = args.k,
                               .v = args.v,
                               .dout = args.dout,
                               .dq = p.wants_dq ? args.dq : Tensor{},
                               .dk = p.wants_dk ? args.dk : Tensor{},
                               .dv = p.wants_dv ? args.dv : Tensor{},
                               .rows = rows,
                               .scales = make_scales(p),
                               .looks_early = looks_early};
  return launch_bwd_repair(p.softcap > 0, p.dtype, num_multiprocessors, params, args.stream);
}

// The sum of `num_partial` numbers per head.
Status run_sinks(const Problem& p, const Args& args, std::int64_t num_partial,
                 const float* dsink_partial) {
  const BwdSinksParams sinks{.num_blocks = num_partial,
                             .dsink_partial = dsink_partial,
                             .dsinks = static_cast<float*>(args.dsinks)};
  return cuda::launch("sm90 backward sinks", bwd_sinks,
                      {.num_ctas = p.heads_q, .num_threads = kSinksThreads}, args.stream, sinks);
}

// Of bwd_short, for the sinks' gradients of each sequence.
std::size_t short_workspace_bytes(const Problem& p) {
  return p.wants_dsinks ? static_cast<std::size_t>(p.heads_q * p.batch) * sizeof(float) + kAlignment
                        : 0;
}

Status run_short(const Problem& p, const Args& args) {
  const auto start =
      (reinterpret_cast<std::uintptr_t>(args.workspace) + kAlignment - 1) / kAlignment * kAlignment;
  auto* const dsink_partial = p.wants_dsinks ? reinterpret_cast<float*>(start) : nullptr;
  FG_RETURN_IF_ERROR(launch_bwd_short(p, args, dsink_partial));
  return p.wants_dsinks ? run_sinks(p, args, p.batch, dsink_partial) : Status{};
}

template <class T>
Status run(const Problem& p, const Args& args) {
  cuda::DeviceProperties device;
  FG_RETURN_IF_ERROR(cuda::device_properties(p.device_id, &device));
  const BwdPlan plan = make_plan(p, device.num_multiprocessors);
  const Layout layout = make_layout(p, plan);
  const auto start =
      (reinterpret_cast<std::uintptr_t>(args.workspace) + kAlignment - 1) / kAlignment * kAlignment;
  const auto at = [start](std::size_t offset) { return reinterpret_cast<float*>(start + offset); };

  RowStatistics rows{};
  rows.num_blocks = layout.num_q_blocks;
  rows.neg_lse_log2 = at(layout.neg_lse_log2);
  rows.neg_delta = at(layout.neg_delta);
  rows.unreadable = reinterpret_cast<std::int32_t*>(start + layout.unreadable);
  rows.dsink_partial = p.wants_dsinks ? at(layout.dsink_partial) : nullptr;
  float* const dq_accumulator = plan.accumulates_dq(p) ? at(layout.dq_accumulator) : nullptr;
  const auto word = [start](std::size_t offset) {
    return reinterpret_cast<std::uint32_t*>(start + offset);
  };
  DqOrder order{};
  std::int64_t keys_per_turn = 1;
  if (plan.ordered()) {
    order = {p.wants_dq ? word(layout.counters) : nullptr, word(layout.ticket)};
    keys_per_turn = kBwdConfigs[plan.variant].block_n() * kBwdConfigs[plan.variant].cluster;
  } else if (plan.variant < 0) {
    order.ticket = word(layout.ticket);
  }
  UnitPipeline pipeline = plan.units;
  pipeline.head_blocks = static_cast<std::int32_t>(head_blocks(p));
  pipeline.counters = pipeline.lag > 0 ? word(layout.unit_counters) : nullptr;
  pipeline.lag = dq_accumulator != nullptr ? pipeline.lag : 0;
  pipeline.lead = all_wide(row_inputs(p, args)) ? pipeline.lead : 0;
  const std::int64_t q_tiles = layout.num_q_blocks * p.heads_q;

  // Of whole batch entries, which hold the units that are not prepared later.
  const std::int64_t prepare_ctas =
      pipeline.lead == 0 ? q_tiles
                         : std::min(q_tiles, (pipeline.lead + p.heads_kv - 1) / p.heads_kv *
                                                 pipeline.head_blocks * p.heads_q);
  BwdParams main{};
  KeyTileParams tiles{};
  if (plan.has_main(p)) {
    const BwdConfig& config = kBwdConfigs[plan.variant];
    tiles.tiles = reinterpret_cast<KeyTile*>(start + layout.tiles);
    tiles.form = {config.block_n(), config.cluster, config.ordered};
    tiles.num_tiles = static_cast<std::uint32_t>(num_clusters(p, plan, pipeline));
    if (p.packed) {
      tiles.packed = make_packed_pass(p, plan, device);
      tiles.packed_tiles = reinterpret_cast<PackedTile*>(start + layout.packed_tiles);
      tiles.num_packed_tiles = word(layout.num_packed_tiles);
    }
    main =
        make_main_params(p, args, plan, rows, dq_accumulator, pipeline, order, tiles.tiles, device);
  }
  const BwdPrepareParams prepare{.sequences = make_sequences(p, args),
                                 .heads_q = p.heads_q,
                                 .inputs = row_inputs(p, args),
                                 .rows = rows,
                                 .dq_accumulator = plan.ordered() ? nullptr : dq_accumulator,
                                 .block_floats = kBlockM * plan.padded_head_dim,
                                 .pipeline = pipeline,
                                 .num_units = num_units(p),
                                 .group = p.group(),
                                 .order = order,
                                 .keys_per_turn = keys_per_turn,
                                 .dq = p.wants_dq ? args.dq : Tensor{},
                                 .ragged = main.ragged_rows != 0,
                                 .head_dim = p.head_dim};
  if (tiles.packed_tiles != nullptr) {
    FG_RETURN_IF_ERROR(cuda::launch("sm90 backward order", bwd_packed_order,
                                    {.num_ctas = 1, .num_threads = kPackedOrderThreads},
                                    args.stream, main.sequences, tiles));
  }
  FG_RETURN_IF_ERROR(
      cuda::launch("sm90 backward prepare", bwd_prepare<T>,
                   {.num_ctas = key_tile_ctas(tiles) + prepare_ctas + zero_ctas(prepare),
                    .num_threads = kPrepareThreads,
                    .overlaps_predecessor = tiles.packed_tiles != nullptr},
                   args.stream, prepare, main, tiles));
  WidePlan wide;
  if (plan.variant < 0 && (p.wants_dk || p.wants_dv)) {
    const std::uintptr_t room = start + std::max(layout.bytes, kAlignment) - kAlignment;
    const std::uintptr_t end =
        reinterpret_cast<std::uintptr_t>(args.workspace) + args.workspace_bytes;
    wide = make_wide_plan(p, device.num_multiprocessors,
                          end > room ? static_cast<std::int64_t>(end - room) : 0);
    FG_RETURN_IF_ERROR(launch_wide(p, args, wide, rows, order.ticket,
                                   reinterpret_cast<std::uint8_t*>(room), device));
  } else if (plan.has_main(p)) {
    FG_RETURN_IF_ERROR(run_main(p, args, plan, main));
  }
  if (plan.separate_dq && !wide.keeps_ds) {
    FG_RETURN_IF_ERROR(run_query(p, args, plan, rows, device.l2_bytes));
  }
  if (plan.accumulates_dq(p) && !plan.ordered() && pipeline.lag == 0) {
    const BwdFinishParams finish{.sequences = make_sequences(p, args),
                                 .heads_kv = p.heads_kv,
                                 .group = p.group(),
                                 .head_dim = p.head_dim,
                                 .head_blocks = head_blocks(p),
                                 .dq_accumulator = dq_accumulator,
                                 .dq = args.dq,
                                 .scale = static_cast<float>(p.scale)};
    const cuda::LaunchShape shape{
        .num_ctas = q_tiles, .num_threads = kFinishThreads, .overlaps_predecessor = true};
    FG_RETURN_IF_ERROR(launch_finish<T>(plan.padded_head_dim, shape, args.stream, finish));
  }
  if (p.wants_dsinks) {
    FG_RETURN_IF_ERROR(run_sinks(p, args, layout.num_q_blocks, rows.dsink_partial));
  }
  // Main and finish let repair start only when prepare has ended, which then made all marks.
  const bool looks_early = !p.wants_dsinks && pipeline.lead == 0 && plan.has_main(p);
  return run_repair(p, args, rows, looks_early, device.num_multiprocessors);
}

}  // namespace

WorkspaceSize backward_workspace_size(const Problem& p) {
  if (serves_short(p)) {
    return {short_workspace_bytes(p), short_workspace_bytes(p)};
  }
  cuda::DeviceProperties device;
  const bool known = cuda::device_properties(p.device_id, &device).ok();
  const BwdPlan plan = make_plan(p, device.num_multiprocessors);
  const std::size_t bytes = make_layout(p, plan).bytes;
  if (plan.variant >= 0 || !known) {
    return {bytes, bytes};
  }
  return {bytes,
          bytes + static_cast<std::size_t>(preferred_wide_room(p, device.num_multiprocessors))};
}

Status launch_backward(const Problem& p, const Args& args) {
  if (serves_short(p)) {
    return run_short(p, args);
  }
  FG_RETURN_IF_ERROR(p.dtype == DType::kBF16 ? run<__nv_bfloat16>(p, args) : run<__half>(p, args));
  return serves_short_among_others(p) ? launch_bwd_short(p, args, nullptr) : Status{};
}

}  // namespace flashgrad::sm90
