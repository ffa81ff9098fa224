// SPDX-License-Identifier: Apache-2.0
// The band mask against its definition, row by row and key by key, in 128-bit arithmetic that can't
// overflow.
#include "core/mask.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flashgrad {
namespace {

using Wide = __int128;

// A mask, the lengths it is applied to, and the offset of the first query if one is given.
struct Case {
  BandMask mask;
  std::int64_t seqlen_q;
  std::int64_t seqlen_kv;
  std::optional<std::int64_t> q_offset;

  [[nodiscard]] Band band() const {
    return Band::of(mask, seqlen_q, seqlen_kv, q_offset ? &*q_offset : nullptr);
  }

  // docs/semantics.md: row i sees key j iff i + shift - left <= j <= i + shift + right.
  [[nodiscard]] bool sees(std::int64_t i, std::int64_t j) const {
    if (i < 0 || i >= seqlen_q || j < 0 || j >= seqlen_kv) {
      return false;
    }
    const Wide aligned = mask.alignment == Alignment::kBottomRight ? Wide{seqlen_kv} - seqlen_q : 0;
    const Wide diagonal = i + (q_offset ? Wide{*q_offset} : aligned);
    const Wide open = Wide{1} << 31;
    return (mask.left >= open || diagonal - mask.left <= j) &&
           (mask.right >= open || j <= diagonal + mask.right);
  }

  [[nodiscard]] std::string describe() const {
    return "left " + std::to_string(mask.left) + " right " + std::to_string(mask.right) +
           (mask.alignment == Alignment::kTopLeft ? " top-left" : " bottom-right") + " seqlen_q " +
           std::to_string(seqlen_q) + " seqlen_kv " + std::to_string(seqlen_kv) + " q_offset " +
           (q_offset ? std::to_string(*q_offset) : "none");
  }
};

// Whether `range` holds exactly the indices in [0, count) for which `contains` is true. Any empty
// range is as good as another.
template <class Contains>
bool holds_exactly(const Range& range, std::int64_t count, Contains&& contains) {
  std::int64_t found = 0;
  for (std::int64_t index = 0; index < count; ++index) {
    const bool inside = index >= range.begin && index < range.end;
    if (inside != contains(index)) {
      return false;
    }
    found += inside ? 1 : 0;
  }
  return found == range.size();
}

// Every query of a Band about every block of rows and keys, blocks past the end of the sequence
// included.
void check_band(const Case& c) {
  SCOPED_TRACE(c.describe());
  const Band band = c.band();
  for (std::int64_t i = -1; i <= c.seqlen_q; ++i) {
    for (std::int64_t j = -1; j <= c.seqlen_kv; ++j) {
      ASSERT_EQ(band.visible(i, j), c.sees(i, j)) << "row " << i << " key " << j;
    }
  }
  const auto count_visible = [&](Range rows, Range keys) {
    std::int64_t count = 0;
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        count += c.sees(i, j) ? 1 : 0;
      }
    }
    return count;
  };
  for (std::int64_t m_begin = 0; m_begin <= c.seqlen_q; ++m_begin) {
    for (std::int64_t m_end = m_begin; m_end <= c.seqlen_q + 2; ++m_end) {
      const Range rows{m_begin, m_end};
      ASSERT_TRUE(holds_exactly(band.kv_range(m_begin, m_end), c.seqlen_kv,
                                [&](std::int64_t j) {
                                  return count_visible(rows, {j, j + 1}) > 0;
                                }))
          << "rows " << m_begin << ".." << m_end;
      const Range existing{m_begin, std::min(m_end, c.seqlen_q)};
      ASSERT_TRUE(holds_exactly(
          band.kv_range_full(m_begin, m_end), c.seqlen_kv,
          [&](std::int64_t j) {
            return !existing.empty() && count_visible(existing, {j, j + 1}) == existing.size();
          }))
          << "rows " << m_begin << ".." << m_end;
      for (std::int64_t n_begin = 0; n_begin <= c.seqlen_kv; ++n_begin) {
        for (std::int64_t n_end = n_begin; n_end <= c.seqlen_kv + 2; ++n_end) {
          const Range keys{n_begin, n_end};
          const std::int64_t count = count_visible(rows, keys);
          ASSERT_EQ(band.is_empty(m_begin, m_end, n_begin, n_end), count == 0)
              << "rows " << m_begin << ".." << m_end << " keys " << n_begin << ".." << n_end;
          if (!rows.empty() && !keys.empty()) {
            ASSERT_EQ(band.is_full(m_begin, m_end, n_begin, n_end),
                      count == rows.size() * keys.size())
                << "rows " << m_begin << ".." << m_end << " keys " << n_begin << ".." << n_end;
          }
        }
      }
    }
  }
  for (std::int64_t n_begin = 0; n_begin <= c.seqlen_kv; ++n_begin) {
    for (std::int64_t n_end = n_begin; n_end <= c.seqlen_kv + 2; ++n_end) {
      const Range keys{n_begin, n_end};
      ASSERT_TRUE(holds_exactly(band.q_range(n_begin, n_end), c.seqlen_q,
                                [&](std::int64_t i) {
                                  return count_visible({i, i + 1}, keys) > 0;
                                }))
          << "keys " << n_begin << ".." << n_end;
      ASSERT_TRUE(
          holds_exactly(band.q_range_full(n_begin, n_end), c.seqlen_q,
                        [&](std::int64_t i) {
                          return !keys.empty() && count_visible({i, i + 1}, keys) == keys.size();
                        }))
          << "keys " << n_begin << ".." << n_end;
    }
  }
}

