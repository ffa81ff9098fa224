// SPDX-License-Identifier: Apache-2.0
// The tiles of the backward above head dim 128, by the kernels' own code.
#include <algorithm>

#include "cuda/sm90/wide_plan.hpp"
#include "cuda/sm90/wide_tile.cuh"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

template <int kKeyCluster, int kQueryCluster>
std::vector<WidePassTiles> tiles_of_passes(const ScheduleProblem& problem, int num_multiprocessors,
                                           std::int64_t l2_bytes) {
  const Problem p = problem.to_problem();
  const std::vector<std::int32_t> cu_q = cumulative(problem.packed_q);
  const std::vector<std::int32_t> cu_kv = cumulative(problem.packed_kv);
  sm90::BwdParams keys{};
  keys.sequences.batch = p.batch;
  keys.sequences.rows_q = p.seqlen_q;
  keys.sequences.rows_kv = p.seqlen_kv;
  keys.sequences.mask = p.mask;
  keys.sequences.cu_seqlens_q = p.packed ? cu_q.data() : nullptr;
  keys.sequences.cu_seqlens_kv = p.packed ? cu_kv.data() : nullptr;
  keys.heads_kv = p.heads_kv;
  keys.group = p.group();
  const std::int64_t spans = p.packed ? p.batch : 1;
  sm90::BwdQueryParams queries{};
  queries.sequences = keys.sequences;
  queries.heads_q = p.heads_q;
  queries.group = p.group();
  queries.num_q_tiles = sm90::num_blocks(p.packed, spans, p.seqlen_q,
                                         std::int64_t{sm90::kWideDqRows} * kQueryCluster);
  queries.num_blocks = sm90::num_blocks(p.packed, p.batch, p.seqlen_q, sm90::kBlockM);

  const sm90::WidePlan plan = sm90::make_wide_plan(
      p, num_multiprocessors, sm90::preferred_wide_room(p, num_multiprocessors));
  const std::int64_t section = sm90::wide_key_section(p, l2_bytes);
  queries.section = sm90::wide_dq_section(p, l2_bytes);
  std::vector<WidePassTiles> passes;
  // Where dS would lie; only offsets from there are computed.
  std::uint8_t room = 0;
  float partial = 0;
  for (const sm90::WidePass& pass :
       sm90::wide_passes(p, plan, kKeyCluster, section, &room, &partial)) {
    WidePassTiles tiles;
    for (std::int64_t i = 0; i < pass.num_units * pass.num_key_tiles; ++i) {
      const sm90::WideTile tile = sm90::wide_tile<kKeyCluster>(keys, pass, i * kKeyCluster);
      if (tile.keys.num_steps > 0) {
        WorkTile work;
        work.sequence = tile.keys.batch_index;
        work.head = tile.keys.head_kv;
        work.unit = work.sequence * p.heads_kv + work.head;
        work.first_row = tile.keys.kv_row;
        work.begin = tile.keys.m_begin;
        work.end = tile.keys.m_end;
        work.steps = tile.keys.num_steps;
        tiles.keys.push_back(work);
      }
    }
    const std::int64_t heads = pass.num_units * p.group();
    for (std::int64_t i = 0; plan.keeps_ds && i < heads * queries.num_q_tiles; ++i) {
      const sm90::WideDqTile tile =
          sm90::wide_dq_tile<1, kQueryCluster>(queries, pass, i * kQueryCluster);
      if (tile.n_end > tile.n_begin) {
        WorkTile work;
        work.sequence = tile.batch_index;
        work.head = tile.head;
        work.unit = work.sequence * p.heads_q + work.head;
        work.first_row = tile.q_row;
        work.begin = tile.n_begin;
        work.end = tile.n_end;
        work.steps = tile.n_end - tile.n_begin;
        tiles.queries.push_back(work);
      }
    }
    passes.push_back(std::move(tiles));
  }
  return passes;
}

}  // namespace

int wide_cluster(const ScheduleProblem& problem) {
  const bool window = problem.mask.left < kUnboundedFrom && problem.mask.right < kUnboundedFrom;
  return !problem.packed_q.empty() || window ? 1 : 2;
}

std::vector<WidePassTiles> wide_launch_order(const ScheduleProblem& problem,
                                             int num_multiprocessors, std::int64_t l2_bytes) {
  return wide_cluster(problem) == 2 ? tiles_of_passes<2, 2>(problem, num_multiprocessors, l2_bytes)
                                    : tiles_of_passes<1, 1>(problem, num_multiprocessors, l2_bytes);
}

}  // namespace flashgrad::plan
