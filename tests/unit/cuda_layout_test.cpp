// SPDX-License-Identifier: Apache-2.0
// The layouts and orders that GPU kernels rely on, checked on the host: swizzled tiles,
// descriptors, fragments, spans of packed batches and the tiles of the backward.
#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "cuda/sm90/bwd_plan.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/sequences.cuh"
#include "cuda/tile/fragment.hpp"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad {
namespace {

TEST(SwizzledTile, EveryElementHasItsOwnPlace) {
  using Tile = tile::SwizzledTile<128>;
  std::set<int> places;
  for (int row = 0; row < 128; ++row) {
    for (int column = 0; column < 128; ++column) {
      const int at = Tile::offset(row, column);
      EXPECT_EQ(at % 2, 0);
      EXPECT_LT(at, Tile::bytes(128));
      places.insert(at);
    }
  }
  EXPECT_EQ(places.size(), 128U * 128U);
}

TEST(SwizzledTile, ChunksAreExclusiveOredWithTheRow) {
  using Tile = tile::SwizzledTile<64>;
  EXPECT_EQ(Tile::offset(0, 8), 16);
  EXPECT_EQ(Tile::offset(1, 0), 128 + 16);
  EXPECT_EQ(Tile::offset(9, 8), 9 * 128);
  EXPECT_EQ(Tile::offset(7, 63), 7 * 128 + 0 * 16 + 14);
  EXPECT_EQ(Tile::offset(0, 64), 64 * 128);
  // A column of 8 rows touches every bank once: no conflict for 16-byte accesses down a column.
  std::set<int> banks;
  for (int row = 0; row < 8; ++row) {
    banks.insert(Tile::offset(row, 24) % 128);
  }
  EXPECT_EQ(banks.size(), 8U);
}

TEST(SwizzledTile, Descriptors) {
  using Tile = tile::SwizzledTile<128>;
  const std::uint64_t k_major = Tile::k_major_descriptor(0x2400);
  EXPECT_EQ(k_major & 0x3FFFU, 0x240U);
  EXPECT_EQ(k_major >> 32 & 0x3FFFU, 64U);
  EXPECT_EQ(k_major >> 62, 1U);
  EXPECT_EQ(Tile::mn_major_descriptor(0x2400) >> 16 & 0x3FFFU, 1024U);
  // A step of 16 columns is 32 bytes inside a box, then the next box.
  EXPECT_EQ(Tile::k_major_step(3), 6U);
  EXPECT_EQ(Tile::k_major_step(4), 1024U);
  // A step of 16 rows.
  EXPECT_EQ(Tile::mn_major_step(1), 128U);
}

TEST(Fragment, CoversTheProductOnce) {
  std::set<std::pair<int, int>> places;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 64; ++i) {
      const tile::Coordinate at = tile::accumulator_coordinate(thread, i);
      EXPECT_LT(at.row, 64);
      EXPECT_LT(at.column, 128);
      places.insert({at.row, at.column});
    }
  }
  EXPECT_EQ(places.size(), 64U * 128U);
}

TEST(Fragment, OrderIsContiguousPerWarp) {
  std::set<int> places;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 64; i += 4) {
      places.insert(tile::fragment_order<128>(thread, i));
    }
  }
  EXPECT_EQ(places.size(), 64U * 128U / 4);
  EXPECT_EQ(*places.rbegin(), 64 * 128 - 4);
  EXPECT_EQ(tile::fragment_order<128>(31, 4) - tile::fragment_order<128>(0, 4), 31 * 4);
}

// The pieces in which a variant makes dq begin at boxes of K and cover a block of the accumulators.
template <int kVariant>
void expect_pieces_cover() {
  constexpr sm90::BwdConfig kConfig = sm90::kBwdConfigs[kVariant];
  static_assert(kConfig.valid());
  std::set<int> places;
  for (int piece = 0; piece < kConfig.dq_pieces(); ++piece) {
    EXPECT_EQ(piece * kConfig.dq_columns() % tile::kBoxColumns, 0);
    for (int thread = 0; thread < 128; ++thread) {
      for (int i = 0; i < kConfig.dq_columns() / 2; i += 4) {
        const int at = tile::fragment_order<kConfig.head_dim>(thread, 0) +
                       piece * 16 * kConfig.dq_columns() + i / 4 * 128;
        EXPECT_EQ(at, tile::fragment_order<kConfig.head_dim>(thread,
                                                             piece * kConfig.dq_columns() / 2 + i));
        places.insert(at);
      }
    }
  }
  EXPECT_EQ(static_cast<int>(places.size()), 64 * kConfig.head_dim / 4);
  EXPECT_EQ(*places.rbegin(), 64 * kConfig.head_dim - 4);
}

TEST(BwdConfig, PiecesOfDqCoverABlock) {
  []<int... kVariants>(std::integer_sequence<int, kVariants...>) {
    (expect_pieces_cover<kVariants>(), ...);
  }
  (std::make_integer_sequence<int, sm90::kNumVariants>());
}

