// SPDX-License-Identifier: Apache-2.0
// From a number of the work list to a tile of the forward: which rows of which head, which key blocks, which of them need a mask.
#pragma once

#include <cstdint>

#include "core/mask.hpp"
#include "cuda/sm90/fwd_params.hpp"

namespace flashgrad::cuda {

// One sequence as the device sees it. Offsets and lengths that point outside of the tensors are clamped.
struct FwdSequence {
  std::int32_t batch_index;  // coordinate of the tensors' batch; 0 if packed
  std::int32_t q_begin;
  std::int32_t kv_begin;
  Band band;
};

__device__ __forceinline__ std::int32_t clamp_to(std::int32_t x, std::int32_t last) { return min(max(x, 0), last); }

__device__ __forceinline__ FwdSequence load_sequence(const FwdParams& p, std::int32_t b) {
  FwdSequence s{b, 0, 0, {}};
  std::int32_t seqlen_q = p.seqlen_q;
  std::int32_t seqlen_kv = p.seqlen_kv;
  if (p.cu_seqlens_q != nullptr) {
    s.batch_index = 0;
    s.q_begin = clamp_to(p.cu_seqlens_q[b], p.seqlen_q);
    s.kv_begin = clamp_to(p.cu_seqlens_kv[b], p.seqlen_kv);
    seqlen_q = clamp_to(p.cu_seqlens_q[b + 1], p.seqlen_q) - s.q_begin;
    seqlen_kv = clamp_to(p.cu_seqlens_kv[b + 1], p.seqlen_kv) - s.kv_begin;
  }
  seqlen_q = max(seqlen_q, 0);
  seqlen_kv = max(seqlen_kv, 0);
  if (p.seqused_q != nullptr) {
    seqlen_q = clamp_to(p.seqused_q[b], seqlen_q);
  }
  if (p.seqused_kv != nullptr) {
    seqlen_kv = clamp_to(p.seqused_kv[b], seqlen_kv);
  }
  s.band = Band::of(p.mask, seqlen_q, seqlen_kv, p.q_offset != nullptr ? p.q_offset + b : nullptr);
  return s;
}

// A range of key blocks in three stretches: [begin, full_begin) and [full_end, end) need the mask, [full_begin, full_end) does not.
struct FwdBlocks {
  std::int32_t begin, full_begin, full_end, end;
};

template <int kBlockN>
__device__ __forceinline__ FwdBlocks key_blocks(const Band& band, std::int64_t m_begin, std::int64_t m_end) {
  const Range hull = band.kv_range(m_begin, m_end);
  const Range common = band.kv_common(m_begin, m_end);
  if (hull.empty()) {
    return {0, 0, 0, 0};
  }
  FwdBlocks blocks{};
  blocks.begin = static_cast<std::int32_t>(hull.begin) / kBlockN;
  blocks.end = (static_cast<std::int32_t>(hull.end) + kBlockN - 1) / kBlockN;
  blocks.full_begin = common.empty() ? blocks.begin : (static_cast<std::int32_t>(common.begin) + kBlockN - 1) / kBlockN;
  blocks.full_end = common.empty() ? blocks.begin : static_cast<std::int32_t>(common.end) / kBlockN;
  blocks.full_end = max(blocks.full_end, blocks.full_begin);
  return blocks;
}

// What the scheduler tells the others through shared memory.
struct FwdTile {
  Band band;
  FwdBlocks blocks;         // of all rows: what is loaded
  FwdBlocks part_blocks[3]; // of the 64 rows of each consumer
  std::int64_t out_offset;  // of the tile's first row
  std::int64_t lse_offset;
  std::int64_t q_offset, k_offset, v_offset;  // of the tile's first row, of the sequence's first key
  std::int32_t m_begin;     // first row, counted in its sequence
  std::int32_t num_rows;    // rows that exist; negative: no more work
  std::int32_t head;
  std::int32_t q_row, kv_row, head_kv, batch;  // coordinates in the tensor maps
};

// By a warp. Also writes, for each row, the first key it sees and the one behind the last. Returns false if there is no such tile.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool make_tile(const FwdParams& p, std::uint32_t work, FwdTile* tile, int2* row_keys, int lane) {
  // Sections of heads, so that the keys in use stay in the L2; inside a section the longest tiles first.
  const std::uint32_t num_m_blocks = p.schedule != nullptr ? *p.schedule_size : p.num_m_blocks;
  if (work >= num_m_blocks * p.num_heads) {
    tile->num_rows = -1;
    return false;
  }
  std::uint32_t heads = p.section_heads + 1;
  std::uint32_t first_head = 0;
  std::uint32_t rest = work;
  const std::uint32_t in_wide_sections = p.wide_sections * heads * num_m_blocks;
  if (work >= in_wide_sections) {
    first_head = p.wide_sections * heads;
    heads = p.section_heads;
    rest -= in_wide_sections;
  }
  const std::uint32_t section = rest / (heads * num_m_blocks);
  rest -= section * heads * num_m_blocks;
  const std::uint32_t rank = rest / heads;
  const std::uint32_t head_of_all = first_head + section * heads + rest % heads;
  std::uint32_t m_block = p.last_block_first ? num_m_blocks - 1 - rank : rank;
  std::uint32_t b = head_of_all / p.heads_q;
  if (p.schedule != nullptr) {
    b = static_cast<std::uint32_t>(p.schedule[rank].sequence);
    m_block = static_cast<std::uint32_t>(p.schedule[rank].m_block);
  }
  const std::uint32_t head = head_of_all % p.heads_q;
  const FwdSequence s = load_sequence(p, static_cast<std::int32_t>(b));
  const std::int32_t m_begin = static_cast<std::int32_t>(m_block) * kBlockM;
  const FwdBlocks blocks = key_blocks<kBlockN>(s.band, m_begin, m_begin + kBlockM);
  if (lane < kBlockM / 64) {
    tile->part_blocks[lane] = key_blocks<kBlockN>(s.band, m_begin + 64 * lane, m_begin + 64 * lane + 64);
  }
#pragma unroll
  for (int row = lane; row < kBlockM; row += 32) {
    const Range keys = s.band.kv_range(m_begin + row, m_begin + row + 1);
    row_keys[row] = make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
  }
  tile->band = s.band;
  tile->blocks = blocks;
  tile->m_begin = m_begin;
  tile->num_rows = max(min(kBlockM, static_cast<std::int32_t>(s.band.seqlen_q) - m_begin), 0);
  tile->head = static_cast<std::int32_t>(head);
  const std::int64_t first_row = s.q_begin + static_cast<std::int64_t>(m_begin);
  tile->out_offset = s.batch_index * p.out_batch_stride + first_row * p.out_row_stride + head * p.out_head_stride;
  tile->lse_offset = s.batch_index * p.lse_batch_stride + first_row * p.lse_row_stride + head * p.lse_head_stride;
  tile->q_offset = s.batch_index * p.q_batch_stride + first_row * p.q_row_stride + head * p.q_head_stride;
  tile->k_offset = s.batch_index * p.k_batch_stride + s.kv_begin * p.k_row_stride + head / p.group * p.k_head_stride;
  tile->v_offset = s.batch_index * p.v_batch_stride + s.kv_begin * p.v_row_stride + head / p.group * p.v_head_stride;
  tile->q_row = static_cast<std::int32_t>(first_row);
  tile->kv_row = s.kv_begin;
  tile->head_kv = static_cast<std::int32_t>(head / p.group);
  tile->batch = s.batch_index;
  return true;
}

}  // namespace flashgrad::cuda
