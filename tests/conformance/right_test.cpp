// SPDX-License-Identifier: Apache-2.0
// What the `right` sentences of the table say besides "matches the oracle": exact values, equal
// bits, independence. One test per id.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "conformance.hpp"

namespace flashgrad::check {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Case case_of(const char* id) { return small_cases(id).front(); }

// Forward and backward of a case on one target, its tensors open to changes between the calls.
class Session {
 public:
  Session(Case c, const Target& target)
      : announce_(c, target),
        case_(std::move(c)),
        target_(target),
        use_(target),
        t_(make_tensors(case_)) {}

  void forward() { run_on(target_, FG_FORWARD, case_, t_, memory_); }
  void backward() { run_on(target_, FG_BACKWARD, case_, t_, memory_); }
  [[nodiscard]] CallTensors& t() { return t_; }
  [[nodiscard]] Bits bits() const { return bits_of(t_); }

 private:
  Announce announce_;
  Case case_;
  Target target_;
  UseTarget use_;
  CallTensors t_;
  WorkspaceMemory memory_;
};

// Calls f(session) on each target after forward and backward.
template <class F>
void on_each_target(const Case& c, F&& f) {
  for (const Target& target : affordable(c)) {
    SCOPED_TRACE(target.name());
    Session s(c, target);
    s.forward();
    s.backward();
    f(s);
  }
}

void expect_all(const HostTensor& t, const char* what, bool (*good)(double)) {
  for (std::int64_t n = 0; t.given() && n < t.num_elements(); ++n) {
    if (!good(t.get(n))) {
      ADD_FAILURE() << what << " element " << n << ": " << t.get(n);
      return;
    }
  }
}

bool is_zero(double x) { return x == 0; }
bool is_finite(double x) { return std::isfinite(x); }

void expect_finite(const CallTensors& t) {
  expect_all(t.out, "out", is_finite);
  expect_all(t.lse, "lse", [](double x) { return std::isfinite(x) || x == -kInf; });
  expect_all(t.dq, "dq", is_finite);
  expect_all(t.dk, "dk", is_finite);
  expect_all(t.dv, "dv", is_finite);
}

// Two cases that must have the same bits on every target.
void expect_same_bits(const Case& a, const Case& b) {
  const testing::ScopedTrace trace(__FILE__, __LINE__, command_line(a) + " and " + command_line(b));
  for (const Target& target : affordable(a)) {
    EXPECT_EQ(run_bits(a, target), run_bits(b, target)) << target.name();
  }
}

TEST(Right, Finite) {
  for (const TableEntry& entry : table()) {
    if (entry.right.find("finite") == std::string::npos) {
      continue;
    }
    SCOPED_TRACE(entry.id);
    for (const Case& c : entry.cases) {
      if (entry.id != "nan_in_masked_key") {
        on_each_target(as_taken(c), [](Session& s) { expect_finite(s.t()); });
      }
    }
  }
}

TEST(Right, OneKey) {
  on_each_target(case_of("one_key"), [](Session& s) {
    for (std::int64_t n = 0; n < 16; ++n) {
      EXPECT_EQ(s.t().dv.get(n), s.t().dout.get(n));
      EXPECT_NEAR(s.t().dq.get(n), 0, 1e-5);
      EXPECT_NEAR(s.t().dk.get(n), 0, 1e-5);
    }
  });
}

TEST(Right, StridesOfDoutAreItsOwn) {
  for (const char* id : {"stride_of_dout_is_its_own", "every_tensor_own_strides", "fused_qkv_views",
                         "size1_dim_any_stride"}) {
    const Case strided = case_of(id);
    Case contiguous = strided;
    contiguous.layout = Layout::kCompact;
    expect_same_bits(strided, contiguous);
  }
  Case small = case_of("stride0_dout");
  small.seqlen_kv = 4096;
  Case contiguous = small;
  contiguous.layout = Layout::kCompact;
  contiguous.dout = "0.75";
  expect_same_bits(small, contiguous);
}

TEST(Right, HugeWindowIsNoWindow) {
  for (const Case& c : small_cases("window_right_huge")) {
    Case full = c;
    full.mask = {};
    expect_same_bits(c, full);
  }
  Case c = case_of("window_right_huge");
  c.mask = {std::int64_t{1} << 31, INT64_MAX};
  Case full = c;
  full.mask = {};
  expect_same_bits(c, full);
}

TEST(Right, WindowEqualsCausal) {
  const Case window = case_of("window_equals_causal");
  Case causal = window;
  causal.mask.left = kUnbounded;
  expect_same_bits(window, causal);
}

// What a call in which no row sees a key leaves.
void expect_empty(Session& s) {
  expect_all(s.t().out, "out", is_zero);
  expect_all(s.t().lse, "lse", [](double x) { return x == -kInf; });
  expect_all(s.t().dq, "dq", is_zero);
  expect_all(s.t().dk, "dk", is_zero);
  expect_all(s.t().dv, "dv", is_zero);
}

TEST(Right, NoWindowIsFullAndLiteralMinusOneIsEmpty) {
  Case c = case_of("no_window");
  EXPECT_EQ(c.mask, BandMask{});  // the table's notation
  c.mask = {-1, -1};              // this library's
  on_each_target(c, expect_empty);
}

// Infinite of either sign, the lse of an empty row means the same to backward.
TEST(Right, LseOfEmptyRows) {
  Case c = case_of("lse_of_empty_rows");
  c.deterministic = true;
  on_each_target(c, [&](Session& s) {
    const Bits bits = s.bits();
    int empty = 0;
    for (std::int64_t n = 0; n < s.t().lse.num_elements(); ++n) {
      if (s.t().lse.get(n) == -kInf) {
        s.t().lse.set(n, kInf);
        ++empty;
      }
    }
    EXPECT_EQ(empty, c.heads_q * (c.seqlen_q - c.seqlen_kv));
    s.backward();
    Bits again = s.bits();
    again[1] = bits[1];  // lse was changed here
    EXPECT_EQ(again, bits);
  });
}

TEST(Right, OneHugeKey) {
  on_each_target(case_of("one_huge_key"), [](Session& s) {
    for (std::int64_t n = 0; n < 64; ++n) {
      EXPECT_EQ(s.t().out.get(n), s.t().v.get(n));
    }
  });
}

// The key that outweighs all others that row i of query head h sees, by so much that their p is 0
// in f32 too; -1 if there is none.
std::int64_t winner(const Case& c, const CallTensors& t, const Band& band, std::int64_t h,
                    std::int64_t i) {
  const Range keys = band.kv_range(i, i + 1);
  const std::int64_t head_kv = h / (c.heads_q / c.heads_kv);
  double best = -kInf;
  double second = -kInf;
  double magnitude = 0;
  std::int64_t at = -1;
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    double dot = 0;
    for (std::int64_t e = 0; e < c.head_dim; ++e) {
      const double product = t.q.get((i * c.heads_q + h) * c.head_dim + e) *
                             t.k.get((j * c.heads_kv + head_kv) * c.head_dim + e);
      dot += product;
      magnitude = std::max(magnitude, std::abs(product));
    }
    double s = dot / std::sqrt(static_cast<double>(c.head_dim));
    s = c.softcap > 0 ? c.softcap * std::tanh(s / c.softcap) : s;
    second = std::max(second, std::min(best, s));
    if (s > best) {
      best = s;
      at = j;
    }
  }
  // f32 may be off by some 1e-6 of the largest of the products.
  return best - second > 200 + 1e-5 * (magnitude + c.softcap) ? at : -1;
}

