// SPDX-License-Identifier: Apache-2.0
// From a number of the work list to a tile of the forward: which rows of which head, which key
// blocks, which of them need a mask.
#pragma once

#include <cstdint>

#include "core/mask.hpp"
#include "cuda/sm90/fwd_params.hpp"

namespace flashgrad::sm90 {

// Key blocks [begin, end) in three stretches: [begin, full_begin) and [full_end, end) need the
// mask, [full_begin, full_end) does not.
struct FwdBlocks {
  std::int32_t begin, full_begin, full_end, end;
};

// Of rows [m_begin, m_end).
template <int kBlockN>
__device__ __forceinline__ FwdBlocks key_blocks(const Band& band, std::int64_t m_begin,
                                                std::int64_t m_end) {
  const Range hull = band.kv_range(m_begin, m_end);
  const Range full = band.kv_range_full(m_begin, m_end);
  if (hull.empty()) {
    return {0, 0, 0, 0};
  }
  FwdBlocks blocks{};
  blocks.begin = static_cast<std::int32_t>(hull.begin) / kBlockN;
  blocks.end = (static_cast<std::int32_t>(hull.end) + kBlockN - 1) / kBlockN;
  blocks.full_begin =
      full.empty() ? blocks.begin : (static_cast<std::int32_t>(full.begin) + kBlockN - 1) / kBlockN;
  blocks.full_end = full.empty() ? blocks.begin : static_cast<std::int32_t>(full.end) / kBlockN;
  blocks.full_end = max(blocks.full_end, blocks.full_begin);
  return blocks;
}

// What the scheduler tells the others through shared memory.
struct FwdTile {
  Band band;
  FwdBlocks blocks;          // of all rows: what is loaded
  FwdBlocks part_blocks[3];  // of the 64 rows of each consumer
  std::int64_t out_offset;   // of the tile's first row
  std::int64_t lse_offset;   // likewise
  std::int64_t q_offset, k_offset,
      v_offset;           // of the tile's first row, of the sequence's first key
  std::int32_t m_begin;   // first row, counted in its sequence
  std::int32_t num_rows;  // rows that exist; negative: no more work
  std::int32_t head;
  std::int32_t q_row, kv_row, head_kv, batch;  // coordinates in the tensors
};

// By a warp. Also writes, for each row, the first key it sees and the one behind the last. Returns
// false if there is no such tile.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool make_tile(const FwdParams& p, std::uint32_t work, FwdTile* tile,
                                          int2* row_keys, int lane) {
  const std::uint32_t num_m_blocks = p.schedule != nullptr ? *p.schedule_size : p.num_m_blocks;
  if (work >= num_m_blocks * p.num_units) {
    tile->num_rows = -1;
    return false;
  }
  // Sections of units, so that the keys in use stay in the L2; inside a section the longest tiles
  // first.
  std::uint32_t units = p.section_units + 1;
  std::uint32_t first_unit = 0;
  std::uint32_t rest = work;
  const std::uint32_t in_wide_sections = p.wide_sections * units * num_m_blocks;
  if (work >= in_wide_sections) {
    first_unit = p.wide_sections * units;
    units = p.section_units;
    rest -= in_wide_sections;
  }
  const std::uint32_t section = rest / (units * num_m_blocks);
  rest -= section * units * num_m_blocks;
  const std::uint32_t rank = rest / units;
  const std::uint32_t unit = first_unit + section * units + rest % units;
  std::uint32_t m_block = p.last_block_first ? num_m_blocks - 1 - rank : rank;
  std::uint32_t span = unit / p.heads_q;
  if (p.schedule != nullptr) {
    span = static_cast<std::uint32_t>(p.schedule[rank].span);
    m_block = static_cast<std::uint32_t>(p.schedule[rank].m_block);
  }
  const auto head = static_cast<std::int32_t>(unit % p.heads_q);
  const auto head_kv = static_cast<std::int32_t>(unit % p.heads_q / p.group);
  const SequenceSpan s = sequence_span(p.sequences, span);
  const std::int32_t m_begin = static_cast<std::int32_t>(m_block) * kBlockM;

  if (lane < kBlockM / 64) {
    tile->part_blocks[lane] =
        key_blocks<kBlockN>(s.band, m_begin + 64 * lane, m_begin + 64 * lane + 64);
  }
#pragma unroll 1
  for (int row = lane; row < kBlockM; row += 32) {
    const Range keys = s.band.kv_range(m_begin + row, m_begin + row + 1);
    row_keys[row] = make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
  }
  tile->band = s.band;
  tile->blocks = key_blocks<kBlockN>(s.band, m_begin, m_begin + kBlockM);
  tile->m_begin = m_begin;
  tile->num_rows = max(min(kBlockM, static_cast<std::int32_t>(s.band.seqlen_q) - m_begin), 0);
  tile->head = head;
  tile->head_kv = head_kv;
  tile->batch = static_cast<std::int32_t>(s.batch_index);
  tile->q_row = static_cast<std::int32_t>(s.q.begin) + m_begin;
  tile->kv_row = static_cast<std::int32_t>(s.kv.begin);
  tile->out_offset = p.out.offset(s.batch_index, s.q.begin + m_begin, head);
  tile->lse_offset = p.lse.offset(s.batch_index, s.q.begin + m_begin, head);
  tile->q_offset = p.q.offset(s.batch_index, s.q.begin + m_begin, head);
  tile->k_offset = p.k.offset(s.batch_index, s.kv.begin, head_kv);
  tile->v_offset = p.v.offset(s.batch_index, s.kv.begin, head_kv);
  return true;
}

}  // namespace flashgrad::sm90
