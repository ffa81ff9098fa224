// SPDX-License-Identifier: Apache-2.0
// What the forward's kernels are told. Plain structs, passed as __grid_constant__.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/sm90/fwd_schedule.hpp"
#include "cuda/sm90/packed_order.hpp"
#include "cuda/sm90/sequences.cuh"

namespace flashgrad::sm90 {

struct FwdMaps {
  CUtensorMap q, k, v, out;
};

inline constexpr std::uint32_t kFwdMapQ = 1;
inline constexpr std::uint32_t kFwdMapK = 2;
inline constexpr std::uint32_t kFwdMapV = 4;
inline constexpr std::uint32_t kFwdMapOut = 8;

struct FwdParams {
  Sequences sequences;
  Tensor q, k, v;        // (batch, seqlen, heads, dim), batch 1 if packed
  Tensor out;            // (batch, seqlen_q, heads_q, head_dim_v)
  Tensor lse;            // (batch, heads_q, seqlen_q) f32; null: not wanted
  const float* sinks;    // (heads_q), or null
  std::uint32_t mapped;  // bits kFwdMap...: the copy engine can address it

  std::int32_t head_dim, head_dim_v;
  std::uint32_t heads_q;
  std::uint32_t group;         // query heads per key head
  std::uint32_t block_m;       // rows of a tile: as many as the consumers have, or fewer
  std::uint32_t num_m_blocks;  // of a sequence; unused if packed
  FwdOrder order;

  const PackedTile* packed_tiles;         // the order of a packed batch's tiles, or null
  const std::uint32_t* num_packed_tiles;  // of them, or null
  std::uint32_t* next_work;               // 0 at launch

  bool last_block_first;  // the last query block sees the most keys
  bool incomplete_first;  // of a sequence's tiles (tile_rows)
  bool out_vectors;       // rows of out can be written 16 bytes at a time
  // Behind a sequence's last key may lie anything, not only the zeros of the copy engine.
  bool clear_values;
  bool leaves_cut;      // sequences whose keys are cut (fwd_split.hpp) are another kernel's
  float scale_log2;     // scale * log2(e), positive without a score function
  float scale_softcap;  // scale / softcap
  float softcap_log2;   // softcap * log2(e); 0: none
};

}  // namespace flashgrad::sm90
