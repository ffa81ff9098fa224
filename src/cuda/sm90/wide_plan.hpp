// SPDX-License-Identifier: Apache-2.0
// How much room dS gets in the backward for head dims above 128, and into which passes
// (wide_pass.hpp) that cuts the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/sequences.cuh"
#include "cuda/sm90/wide_pass.hpp"

namespace flashgrad::sm90 {

// How the work is cut (wide_pass.hpp). A pass takes `units` units and `key_count` key blocks of
// each sequence.
struct WidePlan {
  bool keeps_ds = false;  // else dq is made by bwd_query.cuh, which computes S and dP again
  std::int64_t units = 0;
  std::int64_t key_count = 0;
  std::int64_t ds_bytes = 0;
  std::int64_t partial_bytes = 0;  // f32 sums of dq; 0 if all keys fit one pass

  [[nodiscard]] std::int64_t bytes() const { return ds_bytes + partial_bytes; }
};

inline constexpr std::int64_t kFullRoom = std::int64_t{1} << 30;

// The width of the tiles of q, k and dq; those of v and dout have it too, or 128 columns.
constexpr int padded_head_dim(const Problem& p) {
  return std::max(p.head_dim, p.head_dim_v) <= 192 ? 192 : 256;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The extent of the work.
struct WideExtent {
  std::int64_t units;            // key heads of a batch entry, or of the packed batch
  std::int64_t key_blocks;       // at most so many in a sequence, rounded up to even
  std::int64_t all_key_blocks;   // of a unit
  std::int64_t blocks_per_head;  // of queries
  std::int64_t block_images;     // bytes of dS of one key block and all queries of a unit
  std::int64_t unit_partial;     // bytes of f32 dq of a unit

  explicit WideExtent(const Problem& p)
      : units((p.packed ? 1 : p.batch) * p.heads_kv),
        key_blocks(ceil_div(p.packed ? std::min(p.max_seqlen_kv, p.seqlen_kv) : p.seqlen_kv,
                            std::int64_t{2} * kWideKeys) *
                   2),
        all_key_blocks(std::max<std::int64_t>(1, ceil_div(p.seqlen_kv, kWideKeys))),
        blocks_per_head(num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_q, kBlockM)),
        block_images(std::max<std::int64_t>(1, p.group() * blocks_per_head * kDsImageBytes)),
        unit_partial(p.group() * blocks_per_head * kBlockM * padded_head_dim(p) * 4) {}

  // Key blocks of sequences times units that a pass must have room for, so that its tiles fill the
  // machine: with `slots` of them a pass has about slots * all_key_blocks / key_blocks tiles.
  [[nodiscard]] std::int64_t slots_to_fill(int num_multiprocessors) const {
    const std::int64_t tiles = std::min<std::int64_t>(num_multiprocessors, units * all_key_blocks);
    return std::min(units * key_blocks,
                    ceil_div(ceil_div(tiles * key_blocks, all_key_blocks), 2) * 2);
  }
};

inline WidePlan cut(const WideExtent& e, std::int64_t slots) {
  WidePlan plan;
  plan.keeps_ds = true;
  if (slots >= e.key_blocks) {
    const std::int64_t passes = ceil_div(e.units, std::min(e.units, slots / e.key_blocks));
    plan.units = ceil_div(e.units, passes);
    plan.key_count = e.key_blocks;
  } else {
    const std::int64_t passes = ceil_div(e.key_blocks, slots / 2 * 2);
    plan.units = 1;
    plan.key_count = ceil_div(e.key_blocks, 2 * passes) * 2;
    plan.partial_bytes = e.unit_partial;
  }
  plan.ds_bytes = plan.units * plan.key_count * e.block_images;
  return plan;
}

// The fastest plan that needs at most `room` bytes beyond what every plan needs. dS is kept if room
// for it suffices to fill the machine. Which plan is taken changes dq's bits only between keeping
// and not keeping dS.
inline WidePlan make_wide_plan(const Problem& p, int num_multiprocessors, std::int64_t room) {
  const bool both = p.wants_dq && (p.wants_dk || p.wants_dv);
  const WideExtent e(p);
  if (both && e.units > 0 && e.key_blocks > 0 && e.blocks_per_head > 0) {
    for (const bool whole : {true, false}) {  // a pass with all keys carries no sums
      const std::int64_t left = whole ? room : room - e.unit_partial;
      const std::int64_t slots = std::min(e.units * e.key_blocks, left / e.block_images);
      if (left > 0 && slots >= e.slots_to_fill(num_multiprocessors) &&
          (slots >= e.key_blocks || !whole)) {
        return cut(e, slots);
      }
    }
  }
  return {};
}

// What it can use: all of dS up to 1 GiB, beyond that twice as many key blocks as there are
// multiprocessors, which is linear in the sequence.
inline std::int64_t preferred_wide_room(const Problem& p, int num_multiprocessors) {
  const WideExtent e(p);
  const std::int64_t fill = e.slots_to_fill(2 * num_multiprocessors);
  const std::int64_t slots =
      std::min(e.units * e.key_blocks, std::max(fill, kFullRoom / e.block_images));
  const std::int64_t room = slots * e.block_images + (slots < e.key_blocks ? e.unit_partial : 0);
  return make_wide_plan(p, num_multiprocessors, room).bytes();
}

// Units whose tiles of keys are launched together: their q and dout stay in the L2.
inline std::int64_t wide_key_section(const Problem& p, std::int64_t l2_bytes) {
  const std::int64_t unit_bytes = p.group() * p.seqlen_q * 2 * (p.head_dim + p.head_dim_v);
  return std::max<std::int64_t>(1, l2_bytes * 8 / 15 / std::max<std::int64_t>(1, unit_bytes));
}

// Query heads whose tiles of dq are launched together: their k stays in the L2, beside dS that
// passes through it. H200, d192/128 causal 4k: 762 -> 622 MB read from DRAM.
inline std::int64_t wide_dq_section(const Problem& p, std::int64_t l2_bytes) {
  const std::int64_t k_bytes = std::max<std::int64_t>(1, p.seqlen_kv * 2 * p.head_dim);
  return p.group() * std::clamp<std::int64_t>(l2_bytes / 8 / k_bytes, 1,
                                              std::max<std::int64_t>(1, WideExtent(p).units));
}

// The passes of a plan in their order; `section` as in WidePass.
inline std::vector<WidePass> wide_passes(const Problem& p, const WidePlan& plan, int key_cluster,
                                         std::int64_t section, std::uint8_t* room, float* partial) {
  const WideExtent e(p);
  const std::int64_t units = plan.keeps_ds ? plan.units : e.units;
  const std::int64_t key_count = plan.keeps_ds ? plan.key_count : e.key_blocks;
  const std::int64_t all_tiles = num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_kv,
                                            std::int64_t{kWideKeys} * key_cluster);
  std::vector<WidePass> passes;
  for (std::int64_t unit = 0; unit < e.units; unit += units) {
    for (std::int64_t key = 0; key < e.key_blocks; key += key_count) {
      WidePass pass{};
      pass.first_unit = unit;
      pass.num_units = std::min(units, e.units - unit);
      pass.section = std::min(section, pass.num_units);
      pass.key_begin = key;
      pass.key_count = key_count;
      pass.num_key_tiles =
          p.packed ? all_tiles
                   : std::min(ceil_div(key_count, key_cluster), all_tiles - key / key_cluster);
      pass.blocks_per_head = e.blocks_per_head;
      pass.ds = plan.keeps_ds ? room : nullptr;
      pass.partial = plan.partial_bytes > 0 ? partial : nullptr;
      passes.push_back(pass);
    }
  }
  return passes;
}

}  // namespace flashgrad::sm90
