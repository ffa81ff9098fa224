// SPDX-License-Identifier: Apache-2.0
// The work of one CTA of the backward: which keys, which query blocks, where they lie, and in which
// order it goes through them.
#pragma once

#include <cstdint>

#include "cuda/sm90/config.hpp"
#include "cuda/sm90/packed_order.hpp"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/sequences.cuh"
#include "cuda/sm90/wide_pass.hpp"

namespace flashgrad::sm90 {

// Kept in shared memory; 32 bits suffice because supports() refuses 2^30 rows and more.
struct alignas(16) KeyTile {
  int num_steps;  // query blocks times query heads of the group
  int m_begin;    // query blocks, walked from m_start down to m_begin, then from m_end - 1 down
  int m_end;
  int m_start;  // m_end - 1, unless the tile rotates
  int head_kv;
  int batch_index;
  int q_row;          // row of q where the sequence begins
  int q_block;        // its first block in the row statistics
  int kv_row;         // row of k and v where the tile begins
  int rows_to_write;  // rows of dk and dv that this tile writes
  int live_begin;     // keys of the tile that some query sees; the others are not to be read
  int live_end;
  int has_dead_keys;    // 1 if a key that is not live exists in the tensors
  int peer_live_begin;  // the same of the cluster's other tile, in bwd.cuh
  int peer_live_end;
  int landing_parity[3];  // of the loader's own barriers
  // The band, relative to the tile: query i sees key j of the tile iff i + lo <= j <= i + hi, j <
  // keys_end.
  int lo;
  int hi;
  int keys_end;
  int q_rows;  // rows of q from q_row on that belong to the sequence
  // In ordered kernels (bwd_order.cuh): the turn on block m_start, when it grows, and the blocks
  // that this tile adds to last.
  int turn;
  int segment_mask;  // it grows at the top of each segment of segment_mask + 1 blocks
  int growing_end;   // below this block
  int finish_begin[2];
  int finish_end[2];
  // Query blocks [full_begin, full_end) need no mask for the tile's 64-key block of this index.
  int full_begin[4];
  int full_end[4];
  // Of tiles in which each consumer has one block of 64 keys: query blocks [seen_begin, seen_end)
  // see keys of the block of this index.
  int seen_begin[2];
  int seen_end[2];
  // Where units are served (unit_pipeline.hpp): set once those of the unit's rows are prepared that
  // others prepare; 0 is no answer.
  std::uint32_t rows_ready;
  int head_loaded;  // of k and v: head_kv, unless that is a part of one (bwd_plan.hpp)
};

// Whether a tile of an ordered kernel adds to some blocks last; then also to that of its last step.
FG_HOST_DEVICE inline bool finishes_dq(const KeyTile& tile) {
  return tile.finish_begin[0] < tile.finish_end[0] || tile.finish_begin[1] < tile.finish_end[1];
}

constexpr std::int64_t clamp_to(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// The form of a kernel's tiles.
struct KeyTileForm {
  std::int32_t block_n;
  std::int32_t cluster;  // CTAs of a cluster take neighbouring tiles
  bool ordered;
  std::int32_t head_parts = 1;  // of heads_kv that are parts of one head of k and v
};

// Where tile (or cluster of tiles) number `index` lies, in the order of section_order.hpp.
FG_HOST_DEVICE inline PackedTile tile_place(const BwdParams& p, std::int64_t keys,
                                            std::uint32_t index) {
  const Sequences& s = p.sequences;
  const auto [unit, block] = section_tile(
      {static_cast<std::uint32_t>(p.num_units), static_cast<std::uint32_t>(p.section),
       static_cast<std::uint32_t>(p.num_kv_blocks), static_cast<std::uint32_t>(p.round)},
      index);
  const auto heads = static_cast<std::uint32_t>(p.heads_kv);
  std::int64_t span = unit / heads;  // batch entry, unless packed
  std::int64_t in_span = block;
  if (s.packed()) {
    span = span_of_block(s.cu_seqlens_kv, s.batch, s.rows_kv, block, keys);
    in_span -= first_block(s.cu_seqlens_kv, s.batch, s.rows_kv, span, keys);
  }
  return {static_cast<std::int32_t>(span), static_cast<std::int32_t>(in_span),
          static_cast<std::int32_t>(unit % heads)};
}

// Where a tile lies in a batch of fixed length whose units are served.
FG_HOST_DEVICE inline PackedTile served_place(const BwdParams& p, const ServedOrder& order) {
  return {static_cast<std::int32_t>(order.unit / p.heads_kv),
          static_cast<std::int32_t>(order.block),
          static_cast<std::int32_t>(order.unit % p.heads_kv)};
}

// Fills in the tile of CTA `rank` of the cluster at `place`. It walks the query blocks that any CTA
// of the cluster needs.
FG_HOST_DEVICE inline void describe_key_tile(const BwdParams& p, const KeyTileForm& form,
                                             const PackedTile& place, std::int64_t rank,
                                             KeyTile& tile) {
  const std::int64_t block_n = form.block_n;
  const std::int64_t cluster_n = block_n * form.cluster;
  const Sequences& s = p.sequences;
  tile = {};
  const std::int64_t span = place.span;
  const std::int64_t block = place.block;
  const SequenceSpan sequence = sequence_span(s, span);
  const Band& band = sequence.band;
  const std::int64_t cluster_begin = block * cluster_n;
  const std::int64_t begin = cluster_begin + rank * block_n;

  const Range rows = band.q_range(cluster_begin, cluster_begin + cluster_n);
  if (!rows.empty()) {
    tile.m_begin = static_cast<int>(rows.begin / kBlockM);
    tile.m_end = static_cast<int>((rows.end + kBlockM - 1) / kBlockM);
  }
  tile.m_start = tile.m_end - 1;
  tile.num_steps = (tile.m_end - tile.m_begin) * static_cast<int>(p.group);
  tile.head_kv = place.head;
  tile.batch_index = static_cast<int>(sequence.batch_index);
  tile.q_row = static_cast<int>(sequence.q.begin);
  tile.q_rows = static_cast<int>(sequence.q.end - sequence.q.begin);
  tile.q_block = static_cast<int>(first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM));
  tile.kv_row = static_cast<int>(sequence.kv.begin + begin);
  tile.rows_to_write =
      static_cast<int>(clamp_to(sequence.kv.end - sequence.kv.begin - begin, 0, block_n));
  const Range live = band.kv_range(0, band.seqlen_q);
  const auto has_dead_keys = [&](std::int64_t tile_begin, int* live_begin, int* live_end) {
    *live_begin = static_cast<int>(clamp_to(live.begin - tile_begin, 0, block_n));
    *live_end = static_cast<int>(clamp_to(live.end - tile_begin, 0, block_n));
    const std::int64_t existing = clamp_to(
        (p.ragged_rows != 0 ? sequence.kv.end : s.rows_kv) - sequence.kv.begin - tile_begin, 0,
        block_n);
    return *live_begin > 0 || *live_end < existing;
  };
  tile.has_dead_keys = has_dead_keys(begin, &tile.live_begin, &tile.live_end) ? 1 : 0;
  if (form.cluster == 2 && form.block_n != kWideKeys) {  // bwd.cuh loads keys of the other, too
    tile.has_dead_keys |= has_dead_keys(cluster_begin + (1 - rank) * block_n, &tile.peer_live_begin,
                                        &tile.peer_live_end)
                              ? 1
                              : 0;
  }
  constexpr std::int64_t kFar = std::int64_t{1} << 30;
  tile.lo = static_cast<int>(clamp_to(band.lo - begin, -kFar, kFar));
  tile.hi = static_cast<int>(clamp_to(band.hi - begin, -kFar, kFar));
  tile.keys_end = static_cast<int>(clamp_to(band.seqlen_kv - begin, 0, block_n));
  for (int i = 0; i < form.block_n / 64; ++i) {
    const Range full =
        band.q_range_full(begin + std::int64_t{64} * i, begin + std::int64_t{64} * (i + 1));
    tile.full_begin[i] = static_cast<int>((full.begin + kBlockM - 1) / kBlockM);
    // A last, partial block has no rows beyond: their lse is -inf.
    tile.full_end[i] = static_cast<int>(
        full.end == band.seqlen_q ? (full.end + kBlockM - 1) / kBlockM : full.end / kBlockM);
  }
  constexpr int kConsumers = BwdConfig::kConsumers;
  for (int i = 0; i < kConsumers && form.block_n == kConsumers * 64; ++i) {
    const Range seen =
        band.q_range(begin + std::int64_t{64} * i, begin + std::int64_t{64} * (i + 1));
    tile.seen_begin[i] = seen.empty() ? 0 : static_cast<int>(seen.begin / kBlockM);
    tile.seen_end[i] = seen.empty() ? 0 : static_cast<int>((seen.end + kBlockM - 1) / kBlockM);
  }
  if (form.ordered) {
    const auto to_int = [](std::int64_t x) { return static_cast<int>(x); };
    tile.turn = to_int(block);
    tile.segment_mask = -1;
    tile.finish_begin[0] = tile.m_begin;
    const std::int64_t num_clusters = (band.seqlen_kv + cluster_n - 1) / cluster_n;
    if (p.max_round == 0) {
      // No later cluster sees rows before i, where i + hi is the first key after this one.
      const std::int64_t after = cluster_begin + cluster_n;
      tile.finish_end[0] =
          live.end <= after ? tile.m_end
                            : to_int(clamp_to(after - band.hi, tile.m_begin * std::int64_t{kBlockM},
                                              tile.m_end * std::int64_t{kBlockM}) /
                                     kBlockM);
    } else if (tile.num_steps > 0) {
      const Rotation r = rotation(tile.m_end, num_clusters, p.max_round);
      const std::int64_t round_begin = block / r.round * r.round;
      const std::int64_t j = block - round_begin;
      const std::int64_t in_this_round =
          num_clusters - round_begin < r.round ? num_clusters - round_begin : r.round;
      const auto top = [&](std::int64_t segment) {
        return to_int(segment * r.segment < tile.m_end ? segment * r.segment : tile.m_end);
      };
      tile.m_start = top(j + 1) - 1;
      tile.turn = to_int(round_begin);
      tile.segment_mask = to_int(r.segment - 1);
      tile.growing_end = to_int(in_this_round * r.segment);
      // The last to reach segment j + 1 is j; the last of a round also ends segment 0 and those
      // that nobody of an incomplete round started with.
      if (round_begin + in_this_round == num_clusters) {
        const bool last = j == in_this_round - 1;
        tile.finish_begin[0] = last ? 0 : top(j + 1);
        tile.finish_end[0] = last ? top(1) : top(j + 2);
        tile.finish_begin[1] = last ? top(in_this_round) : 0;
        tile.finish_end[1] = last ? tile.m_end : 0;
      }
    }
  }
}

// The same in bwd.cuh.
FG_HOST_DEVICE inline KeyTile key_tile_at(const BwdParams& p, const KeyTileForm& form,
                                          const PackedTile& place, std::int64_t rank) {
  KeyTile tile;
  describe_key_tile(p, form, place, rank, tile);
  tile.head_loaded = tile.head_kv / form.head_parts;
  return tile;
}

// How the tiles of the main kernel come to be described before it runs.
struct KeyTileParams {
  KeyTile* tiles;  // (num_tiles * form.cluster); null: not wanted
  KeyTileForm form;
  std::uint32_t num_tiles;  // or clusters of tiles: the grid
  // Of a packed batch, whose tiles a kernel before prepare puts in order:
  PackedPass packed;
  PackedTile* packed_tiles;         // (num_tiles), or null: fixed length
  std::uint32_t* num_packed_tiles;  // in use; the rest of the grid has no work
};

// Walks the steps of a tile. kHeadsInside: query blocks from m_start downwards and, past m_begin,
// from the last one on, and for each the query heads of the group: clusters that meet at a block in
// turns then never wait for each other's other heads. Else query heads, and in each the blocks.
template <bool kHeadsInside>
struct StepWalk {
  int m_begin;
  int m_last;
  int m;
  int group;
  int head;
  int head_end;  // of the group

