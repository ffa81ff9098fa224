// SPDX-License-Identifier: Apache-2.0
// The tiles of a problem in launch order, by the kernels' own code.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "cuda/sm90/fwd_schedule.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/unit_pipeline.hpp"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

// Neighbouring key blocks of `keys` that rotating tiles launch together, as in bwd_launch.cu.
std::int64_t kernel_round(const ScheduleProblem& problem, std::int64_t keys,
                          std::int64_t max_round) {
  return sm90::rotation((problem.seqlen_q + sm90::kBlockM - 1) / sm90::kBlockM,
                        (problem.seqlen_kv + keys - 1) / keys, max_round)
      .round;
}

// Rows of a head, queries (backward) or keys, whose bytes fill the share of the L2 that the kernels
// give to a section.
std::uint32_t rows_in_l2(const ScheduleProblem& problem, double l2_bytes) {
  const auto bytes = static_cast<std::int64_t>(l2_bytes);
  return sm90::rows_in_l2(problem.backward ? sm90::bwd_l2_share(bytes) : sm90::fwd_l2_share(bytes),
                          static_cast<std::int64_t>(unit_bytes(problem, 1, 1)));
}

// The sequences of a problem as the kernels see them, and the offsets that they point to.
struct HostSequences {
  std::vector<std::int32_t> cu_q;
  std::vector<std::int32_t> cu_kv;
  sm90::Sequences sequences{};

  explicit HostSequences(const ScheduleProblem& problem)
      : cu_q(cumulative(problem.packed_q)), cu_kv(cumulative(problem.packed_kv)) {
    const bool packed = !problem.packed_q.empty();
    sequences.batch = packed ? static_cast<std::int64_t>(problem.packed_q.size()) : problem.batch;
    sequences.rows_q = packed ? cu_q.back() : problem.seqlen_q;
    sequences.rows_kv = packed ? cu_kv.back() : problem.seqlen_kv;
    sequences.mask = problem.mask;
    sequences.cu_seqlens_q = packed ? cu_q.data() : nullptr;
    sequences.cu_seqlens_kv = packed ? cu_kv.data() : nullptr;
  }
};

// The backward's tiles for one launch of its main kernel.
class BackwardTiles {
 public:
  // `max_round`: of rotating tiles; negative: not an ordered kernel.
  BackwardTiles(const ScheduleProblem& problem, const TileSize& tile, std::int64_t section,
                int max_round)
      : problem_(problem),
        host_(problem),
        form_{tile.keys, tile.cluster, max_round >= 0},
        keys_(std::int64_t{tile.keys} * tile.cluster) {
    if (tile.keys != 128 && (tile.keys != 256 || tile.cluster != 1)) {
      throw std::invalid_argument("backward tiles have 128 keys, a cluster of two of them, or 256");
    }
    params_.sequences = host_.sequences;
    params_.heads_kv = problem.heads_kv;
    params_.group = problem.heads_q / problem.heads_kv;
    params_.head_dim = problem.head_dim;
    params_.head_dim_v = problem.width_v();
    params_.num_kv_blocks = sm90::num_blocks(packed(), packed() ? params_.sequences.batch : 1,
                                             params_.sequences.rows_kv, keys_);
    params_.num_units = (packed() ? 1 : problem.batch) * problem.heads_kv;
    params_.section = std::min(section, params_.num_units);
    if (max_round > 0) {
      params_.max_round = max_round;
      params_.round = kernel_round(problem, keys_, max_round);
    }
  }

  // In the order of section_order.hpp, or for `slots` SMs or clusters of packed_order.hpp.
  std::vector<WorkTile> in_sections(int slots) {
    if (packed() && slots > 0) {
      for (const sm90::PackedTile& place : sm90::packed_order({.of_keys = true,
                                           .last_block_first = false,
                                           .tile_rows = static_cast<std::uint32_t>(keys_),
                                           .heads = static_cast<std::uint32_t>(problem_.heads_kv),
                                           .heads_per_key = 1,
                                           .slots = static_cast<std::uint32_t>(slots),
                                           .l2_rows = rows_in_l2(problem_, problem_.l2_bytes),
                                           .class_shift = sm90::class_shift(*std::max_element(
                                               problem_.packed_q.begin(), problem_.packed_q.end())),
                                           .max_round = params_.max_round},
                                                              params_.sequences)) {
        add(place);
      }
    } else {
      for (std::int64_t i = 0; i < params_.num_units * params_.num_kv_blocks; ++i) {
        add(sm90::tile_place(params_, keys_, static_cast<std::uint32_t>(i)));
      }
    }
    return std::move(tiles_);
  }

