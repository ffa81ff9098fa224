// SPDX-License-Identifier: Apache-2.0
// The work of one CTA of the backward for head dims above 128: of bwd_wide.cuh, which keys and
// query blocks; of bwd_wide_dq.cuh, which queries and key blocks. Plain arithmetic, for the device
// and for tests on the host.
#pragma once

#include <cstdint>

#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/wide_pass.hpp"

namespace flashgrad::sm90 {

// Of a CTA of bwd_wide.cuh, in shared memory.
struct WideTile {
  int exists;  // 0: past the last tile
  KeyTile keys;
  // Numbers of images of dS (wide_pass.hpp); 32 bits: 2^31 of them would be 16 TB.
  int image;           // of the first step
  int to_block_below;  // from a query block's image to that of the block below
  int to_next_head;    // from the image of a head's last step to that of the next head's first
};

// Fills in the tile of a CTA. num_steps is -1 if another pass makes its keys. Tiles are launched in
// sections of units, in each by ascending keys: for causal masks the longest come first, and the
// live q and dout of a section fit the L2.
template <int kCluster>
FG_HOST_DEVICE inline void describe_wide_tile(const BwdParams& p, const WidePass& pass,
                                              std::int64_t cta, WideTile& tile) {
  // 32 bits: there are fewer than 2^31 CTAs, and a 64-bit division takes four times as long.
  const auto to_u32 = [](std::int64_t x) { return static_cast<std::uint32_t>(x); };
  const auto to_int = [](std::int64_t x) { return static_cast<int>(x); };
  const int rank = to_int(cta % kCluster);
  const std::uint32_t index = to_u32(cta) / kCluster;
  const std::uint32_t first =
      index / to_u32(pass.section * pass.num_key_tiles) * to_u32(pass.section);
  const std::uint32_t in_section = index - first * to_u32(pass.num_key_tiles);
  const std::uint32_t after = to_u32(pass.num_units) - first;
  const std::uint32_t units = after < to_u32(pass.section) ? after : to_u32(pass.section);
  const std::uint32_t local_unit = first + in_section % units;
  const std::uint32_t unit = to_u32(pass.first_unit) + local_unit;
  const std::uint32_t heads_kv = to_u32(p.heads_kv);
  const Sequences& s = p.sequences;
  // The batch entry, or the span of a packed batch; and the cluster's keys, counted in blocks of
  // the cluster from the beginning of the sequence.
  PackedTile place{to_int(unit / heads_kv), to_int(in_section / units), to_int(unit % heads_kv)};
  if (s.packed()) {
    constexpr int kClusterKeys = kWideKeys * kCluster;
    place.span =
        to_int(span_of_block(s.cu_seqlens_kv, s.batch, s.rows_kv, place.block, kClusterKeys));
    place.block -=
        to_int(first_block(s.cu_seqlens_kv, s.batch, s.rows_kv, place.span, kClusterKeys));
  } else {
    place.block += to_int(pass.key_begin) / kCluster;
  }
  tile.exists = 1;
  describe_key_tile(p, {kWideKeys, kCluster, false}, place, rank, tile.keys);
  const int key_count = to_int(pass.key_count);
  const int n = place.block * kCluster - to_int(pass.key_begin);
  // Every launch meets all keys of a packed batch; those that no query sees, also outside of every
  // sequence, are the first pass's.
  const bool elsewhere = tile.keys.num_steps > 0 ? n < 0 || n >= key_count : pass.key_begin > 0;
  if (s.packed() && elsewhere) {
    tile.keys.num_steps = -1;
  }
  const int blocks_per_head = to_int(pass.blocks_per_head);
  const int m = (s.packed() ? tile.keys.q_block : 0) + tile.keys.m_end - 1;
  tile.image = (to_int(local_unit) * to_int(p.group) * blocks_per_head + m) * key_count + n + rank;
  tile.to_block_below = -key_count;
  tile.to_next_head = (blocks_per_head + tile.keys.m_end - 1 - tile.keys.m_begin) * key_count;
}

template <int kCluster>
inline WideTile wide_tile(const BwdParams& p, const WidePass& pass, std::int64_t cta) {
  WideTile tile;
  describe_wide_tile<kCluster>(p, pass, cta, tile);
  return tile;
}

inline constexpr int kWideDqRows = 128;

// Of a CTA of bwd_wide_dq.cuh, in shared memory.
struct WideDqTile {
  int exists;   // 0: past the last tile
  int n_begin;  // key blocks of the pass that the cluster's queries see
  int n_end;
  // For the 64 rows of each consumer: the same, what is carried, and where.
  int own_begin[2];
  int own_end[2];
  int continues[2];           // an earlier pass left sums
  int goes_on[2];             // a later pass needs them
  int finishes[2];            // dq is written
  const std::uint8_t* ds[2];  // the image of key block 0
  float* partial[2];
  std::int64_t statistics[2];  // place in neg_lse_log2
  int head;
  int head_kv;
  int batch_index;
  int q_row;          // row of q where the tile begins
  int kv_row;         // row of k where the sequence begins
  int rows_to_write;  // of dq
  int live_begin;     // keys of the sequence that some query sees; the others are not to be read
  int live_end;
  int keys_existing;  // keys from kv_row to the end of the tensor
};

template <int kD, int kCluster>
FG_HOST_DEVICE inline WideDqTile wide_dq_tile(const BwdQueryParams& p, const WidePass& pass,
                                              std::int64_t cta) {
  constexpr int kRows = kWideDqRows * kCluster;
  // 32 bits, as in wide_tile.
  const auto heads = static_cast<std::uint32_t>(pass.num_units * p.group);  // of the pass
  const std::uint32_t index = static_cast<std::uint32_t>(cta) / kCluster;
  const auto section = static_cast<std::uint32_t>(p.section);
  const std::uint32_t first_head =
      index / (section * static_cast<std::uint32_t>(p.num_q_tiles)) * section;
  const std::uint32_t in_section = index - first_head * static_cast<std::uint32_t>(p.num_q_tiles);
  const std::uint32_t together = heads - first_head < section ? heads - first_head : section;
  const std::int64_t local_head = first_head + in_section % together;
  // Descending: with a causal mask the longest come first.
  std::int64_t block = p.num_q_tiles - 1 - in_section / together;
  const std::int64_t head = pass.first_unit * p.group + local_head;  // counts through the batch
  const Sequences& s = p.sequences;
  const auto heads_q = static_cast<std::uint32_t>(p.heads_q);
  const auto head_of_entry = static_cast<int>(static_cast<std::uint32_t>(head) % heads_q);
  std::int64_t span = static_cast<std::uint32_t>(head) / heads_q;
  if (s.packed()) {
    span = span_of_block(s.cu_seqlens_q, s.batch, s.rows_q, block, kRows);
    block -= first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kRows);
  }
  const SequenceSpan sequence = sequence_span(s, span);
  const Band& band = sequence.band;
  const std::int64_t cluster_begin = block * kRows;
  const std::int64_t begin = cluster_begin + cta % kCluster * kWideDqRows;
  const std::int64_t pass_end = pass.key_begin + pass.key_count;
  const auto blocks_of = [](const Range& keys) {
    return keys.empty() ? Range{}
                        : Range{keys.begin / kWideKeys, (keys.end + kWideKeys - 1) / kWideKeys};
  };
  const auto in_pass = [&](const Range& blocks, int* first, int* last) {
    *first = static_cast<int>(clamp_to(blocks.begin, pass.key_begin, pass_end));
    *last = static_cast<int>(clamp_to(blocks.end, *first, pass_end));
  };
  WideDqTile tile{};
  tile.exists = 1;
  in_pass(blocks_of(band.kv_range(cluster_begin, cluster_begin + kRows)), &tile.n_begin,
          &tile.n_end);
  const std::int64_t q_block =
      first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM) + begin / kBlockM;
  const std::int64_t local_block = s.packed() ? q_block : begin / kBlockM;
  for (int i = 0; i < 2; ++i) {
    const Range blocks = blocks_of(
        band.kv_range(begin + std::int64_t{kBlockM} * i, begin + std::int64_t{kBlockM} * (i + 1)));
    in_pass(blocks, &tile.own_begin[i], &tile.own_end[i]);
    const bool here = tile.own_begin[i] < tile.own_end[i];
    tile.continues[i] = here && blocks.begin < pass.key_begin ? 1 : 0;
    tile.goes_on[i] = here && blocks.end > pass_end ? 1 : 0;
    tile.finishes[i] =
        (here && blocks.end <= pass_end) || (blocks.empty() && pass.key_begin == 0) ? 1 : 0;
    const std::int64_t at = local_head * pass.blocks_per_head + local_block + i;
    tile.ds[i] = pass.ds + (at * pass.key_count - pass.key_begin) * kDsImageBytes;
    tile.partial[i] = pass.partial == nullptr ? nullptr : pass.partial + at * kBlockM * kD;
    tile.statistics[i] = (head_of_entry * p.num_blocks + q_block + i) * kBlockM;
  }
  tile.head = head_of_entry;
  tile.head_kv = tile.head / static_cast<int>(p.group);
  tile.batch_index = static_cast<int>(sequence.batch_index);
  tile.q_row = static_cast<int>(sequence.q.begin + begin);
  tile.kv_row = static_cast<int>(sequence.kv.begin);
  tile.rows_to_write =
      static_cast<int>(clamp_to(sequence.q.end - sequence.q.begin - begin, 0, kWideDqRows));
  const Range live = band.kv_range(0, band.seqlen_q);
  tile.live_begin = static_cast<int>(live.begin);
  tile.live_end = static_cast<int>(live.end);
  tile.keys_existing = static_cast<int>(s.rows_kv - tile.kv_row);
  return tile;
}

}  // namespace flashgrad::sm90
