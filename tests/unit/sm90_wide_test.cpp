// SPDX-License-Identifier: Apache-2.0
// The backward for head dims above 128 on Hopper: plans, passes and tiles, walked through on the
// host without the products. Each image of dS must be written once, before it is read once, inside
// of the room; each dq must be summed by ascending keys and finished once, whatever the room is.
#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

#include "cuda/sm90/wide_plan.hpp"
#include "cuda/sm90/wide_tile.cuh"

namespace flashgrad {
namespace {

using sm90::WidePass;
using sm90::WidePlan;

constexpr int kMultiprocessors = 132;

struct Shape {
  const char* name;
  std::int64_t batch, seqlen_q, seqlen_kv, heads_q, heads_kv;
  BandMask mask;
  std::vector<std::int32_t> cu_q, cu_kv;  // packed if not empty
};

Problem make_problem(const Shape& shape) {
  Problem p;
  p.batch = shape.batch;
  p.seqlen_q = p.max_seqlen_q = shape.seqlen_q;
  p.seqlen_kv = p.max_seqlen_kv = shape.seqlen_kv;
  p.heads_q = shape.heads_q;
  p.heads_kv = shape.heads_kv;
  p.head_dim = p.head_dim_v = 256;
  p.wants_dq = p.wants_dk = p.wants_dv = true;
  p.mask = shape.mask;
  p.packed = !shape.cu_q.empty();
  return p;
}

sm90::Sequences sequences_of(const Shape& shape) {
  sm90::Sequences s{};
  s.batch = shape.batch;
  s.rows_q = shape.seqlen_q;
  s.rows_kv = shape.seqlen_kv;
  s.mask = shape.mask;
  s.cu_seqlens_q = shape.cu_q.empty() ? nullptr : shape.cu_q.data();
  s.cu_seqlens_kv = shape.cu_q.empty() ? nullptr : shape.cu_kv.data();
  return s;
}

const BandMask kFull{};
const BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};

std::vector<Shape> shapes() {
  return {{"full", 2, 700, 900, 4, 2, kFull, {}, {}},
          {"causal", 3, 1030, 1100, 3, 3, kCausal, {}, {}},
          {"long keys", 1, 300, 20000, 2, 1, kFull, {}, {}},
          {"long causal", 1, 20000, 20000, 1, 1, kCausal, {}, {}},
          {"window", 1, 9000, 9000, 1, 1, {1000, 200, Alignment::kBottomRight}, {}, {}},
          {"band off the diagonal", 1, 900, 9000, 1, 1, {-700, 3000, Alignment::kTopLeft}, {}, {}},
          {"tiny", 1, 1, 1, 1, 1, kFull, {}, {}},
          {"packed",
           6,
           1300,
           20400,
           2,
           2,
           kCausal,
           {1, 1, 70, 200, 1200, 1200, 1290},
           {0, 64, 164, 400, 19500, 20000, 20395}}};
}

// What the clusters of one launch do, in terms of (head of the batch, query block of the tensors'
// numbering, key block of the sequence).
class Walk {
 public:
  Walk(const Shape& shape, const WidePlan& plan)
      : problem_(make_problem(shape)), sequences_(sequences_of(shape)), plan_(plan) {}

  template <int kKeyCluster, int kQueryCluster>
  void run() {
    const bool packed = problem_.packed;
    sm90::BwdParams keys{};
    keys.sequences = sequences_;
    keys.heads_kv = problem_.heads_kv;
    keys.group = problem_.group();
    sm90::BwdQueryParams queries{};
    queries.sequences = sequences_;
    queries.heads_q = problem_.heads_q;
    queries.group = problem_.group();
    queries.num_q_tiles = sm90::num_blocks(packed, packed ? problem_.batch : 1, problem_.seqlen_q,
                                           sm90::kWideDqRows * kQueryCluster);
    queries.num_blocks = sm90::num_blocks(packed, problem_.batch, problem_.seqlen_q, sm90::kBlockM);
    queries.section = 2 * problem_.group();
    for (const WidePass& pass :
         sm90::wide_passes(problem_, plan_, kKeyCluster, /*section=*/2, room_, partial_)) {
      written_.clear();
      for (std::int64_t cta = 0; cta < pass.num_units * pass.num_key_tiles * kKeyCluster; ++cta) {
        write(sm90::wide_tile<kKeyCluster>(keys, pass, cta));
      }
      const std::int64_t heads = pass.num_units * problem_.group();
      for (std::int64_t cta = 0; cta < heads * queries.num_q_tiles * kQueryCluster; ++cta) {
        read(pass, sm90::wide_dq_tile<256, kQueryCluster>(queries, pass, cta));
      }
    }
    check_complete();
  }