  // As describe() in bwd_prepare.cuh. Prerequisites as in bwd_units.cuh.
  std::vector<WorkTile> served(const ServedUnits& units) {
    const auto unit_or_none = [&](std::int64_t unit) {
      return unit >= 0 && unit < params_.num_units ? unit : -1;
    };
    const auto rows = static_cast<double>(params_.group * problem_.seqlen_q);  // of a unit
    const auto d = static_cast<double>(problem_.head_dim);
    const auto dv = static_cast<double>(problem_.width_v());
    const std::int64_t clusters =
        params_.num_units * (params_.num_kv_blocks + 1) + units.lag * units.last_parts;
    for (std::int64_t i = 0; i < clusters; ++i) {
      const sm90::ServedOrder order(i, params_.section, params_.num_kv_blocks, params_.num_units,
                                    units.last_parts);
      if (!order.serves()) {
        const std::size_t before = tiles_.size();
        add(sm90::served_place(params_, order));
        if (tiles_.size() > before) {
          WorkTile& tile = tiles_.back();
          tile.awaits_prepared = tile.unit >= units.lead ? tile.unit : -1;
          tile.awaits_finished = unit_or_none(tile.unit - units.slots);
          tile.unit_bytes = rows * 2 * (d + dv);  // the sums are in their slot
        }
        continue;
      }
      const bool beyond = order.unit >= params_.num_units;
      WorkTile work;
      work.serves = true;
      work.unit = order.unit;
      work.prepares = beyond ? -1 : unit_or_none(order.unit + units.lead);
      work.finishes = unit_or_none(order.unit - units.lag);
      const double prepared = work.prepares >= 0 ? rows * 4 * dv : 0;  // out and dout
      double finished = 0;
      if (work.finishes >= 0) {
        const bool clears = work.finishes + units.slots < params_.num_units;
        finished = units.slot_bytes * (clears ? 2 : 1) + rows * 2 * d;
      }
      work.served_bytes = prepared + finished / static_cast<double>(beyond ? units.last_parts : 1);
      tiles_.push_back(std::move(work));
    }
    return std::move(tiles_);
  }

 private:
  [[nodiscard]] bool packed() const { return !problem_.packed_q.empty(); }

  void add(const sm90::PackedTile& place) {
    const sm90::KeyTile tile = sm90::key_tile_at(params_, form_, place, 0);
    if (tile.num_steps == 0) {
      return;  // it only writes zeros
    }
    WorkTile work;
    work.sequence = tile.batch_index;
    std::int64_t seqlen_q = problem_.seqlen_q;
    std::int64_t seqlen_kv = problem_.seqlen_kv;
    if (packed()) {
      const std::vector<std::int32_t>& cu_kv = host_.cu_kv;
      work.sequence = std::upper_bound(cu_kv.begin(), cu_kv.end(), tile.kv_row) - cu_kv.begin() - 1;
      seqlen_q = problem_.packed_q[static_cast<std::size_t>(work.sequence)];
      seqlen_kv = problem_.packed_kv[static_cast<std::size_t>(work.sequence)];
    }
    const std::int64_t blocks_per_head = sm90::num_blocks(packed(), params_.sequences.batch,
                                                          params_.sequences.rows_q, sm90::kBlockM);
    work.unit_bytes = unit_bytes(problem_, seqlen_q, seqlen_kv);
    work.head = tile.head_kv;
    work.unit = work.sequence * problem_.heads_kv + tile.head_kv;
    work.first_row = tile.kv_row;
    work.begin = tile.m_begin;
    work.end = tile.m_end;
    work.slot = tile.head_kv * params_.group * blocks_per_head + tile.q_block;
    work.steps = tile.num_steps;
    if (form_.ordered) {
      sm90::StepWalk<true> walk(tile, static_cast<int>(params_.group));
      sm90::Turn turn(tile);
      sm90::RowStatistics rows{};
      rows.num_blocks = blocks_per_head;
      for (int step = 0; step < tile.num_steps; ++step) {
        work.visits.push_back(walk.slot(rows, tile));
        work.turns.push_back(turn.value);
        if (walk.advance()) {
          turn.advance(walk, tile);
        }
      }
    }
    tiles_.push_back(std::move(work));
  }