  FG_HOST_DEVICE StepWalk(const KeyTile& tile, int heads_of_group)
      : m_begin(tile.m_begin),
        m_last(tile.m_end - 1),
        m(kHeadsInside ? tile.m_start : m_last),
        group(heads_of_group),
        head(tile.head_kv * group),
        head_end(head + group) {}
  // The number of the step's block in the row statistics. 32 bits: 2^31 blocks of dq accumulators
  // would be 16 TB and more.
  FG_HOST_DEVICE int slot(const RowStatistics& rows, const KeyTile& tile) const {
    return head * static_cast<int>(rows.num_blocks) + tile.q_block + m;
  }
  // Returns whether it went on to another query block.
  FG_HOST_DEVICE bool advance() {
    if (kHeadsInside) {
      if (++head < head_end) {
        return false;
      }
      head -= group;
    }
    if (--m < m_begin) {
      m = m_last;
      head += kHeadsInside ? 0 : 1;
    }
    return true;
  }
};

// The turn of this cluster on the walk's block.
struct Turn {
  int value;

  FG_HOST_DEVICE explicit Turn(const KeyTile& tile) : value(tile.turn) {}
  // After walk.advance() has gone on to another block.
  FG_HOST_DEVICE void advance(const StepWalk<true>& walk, const KeyTile& tile) {
    if (((walk.m & tile.segment_mask) == tile.segment_mask || walk.m == walk.m_last) &&
        walk.m < tile.growing_end) {
      ++value;
    }
  }
};

}  // namespace flashgrad::sm90