 private:
  void write(const sm90::WideTile& tile) {
    const sm90::KeyTile& keys = tile.keys;
    if (keys.num_steps < 0) {
      return;
    }
    // dk and dv of these rows.
    for (int r = 0; r < keys.rows_to_write; ++r) {
      ++keys_made_[{keys.batch_index, keys.head_kv, keys.kv_row + r}];
    }
    int image = tile.image;
    int left = keys.m_end - keys.m_begin - 1;
    for (int step = 0; step < keys.num_steps; ++step) {
      ASSERT_GE(image, 0);
      ASSERT_LT(std::int64_t{image} * sm90::kDsImageBytes, plan_.ds_bytes);
      ASSERT_TRUE(written_.insert({image, false}).second) << "image " << image << " twice";
      image += left > 0 ? tile.to_block_below : tile.to_next_head;
      left = left > 0 ? left - 1 : keys.m_end - keys.m_begin - 1;
    }
  }

  void read(const WidePass& pass, const sm90::WideDqTile& tile) {
    for (int i = 0; i < 2; ++i) {
      // Rows of this consumer that exist, by the first of them.
      const int rows = std::min(tile.rows_to_write - 64 * i, 64);
      const auto block = std::tuple{tile.batch_index, tile.head, tile.q_row + 64 * i};
      for (int n = tile.own_begin[i]; n < tile.own_end[i]; ++n) {
        ASSERT_GE(n, tile.n_begin);
        ASSERT_LT(n, tile.n_end);
        const std::int64_t at =
            (tile.ds[i] - room_) + static_cast<std::int64_t>(n) * sm90::kDsImageBytes;
        const auto image = written_.find(at / sm90::kDsImageBytes);
        ASSERT_NE(image, written_.end()) << "key block " << n << " was not written";
        ASSERT_FALSE(image->second) << "read twice";
        image->second = true;
      }
      if (rows <= 0) {
        EXPECT_EQ(tile.own_begin[i], tile.own_end[i]);
        continue;
      }
      if (tile.own_begin[i] < tile.own_end[i]) {
        const auto last = next_key_.find(block);
        EXPECT_EQ(tile.continues[i] != 0, last != next_key_.end());
        if (last != next_key_.end()) {
          EXPECT_EQ(last->second, tile.own_begin[i]);
        }
        EXPECT_EQ(finished_.count(block), 0U);
        EXPECT_NE(tile.finishes[i], tile.goes_on[i]);
        next_key_[block] = tile.own_end[i];
        if (tile.continues[i] != 0 || tile.goes_on[i] != 0) {
          ASSERT_NE(pass.partial, nullptr);
          const std::int64_t at = tile.partial[i] - partial_;
          ASSERT_GE(at, 0);
          ASSERT_LE((at + sm90::kBlockM * 256) * 4, plan_.partial_bytes);
        }
      }
      if (tile.finishes[i] != 0) {
        ++finished_[block];
        rows_finished_ += rows;
      }
    }
  }

  void check_complete() {
    const std::int64_t batch = problem_.packed ? 1 : problem_.batch;
    EXPECT_EQ(rows_finished_, batch * problem_.seqlen_q * problem_.heads_q);
    for (const auto& [block, count] : finished_) {
      EXPECT_EQ(count, 1);
    }
    EXPECT_EQ(static_cast<std::int64_t>(keys_made_.size()),
              batch * problem_.seqlen_kv * problem_.heads_kv);
    for (const auto& [key, count] : keys_made_) {
      ASSERT_EQ(count, 1);
    }
  }

