// SPDX-License-Identifier: Apache-2.0
// The tiles of a problem in launch order, by the kernels' own code.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "cuda/sm90/bwd_section.hpp"
#include "cuda/sm90/fwd_schedule.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

// Neighbouring key blocks of `keys` that rotating tiles launch together, as in bwd_launch.cu.
std::int64_t kernel_round(const ScheduleProblem& problem, bool packed, std::int64_t keys,
                          std::int64_t max_round) {
  const auto batch = static_cast<std::int64_t>(packed ? problem.packed_q.size() : 1);
  const std::int64_t key_blocks = sm90::num_blocks(packed, batch, problem.seqlen_kv, keys);
  return packed ? key_blocks
                : sm90::rotation((problem.seqlen_q + sm90::kBlockM - 1) / sm90::kBlockM, key_blocks,
                                 max_round)
                      .round;
}

// `max_round`: of rotating tiles; negative: not an ordered kernel.
template <int kKeys, int kCluster>
std::vector<WorkTile> backward_tiles(const ScheduleProblem& problem, std::int64_t section,
                                     int max_round) {
  const bool packed = !problem.packed_q.empty();
  const std::vector<std::int32_t> cu_q = cumulative(problem.packed_q);
  const std::vector<std::int32_t> cu_kv = cumulative(problem.packed_kv);
  sm90::BwdParams params{};
  params.sequences.batch =
      packed ? static_cast<std::int64_t>(problem.packed_q.size()) : problem.batch;
  params.sequences.rows_q = packed ? cu_q.back() : problem.seqlen_q;
  params.sequences.rows_kv = packed ? cu_kv.back() : problem.seqlen_kv;
  params.sequences.mask = problem.mask;
  params.sequences.cu_seqlens_q = packed ? cu_q.data() : nullptr;
  params.sequences.cu_seqlens_kv = packed ? cu_kv.data() : nullptr;
  params.heads_kv = problem.heads_kv;
  params.group = problem.heads_q / problem.heads_kv;
  params.head_dim = problem.head_dim;
  params.head_dim_v = problem.width_v();
  params.num_kv_blocks = sm90::num_blocks(packed, packed ? params.sequences.batch : 1,
                                          params.sequences.rows_kv, std::int64_t{kKeys} * kCluster);
  params.num_units = (packed ? 1 : problem.batch) * problem.heads_kv;
  params.section = std::min(section, params.num_units);
  if (max_round > 0) {
    params.max_round = max_round;
    params.round = kernel_round(problem, packed, std::int64_t{kKeys} * kCluster, max_round);
  }
  const std::int64_t blocks_per_head =
      sm90::num_blocks(packed, params.sequences.batch, params.sequences.rows_q, sm90::kBlockM);
  std::vector<WorkTile> tiles;
  for (std::int64_t i = 0; i < params.num_units * params.num_kv_blocks; ++i) {
    const sm90::KeyTile tile = max_round < 0
                                   ? sm90::key_tile<kKeys, kCluster>(params, i * kCluster)
                                   : sm90::key_tile<kKeys, kCluster, true>(params, i * kCluster);
    if (tile.num_steps == 0) {
      continue;  // it only writes zeros
    }
    WorkTile work;
    work.sequence = tile.batch_index;
    std::int64_t seqlen_q = problem.seqlen_q;
    std::int64_t seqlen_kv = problem.seqlen_kv;
    if (packed) {
      work.sequence = std::upper_bound(cu_kv.begin(), cu_kv.end(), tile.kv_row) - cu_kv.begin() - 1;
      seqlen_q = problem.packed_q[static_cast<std::size_t>(work.sequence)];
      seqlen_kv = problem.packed_kv[static_cast<std::size_t>(work.sequence)];
    }
    work.unit_bytes = unit_bytes(problem, seqlen_q, seqlen_kv);
    work.head = tile.head_kv;
    work.unit = work.sequence * problem.heads_kv + tile.head_kv;
    work.first_row = tile.kv_row;
    work.begin = tile.m_begin;
    work.end = tile.m_end;
    work.slot = tile.head_kv * params.group * blocks_per_head + tile.q_block;
    work.steps = tile.num_steps;
    if (max_round >= 0) {
      sm90::StepWalk<true> walk(tile, static_cast<int>(params.group));
      sm90::Turn turn(tile);
      sm90::RowStatistics rows{};
      rows.num_blocks = blocks_per_head;
      for (int step = 0; step < tile.num_steps; ++step) {
        work.visits.push_back(walk.slot(rows, tile));
        work.turns.push_back(turn.value);
        walk.advance();
        turn.advance(walk, tile);
      }
    }
    tiles.push_back(std::move(work));
  }
  return tiles;
}

