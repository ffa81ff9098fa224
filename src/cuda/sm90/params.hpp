// SPDX-License-Identifier: Apache-2.0
// What the backward's kernels are told. Plain structs, passed as __grid_constant__.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/sm90/sequences.cuh"
#include "cuda/sm90/unit_pipeline.hpp"

namespace flashgrad::sm90 {

struct KeyTile;  // key_tile.cuh

// Whether all rows of a tensor of 16-bit elements begin at multiples of 16 bytes.
FG_HOST_DEVICE inline bool has_aligned_rows(const Tensor& t) {
  const auto strides = static_cast<std::uintptr_t>(t.row_stride | t.head_stride | t.batch_stride);
  return (reinterpret_cast<std::uintptr_t>(t.data) | 2 * strides) % 16 == 0;
}

// The per-row numbers that prepare leaves for the main kernel, in query blocks of 64 rows numbered
// through all spans (sequences.cuh).
inline constexpr std::int32_t kHasNan = 2;
struct RowStatistics {
  std::int64_t num_blocks;
  float* neg_lse_log2;  // (heads_q, num_blocks, 64): -lse * log2(e); -inf: the row is not read
  float* neg_delta;     // (heads_q, num_blocks, 64): dlse - delta, 0 for such a row
  // (heads_q, num_blocks): 1 if a marked row exists in the tensors, kHasNan more if a row that is
  // read has NaN in one of the two.
  std::int32_t* unreadable;
  float* dsink_partial;  // (heads_q, num_blocks), or null
};

// How an ordered main kernel takes turns at adding dq (bwd_order.cuh).
struct DqOrder {
  std::uint32_t* counters;  // (heads_q, num_blocks, 2), or null: no dq
  std::uint32_t* ticket;    // of ordered kernels and wide_rounds.cuh, set to 0; null: not there
};

// In a counter: the accumulators of the block have not been written.
inline constexpr std::uint32_t kNothingYet = 0x80000000U;

// What the row statistics are made of.
struct RowInputs {
  std::int64_t head_dim_v;
  Tensor out;          // (batch, seqlen_q, heads_q, head_dim_v)
  Tensor dout;         // likewise, any strides; null: 0
  Tensor lse;          // (batch, heads_q, seqlen_q) f32, any strides
  Tensor dlse;         // likewise; null: 0
  const float* sinks;  // (heads_q), or null
};

struct BwdPrepareParams {
  Sequences sequences;
  std::int64_t heads_q;
  RowInputs inputs;
  RowStatistics rows;
  float* dq_accumulator;      // of BwdParams, zeroed; null: not wanted
  std::int64_t block_floats;  // 64 * padded head_dim
  UnitPipeline pipeline;      // its counters are zeroed
  std::int64_t num_units;
  std::int64_t group;
  DqOrder order;  // set where not null
  std::int64_t keys_per_turn;
  Tensor dq;    // rows of blocks that no key reaches become 0; null: others write them
  bool ragged;  // the maps of main end with each sequence: rows from there on are zeros
  std::int64_t head_dim;
};

// Of logits, as the kernels use them.
struct Scales {
  float scale;
  float log2;     // scale * log2(e); with softcap: softcap * log2(e)
  float softcap;  // scale / softcap
};

struct BwdParams {
  std::int64_t num_ctas;  // of bwd.cuh
  Sequences sequences;
  std::int64_t heads_kv;
  std::int64_t group;     // query heads per key head
  std::int64_t head_dim;  // as given; the kernel's own is padded
  std::int64_t head_dim_v;
  // Of bwd.cuh:
  std::int64_t num_kv_blocks;  // per unit
  std::int64_t num_units;      // key heads of a batch entry, or of the packed batch
  std::int64_t section;        // units whose tiles are launched together, longest tiles first
  std::int64_t round = 1;      // neighbouring tiles of a unit launched together
  // Of each CTA in the order of the launch, described by prepare; null: no bwd.cuh.
  KeyTile* tiles;
  // For what the copy engine can't address (bit i of `mapped` clear): q, k, v, dout as they are.
  Tensor q, k, v, dout;
  std::uint32_t mapped;  // bits kMapQ...
  // The fifth coordinate of the maps: kRaggedRows where they end with each sequence
  // (tensor_map.hpp), else 0.
  std::int32_t ragged_rows;
  Tensor dk, dv;  // null: not wanted
  RowStatistics rows;
  RowInputs inputs;  // of units that tiles of others prepare
  // f32 in fragment order, (pipeline.slots, group, pipeline.head_blocks, 64 * head_dim) or, in
  // ordered kernels, (heads_q, num_blocks, 64 * head_dim); null: not wanted
  float* dq_accumulator;
  UnitPipeline pipeline;  // kernels that are not ordered
  DqOrder order;          // ordered kernels
  Tensor dq;              // ordered kernels, and those that finish units
  std::uint32_t* ticket;  // of bwd_wide.cuh, 0 between launches; null in bwd.cuh
  int max_round;          // of rotating tiles (KeyTile) in ordered kernels; 0: none rotate
  float scale;
  float scale_log2;     // scale * log2(e); with softcap: softcap * log2(e)
  float scale_softcap;  // scale / softcap
};

inline constexpr std::uint32_t kMapQ = 1;
inline constexpr std::uint32_t kMapK = 2;
inline constexpr std::uint32_t kMapV = 4;
inline constexpr std::uint32_t kMapDout = 8;

struct BwdQueryParams {
  Sequences sequences;
  std::int64_t heads_q;
  std::int64_t group;
  std::int64_t head_dim;
  std::int64_t head_dim_v;
  std::int64_t num_q_tiles;  // of 128 rows, per unit
  std::int64_t num_units;    // query heads of a batch entry, or of the packed batch
  std::int64_t section;      // units whose tiles are launched together
  Tensor q, k, v, dout;      // for what the copy engine can't address
  std::uint32_t mapped;      // bits kMapQ...
  Tensor dq;
  std::int64_t num_blocks;    // as in RowStatistics
  const float* neg_lse_log2;  // (heads_q, num_blocks, 64)
  const float* neg_delta;     // (heads_q, num_blocks, 64)
  std::uint32_t* ticket;      // of bwd_wide_dq.cuh, 0 between launches; null in bwd_query.cuh
  float scale;                // these as in BwdParams
  float scale_log2;
  float scale_softcap;
};

struct BwdFinishParams {
  Sequences sequences;
  std::int64_t heads_kv;
  std::int64_t group;
  std::int64_t head_dim;
  std::int64_t head_blocks;     // query blocks per query head of a unit
  const float* dq_accumulator;  // of BwdParams
  Tensor dq;
  float scale;
};

struct BwdSinksParams {
  std::int64_t num_blocks;
  const float* dsink_partial;  // (heads_q, num_blocks)
  float* dsinks;               // (heads_q)
};

}  // namespace flashgrad::sm90
