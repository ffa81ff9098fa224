// SPDX-License-Identifier: Apache-2.0
// The work of one CTA of the backward: which keys, which query blocks, where they lie.
#pragma once

#include <cstdint>

#include "cuda/sm90/config.hpp"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/sequences.cuh"

namespace flashgrad::sm90 {

// Kept in shared memory; 32 bits suffice because supports() refuses 2^30 rows and more.
struct KeyTile {
  int num_steps;  // query blocks times query heads of the group
  int m_begin;    // query blocks, walked from m_end - 1 down
  int m_end;
  int head_kv;
  int batch_index;
  int q_row;          // row of q where the sequence begins
  int q_block;        // its first block in the row statistics
  int kv_row;         // row of k and v where the tile begins
  int rows_to_write;  // rows of dk and dv that this tile writes
  int live_begin;     // keys of the tile that some query sees; the others are not to be read
  int live_end;
  int has_dead_keys;    // 1 if a key that is not live exists in the tensors
  int peer_live_begin;  // the same of the cluster's other tile
  int peer_live_end;
  int landing_parity[3];  // of the loader's own barriers
  // The band, relative to the tile: query i sees key j of the tile iff i + lo <= j <= i + hi, j <
  // keys_end.
  int lo;
  int hi;
  int keys_end;
  // Query blocks [full_begin, full_end) need no mask for the tile's 64-key block of this index.
  int full_begin[4];
  int full_end[4];
};

constexpr std::int64_t clamp_to(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Tiles are launched in sections of units, in each by ascending key block: for causal masks the
// longest come first, and the live q, dout and dq of a section fit the L2.
//
// A cluster of kCluster CTAs takes neighbouring tiles and walks the query blocks that any of them
// needs.
template <int kBlockN, int kCluster>
FG_HOST_DEVICE inline KeyTile key_tile(const BwdParams& p, std::int64_t cta) {
  constexpr int kClusterN = kBlockN * kCluster;
  const std::int64_t index = cta / kCluster;
  const std::int64_t rank = cta % kCluster;
  const std::int64_t per_section = p.section * p.num_kv_blocks;
  const std::int64_t section = index / per_section;
  const std::int64_t in_section = index % per_section;
  const std::int64_t units =
      p.num_units - section * p.section < p.section ? p.num_units - section * p.section : p.section;
  const std::int64_t unit = section * p.section + in_section % units;
  const Sequences& s = p.sequences;
  std::int64_t block = in_section / units;
  std::int64_t span = unit / p.heads_kv;  // the batch entry, unless packed
  if (s.packed()) {
    span = span_of_block(s.cu_seqlens_kv, s.batch, s.rows_kv, block, kClusterN);
    block -= first_block(s.cu_seqlens_kv, s.batch, s.rows_kv, span, kClusterN);
  }
  const SequenceSpan sequence = sequence_span(s, span);
  const Band& band = sequence.band;
  const std::int64_t cluster_begin = block * kClusterN;
  const std::int64_t begin = cluster_begin + rank * kBlockN;

  KeyTile tile{};
  const Range rows = band.q_range(cluster_begin, cluster_begin + kClusterN);
  if (!rows.empty()) {
    tile.m_begin = static_cast<int>(rows.begin / kBlockM);
    tile.m_end = static_cast<int>((rows.end + kBlockM - 1) / kBlockM);
  }
  tile.num_steps = (tile.m_end - tile.m_begin) * static_cast<int>(p.group);
  tile.head_kv = static_cast<int>(unit % p.heads_kv);
  tile.batch_index = static_cast<int>(sequence.batch_index);
  tile.q_row = static_cast<int>(sequence.q.begin);
  tile.q_block = static_cast<int>(first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM));
  tile.kv_row = static_cast<int>(sequence.kv.begin + begin);
  tile.rows_to_write =
      static_cast<int>(clamp_to(sequence.kv.end - sequence.kv.begin - begin, 0, kBlockN));
  const Range live = band.kv_range(0, band.seqlen_q);
  const auto has_dead_keys = [&](std::int64_t tile_begin, int* live_begin, int* live_end) {
    *live_begin = static_cast<int>(clamp_to(live.begin - tile_begin, 0, kBlockN));
    *live_end = static_cast<int>(clamp_to(live.end - tile_begin, 0, kBlockN));
    const std::int64_t existing = clamp_to(s.rows_kv - sequence.kv.begin - tile_begin, 0, kBlockN);
    return *live_begin > 0 || *live_end < existing;
  };
  tile.has_dead_keys = has_dead_keys(begin, &tile.live_begin, &tile.live_end) ? 1 : 0;
  if (kCluster == 2) {
    tile.has_dead_keys |= has_dead_keys(cluster_begin + (1 - rank) * kBlockN, &tile.peer_live_begin,
                                        &tile.peer_live_end)
                              ? 1
                              : 0;
  }
  constexpr std::int64_t kFar = std::int64_t{1} << 30;
  tile.lo = static_cast<int>(clamp_to(band.lo - begin, -kFar, kFar));
  tile.hi = static_cast<int>(clamp_to(band.hi - begin, -kFar, kFar));
  tile.keys_end = static_cast<int>(clamp_to(band.seqlen_kv - begin, 0, kBlockN));
  for (int i = 0; i < kBlockN / 64; ++i) {
    const Range full =
        band.q_range_full(begin + std::int64_t{64} * i, begin + std::int64_t{64} * (i + 1));
    tile.full_begin[i] = static_cast<int>((full.begin + kBlockM - 1) / kBlockM);
    // A last, partial block has no rows beyond: their lse is -inf.
    tile.full_end[i] = static_cast<int>(
        full.end == band.seqlen_q ? (full.end + kBlockM - 1) / kBlockM : full.end / kBlockM);
  }
  return tile;
}

}  // namespace flashgrad::sm90