// Places and sizes of tiles in shared memory: whole boxes, each at a multiple of the alignment.
TEST(BwdConfig, TilesHoldTheirColumns) {
  for (const sm90::BwdConfig& c : sm90::kBwdConfigs) {
    EXPECT_GE(c.boxes() * tile::kBoxColumns, c.head_dim);
    EXPECT_LT((c.boxes() - 1) * tile::kBoxColumns, c.head_dim);
    EXPECT_EQ(c.kv_bytes(), c.boxes() * c.block_n() * 128);
    EXPECT_EQ(c.q_bytes(), c.boxes() * 64 * 128);
    for (const int at : {c.v_offset(), c.peer_k_offset(), c.q_offset(), c.do_offset(),
                         c.ds_offset(), c.peer_ds_offset(), c.lse_offset()}) {
      EXPECT_EQ(at % tile::kTileAlignment, 0);
    }
  }
}

TEST(BwdPlan, AWidthRunsInTheNarrowestKernelThatHoldsIt) {
  Problem p;
  p.batch = 4;
  p.heads_q = p.heads_kv = 16;
  p.seqlen_q = p.seqlen_kv = p.max_seqlen_q = p.max_seqlen_kv = 4096;
  p.wants_dq = p.wants_dk = p.wants_dv = true;
  const auto width = [&p](std::int64_t d, std::int64_t dv) {
    p.head_dim = d;
    p.head_dim_v = dv;
    const sm90::BwdPlan plan = sm90::make_plan(p, 132);
    return plan.variant < 0 ? -1 : sm90::kBwdConfigs[plan.variant].head_dim;
  };
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    EXPECT_EQ(width(1, 64), 64);
    EXPECT_EQ(width(65, 16), 96);
    EXPECT_EQ(width(80, 96), 96);
    EXPECT_EQ(width(96, 97), 128);
    EXPECT_EQ(width(129, 16), -1);
  }
  p.softcap = 30;  // has no kernel of 96
  EXPECT_EQ(width(96, 96), 128);
}

TEST(BwdPlan, SequencesWhoseKeysFitATileAreWhole) {
  Problem p;
  p.dtype = p.dq_dtype = DType::kBF16;
  p.batch = 4;
  p.heads_q = p.heads_kv = 16;
  p.seqlen_q = p.max_seqlen_q = 500;
  p.wants_dq = p.wants_dk = p.wants_dv = true;
  // Keys of a whole variant's tile or cluster, or 0.
  const auto whole_keys = [&p](std::int64_t d, std::int64_t keys) {
    p.head_dim = p.head_dim_v = d;
    p.seqlen_kv = p.max_seqlen_kv = keys;
    const sm90::BwdPlan plan = sm90::make_plan(p, 132);
    if (!plan.whole()) {
      return std::int64_t{0};
    }
    EXPECT_FALSE(plan.accumulates_dq(p) || plan.ordered() || plan.units.serves());
    return sm90::keys_per_tile(plan);
  };
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    EXPECT_EQ(whole_keys(64, 256), 256);
    EXPECT_EQ(whole_keys(64, 257), 0);
    EXPECT_EQ(whole_keys(96, 128), 128);
    EXPECT_EQ(whole_keys(96, 129), 0);
    EXPECT_EQ(whole_keys(128, 128), 128);
    EXPECT_EQ(whole_keys(128, 129), 256);
    EXPECT_EQ(whole_keys(128, 257), 0);
    EXPECT_EQ(whole_keys(127, 100), 0);  // rows that are not whole pieces of 16 bytes
    p.dq_dtype = DType::kF32;
    EXPECT_EQ(whole_keys(64, 100), 0);
    p.dq_dtype = p.dtype;
    p.unaligned_dq = true;
    EXPECT_EQ(whole_keys(64, 100), 0);
    p.unaligned_dq = false;
    p.softcap = 30;
    EXPECT_EQ(whole_keys(64, 100), 0);
    p.softcap = 0;
  }
  p.deterministic = false;
  p.packed = true;
  p.head_dim = p.head_dim_v = 64;
  p.seqlen_kv = 4000;
  p.max_seqlen_kv = 256;
  EXPECT_TRUE(sm90::make_plan(p, 132).whole());
  p.max_seqlen_kv = 257;
  EXPECT_FALSE(sm90::make_plan(p, 132).whole());
}

sm90::Sequences packed(const std::vector<std::int32_t>& cu_q,
                       const std::vector<std::int32_t>& cu_kv, std::int64_t rows_q,
                       std::int64_t rows_kv) {
  sm90::Sequences s{};
  s.batch = static_cast<std::int64_t>(cu_q.size()) - 1;
  s.rows_q = rows_q;
  s.rows_kv = rows_kv;
  s.cu_seqlens_q = cu_q.data();
  s.cu_seqlens_kv = cu_kv.data();
  return s;
}

