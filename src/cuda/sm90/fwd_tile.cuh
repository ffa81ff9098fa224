// SPDX-License-Identifier: Apache-2.0
// From a number of the work list to a tile of the forward: which rows of which head, which key
// blocks, which of them need a mask.
#pragma once

#include <cstdint>

#include "core/mask.hpp"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_schedule.hpp"
#include "cuda/sm90/fwd_split.hpp"

namespace flashgrad::sm90 {

// What the scheduler tells the others through shared memory.
struct FwdTile {
  Band band;
  FwdBlocks blocks;          // of all rows: what is loaded
  FwdBlocks part_blocks[3];  // of the 64 rows of each consumer
  std::int64_t out_offset;   // of the tile's first row
  std::int64_t lse_offset;   // likewise
  std::int32_t m_begin;      // first row, counted in its sequence
  std::int32_t num_rows;     // rows that exist; negative: no more work
  std::int32_t head;
  std::int32_t q_row, kv_row, head_kv, batch;  // coordinates in the tensors
};

// All but the key blocks of a tile with these rows of a head of a span.
__device__ __forceinline__ void place_tile(const FwdParams& p, const SequenceSpan& s,
                                           const FwdRows& rows, std::int32_t head, FwdTile* tile) {
  tile->band = s.band;
  tile->m_begin = rows.begin;
  tile->num_rows = rows.end - rows.begin;
  tile->head = head;
  tile->head_kv = head / static_cast<std::int32_t>(p.group);
  tile->batch = static_cast<std::int32_t>(s.batch_index);
  tile->q_row = static_cast<std::int32_t>(s.q.begin) + rows.begin;
  tile->kv_row = static_cast<std::int32_t>(s.kv.begin);
  tile->out_offset = p.out.offset(s.batch_index, s.q.begin + rows.begin, head);
  tile->lse_offset = p.lse.offset(s.batch_index, s.q.begin + rows.begin, head);
}

// By a warp. Returns false if there is no such tile.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ bool make_tile(const FwdParams& p, std::uint32_t work, FwdTile* tile,
                                          int lane) {
  const std::uint32_t num_tiles =
      p.packed_tiles != nullptr ? *p.num_packed_tiles : p.num_m_blocks * p.order.num_units;
  if (work >= num_tiles) {
    tile->num_rows = -1;
    return false;
  }
  std::uint32_t span = 0;
  std::uint32_t m_block = 0;
  std::int32_t head = 0;
  if (p.packed_tiles != nullptr) {
    const PackedTile place = p.packed_tiles[work];
    span = static_cast<std::uint32_t>(place.span);
    m_block = static_cast<std::uint32_t>(place.block);
    head = place.head;
  } else {
    const auto [unit, rank] = work_item(p.order, p.num_m_blocks, work);
    span = unit / p.heads_q;
    m_block = p.last_block_first ? p.num_m_blocks - 1 - rank : rank;
    head = static_cast<std::int32_t>(unit % p.heads_q);
  }
  const SequenceSpan s = sequence_span(p.sequences, span);
  FwdRows rows = tile_rows(s.band.seqlen_q, static_cast<std::int32_t>(p.block_m),
                           static_cast<std::int32_t>(m_block), p.incomplete_first);
  if (p.leaves_cut && key_chunks(s.band, kBlockN).count > 1) {
    rows.end = rows.begin;
  }

  // A lane for each consumer, and one for the tile.
  constexpr int kParts = kBlockM / 64;
  if (lane <= kParts) {
    const bool is_part = lane < kParts;
    const std::int32_t begin = is_part ? min(rows.begin + 64 * lane, rows.end) : rows.begin;
    const std::int32_t end = is_part ? min(begin + 64, rows.end) : rows.end;
    (is_part ? tile->part_blocks[lane] : tile->blocks) = key_blocks<kBlockN>(s.band, begin, end);
  }
  place_tile(p, s, rows, head, tile);
  return true;
}

// By a warp: for kRows rows of a tile, from row `first` on, the first key that each sees and the
// one behind the last.
template <int kRows>
__device__ __forceinline__ void list_row_keys(const FwdTile& tile, int first, int2* row_keys,
                                              int lane) {
#pragma unroll 1
  for (int row = lane; row < kRows; row += 32) {
    const int m = tile.m_begin + first + row;
    const Range keys = tile.band.kv_range(m, m + 1);
    row_keys[row] = make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
  }
}

}  // namespace flashgrad::sm90
