// SPDX-License-Identifier: Apache-2.0
// The backward pass's sizes and buffers: how a sequence is cut into blocks, what is held per query
// head and per thread, and where it lies in the workspace.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/problem.hpp"
#include "cpu/arena.hpp"
#include "cpu/micro_kernel.hpp"
#include "cpu/pack.hpp"

namespace flashgrad::cpu {

// Blocks follow the sequence's own lengths only, so its bits depend neither on the batch nor on the
// threads.
struct Blocks {
  std::int64_t block_q = 0;
  std::int64_t block_kv = 0;
  std::int64_t padded_q = 0;  // seqlen_q rounded up to the panel width
  std::int64_t num_q = 0;
  std::int64_t num_kv = 0;
};

// Far larger than the first cache on purpose: contiguous panels stream. Zen 5, one thread, 4096
// rows of head_dim 128: f32 512 keys x 128 queries 237 GFLOP/s, 256 x 256 228, 512 x 256 232, 256 x
// 128 227; bf16 450 within 2 % for all of them. Short sequences need more key blocks, or cores run
// out of work.
template <class Isa>
inline constexpr std::int64_t kBlockQ = 128 * Isa::kPair;
template <class Isa>
inline constexpr std::int64_t kMaxBlockKv = Isa::kPair == 1 ? 512 : 256;

// Tiles of keys whose S^T is computed before their dP^T. Zen 5, f32, head_dim 128: 1.3 % less time
// than one by one; 8 and 32 are within 0.2 % of it.
inline constexpr std::int64_t kGroupTiles = 16;

// Units of K that dQ += dS K takes at a time: a panel of them, 32 KB, stays in the first cache for
// all queries of the block. Zen 5, f32, head_dim 128: the product takes 2.4 % less time than with
// the whole key block.
template <class Isa>
inline constexpr std::int64_t kDqDepth = (32 << 10) / (4 * kWidth<Isa>);

template <class Isa>
FG_INLINE Blocks blocks_of(std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  static_assert(kBlockQ<Isa> % kWidth<Isa> == 0 && kWidth<Isa> % kRowMultiple<Isa> == 0);
  Blocks blocks;
  blocks.padded_q = round_up(seqlen_q, kWidth<Isa>);
  blocks.block_q = blocks.padded_q < kBlockQ<Isa> ? blocks.padded_q : kBlockQ<Isa>;
  blocks.block_kv = seqlen_kv <= 1024 ? 128 : seqlen_kv < 4096 ? 256 : kMaxBlockKv<Isa>;
  if (seqlen_kv < blocks.block_kv) {
    blocks.block_kv = round_up(seqlen_kv, kRowMultiple<Isa>);
  }
  blocks.num_q = seqlen_q == 0 ? 0 : ceil_div(seqlen_q, blocks.block_q);
  blocks.num_kv = seqlen_kv == 0 ? 0 : ceil_div(seqlen_kv, blocks.block_kv);
  return blocks;
}

// What does not change during a call.
template <class Isa>
struct BackwardPlan {
  explicit BackwardPlan(const Problem& problem)
      : p(problem),
        columns_qk(round_up(problem.head_dim, Isa::kLanes)),
        columns_v(round_up(problem.head_dim_v, Isa::kLanes)),
        units_qk(staged_units<Isa>(problem.head_dim)),
        units_v(staged_units<Isa>(problem.head_dim_v)),
        needs_ds(problem.wants_dq || problem.wants_dk),
        needs_dv(problem.wants_dv && problem.has_dout),
        needs_p(needs_ds || needs_dv) {}

  const Problem& p;
  std::int64_t columns_qk;  // head_dim in whole vectors: columns of dq and dk
  std::int64_t columns_v;   // likewise of dv
  std::int64_t units_qk;    // a staged row of q or k
  std::int64_t units_v;     // a staged row of v or dout
  bool needs_ds;
  bool needs_dv;  // without dout, dv is 0, and dp too: its product has no depth
  bool needs_p;

