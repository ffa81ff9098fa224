// SPDX-License-Identifier: Apache-2.0
// The order of the sm90 forward's tiles and their key blocks, on the host.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>

#include "core/mask.hpp"
#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/fwd_schedule.hpp"
#include "cuda/sm90/fwd_tile_rows.hpp"

namespace flashgrad::sm90 {
namespace {

TEST(Sm90ForwardConfig, PiecesOfSharedMemoryFollowEachOther) {
  for (const FwdConfig& c : kFwdConfigs) {
    for (const int tile : {c.q_offset(), c.k_offset(), c.v_offset(), c.out_offset(),
                           FwdConfig::bytes(16, c.head_dim_v)}) {
      EXPECT_EQ(tile % tile::kTileAlignment, 0) << c.head_dim;
    }
    EXPECT_EQ(c.k_offset(), c.q_bytes());
    EXPECT_EQ(c.v_offset(), c.k_offset() + c.kStages * c.k_bytes());
    EXPECT_EQ(c.out_offset(), c.v_offset() + c.kStages * c.v_bytes());
    // Out goes through shared memory in all kernels but those that leave no room for it.
    EXPECT_EQ(c.stages_out(), c.head_dim_v <= 128) << c.head_dim;
    EXPECT_EQ(c.row_keys_offset() - c.out_offset(), c.stages_out() ? c.out_bytes() : 0);
    EXPECT_EQ(c.barrier_offset() % 8, 0);
    EXPECT_EQ(c.shared_bytes(), c.barrier_offset() + 8 * c.num_barriers(c.tiles()));
    EXPECT_LE(c.shared_bytes(), FwdConfig::kSharedBytes);
  }
}

TEST(Sm90ForwardOrder, RunsEveryTileOnce) {
  for (const std::int64_t units : {1, 2, 5, 16, 37}) {
    for (const std::int64_t per_section : {1, 3, 4, 16, 100}) {
      const FwdOrder order = make_order(units, per_section);
      for (const std::uint32_t tiles : {1U, 2U, 7U, 86U}) {
        std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
        const auto total = static_cast<std::uint32_t>(units) * tiles;
        for (std::uint32_t work = 0; work < total; ++work) {
          const FwdWorkItem item = work_item(order, tiles, work);
          ASSERT_LT(item.unit, units);
          ASSERT_LT(item.rank, tiles);
          seen.emplace(item.unit, item.rank);
        }
        EXPECT_EQ(seen.size(), total) << units << " units in sections of " << per_section;
      }
    }
  }
}

TEST(Sm90ForwardOrder, LongestFirstInSectionsOfEnoughUnits) {
  constexpr std::uint32_t kTiles = 6;
  const FwdOrder order = make_order(16, 3);
  std::uint32_t work = 0;
  for (std::uint32_t first = 0; first < 16;) {
    // 16 units are sections of 4, 3, 3, 3, 3: none has fewer than 3.
    const std::uint32_t width = first == 0 ? 4 : 3;
    for (std::uint32_t rank = 0; rank < kTiles; ++rank) {
      for (std::uint32_t unit = first; unit < first + width; ++unit, ++work) {
        const FwdWorkItem item = work_item(order, kTiles, work);
        EXPECT_EQ(item.rank, rank);
        EXPECT_EQ(item.unit, unit);
      }
    }
    first += width;
  }
  EXPECT_EQ(work, 16 * kTiles);
}

// Every visible key lies in the blocks, every block of the middle stretch needs no mask, and a
// block that needs none lies in the middle stretch.
TEST(Sm90ForwardBlocks, ThreeStretches) {
  constexpr int kBlockN = 16;
  constexpr std::int64_t kRows = 24;
  for (const std::int64_t seqlen_q : {1, 23, 24, 70}) {
    for (const std::int64_t seqlen_kv : {0, 1, 16, 33, 90}) {
      for (const std::int64_t left :
           {std::int64_t{-20}, std::int64_t{0}, std::int64_t{30}, kUnbounded}) {
        for (const std::int64_t right :
             {std::int64_t{-5}, std::int64_t{0}, std::int64_t{40}, kUnbounded}) {
          const Band band = Band::of({left, right, Alignment::kBottomRight}, seqlen_q, seqlen_kv);
          for (std::int64_t m = 0; m < seqlen_q; m += kRows) {
            const FwdBlocks blocks = key_blocks<kBlockN>(band, m, m + kRows);
            const std::int64_t m_end = m + kRows < seqlen_q ? m + kRows : seqlen_q;
            ASSERT_LE(blocks.begin, blocks.end);
            for (std::int32_t n = 0; n * kBlockN < seqlen_kv + kBlockN; ++n) {
              const std::int64_t key = static_cast<std::int64_t>(n) * kBlockN;
              const bool inside = n >= blocks.begin && n < blocks.end;
              const bool full = n >= blocks.full_begin && n < blocks.full_end;
              ASSERT_TRUE(inside || band.is_empty(m, m_end, key, key + kBlockN));
              ASSERT_EQ(full, band.is_full(m, m_end, key, key + kBlockN))
                  << "rows " << m << ".." << m_end << " block " << n << " of " << seqlen_kv;
              ASSERT_TRUE(inside || !full);
            }
          }
        }
      }
    }
  }
}

// Every row lies in one tile, consumers' rows begin at multiples of 64 from the first row on, and
// only the tile that sees the fewest keys is incomplete by 64 rows or more.
TEST(Sm90ForwardRows, CoverTheSequence) {
  for (const std::int32_t block_m : {64, 128, 192}) {
    for (const std::int32_t rows : {0, 1, 63, 64, 65, 191, 192, 193, 256, 1000, 1024, 4096}) {
      for (const bool last_block_first : {false, true}) {
        std::int32_t begin = 0;
        const std::int32_t blocks = (rows + block_m - 1) / block_m;
        for (std::int32_t block = 0; block < blocks + 2; ++block) {
          const FwdRows tile = tile_rows(rows, block_m, block, last_block_first);
          if (block >= blocks) {
            ASSERT_EQ(tile.begin, tile.end) << rows << " rows, tile " << block;
            continue;
          }
          ASSERT_EQ(tile.begin, begin);
          ASSERT_EQ(tile.begin % 64, 0);
          ASSERT_GT(tile.end, tile.begin);
          ASSERT_LE(tile.end - tile.begin, block_m);
          if (block != (last_block_first ? 0 : blocks - 1)) {
            ASSERT_GT(tile.end - tile.begin, block_m - 64);
          }
          begin = tile.end;
        }
        ASSERT_EQ(begin, rows);
      }
    }
  }
}

// H200, head_dim 128, the fastest of tiles of 64, 128 and 192 rows:
// benchmarks/results/2026-11-30-h200-forward-few.json.
TEST(Sm90ForwardRows, AreFewerWhereTilesAre) {
  struct Fastest {
    std::int64_t units, seqlen;
    bool causal;
    int block_m;
  };
  for (const Fastest& f :
       {Fastest{1, 16384, true, 64}, Fastest{1, 16384, false, 128}, Fastest{2, 16384, true, 128},
        Fastest{2, 16384, false, 128}, Fastest{4, 16384, true, 192}, Fastest{1, 4096, false, 64},
        Fastest{4, 4096, true, 64}, Fastest{4, 4096, false, 128}, Fastest{8, 4096, true, 128},
        Fastest{8, 4096, false, 128}, Fastest{16, 4096, true, 192}, Fastest{16, 4096, false, 192},
        Fastest{2, 8192, true, 64}, Fastest{8, 8192, false, 192}, Fastest{8, 1024, false, 64},
        Fastest{16, 1024, false, 128}, Fastest{16, 2048, true, 128}, Fastest{1, 32768, true, 128},
        Fastest{2, 32768, true, 192}}) {
    const BandMask mask{.right = f.causal ? 0 : kUnbounded};
    EXPECT_EQ(forward_block_m({.band = Band::of(mask, f.seqlen, f.seqlen),
                               .units = f.units,
                               .num_consumers = 3,
                               .block_n = 80,
                               .last_block_first = f.causal},
                              132),
              f.block_m)
        << f.units << " units of " << f.seqlen << (f.causal ? ", causal" : "");
  }
  // Any number of heads and rows, sequences without rows or keys, masks that hide all.
  for (const std::int64_t units : {std::int64_t{1}, std::int64_t{1} << 40}) {
    for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 30}) {
      for (const std::int64_t left : {std::int64_t{-1}, kUnbounded}) {
        for (const int num_consumers : {2, 3}) {
          const int block_m =
              forward_block_m({.band = Band::of({.left = left, .right = -1}, rows, rows / 2),
                               .units = units,
                               .num_consumers = num_consumers,
                               .block_n = 96,
                               .last_block_first = true},
                              132);
          ASSERT_EQ(block_m % 64, 0);
          ASSERT_GT(block_m, 0);
          ASSERT_LE(block_m, 64 * num_consumers);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashgrad::sm90