// Runs both passes with a dout of small integers, 0 in rows without a winner.
void expect_dv_of_winners(Session& s, const std::vector<std::int64_t>& winners) {
  const HostTensor& dout = s.t().dout;
  const HostTensor& dv = s.t().dv;
  const std::int64_t heads_q = dout.shape()[2];
  const std::int64_t heads_kv = dv.shape()[2];
  const std::int64_t dim = dv.shape()[3];
  std::vector<double> want(static_cast<std::size_t>(dv.num_elements()));
  for (std::int64_t n = 0; n < dout.num_elements() / dim; ++n) {
    const std::int64_t j = winners[static_cast<std::size_t>(n)];
    const std::int64_t head_kv = n % heads_q / (heads_q / heads_kv);
    for (std::int64_t e = 0; e < dim; ++e) {
      const auto value = j < 0 ? 0. : static_cast<double>((5 * n + e) % 7 - 3);
      dout.set(n * dim + e, value);
      if (j >= 0) {
        want[static_cast<std::size_t>((j * heads_kv + head_kv) * dim + e)] += value;
      }
    }
  }
  s.forward();
  s.backward();
  double worst = 0;
  for (std::size_t n = 0; n < want.size(); ++n) {
    const double error = std::abs(dv.get(static_cast<std::int64_t>(n)) - want[n]);
    worst = std::max(worst, std::isnan(error) ? kInf : error);
  }
  // A GPU multiplies by log2(e) first, and its lse is off by half an ulp of the logits: dv must be
  // finite there.
  EXPECT_LE(worst, tested_place() == Place::kHost ? 0 : std::numeric_limits<double>::max());
}