  [[nodiscard]] std::int64_t depth_qk() const { return ceil_div(p.head_dim, Isa::kPair); }
  [[nodiscard]] std::int64_t depth_v() const {
    return p.has_dout ? ceil_div(p.head_dim_v, Isa::kPair) : 0;
  }
};

// One query head, packed. Rows are the sequence's, padded to the panel width; padding and rows that
// add nothing are zeros.
template <class Isa>
struct HeadPack {
  using Unit = typename Isa::Unit;
  Unit* q_columns;     // Q^T, B of S^T = K Q^T: [panel of rows][units_qk][kWidth]
  Unit* dout_columns;  // dO^T, B of dP^T = V dO^T: [panel of rows][units_v][kWidth]
  // Q, B of dK += dS^T Q: [q block][panel of columns][rows of the block / kPair][its columns]
  Unit* q_depth;
  Unit* dout_depth;               // dO, B of dV += P^T dO: likewise
  float* neg_lse;                 // (rows): -lse; -inf: the row adds nothing
  float* neg_delta;               // (rows): dlse - delta
  float* dq;                      // (rows, columns_qk): the sum so far
  std::uint8_t* q_not_finite;     // (rows): an infinity or NaN in it; q_depth has zeros instead
  std::uint8_t* dout_not_finite;  // (rows): likewise, dout_depth
  // (panels): a row that the mask shows adds nothing, because its lse is infinite.
  std::uint8_t* panel_has_void;
  std::uint8_t* block_not_finite;            // (q blocks): one of the rows is marked
  std::atomic<std::int32_t>* next_kv_block;  // (q blocks): whose turn it is to add to dq
};

template <class Isa>
static HeadPack<Isa> take_head(Arena& arena, const BackwardPlan<Isa>& plan, const Blocks& blocks) {
  using Unit = typename Isa::Unit;
  const std::int64_t rows = blocks.padded_q;
  HeadPack<Isa> head{};
  if (plan.needs_p) {
    head.q_columns = arena.take<Unit>(rows * plan.units_qk);
  }
  if (plan.needs_ds && plan.p.has_dout) {
    head.dout_columns = arena.take<Unit>(rows * plan.units_v);
  }
  if (plan.p.wants_dk) {
    head.q_depth = arena.take<Unit>(rows / Isa::kPair * plan.columns_qk);
  }
  if (plan.needs_dv) {
    head.dout_depth = arena.take<Unit>(rows / Isa::kPair * plan.columns_v);
  }
  if (plan.p.wants_dq) {
    head.dq = arena.take<float>(rows * plan.columns_qk);
  }
  head.neg_lse = arena.take<float>(rows);
  head.neg_delta = arena.take<float>(rows);
  head.q_not_finite = arena.take<std::uint8_t>(rows);
  head.dout_not_finite = arena.take<std::uint8_t>(rows);
  head.panel_has_void = arena.take<std::uint8_t>(rows / kWidth<Isa>);
  head.block_not_finite = arena.take<std::uint8_t>(blocks.num_q);
  head.next_kv_block = arena.take<std::atomic<std::int32_t>>(blocks.num_q);
  return head;
}

// One (sequence, kv head) with the query heads of its group, or with some of them where memory is
// short.
template <class Isa>
struct Job {
  Sequence sequence;
  std::int64_t batch = 0;  // index of the sequence
  std::int64_t kv_head = 0;
  std::int64_t group_begin = 0;  // its heads of the group: [group_begin, group_end)
  std::int64_t group_end = 0;
  Blocks blocks;
  HeadPack<Isa>* heads = nullptr;  // (group_end - group_begin)
  // Sums of all keys from one part of the group to the next; null: the job is whole.
  float* dk = nullptr;
  float* dv = nullptr;

  [[nodiscard]] std::int64_t num_packs() const { return (group_end - group_begin) * blocks.num_q; }
};

template <class Isa>
static void take_heads(Arena& arena, const BackwardPlan<Isa>& plan, Job<Isa>& job) {
  const std::int64_t num_heads = job.group_end - job.group_begin;
  job.heads = arena.take<HeadPack<Isa>>(num_heads);
  for (std::int64_t g = 0; g < num_heads; ++g) {
    const HeadPack<Isa> head = take_head(arena, plan, job.blocks);
    if (job.heads != nullptr) {
      job.heads[g] = head;
    }
  }
}

// What a thread needs for one key block.
template <class Isa>
struct KeyBlockBuffers {
  using Unit = typename Isa::Unit;
  Unit* k_rows;    // A of S^T: (block_kv, units_qk)
  Unit* v_rows;    // A of dP^T: (block_kv, units_v)
  Unit* k_depth;   // K, B of dQ += dS K: [panel of columns][block_kv / kPair][columns of the panel]
  Unit* p_rows;    // P^T, A of dV: (block_kv, ld_p)
  Unit* ds_rows;   // dS^T, A of dK and, with kPair = 1, of dQ: (block_kv, ld_p)
  Unit* ds_pairs;  // kPair = 2, A of dQ: dS^T with the keys interleaved: (block_kv / 2, ld_pairs)
  float* dk;       // (block_kv, columns_qk)
  float* dv;       // (block_kv, columns_v)
  Unit* staging;   // (kLanes, units): rows on their way into a pack
  std::uint8_t* k_not_finite;  // (block_kv): k_depth has zeros instead of this row
};

// Row strides of P^T, dS^T and dS^T interleaved. (A vector more, so that rows do not share sets of
// the cache, brought nothing.)
template <class Isa>
inline constexpr std::int64_t kLdP = kBlockQ<Isa> / Isa::kPair;
template <class Isa>
inline constexpr std::int64_t kLdPairs = kBlockQ<Isa>;

template <class Isa>
static KeyBlockBuffers<Isa> take_buffers(Arena& arena, const BackwardPlan<Isa>& plan,
                                         std::int64_t block_kv) {
  using Unit = typename Isa::Unit;
  const std::int64_t rows = block_kv;
  KeyBlockBuffers<Isa> b{};
  b.k_rows = arena.take<Unit>(rows * plan.units_qk);
  b.v_rows = arena.take<Unit>(rows * plan.units_v);
  b.k_depth = arena.take<Unit>(rows / Isa::kPair * plan.columns_qk);
  b.p_rows = arena.take<Unit>(rows * kLdP<Isa>);
  b.ds_rows = arena.take<Unit>(rows * kLdP<Isa>);
  if (Isa::kPair == 2) {
    b.ds_pairs = arena.take<Unit>(rows / 2 * kLdPairs<Isa>);
  }
  b.dk = arena.take<float>(rows * plan.columns_qk);
  b.dv = arena.take<float>(rows * plan.columns_v);
  b.staging =
      arena.take<Unit>(Isa::kLanes * (plan.units_qk > plan.units_v ? plan.units_qk : plan.units_v));
  b.k_not_finite = arena.take<std::uint8_t>(rows);
  return b;
}

}  // namespace flashgrad::cpu