TEST(Sequences, BlocksCoverEveryRowOnce) {
  const std::vector<std::int32_t> cu = {3, 3, 67, 68, 300, 300, 428};
  const std::int64_t rows = 431;
  const sm90::Sequences s = packed(cu, cu, rows, rows);
  std::vector<int> covered(static_cast<std::size_t>(rows), 0);
  for (std::int64_t block = 0; block < sm90::num_blocks(true, s.batch, rows, 64); ++block) {
    const std::int64_t span = sm90::span_of_block(cu.data(), s.batch, rows, block, 64);
    const std::int64_t first = sm90::first_block(cu.data(), s.batch, rows, span, 64);
    const sm90::Span range = sm90::packed_span(cu.data(), s.batch, rows, span);
    for (std::int64_t r = range.begin + (block - first) * 64;
         r < range.begin + (block - first + 1) * 64 && r < range.end; ++r) {
      ++covered[static_cast<std::size_t>(r)];
    }
  }
  EXPECT_EQ(covered, std::vector<int>(static_cast<std::size_t>(rows), 1));
}

TEST(Sequences, BadOffsetsStayInside) {
  const std::vector<std::int32_t> cu = {-5, 900, 10, 70};
  for (std::int64_t span = 0; span < 5; ++span) {
    const sm90::Span range = sm90::packed_span(cu.data(), 3, 100, span);
    EXPECT_GE(range.begin, 0);
    EXPECT_LE(range.begin, range.end);
    EXPECT_LE(range.end, 100);
  }
}

// Every visible (row, key) pair falls into one step of one tile, for both cluster sizes.
template <int kCluster>
void expect_tiles_cover(const BandMask& mask, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  sm90::BwdParams p{};
  p.sequences.batch = 2;
  p.sequences.rows_q = seqlen_q;
  p.sequences.rows_kv = seqlen_kv;
  p.sequences.mask = mask;
  p.heads_kv = 3;
  p.group = 2;
  p.num_units = 6;
  p.section = 4;
  p.num_kv_blocks = sm90::num_blocks(false, 1, seqlen_kv, 128 * kCluster);
  const Band band = Band::of(mask, seqlen_q, seqlen_kv);
  std::set<std::tuple<int, int, int>> tiles;
  for (std::int64_t cta = 0; cta < p.num_units * p.num_kv_blocks * kCluster; ++cta) {
    const sm90::KeyTile tile = sm90::key_tile_at(
        p, {128, kCluster, false},
        sm90::tile_place(p, 128 * kCluster, static_cast<std::uint32_t>(cta / kCluster)),
        cta % kCluster);
    EXPECT_TRUE(tiles.insert({tile.batch_index, tile.head_kv, tile.kv_row}).second);
    std::set<int> seeing[2];  // query blocks that see keys of each half of the tile
    for (std::int64_t j = 0; j < tile.keys_end; ++j) {
      for (std::int64_t i = 0; i < seqlen_q; ++i) {
        const std::int64_t key = tile.kv_row + j;
        const bool visible = band.visible(i, key);
        const auto block = static_cast<int>(i / 64);
        const bool walked = block >= tile.m_begin && block < tile.m_end;
        EXPECT_TRUE(walked || !visible);
        EXPECT_EQ(visible, i + tile.lo <= j && j <= i + tile.hi);
        if (block >= tile.full_begin[j / 64] && block < tile.full_end[j / 64]) {
          EXPECT_TRUE(visible);
        }
        if (visible) {
          EXPECT_TRUE(j >= tile.live_begin && j < tile.live_end);
          seeing[j / 64].insert(block);
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const std::set<int>& blocks = seeing[half];
      EXPECT_EQ(tile.seen_end[half] - tile.seen_begin[half], static_cast<int>(blocks.size()));
      if (!blocks.empty()) {
        EXPECT_EQ(tile.seen_begin[half], *blocks.begin());
        EXPECT_EQ(tile.seen_end[half], *blocks.rbegin() + 1);
      }
    }
  }
  EXPECT_EQ(static_cast<std::int64_t>(tiles.size()), p.num_units * p.num_kv_blocks * kCluster);
}

TEST(KeyTile, CoversEveryVisiblePair) {
  const BandMask masks[] = {{},
                            {kUnbounded, 0, Alignment::kBottomRight},
                            {kUnbounded, 0, Alignment::kTopLeft},
                            {100, 50, Alignment::kBottomRight},
                            {-20, 90, Alignment::kTopLeft}};
  for (const BandMask& mask : masks) {
    expect_tiles_cover<1>(mask, 130, 300);
    expect_tiles_cover<2>(mask, 130, 300);
    expect_tiles_cover<1>(mask, 300, 130);
    expect_tiles_cover<2>(mask, 257, 256);
  }
}

}  // namespace
}  // namespace flashgrad