// Where one key outweighs all others its p is 1, and theirs 0, however large the logits: dv is the
// sum of the dout of the rows that a key wins, to the bit. For that the forward and the backward
// must have computed the same logits.
TEST(Right, OneKeyOutweighsTheOthers) {
  struct Kind {
    DType dtype;
    const char* q;
    const char* k;
    double logits;  // their size
  };
  for (const auto& [dtype, q, k, logits] : {Kind{DType::kF32, "100n", "10n", 1e3},
                                            {DType::kF32, "100n", "1000n", 1e5},
                                            {DType::kF32, "3000n", "3000n", 1e7},
                                            {DType::kF16, "300n", "300n", 1e5},
                                            {DType::kBF16, "1000n", "1000n", 1e6},
                                            {DType::kBF16, "10000n", "10000n", 1e8}}) {
    for (const BandMask& mask : {BandMask{}, BandMask{.right = 0}}) {
      for (const double softcap : {0.0, 3 * logits}) {
        for (const char* shape : {"hq=4,hkv=2,sq=70,sk=90,d=64", "hq=1,sq=150,d=21,dv=40"}) {
          Case c = parse_shape(shape);
          c.dtype = dtype;
          c = as_taken(c);
          c.q = q;
          c.k = k;
          c.mask = mask;
          c.softcap = softcap;
          const CallTensors inputs = make_tensors(c);
          const Band band = sequences(c).front().band;
          std::vector<std::int64_t> winners;  // (seqlen_q, heads_q)
          for (std::int64_t n = 0; n < c.seqlen_q * c.heads_q; ++n) {
            winners.push_back(winner(c, inputs, band, n % c.heads_q, n / c.heads_q));
          }
          EXPECT_LT(std::count(winners.begin(), winners.end(), -1), c.seqlen_q * c.heads_q * 3 / 4);
          for (const Target& target : affordable(c)) {
            SCOPED_TRACE(target.name());
            Session s(c, target);
            expect_dv_of_winners(s, winners);
          }
        }
      }
    }
  }
}

// Several keys compete with logits of hundreds: what s loses, p loses many times over. Summed in
// one chain s erred so much that these failed on every instruction set.
TEST(Right, LogitsOfHundreds) {
  if (tested_place() != Place::kHost) {
    GTEST_SKIP() << "f32 is computed on host memory";
  }
  struct Kind {
    const char* shape;
    double scale;
    std::uint64_t seed;
  };
  for (const auto& [shape, scale, seed] :
       {Kind{"sq=16,sk=64,d=64", 20, 11}, Kind{"sq=64,sk=64,d=64", 60, 22}}) {
    Case c = parse_shape(shape);
    c.dtype = DType::kF32;
    c.scale = scale;
    c.seed = seed;
    expect_right(c);
  }
}

TEST(Right, EmptyDims) {
  for (const Case& c : small_cases("empty_dims")) {
    on_each_target(c, expect_empty);
  }
}

TEST(Right, KeysOfEmptyQuerySequences) {
  on_each_target(case_of("varlen_gqa_256_zero_q"), [](Session& s) {
    for (const HostTensor* t : {&s.t().dk, &s.t().dv}) {
      for (std::int64_t j = 0; j < 8192; ++j) {
        const bool seen = j >= 2538 && j < 5120;
        EXPECT_EQ(t->get(j * 256 + 17) != 0, seen) << j;
      }
    }
  });
}

TEST(Right, SinkOnlyRow) {
  const Case c = case_of("sink_only_row");
  on_each_target(c, [&](Session& s) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t i = 0; i < 64; ++i) {  // batch 0 has no keys
        EXPECT_EQ(s.t().lse.get(h * 64 + i), s.t().sinks.get(h));
        EXPECT_EQ(s.t().out.get((i * 4 + h) * 64), 0);
      }
    }
  });
}

