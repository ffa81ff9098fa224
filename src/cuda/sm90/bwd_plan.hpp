// SPDX-License-Identifier: Apache-2.0
// Which kernels a backward call runs, and whether its units are served inside of the main one:
// plain arithmetic of the problem and the device, for the launch and for `flashgrad plan`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "core/problem.hpp"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/sequences.cuh"
#include "cuda/sm90/unit_pipeline.hpp"

namespace flashgrad::sm90 {

inline constexpr int kNumVariants = static_cast<int>(std::size(kBwdConfigs));

constexpr bool hides_nothing(const BandMask& mask) {
  return mask.left >= kUnboundedFrom && mask.right >= kUnboundedFrom;
}

// Clusters halve the traffic with the L2, but their CTAs walk the query blocks of both: with a band
// that costs two steps a tile, so it pays for long sequences. H200, d128, whole calls without /
// with, cool: full 16k 682 / 716, 4k 608 / 632, 1k 426 / 437; causal 16k 669 / 691, 4k 542 / 545,
// 1k 302 / 284.
constexpr bool wants_cluster(const BandMask& mask, bool packed, std::int64_t seqlen_q,
                             std::int64_t seqlen_kv) {
  const bool half = mask.left >= kUnboundedFrom || mask.right >= kUnboundedFrom;
  return !packed && seqlen_kv > 128 && (hides_nothing(mask) || (half && seqlen_q >= 4096));
}

// Keys of the longest sequence that a call may have.
inline std::int64_t most_keys(const Problem& p) {
  return p.packed ? std::min(p.seqlen_kv, p.max_seqlen_kv) : p.seqlen_kv;
}

// Whether the tiles of a variant hold all keys of every sequence, and it may write dq: in rows of
// 16-bit elements, 16 bytes at a time. With a cluster the loader clears the rows of a packed batch
// that follow a sequence in its last block, which costs more than it gains; ordered kernels do too.
// H200, d128, causal, 83 sequences of 197 tokens, us: sums 398, with a cluster 655.
inline bool holds_whole(const BwdConfig& config, const Problem& p) {
  return config.whole && most_keys(p) <= config.keys_per_cluster() &&
         (config.cluster == 1 || !p.packed || p.deterministic) && p.wants_dq &&
         p.dq_dtype == p.dtype && !p.unaligned_dq && p.head_dim % 8 == 0;
}

// Whether variant `a` is rather taken than `b`, of those that serve a problem: the narrowest, then
// one that holds its sequences whole, the smallest of these, then one with a cluster.
constexpr bool goes_before(const BwdConfig& a, const BwdConfig& b) {
  if (a.head_dim != b.head_dim) {
    return a.head_dim < b.head_dim;
  }
  if (a.whole != b.whole) {
    return a.whole;
  }
  return a.whole ? a.cluster < b.cluster : a.cluster > b.cluster;
}

// The number of the variant that serves the problem, with clusters only where they pay, or -1: then
// bwd_wide_launch.hpp does. Which ordered one depends on nothing that varies with the batch; what a
// whole one computes has the same bits.
inline int find_variant(const Problem& p, bool ordered) {
  const std::int64_t width = std::max(p.head_dim, p.head_dim_v);
  int found = -1;
  for (int i = 0; i < kNumVariants; ++i) {
    const BwdConfig& config = kBwdConfigs[i];
    const bool fits = config.whole ? holds_whole(config, p)
                                   : config.ordered == ordered &&
                                         (config.cluster == 1 || p.deterministic ||
                                          wants_cluster(p.mask, p.packed, p.seqlen_q, p.seqlen_kv));
    if (config.head_dim >= width && config.softcap == (p.softcap > 0) && fits &&
        (found < 0 || goes_before(config, kBwdConfigs[found]))) {
      found = i;
    }
  }
  return found;
}

// Keys that a row sees under a window, a band that is bounded on both sides; 0 or less: none.
inline std::int64_t window_keys(const BandMask& mask) {
  return std::max(mask.left, -kUnboundedFrom) + std::max(mask.right, -kUnboundedFrom) + 1;
}

// Whether the key tiles of a unit take about as long as they do with a causal mask, or longer.
// Under a narrow window they are done before a unit could be served: with a window of (1024, 0) at
// 16k tokens a call that serves units takes more than twice as long.
inline bool has_long_tiles(const Problem& p) {
  return p.mask.left >= kUnboundedFrom || p.mask.right >= kUnboundedFrom ||
         2 * window_keys(p.mask) >= p.seqlen_q;
}

inline std::int64_t num_units(const Problem& p) { return (p.packed ? 1 : p.batch) * p.heads_kv; }

// Query blocks per head of a unit.
inline std::int64_t head_blocks(const Problem& p) {
  return num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_q, kBlockM);
}

