// SPDX-License-Identifier: Apache-2.0
// What the forward kernels read besides the tensor maps.
#pragma once

#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::cuda {

// The order of a packed batch's tiles, made on the device: longest first. Lies in the workspace.
struct FwdScheduleEntry {
  std::int32_t sequence;
  std::int32_t m_block;
};

struct FwdParams {
  void* out;                              // (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)
  float* lse;                             // (batch, heads_q, seqlen_q) or (heads_q, total_q); null: not wanted
  const float* sinks;                     // (heads_q); null: none
  const std::int32_t* cu_seqlens_q;       // (batch + 1); null: fixed length
  const std::int32_t* cu_seqlens_kv;      // (batch + 1); null: fixed length
  const std::int32_t* seqused_q;          // (batch); null: all
  const std::int32_t* seqused_kv;         // (batch); null: all
  const std::int64_t* q_offset;           // (batch); null: the alignment decides
  const FwdScheduleEntry* schedule;       // (num_m_blocks); null: fixed length
  const std::uint32_t* schedule_size;     // entries in use; null: fixed length
  std::uint32_t* next_work;               // 0 at launch; null: one tile per CTA
  const void* q;                          // (batch, seqlen_q, heads_q, head_dim) or packed; for rows that are recomputed
  const void* k;                          // (batch, seqlen_kv, heads_kv, head_dim) or packed
  const void* v;                          // (batch, seqlen_kv, heads_kv, head_dim_v) or packed
  std::int64_t q_batch_stride, q_row_stride, q_head_stride;
  std::int64_t k_batch_stride, k_row_stride, k_head_stride;
  std::int64_t v_batch_stride, v_row_stride, v_head_stride;
  std::int64_t out_batch_stride, out_row_stride, out_head_stride;
  std::int64_t lse_batch_stride, lse_row_stride, lse_head_stride;
  BandMask mask;
  std::int64_t batch;
  std::int32_t seqlen_q, seqlen_kv;       // the tensors' rows: totals if packed
  std::uint32_t heads_q, group;           // query heads; query heads per key head
  std::uint32_t num_m_blocks;             // of one sequence; if packed, the schedule's capacity
  std::uint32_t num_heads;                // batch * heads_q; heads_q if packed
  std::uint32_t section_heads;            // heads whose keys share the L2 at a time
  std::uint32_t wide_sections;            // the first sections, which have one head more
  std::int32_t head_dim, head_dim_v;
  bool last_block_first;                  // the last query block is the longest
  bool out_vectors;                       // rows of out can be written 16 bytes at a time
  float scale_log2;                       // scores times this are exponents of 2
  float tanh_scale;                       // softcap: exponent = cap_log2 * tanh(score * tanh_scale); 0: none
  float cap_log2;
};

}  // namespace flashgrad::cuda