  const ScheduleProblem& problem_;
  HostSequences host_;
  sm90::KeyTileForm form_;
  std::int64_t keys_;  // of a tile, or of a cluster's
  sm90::BwdParams params_{};
  std::vector<WorkTile> tiles_;
};

template <int kKeys>
std::vector<WorkTile> forward_tiles(const ScheduleProblem& problem, int rows, std::int64_t section,
                                    bool longest_first, int slots) {
  const bool packed = !problem.packed_q.empty();
  const bool last_first = longest_first && problem.mask.right < kUnboundedFrom;
  const bool incomplete_first =
      longest_first && problem.incomplete_first && sm90::sees_more_later(problem.mask);
  const HostSequences host(problem);
  // Of the sequence, the block of queries and the head.
  std::vector<sm90::PackedTile> order;
  if (packed && longest_first) {
    order = sm90::packed_order(
        {.of_keys = false,
         .last_block_first = last_first,
         .tile_rows = static_cast<std::uint32_t>(rows),
         .heads = static_cast<std::uint32_t>(problem.heads_q),
         .heads_per_key = static_cast<std::uint32_t>(problem.heads_q / problem.heads_kv),
         .slots = static_cast<std::uint32_t>(slots),
         .l2_rows = rows_in_l2(problem, problem.l2_bytes),
         .class_shift = sm90::class_shift(
             *std::max_element(problem.packed_kv.begin(), problem.packed_kv.end())),
         .max_round = 0},
        host.sequences);
  } else if (packed) {
    for (std::int32_t head = 0; head < problem.heads_q; ++head) {
      for (std::size_t i = 0; i < problem.packed_q.size(); ++i) {
        for (std::int32_t block = 0; block * rows < problem.packed_q[i]; ++block) {
          order.push_back({static_cast<std::int32_t>(i) + 1, block, head});
        }
      }
    }
  } else {
    const std::int64_t units = problem.batch * problem.heads_q;
    const auto per_unit = static_cast<std::uint32_t>((problem.seqlen_q + rows - 1) / rows);
    const sm90::FwdOrder sections = sm90::make_order(units, section);
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(units) * per_unit; ++i) {
      const auto [unit, rank] = sm90::work_item(sections, per_unit, i);
      order.push_back({static_cast<std::int32_t>(unit / problem.heads_q),
                       static_cast<std::int32_t>(last_first ? per_unit - 1 - rank : rank),
                       static_cast<std::int32_t>(unit % problem.heads_q)});
    }
  }
  std::vector<WorkTile> tiles;
  for (const sm90::PackedTile& at : order) {
    const Band band = sm90::sequence_span(host.sequences, at.span).band;
    const auto [first_row, end_row] =
        sm90::tile_rows(band.seqlen_q, rows, at.block, incomplete_first);
    const sm90::FwdBlocks keys = sm90::key_blocks<kKeys>(band, first_row, end_row);
    if (keys.begin == keys.end) {
      continue;
    }
    WorkTile work;
    work.sequence = packed ? at.span - 1 : at.span;
    work.head = at.head;
    work.unit = work.sequence * problem.heads_q + work.head;
    work.first_row = first_row;
    work.begin = keys.begin;
    work.end = keys.end;
    work.steps = keys.end - keys.begin;
    work.unit_bytes = unit_bytes(problem, band.seqlen_q, band.seqlen_kv);
    tiles.push_back(work);
  }
  return tiles;
}

bool hides_nothing(const ScheduleProblem& problem) {
  return problem.mask.left >= kUnboundedFrom && problem.mask.right >= kUnboundedFrom;
}

std::vector<WorkTile> forward_order(const ScheduleProblem& problem, const TileSize& tile,
                                    std::int64_t section, bool longest_first) {
  switch (tile.keys) {
    case 80:
      return forward_tiles<80>(problem, tile.rows, section, longest_first, tile.slots);
    case 96:
      return forward_tiles<96>(problem, tile.rows, section, longest_first, tile.slots);
    case 128:
      return forward_tiles<128>(problem, tile.rows, section, longest_first, tile.slots);
    default:
      throw std::invalid_argument("forward steps have 80, 96 or 128 keys");
  }
}

// Sections one by one, in each the tiles by their steps. A section of a packed batch has all
// sequences of its heads.
void sort_in_sections(std::vector<WorkTile>& tiles, bool packed, std::int64_t section,
                      bool longest_first) {
  const auto section_of = [=](const WorkTile& tile) {
    return (packed ? tile.head : tile.unit) / section;
  };
  std::stable_sort(tiles.begin(), tiles.end(), [&](const WorkTile& x, const WorkTile& y) {
    if (section_of(x) != section_of(y)) {
      return section_of(x) < section_of(y);
    }
    return longest_first ? x.steps > y.steps : x.steps < y.steps;
  });
}

}  // namespace