  Problem problem_;
  sm90::Sequences sequences_;
  WidePlan plan_;
  // Never dereferenced: stand-ins for addresses on the device.
  std::uint8_t* const room_ = reinterpret_cast<std::uint8_t*>(std::uintptr_t{1} << 40);
  float* const partial_ = reinterpret_cast<float*>(std::uintptr_t{1} << 44);
  std::map<std::int64_t, bool> written_;  // images of the pass: has it been read?
  std::map<std::tuple<int, int, int>, int> next_key_, finished_, keys_made_;
  std::int64_t rows_finished_ = 0;
};

TEST(WideBackward, EveryImageAndSumInEveryRoom) {
  for (const Shape& shape : shapes()) {
    const Problem p = make_problem(shape);
    const std::int64_t preferred = sm90::preferred_wide_room(p, kMultiprocessors);
    int plans = 0;
    WidePlan previous;
    for (std::int64_t percent = 100; percent > 0; percent -= 1) {
      const WidePlan plan = sm90::make_wide_plan(p, kMultiprocessors, preferred * percent / 100);
      ASSERT_LE(plan.bytes(), preferred * percent / 100);
      if (!plan.keeps_ds) {
        break;
      }
      if (plan.units == previous.units && plan.key_count == previous.key_count) {
        continue;
      }
      previous = plan;
      SCOPED_TRACE(std::string(shape.name) + ", " + std::to_string(plan.units) + " units, " +
                   std::to_string(plan.key_count) + " key blocks");
      Walk(shape, plan).run<1, 1>();
      if (!p.packed) {
        Walk(shape, plan).run<2, 2>();
      }
      ++plans;
    }
    EXPECT_GT(plans, 0) << shape.name;
  }
}

TEST(WideBackward, PreferredRoomIsBoundedAndKeepsDs) {
  for (const Shape& shape : shapes()) {
    const Problem p = make_problem(shape);
    const std::int64_t room = sm90::preferred_wide_room(p, kMultiprocessors);
    EXPECT_TRUE(sm90::make_wide_plan(p, kMultiprocessors, room).keeps_ds) << shape.name;
    EXPECT_FALSE(sm90::make_wide_plan(p, kMultiprocessors, 0).keeps_ds) << shape.name;
  }
  // Linear in the sequence beyond 1 GiB: twice the multiprocessors times 8 KiB a query block, and
  // 64 KiB of sums.
  for (const std::int64_t seqlen : {1 << 17, 1 << 18, 1 << 19}) {
    const Problem p = make_problem({"", 1, seqlen, seqlen, 1, 1, kCausal, {}, {}});
    const std::int64_t room = sm90::preferred_wide_room(p, kMultiprocessors);
    EXPECT_LE(room, seqlen / 64 * (2 * kMultiprocessors * 8192 + 65536));
    EXPECT_GT(room, seqlen / 64 * kMultiprocessors * 8192);
  }
}

TEST(WideBackward, WithoutDqOrKeysNothingIsKept) {
  Problem p = make_problem({"", 1, 512, 512, 1, 1, kFull, {}, {}});
  p.wants_dq = false;
  EXPECT_EQ(sm90::preferred_wide_room(p, kMultiprocessors), 0);
  p.wants_dq = true;
  p.wants_dk = p.wants_dv = false;
  EXPECT_EQ(sm90::preferred_wide_room(p, kMultiprocessors), 0);
}

TEST(WideDqSection, HeadsWhoseKeysFitAreTogetherAndEachTileComesOnce) {
  const Shape shape{"causal", 2, 4096, 4096, 6, 3, kCausal, {}, {}};
  const Problem p = make_problem(shape);
  constexpr std::int64_t kKBytes = 4096 * 2 * 256;
  EXPECT_EQ(sm90::wide_dq_section(p, 8 * kKBytes - 1), 2);  // one unit, two query heads
  EXPECT_EQ(sm90::wide_dq_section(p, 32 * kKBytes), 8);
  EXPECT_EQ(sm90::wide_dq_section(p, 1000 * kKBytes), 12);
  sm90::BwdQueryParams queries{};
  queries.sequences = sequences_of(shape);
  queries.heads_q = 6;
  queries.group = 2;
  queries.num_q_tiles = 16;
  queries.num_blocks = 128;
  queries.section = 8;
  std::uint8_t images = 0;  // only their addresses are worked out
  WidePass pass{};
  pass.ds = &images;
  pass.num_units = 6;
  pass.key_count = 64;
  pass.blocks_per_head = 64;
  std::map<std::pair<int, int>, int> times;
  for (int number = 0; number < 12 * 16; ++number) {
    const sm90::WideDqTile tile = sm90::wide_dq_tile<256, 2>(queries, pass, 2 * number);
    const int head = tile.batch_index * 6 + tile.head;
    // 8 heads, longest tiles first, then the other 4.
    const bool first = number < 8 * 16;
    EXPECT_EQ(head < 8, first) << number;
    EXPECT_EQ(tile.n_end, 64 - (first ? number / 8 : (number - 8 * 16) / 4) * 4) << number;
    EXPECT_EQ((++times[{head, tile.q_row}]), 1);
  }
}

}  // namespace
}  // namespace flashgrad