void check_all(const std::vector<std::int64_t>& sides, const std::vector<std::int64_t>& lengths,
               const std::vector<std::optional<std::int64_t>>& q_offsets) {
  for (const std::int64_t left : sides) {
    for (const std::int64_t right : sides) {
      for (const Alignment alignment : {Alignment::kBottomRight, Alignment::kTopLeft}) {
        for (const std::int64_t seqlen_q : lengths) {
          for (const std::int64_t seqlen_kv : lengths) {
            for (const std::optional<std::int64_t> q_offset : q_offsets) {
              check_band({{left, right, alignment}, seqlen_q, seqlen_kv, q_offset});
              if (::testing::Test::HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Mask, EveryBlockOfSmallSequences) {
  check_all({-6, -2, -1, 0, 1, 3, 6, kUnbounded}, {0, 1, 3, 6}, {std::nullopt});
}

TEST(Mask, OffsetsReplaceTheAlignment) {
  check_all({-2, 0, 1, 4, kUnbounded}, {1, 4}, {-7, -1, 0, 2, 9});
}

// Shifts and sides whose sum leaves 64 bits, and pairs of huge ones that cancel to a band inside
// the sequence.
TEST(Mask, ExtremeShiftsAndSides) {
  constexpr std::int64_t kMin = INT64_MIN;
  constexpr std::int64_t kMax = INT64_MAX;
  constexpr std::int64_t kOpen = std::int64_t{1} << 31;
  constexpr std::int64_t kQuarter = std::int64_t{1} << 61;
  check_all(
      {kMin, kMin + 2, -kMax, -kQuarter - 1, -kQuarter, -kOpen, -1, 0, kOpen - 1, kOpen, kMax},
      {1, 4},
      {kMin, kMin + 1, kMin + 3, -kQuarter - 2, -kOpen - 1, -kOpen, 1 - kOpen, 0, kOpen - 1, kOpen,
       kQuarter, kQuarter + 2, kMax - 1, kMax});
}

TEST(Mask, SidesOpenAtTwoToThe31) {
  const std::int64_t far = std::int64_t{1} << 33;
  const std::int64_t open = std::int64_t{1} << 31;
  const auto sees_first_key = [&](std::int64_t left) {
    return Band::of({left, 0, Alignment::kTopLeft}, far, far).visible(far - 1, 0);
  };
  EXPECT_FALSE(sees_first_key(open - 1));
  EXPECT_TRUE(sees_first_key(open));
  EXPECT_TRUE(sees_first_key(open + 1));
  const auto sees_last_key = [&](std::int64_t right) {
    return Band::of({0, right, Alignment::kTopLeft}, far, far).visible(0, far - 1);
  };
  EXPECT_FALSE(sees_last_key(open - 1));
  EXPECT_TRUE(sees_last_key(open));
}

TEST(Mask, NamedMasks) {
  const Band causal = Band::of({kUnbounded, 0, Alignment::kBottomRight}, 2, 5);
  EXPECT_EQ(causal.kv_range(0, 1), (Range{0, 4}));
  EXPECT_EQ(causal.kv_range(1, 2), (Range{0, 5}));
  const Band top_left = Band::of({kUnbounded, 0, Alignment::kTopLeft}, 2, 5);
  EXPECT_EQ(top_left.kv_range(0, 2), (Range{0, 2}));
  EXPECT_TRUE(Band::of({-1, -1, Alignment::kBottomRight}, 9, 9).is_empty(0, 9, 0, 9))
      << "no row sees anything";
  const Band off_diagonal = Band::of({-128, 864, Alignment::kTopLeft}, 1000, 1000);
  EXPECT_EQ(off_diagonal.kv_range(0, 1), (Range{128, 865}));
  EXPECT_TRUE(off_diagonal.is_empty(872, 1000, 0, 1000))
      << "128 keys past the diagonal there are none left";
}

}  // namespace
}  // namespace flashgrad