// Which kernels run.
struct BwdPlan {
  int variant = -1;          // of the main kernel; -1: bwd_wide
  bool separate_dq = false;  // by bwd_query: nothing but dq, or a wide head without room for dS
  int padded_head_dim = 0;
  UnitPipeline units;        // of main kernels that are not ordered
  std::int64_t section = 0;  // units launched together where they are served, else 0

  [[nodiscard]] bool ordered() const { return variant >= 0 && kBwdConfigs[variant].ordered; }
  [[nodiscard]] bool whole() const { return variant >= 0 && kBwdConfigs[variant].whole; }
  // dq is summed in the workspace.
  [[nodiscard]] bool accumulates_dq(const Problem& p) const {
    return p.wants_dq && !separate_dq && !whole();
  }
  // bwd.cuh runs.
  [[nodiscard]] bool has_main(const Problem& p) const {
    return variant >= 0 && (p.wants_dk || p.wants_dv || (p.wants_dq && !separate_dq));
  }
};

// Keys of a tile of the main kernel, or of its cluster's.
inline std::int64_t keys_per_tile(const BwdPlan& plan) {
  return kBwdConfigs[plan.variant].keys_per_cluster();
}

// Its tiles, or clusters of tiles, of a unit: a key head of a batch entry or of the packed batch.
inline std::int64_t key_tiles_per_unit(const Problem& p, const BwdPlan& plan) {
  return num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_kv, keys_per_tile(plan));
}
// Its CTAs, or clusters of them: for each tile, and those that serve units.
inline std::int64_t num_clusters(const Problem& p, const BwdPlan& plan,
                                 const UnitPipeline& pipeline) {
  const std::int64_t served =
      pipeline.serves() ? num_units(p) + std::int64_t{pipeline.lag} * pipeline.last_parts : 0;
  return num_units(p) * key_tiles_per_unit(p, plan) + served;
}

// The call as its main kernel sees it where the query heads of a key head are divided: each part is
// a key head of its own, of which only K and V are not. dk and dv of the parts are summed
// afterwards (bwd_sum.hpp).
inline Problem divide_heads(Problem p, std::int64_t parts) {
  p.heads_kv *= parts;
  return p;
}

// How long the main kernel takes with each key head in `parts`, about, in steps of its tiles: to
// compare numbers of parts. The tiles of a window, or without a mask, take as long as each other,
// and run in rounds. Under a half-open mask they take half as long as the longest in the mean,
// which comes first; and while they walk more than 4 heads, they are at different heads at the same
// time, so that more is in use than the L2 holds (clusters need half as much of it). Of a packed
// batch only the longest sequence is known.
//
// The constants are fitted on calls in 1 to 71 parts, H200, benchmarks/results/
// 2026-11-30-h200-head-parts.json: 6 steps for the start and the end of a tile, 3 for dk and dv of
// a part, written and read as f32. There the choice takes 0.4 % longer than the best in the mean, 8
// % at most, and 1 % longer than undivided heads at most.
inline double steps_in_parts(const Problem& p, std::int64_t parts, int num_multiprocessors) {
  const Problem divided = divide_heads(p, parts);
  const BwdConfig& config = kBwdConfigs[find_variant(p, false)];
  const std::int64_t keys = config.keys_per_cluster();
  const auto tiles = static_cast<double>(
      num_units(divided) * num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_kv, keys));
  const auto at_a_time = static_cast<double>(std::max(num_multiprocessors / config.cluster, 1));
  const bool open_left = p.mask.left >= kUnboundedFrom;
  const bool open_right = p.mask.right >= kUnboundedFrom;
  std::int64_t rows = p.packed ? p.max_seqlen_q : p.seqlen_q;
  if (!open_left && !open_right) {
    rows = std::clamp<std::int64_t>(window_keys(p.mask) + keys, 0, rows);
  }
  const std::int64_t blocks = (rows + kBlockM - 1) / kBlockM;
  auto longest = static_cast<double>(blocks * divided.group());
  double mean = longest;
  if (open_left != open_right) {
    longest *= config.cluster == 1 && divided.group() > 4 ? 1.3 : 1;
    mean = longest / 2;
  }
  if (p.packed && (open_left || open_right)) {
    mean *= 2.0 / 3;
  }
  const double ends = 6;
  const double sums = parts > 1 ? 3.0 * config.cluster : 0;
  const double steps = mean == longest
                           ? std::ceil(tiles / at_a_time) * (longest + ends)
                           : std::max(longest + ends, tiles / at_a_time * (mean + ends));
  return steps + tiles / at_a_time * sums;
}