Problem ScheduleProblem::to_problem() const {
  Problem p;
  p.packed = !packed_q.empty();
  p.batch = p.packed ? static_cast<std::int64_t>(packed_q.size()) : batch;
  p.seqlen_q = seqlen_q;
  p.seqlen_kv = seqlen_kv;
  p.max_seqlen_q = p.packed ? *std::max_element(packed_q.begin(), packed_q.end()) : seqlen_q;
  p.max_seqlen_kv = p.packed ? *std::max_element(packed_kv.begin(), packed_kv.end()) : seqlen_kv;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.head_dim = head_dim;
  p.head_dim_v = width_v();
  p.wants_dq = p.wants_dk = p.wants_dv = true;
  p.mask = mask;
  return p;
}

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

std::vector<WorkTile> launch_order(const ScheduleProblem& problem, const Policy& policy,
                                   const TileSize& tile) {
  const std::int64_t section = policy.swizzled ? problem.section : 1;
  const bool packed = !problem.packed_q.empty();
  if (!problem.backward) {
    return forward_order(problem, tile, section, policy.launch == Policy::Launch::kLongestFirst);
  }
  if (policy.serves) {
    return served_order(problem, tile);
  }
  // The kernels' own order of a packed batch; the others work through its heads.
  const bool natural = policy.launch == Policy::Launch::kNatural && policy.swizzled;
  const int slots = natural ? tile.slots : 0;
  if (policy.turns == Policy::Turns::kKernel) {
    return BackwardTiles(problem, tile, section, hides_nothing(problem) ? tile.max_round : 0)
        .in_sections(slots);
  }
  std::vector<WorkTile> tiles = BackwardTiles(problem, tile, section, -1).in_sections(slots);
  switch (policy.launch) {
    case Policy::Launch::kNatural:
      break;
    case Policy::Launch::kLongestFirst:
      sort_in_sections(tiles, packed, section, true);
      break;
    case Policy::Launch::kShortestFirst:
      sort_in_sections(tiles, packed, section, false);
      break;
  }
  return tiles;
}

std::vector<WorkTile> served_order(const ScheduleProblem& problem, const TileSize& tile) {
  const ServedUnits units = served_units(problem, tile);
  if (!units.why_not.empty()) {
    throw std::invalid_argument("no units are served: " + units.why_not);
  }
  return BackwardTiles(problem, tile, units.section, -1).served(units);
}

std::int64_t kernel_section(const ScheduleProblem& problem, const Policy& policy,
                            const TileSize& tile, int processors, double l2_bytes) {
  if (policy.serves) {
    return planned_section(problem, tile);
  }
  const Band band = Band::of(problem.mask, problem.seqlen_q, problem.seqlen_kv);
  const std::int64_t keys = std::int64_t{tile.keys} * tile.cluster;
  const std::uint32_t in_use =
      problem.backward ? static_cast<std::uint32_t>(std::max<std::int64_t>(problem.seqlen_q, 1))
                       : sm90::keys_in_use(band, problem.seqlen_kv, tile.rows);
  const std::uint32_t in_l2 = rows_in_l2(problem, l2_bytes) / in_use;
  if (!problem.backward) {
    return problem.heads_q / problem.heads_kv * std::max<std::int64_t>(1, in_l2);
  }
  const std::int64_t batch = problem.packed_q.empty() ? problem.batch : 1;
  const bool rotates = policy.turns == Policy::Turns::kKernel && hides_nothing(problem);
  const std::int64_t round = rotates ? kernel_round(problem, keys, tile.max_round) : 1;
  const std::int64_t tiles = round > 1 ? round : (problem.seqlen_kv + keys - 1) / keys;
  const auto units = static_cast<std::uint32_t>(batch * problem.heads_kv);
  const auto slots = static_cast<std::uint32_t>(processors);
  const auto of_unit = static_cast<std::uint32_t>(tiles);
  const std::uint32_t section =
      sm90::units_together(units, in_l2, sm90::units_that_fill(slots, of_unit));
  return rotates ? sm90::units_at_a_time(units, slots, of_unit, section) : section;
}

}  // namespace flashgrad::plan