template <int kKeys>
std::vector<WorkTile> forward_tiles(const ScheduleProblem& problem, int rows, std::int64_t section,
                                    bool longest_first) {
  const bool packed = !problem.packed_q.empty();
  // A unit is a head of a batch entry, or of all sequences of a packed batch; work_item numbers the
  // tiles of a unit by ranks.
  struct Part {
    std::int64_t sequence;
    std::int64_t block;
    std::int64_t seqlen_q;
    std::int64_t seqlen_kv;
    sm90::FwdBlocks keys;
  };
  std::vector<Part> parts;
  const auto add_parts = [&](std::int64_t sequence, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
    const Band band = Band::of(problem.mask, seqlen_q, seqlen_kv);
    for (std::int64_t block = 0; block * rows < seqlen_q; ++block) {
      parts.push_back({sequence, block, seqlen_q, seqlen_kv,
                       sm90::key_blocks<kKeys>(band, block * rows, (block + 1) * rows)});
    }
  };
  if (packed) {
    for (std::size_t i = 0; i < problem.packed_q.size(); ++i) {
      add_parts(static_cast<std::int64_t>(i), problem.packed_q[i], problem.packed_kv[i]);
    }
  } else {
    add_parts(0, problem.seqlen_q, problem.seqlen_kv);
  }
  const auto steps = [](const Part& part) { return part.keys.end - part.keys.begin; };
  if (longest_first) {  // as fwd_prepare.cuh sorts a packed batch, and fwd_tile.cuh counts down
    std::stable_sort(parts.begin(), parts.end(),
                     [&](const Part& x, const Part& y) { return steps(x) > steps(y); });
  }
  const std::int64_t units = (packed ? 1 : problem.batch) * problem.heads_q;
  const sm90::FwdOrder order = sm90::make_order(units, section);
  const auto per_unit = static_cast<std::uint32_t>(parts.size());
  std::vector<WorkTile> tiles;
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(units) * per_unit; ++i) {
    const auto [unit, rank] = sm90::work_item(order, per_unit, i);
    const Part& part = parts[rank];
    if (steps(part) == 0) {
      continue;
    }
    WorkTile work;
    work.sequence = packed ? part.sequence : unit / problem.heads_q;
    work.head = unit % problem.heads_q;
    work.unit = work.sequence * problem.heads_q + work.head;
    work.first_row = part.block * rows;
    work.begin = part.keys.begin;
    work.end = part.keys.end;
    work.steps = steps(part);
    work.unit_bytes = unit_bytes(problem, part.seqlen_q, part.seqlen_kv);
    tiles.push_back(work);
  }
  return tiles;
}

bool hides_nothing(const ScheduleProblem& problem) {
  return problem.mask.left >= kUnboundedFrom && problem.mask.right >= kUnboundedFrom;
}

std::vector<WorkTile> backward_order(const ScheduleProblem& problem, const TileSize& tile,
                                     std::int64_t section, int max_round) {
  if (tile.cluster == 2 && tile.keys == 128) {
    return backward_tiles<128, 2>(problem, section, max_round);
  }
  if (tile.cluster == 1 && tile.keys == 128) {
    return backward_tiles<128, 1>(problem, section, max_round);
  }
  if (tile.cluster == 1 && tile.keys == 256) {
    return backward_tiles<256, 1>(problem, section, max_round);
  }
  throw std::invalid_argument("backward tiles have 128 keys, a cluster of two of them, or 256");
}

std::vector<WorkTile> forward_order(const ScheduleProblem& problem, const TileSize& tile,
                                    std::int64_t section, bool longest_first) {
  switch (tile.keys) {
    case 80:
      return forward_tiles<80>(problem, tile.rows, section, longest_first);
    case 96:
      return forward_tiles<96>(problem, tile.rows, section, longest_first);
    case 128:
      return forward_tiles<128>(problem, tile.rows, section, longest_first);
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
  if (policy.turns == Policy::Turns::kKernel) {
    return backward_order(problem, tile, section, hides_nothing(problem) ? tile.max_round : 0);
  }
  std::vector<WorkTile> tiles = backward_order(problem, tile, section, -1);
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

std::int64_t kernel_section(const ScheduleProblem& problem, const Policy& policy,
                            const TileSize& tile, int processors, double l2_bytes) {
  const bool packed = !problem.packed_q.empty();
  const double bytes = unit_bytes(problem, problem.seqlen_q, problem.seqlen_kv);
  if (!problem.backward) {
    const std::int64_t group = problem.heads_q / problem.heads_kv;
    return group * std::max<std::int64_t>(1, static_cast<std::int64_t>(l2_bytes / 2 / bytes));
  }
  std::int64_t at_least = 1;
  if (policy.turns == Policy::Turns::kKernel && hides_nothing(problem)) {
    const std::int64_t round = std::max<std::int64_t>(
        1, kernel_round(problem, packed, std::int64_t{tile.keys} * tile.cluster, tile.max_round));
    at_least = (processors + round - 1) / round;
  }
  return sm90::bwd_section((packed ? 1 : problem.batch) * problem.heads_kv,
                           static_cast<std::int64_t>(bytes), at_least,
                           static_cast<std::int64_t>(l2_bytes));
}

}  // namespace flashgrad::plan