TEST(Right, NanInQuery) {
  const Case c = case_of("nan_in_query");
  on_each_target(c, [&](Session& s) {
    CallTensors& t = s.t();
    std::int64_t at = -1;
    for (std::int64_t n = 0; n < t.q.num_elements(); ++n) {
      if (std::isnan(t.q.get(n))) {
        EXPECT_EQ(at, -1);
        at = n;
      }
    }
    const std::int64_t head = at / 8 % 4;
    const std::int64_t row = at / 8 / 4;  // counted over the batch
    for (std::int64_t n = 0; n < t.q.num_elements(); ++n) {
      const std::int64_t h = n / 8 % 4;
      const std::int64_t i = n / 8 / 4;
      EXPECT_EQ(std::isnan(t.out.get(n)), h == head && i == row) << n;
      EXPECT_EQ(std::isnan(t.dq.get(n)), h == head && i == row) << n;
      EXPECT_EQ(std::isnan(t.dk.get(n)), h == head && i / 16 == row / 16) << n;
      EXPECT_EQ(std::isnan(t.dv.get(n)), h == head && i / 16 == row / 16) << n;
    }
    for (std::int64_t n = 0; n < t.lse.num_elements(); ++n) {
      EXPECT_EQ(std::isnan(t.lse.get(n)),
                n / 16 % 4 == head && n / 64 == row / 16 && n % 16 == row % 16)
          << n;
    }
  });
}

TEST(Right, NanInMaskedKey) {
  on_each_target(case_of("nan_in_masked_key"), [](Session& s) {
    EXPECT_TRUE(std::isnan(s.t().k.get(15 * 8)));
    expect_finite(s.t());
    for (std::int64_t n = 12 * 8; n < 16 * 8; ++n) {
      EXPECT_EQ(s.t().dk.get(n), 0);
      EXPECT_EQ(s.t().dv.get(n), 0);
    }
  });
}

// In both passes, whatever else its tile holds.
TEST(Right, NanStaysWithWhatSeesIt) {
  for (const char* shape :
       {"hq=4,hkv=2,sq=150,d=64", "hq=2,sq=150,d=128", "hq=2,sq=150,d=192,dv=128",
        "hq=2,hkv=1,cu_q=0:70:150,cu_kv=0:90:160,d=256"}) {
    for (std::string Case::*const tensor : {&Case::q, &Case::k, &Case::v, &Case::dout}) {
      for (const BandMask& mask : {BandMask{.right = 0}, BandMask{30, 10, Alignment::kTopLeft}}) {
        Case c = parse_shape(shape);
        c.dtype = DType::kBF16;
        c.mask = mask;
        c.*tensor = "n with one NaN";
        c.deterministic = mask.right == 0;
        expect_right(c);
      }
    }
  }
}

// The others keep their bits when one of dq, dk, dv is not wanted.
TEST(Right, SkipFrozen) {
  const std::vector<Case> cases = small_cases("skip_frozen");
  for (const Target& target : targets()) {
    const Bits all = run_bits(cases.front(), target);
    for (const Case& c : cases) {
      const Bits bits = run_bits(c, target);
      for (std::size_t n = 0; n < bits.size(); ++n) {
        EXPECT_TRUE(bits[n] == 0 || bits[n] == all[n]) << target.name() << ", " << command_line(c);
      }
    }
  }
}

TEST(Right, LseGradient) {
  const std::vector<Case> cases = small_cases("lse_gradient");
  on_each_target(cases.at(1), [](Session& s) { expect_all(s.t().dv, "dv", is_zero); });
  Case without = cases.at(2);
  without.dlse = "none";
  expect_same_bits(cases.at(2), without);
}

// out of a row does not move when keys after it do.
TEST(Right, WindowNeverSeesTheFuture) {
  on_each_target(case_of("window_future"), [](Session& s) {
    constexpr std::int64_t kRow = 40;
    std::vector<double> before;
    for (std::int64_t n = 0; n < (kRow + 1) * 16; ++n) {
      before.push_back(s.t().out.get(n));
    }
    for (const double other : {7.0, kNaN}) {
      for (std::int64_t n = (kRow + 1) * 16; n < 64 * 16; ++n) {
        s.t().k.set(n, other);
        s.t().v.set(n, other);
      }
      s.forward();
      // Of a tile with NaN a GPU computes the rows that do not see it another way: as exact, but
      // not to the bit.
      const bool same_way = !std::isnan(other) || tested_place() == Place::kHost;
      for (std::int64_t n = 0; n < (kRow + 1) * 16; ++n) {
        const double want = before[static_cast<std::size_t>(n)];
        EXPECT_NEAR(s.t().out.get(n), want, same_way ? 0 : 0x1p-7);  // out is of size 1
      }
    }
    EXPECT_TRUE(std::isnan(s.t().out.get((kRow + 1) * 16)));
  });
}

TEST(Right, NoncausalSeesEverything) {
  on_each_target(case_of("noncausal_is_noncausal"), [](Session& s) {
    s.t().v.set(s.t().v.num_elements() - 1, kNaN);  // last key, last head, last component
    s.forward();
    EXPECT_TRUE(std::isnan(s.t().out.get(2 * 64 - 1)));  // of the first row
  });
}

}  // namespace
}  // namespace flashgrad::check
