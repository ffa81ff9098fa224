// SPDX-License-Identifier: Apache-2.0
// Whether and how the units of a backward call are served, by the plan of its launch, and what is
// left to the kernels before and after the main one.
#include <algorithm>

#include "cuda/sm90/bwd_plan.hpp"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

sm90::BwdPlan plan_of(const Problem& p, const TileSize& tile) {
  return sm90::make_plan(p, tile.slots * tile.cluster);
}

// f32 sums of dq of a unit, in blocks of its padded head dim.
double slot_bytes(const Problem& p, const sm90::BwdPlan& plan) {
  return static_cast<double>(p.group() * sm90::head_blocks(p) * sm90::kBlockM *
                             plan.padded_head_dim) *
         4;
}

}  // namespace

std::int64_t planned_section(const ScheduleProblem& problem, const TileSize& tile) {
  return plan_of(problem.to_problem(), tile).section;
}

ServedUnits served_units(const ScheduleProblem& problem, const TileSize& tile) {
  const Problem p = problem.to_problem();
  const sm90::BwdPlan plan = plan_of(p, tile);
  ServedUnits units;
  if (plan.variant < 0) {
    units.why_not = "above head_dim 128 the backward runs in passes";
  } else if (plan.whole()) {
    units.why_not = "its tiles hold all keys of a sequence, so that dq is not summed";
  } else if (p.packed) {
    units.why_not = "the sequences of a packed batch are one unit";
  } else if (!sm90::has_long_tiles(p)) {
    units.why_not = "the tiles of a narrow window are done before a unit could be served";
  } else if (!plan.units.serves()) {
    units.why_not = "too few units (" + std::to_string(sm90::num_units(p)) +
                    ") for the tiles that run at a time";
  } else if (sm90::kBwdConfigs[plan.variant].cluster != tile.cluster ||
             sm90::kBwdConfigs[plan.variant].block_n() != tile.keys) {
    units.why_not = "the kernel of this call has clusters of " +
                    std::to_string(sm90::kBwdConfigs[plan.variant].cluster) + " and " +
                    std::to_string(sm90::kBwdConfigs[plan.variant].block_n()) + " keys a CTA";
  } else {
    // As make_plan does, for sections of any size.
    const sm90::UnitPipeline pipeline = sm90::plan_units(
        sm90::num_units(p), sm90::key_tiles_per_unit(p, plan) * tile.cluster, problem.section,
        sm90::hides_nothing(p.mask), std::int64_t{tile.slots} * tile.cluster, tile.cluster);
    if (pipeline.lag == 0) {
      units.why_not = "too few units for sections of " + std::to_string(problem.section);
    }
    units.section = problem.section;
    units.slots = pipeline.slots;
    units.lead = pipeline.lead;
    units.lag = pipeline.lag;
    units.last_parts = pipeline.last_parts;
    units.slot_bytes = slot_bytes(p, plan);
  }
  return units;
}

ScheduleProblem in_parts(ScheduleProblem problem, bool deterministic, int num_multiprocessors) {
  Problem p = problem.to_problem();
  p.deterministic = deterministic;
  problem.head_parts = sm90::head_parts(p, num_multiprocessors);
  problem.heads_kv *= problem.head_parts;
  return problem;
}

EndBytes end_bytes(const ScheduleProblem& problem, const Policy& policy, const TileSize& tile) {
  const Problem p = problem.to_problem();
  const auto dout_and_out = [&](double rows) {
    return rows * 4 * static_cast<double>(p.head_dim_v);
  };
  const std::int64_t entries = p.packed ? 1 : p.batch;
  const auto rows = static_cast<double>(entries * p.seqlen_q * p.heads_q);
  EndBytes ends;
  if (problem.head_parts > 1) {
    const auto elements = static_cast<double>(entries * p.seqlen_kv * p.heads_kv) *
                          static_cast<double>(p.head_dim + p.head_dim_v);
    ends.sum = elements * 4 + elements / static_cast<double>(problem.head_parts) * 2;
  }
  const sm90::BwdPlan plan = plan_of(p, tile);
  if (policy.turns == Policy::Turns::kKernel || plan.whole()) {
    ends.prepare = dout_and_out(rows);
    return ends;
  }
  if (policy.serves) {
    const ServedUnits units = served_units(problem, tile);
    const auto unit_rows = static_cast<double>(p.group() * p.seqlen_q);
    ends.prepare = dout_and_out(static_cast<double>(units.lead) * unit_rows) +
                   static_cast<double>(units.slots) * units.slot_bytes;
    return ends;
  }
  const double sums = static_cast<double>(sm90::num_units(p)) * slot_bytes(p, plan);
  ends.prepare = dout_and_out(rows) + sums;
  ends.finish = sums + rows * 2 * static_cast<double>(p.head_dim);
  return ends;
}

}  // namespace flashgrad::plan