// Into how many parts the query heads of each key head are divided. A tile walks all query heads of
// its part, so with few tiles the longest, or the last ones, take long while most of the device has
// nothing to do. A deterministic call adds dk and dv in the order of its parts: their number
// depends on the heads alone, and is modest, since it costs up to 10 % where there are tiles
// enough.
inline std::int64_t head_parts(const Problem& p, int num_multiprocessors) {
  // bwd_sum.cu counts rows of heads in 32 bits.
  const bool countable = num_units(p) * p.seqlen_kv <= std::int64_t{UINT32_MAX};
  if (p.group() == 1 || find_variant(p, p.deterministic) < 0 || !(p.wants_dk || p.wants_dv) ||
      !countable) {
    return 1;
  }
  const std::int64_t most = std::clamp<std::int64_t>(p.heads_q / 4, 4, 8) / p.heads_kv;
  std::int64_t best = 1;
  double best_steps = p.deterministic ? 0 : steps_in_parts(p, 1, num_multiprocessors);
  for (std::int64_t parts = 2; parts <= p.group(); ++parts) {
    if (p.group() % parts != 0 || (p.deterministic && parts > most)) {
      continue;
    }
    const double steps = p.deterministic ? 0 : steps_in_parts(p, parts, num_multiprocessors);
    if (p.deterministic || steps < best_steps) {
      best = parts;
      best_steps = steps;
    }
  }
  return best;
}

inline BwdPlan make_plan(const Problem& p, int num_multiprocessors) {
  BwdPlan plan;
  plan.variant = find_variant(p, p.deterministic);
  plan.separate_dq =
      p.wants_dq && (plan.variant < 0 || (!p.deterministic && !(p.wants_dk || p.wants_dv)));
  const std::int64_t width = std::max(p.head_dim, p.head_dim_v);
  plan.padded_head_dim = plan.variant >= 0 && !plan.separate_dq ? kBwdConfigs[plan.variant].head_dim
                         : width <= 64                          ? 64
                         : width <= 128                         ? 128
                                                                : 256;
  if (plan.variant < 0 || plan.ordered() || plan.whole() || plan.separate_dq) {
    return plan;
  }
  const BwdConfig& config = kBwdConfigs[plan.variant];
  plan.units.slots = static_cast<std::int32_t>(num_units(p));
  // Who serves a unit writes whole rows of the kernel's width, 16 bits an element, or else
  // element by element, which takes longer than the kernel that finishes.
  const bool whole_rows = p.head_dim == config.head_dim && p.dq_dtype == p.dtype;
  if (p.packed || !config.serves_units() || p.seqlen_q == 0 || !has_long_tiles(p) || !whole_rows) {
    return plan;
  }
  const std::int64_t tiles = key_tiles_per_unit(p, plan) * config.cluster;
  const bool equal_tiles = hides_nothing(p.mask);
  const std::int64_t section = unit_section(tiles, equal_tiles, num_multiprocessors);
  plan.units =
      plan_units(num_units(p), tiles, section, equal_tiles, num_multiprocessors, config.cluster);
  plan.section = plan.units.lag > 0 ? section : 0;
  if (p.wants_dsinks) {
    plan.units.lead = 0;  // the prepare kernel sums them
  }
  return plan;
}

}  // namespace flashgrad::sm90
