// SPDX-License-Identifier: Apache-2.0
// Implements bwd_launch.hpp: cuts the workspace, fills the parameters and launches prepare, main,
// sum and finish, chained by programmatic dependent launch.
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
#include "cuda/sm90/bwd_sum.hpp"
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
  std::size_t dk_parts = 0;
  std::size_t dv_parts = 0;
  std::size_t bytes = 0;  // alignment of the start included
};

constexpr std::size_t kAlignment = 256;

std::int64_t num_key_rows(const Problem& p) { return (p.packed ? 1 : p.batch) * p.seqlen_kv; }

// `p` as the main kernel sees it (divide_heads).
Layout make_layout(const Problem& p, const BwdPlan& plan, std::int64_t parts) {
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
  if (parts > 1) {
    const std::int64_t rows = num_key_rows(p) * p.heads_kv;
    layout.dk_parts = p.wants_dk ? take(rows * p.head_dim * 4) : 0;
    layout.dv_parts = p.wants_dv ? take(rows * p.head_dim_v * 4) : 0;
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

// What the launches of a call are told alike.
struct Call {
  const Problem& p;
  const Args& args;
  cuda::DeviceProperties device;
  std::int64_t parts = 1;  // of each key head
  Problem divided;         // as the main kernel sees it (divide_heads)
  BwdPlan plan;            // of `divided`, as all below
  Layout layout;
  std::uintptr_t start = 0;
  RowStatistics rows{};
  float* dq_accumulator = nullptr;  // null: not wanted
  DqOrder order{};
  UnitPipeline pipeline;

  [[nodiscard]] float* floats(std::size_t offset) const {
    return reinterpret_cast<float*>(start + offset);
  }
  [[nodiscard]] std::uint32_t* words(std::size_t offset) const {
    return reinterpret_cast<std::uint32_t*>(start + offset);
  }
  [[nodiscard]] std::int64_t num_q_tiles() const { return layout.num_q_blocks * p.heads_q; }
};

// Plans the call and cuts its workspace. Key heads are divided only where there is room.
Status make_call(Call& c) {
  const Problem& p = c.p;
  FG_RETURN_IF_ERROR(cuda::device_properties(p.device_id, &c.device));
  const auto plan = [&](std::int64_t parts) {
    c.parts = parts;
    c.divided = divide_heads(p, parts);
    c.plan = make_plan(c.divided, c.device.num_multiprocessors);
    c.layout = make_layout(c.divided, c.plan, parts);
  };
  plan(head_parts(p, c.device.num_multiprocessors));
  if (c.parts > 1 && c.layout.bytes > c.args.workspace_bytes) {
    plan(1);
  }
  const Layout& layout = c.layout;
  c.start = (reinterpret_cast<std::uintptr_t>(c.args.workspace) + kAlignment - 1) / kAlignment *
            kAlignment;
  c.rows.num_blocks = layout.num_q_blocks;
  c.rows.neg_lse_log2 = c.floats(layout.neg_lse_log2);
  c.rows.neg_delta = c.floats(layout.neg_delta);
  c.rows.unreadable = reinterpret_cast<std::int32_t*>(c.start + layout.unreadable);
  c.rows.dsink_partial = p.wants_dsinks ? c.floats(layout.dsink_partial) : nullptr;
  c.dq_accumulator = c.plan.accumulates_dq(p) ? c.floats(layout.dq_accumulator) : nullptr;
  if (c.plan.ordered()) {
    c.order = {p.wants_dq ? c.words(layout.counters) : nullptr, c.words(layout.ticket)};
  } else if (c.plan.variant < 0) {
    c.order.ticket = c.words(layout.ticket);
  }
  c.pipeline = c.plan.units;
  c.pipeline.head_blocks = static_cast<std::int32_t>(head_blocks(p));
  c.pipeline.counters = c.pipeline.lag > 0 ? c.words(layout.unit_counters) : nullptr;
  c.pipeline.lag = c.dq_accumulator != nullptr ? c.pipeline.lag : 0;
  c.pipeline.lead = all_wide(row_inputs(p, c.args)) ? c.pipeline.lead : 0;
  return {};
}

// dk or dv of the parts of all key heads, f32.
Tensor parts_tensor(const Call& c, std::size_t offset, std::int64_t columns) {
  const std::int64_t row = c.divided.heads_kv * columns;
  return {.data = c.floats(offset),
          .dtype = DType::kF32,
          .batch_stride = c.p.packed ? 0 : c.p.seqlen_kv * row,
          .row_stride = row,
          .head_stride = columns};
}

BwdParams make_main_params(const Call& c) {
  const Problem& p = c.divided;
  const BwdPlan& plan = c.plan;
  const int cluster = kBwdConfigs[plan.variant].cluster;
  BwdParams params = key_params(p, c.args, c.rows);
  if (c.parts > 1) {
    params.dk = p.wants_dk ? parts_tensor(c, c.layout.dk_parts, p.head_dim) : Tensor{};
    params.dv = p.wants_dv ? parts_tensor(c, c.layout.dv_parts, p.head_dim_v) : Tensor{};
  }
  params.num_kv_blocks = key_tiles_per_unit(p, plan);
  params.num_units = num_units(p);
  params.num_ctas = num_clusters(p, plan, c.pipeline) * cluster;
  params.inputs = row_inputs(p, c.args);
  params.dq_accumulator = c.dq_accumulator;
  params.pipeline = c.pipeline;
  params.dq = p.wants_dq ? c.args.dq : Tensor{};
  params.tiles = reinterpret_cast<KeyTile*>(c.start + c.layout.tiles);
  params.ragged_rows = p.packed && cluster == 1 ? cuda::kRaggedRows : 0;
  if (plan.ordered()) {
    params.order = c.order;
    params.max_round = max_round(p, cluster, c.device);
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
  const auto slots = static_cast<std::uint32_t>(c.device.num_multiprocessors / cluster);
  const auto of_unit =
      static_cast<std::uint32_t>(params.round > 1 ? params.round : params.num_kv_blocks);
  const auto in_l2 = rows_in_l2(bwd_l2_share(c.device.l2_bytes), bytes_per_query(p)) /
                     static_cast<std::uint32_t>(std::max<std::int64_t>(p.seqlen_q, 1));
  params.section = units_together(num_units, in_l2, units_that_fill(slots, of_unit));
  if (params.max_round > 0) {
    params.section =
        units_at_a_time(num_units, slots, of_unit, static_cast<std::uint32_t>(params.section));
  }
  return params;
}

// How its tiles come to be described.
KeyTileParams make_tile_params(const Call& c) {
  const BwdConfig& config = kBwdConfigs[c.plan.variant];
  KeyTileParams tiles{};
  tiles.tiles = reinterpret_cast<KeyTile*>(c.start + c.layout.tiles);
  tiles.form = {config.block_n(), config.cluster, config.ordered,
                static_cast<std::int32_t>(c.parts)};
  tiles.num_tiles = static_cast<std::uint32_t>(num_clusters(c.divided, c.plan, c.pipeline));
  if (c.p.packed) {
    tiles.packed = make_packed_pass(c.divided, c.plan, c.device);
    tiles.packed_tiles = reinterpret_cast<PackedTile*>(c.start + c.layout.packed_tiles);
    tiles.num_packed_tiles = c.words(c.layout.num_packed_tiles);
  }
  return tiles;
}

// `main` and `tiles` are empty where bwd.cuh does not run.
template <class T>
Status run_prepare(const Call& c, const BwdParams& main, const KeyTileParams& tiles) {
  const Problem& p = c.divided;
  const UnitPipeline& pipeline = c.pipeline;
  const bool clears_dq = p.wants_dq && !c.plan.separate_dq && (c.plan.ordered() || c.plan.whole());
  const BwdPrepareParams prepare{.sequences = make_sequences(p, c.args),
                                 .heads_q = p.heads_q,
                                 .inputs = row_inputs(p, c.args),
                                 .rows = c.rows,
                                 .dq_accumulator = c.plan.ordered() ? nullptr : c.dq_accumulator,
                                 .block_floats = kBlockM * c.plan.padded_head_dim,
                                 .pipeline = pipeline,
                                 .num_units = num_units(p),
                                 .group = p.group(),
                                 .order = c.order,
                                 .keys_per_turn = c.plan.ordered() ? keys_per_tile(c.plan) : 1,
                                 .dq = clears_dq ? c.args.dq : Tensor{},
                                 .ragged = main.ragged_rows != 0,
                                 .head_dim = p.head_dim};
  if (tiles.packed_tiles != nullptr) {
    FG_RETURN_IF_ERROR(cuda::launch("sm90 backward order", bwd_packed_order,
                                    {.num_ctas = 1, .num_threads = kPackedOrderThreads},
                                    c.args.stream, main.sequences, tiles));
  }
  // Of whole batch entries, which hold the units that are not prepared later.
  const std::int64_t row_ctas =
      pipeline.lead == 0 ? c.num_q_tiles()
                         : std::min(c.num_q_tiles(), (pipeline.lead + p.heads_kv - 1) / p.heads_kv *
                                                         pipeline.head_blocks * p.heads_q);
  return cuda::launch("sm90 backward prepare", bwd_prepare<T>,
                      {.num_ctas = key_tile_ctas(tiles) + row_ctas + zero_ctas(prepare),
                       .num_threads = kPrepareThreads,
                       .overlaps_predecessor = tiles.packed_tiles != nullptr},
                      c.args.stream, prepare, main, tiles);
}

Status run_main(const Call& c, BwdParams params) {
  const BwdConfig& config = kBwdConfigs[c.plan.variant];
  const cuda::MapKind kind = config.cluster > 1        ? cuda::MapKind::k4d
                             : params.ragged_rows != 0 ? cuda::MapKind::kRagged
                                                       : cuda::MapKind::k5d;
  BwdMaps maps{};
  FG_RETURN_IF_ERROR(
      make_maps(c.p, c.args, kBlockM, config.block_n(), kind, &maps, &params.mapped));
  return launch_bwd_main(c.plan.variant, c.p.dtype, maps, params, c.args.stream);
}

// dk and dv of the key heads whose parts `main` has made.
Status run_sum(const Call& c, const BwdParams& main) {
  const Problem& p = c.p;
  const auto gradient = [](const Tensor& parts, const Tensor& sum, std::int64_t columns) {
    return BwdSumParams::Gradient{static_cast<const float*>(parts.data), parts ? sum : Tensor{},
                                  static_cast<std::int32_t>(columns)};
  };
  const BwdSumParams params{.dk = gradient(main.dk, c.args.dk, p.head_dim),
                            .dv = gradient(main.dv, c.args.dv, p.head_dim_v),
                            .parts = static_cast<std::int32_t>(c.parts),
                            .heads = static_cast<std::uint32_t>(p.heads_kv),
                            .rows = static_cast<std::uint32_t>(p.seqlen_kv),
                            .num_rows = num_key_rows(p)};
  return launch_bwd_sum(p.dtype, params, c.args.stream);
}

// dk and dv, and dq or what it is made of; *keeps_ds: above head dim 128, dq from dS.
Status run_keys(const Call& c, const BwdParams& main, bool* keeps_ds) {
  const Problem& p = c.p;
  if (c.plan.has_main(p)) {
    FG_RETURN_IF_ERROR(run_main(c, main));
    return c.parts > 1 ? run_sum(c, main) : Status{};
  }
  if (c.plan.variant >= 0 || !(p.wants_dk || p.wants_dv)) {
    return {};
  }
  const std::uintptr_t room = c.start + std::max(c.layout.bytes, kAlignment) - kAlignment;
  const std::uintptr_t end =
      reinterpret_cast<std::uintptr_t>(c.args.workspace) + c.args.workspace_bytes;
  const WidePlan wide = make_wide_plan(p, c.device.num_multiprocessors,
                                       end > room ? static_cast<std::int64_t>(end - room) : 0);
  *keeps_ds = wide.keeps_ds;
  return launch_wide(p, c.args, wide, c.rows, c.order.ticket, reinterpret_cast<std::uint8_t*>(room),
                     c.device);
}

Status run_query(const Call& c) {
  const Problem& p = c.p;
  BwdQueryParams params = query_params(p, c.args, c.rows, 128);
  // Heads whose keys and values stay in the L2 together.
  const std::int64_t key_head_bytes = p.seqlen_kv * 2 * (p.head_dim + p.head_dim_v);
  params.section =
      p.group() *
      std::max<std::int64_t>(1, c.device.l2_bytes / 2 / std::max<std::int64_t>(1, key_head_bytes));
  BwdMaps maps{};
  FG_RETURN_IF_ERROR(make_maps(p, c.args, kBlockM, 64, cuda::MapKind::k4d, &maps, &params.mapped));
  return launch_bwd_query(c.plan.padded_head_dim, p.softcap > 0, p.dtype, maps, params,
                          c.args.stream);
}

// dq from the sums that the main kernel has left.
template <class T>
Status run_finish(const Call& c) {
  const Problem& p = c.divided;
  const BwdFinishParams finish{.sequences = make_sequences(p, c.args),
                               .heads_kv = p.heads_kv,
                               .group = p.group(),
                               .head_dim = p.head_dim,
                               .head_blocks = head_blocks(p),
                               .dq_accumulator = c.dq_accumulator,
                               .dq = c.args.dq,
                               .scale = static_cast<float>(p.scale)};
  const cuda::LaunchShape shape{
      .num_ctas = c.num_q_tiles(), .num_threads = kFinishThreads, .overlaps_predecessor = true};
  return launch_finish<T>(c.plan.padded_head_dim, shape, c.args.stream, finish);
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

Status run_repair(const Call& c) {
  const Problem& p = c.p;
  const Args& args = c.args;
  // Without a band every row sees every key of its sequence: there is nothing to keep apart.
  if (hides_nothing(p.mask) || !(p.wants_dq || p.wants_dk || p.wants_dv)) {
    return {};
  }
  // Main and finish let repair start only when prepare has ended, which then made all marks.
  const bool looks_early = !p.wants_dsinks && c.pipeline.lead == 0 && c.plan.has_main(p);
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
                               .rows = c.rows,
                               .scales = make_scales(p),
                               .looks_early = looks_early};
  return launch_bwd_repair(p.softcap > 0, p.dtype, c.device.num_multiprocessors, params,
                           args.stream);
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
  Call c{.p = p, .args = args};
  FG_RETURN_IF_ERROR(make_call(c));
  BwdParams main{};
  KeyTileParams tiles{};
  if (c.plan.has_main(p)) {
    main = make_main_params(c);
    tiles = make_tile_params(c);
  }
  FG_RETURN_IF_ERROR(run_prepare<T>(c, main, tiles));
  bool keeps_ds = false;
  FG_RETURN_IF_ERROR(run_keys(c, main, &keeps_ds));
  if (c.plan.separate_dq && !keeps_ds) {
    FG_RETURN_IF_ERROR(run_query(c));
  }
  if (c.plan.accumulates_dq(p) && !c.plan.ordered() && c.pipeline.lag == 0) {
    FG_RETURN_IF_ERROR(run_finish<T>(c));
  }
  if (p.wants_dsinks) {
    FG_RETURN_IF_ERROR(run_sinks(p, args, c.layout.num_q_blocks, c.rows.dsink_partial));
  }
  return run_repair(c);
}

}  // namespace

WorkspaceSize backward_workspace_size(const Problem& p) {
  if (serves_short(p)) {
    return {short_workspace_bytes(p), short_workspace_bytes(p)};
  }
  cuda::DeviceProperties device;
  const bool known = cuda::device_properties(p.device_id, &device).ok();
  const auto bytes_of = [&](const Problem& problem, std::int64_t parts) {
    const Problem divided = divide_heads(problem, parts);
    const BwdPlan plan = make_plan(divided, device.num_multiprocessors);
    return make_layout(divided, plan, parts).bytes;
  };
  // Who asks may not have told the address of dq, at which it may not be possible to write it
  // whole.
  Problem anywhere = p;
  anywhere.unaligned_dq = true;
  const std::size_t minimum = std::max(bytes_of(p, 1), bytes_of(anywhere, 1));
  if (!known) {
    return {minimum, minimum};
  }
  if (find_variant(p, p.deterministic) >= 0) {
    return {minimum, std::max(minimum, bytes_of(p, head_parts(p, device.num_multiprocessors)))};
  }
  return {minimum,
          minimum + static_cast<std::size_t>(preferred_wide_room(p, device.num_multiprocessors))};
}

Status launch_backward(const Problem& p, const Args& args) {
  if (serves_short(p)) {
    return run_short(p, args);
  }
  FG_RETURN_IF_ERROR(p.dtype == DType::kBF16 ? run<__nv_bfloat16>(p, args) : run<__half>(p, args));
  return serves_short_among_others(p) ? launch_bwd_short(p, args, nullptr) : Status{};
}

}  // namespace flashgrad::sm90
