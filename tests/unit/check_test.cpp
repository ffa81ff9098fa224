// SPDX-License-Identifier: Apache-2.0
// The check library itself: what it must notice in a backend that errs, and that its texts read
// back. tests/conformance/mutation_test.cpp does the same for wrong mathematics.
#include "check/check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace flashgrad::check {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr DLDataType kBF16{kDLBfloat, 16, 1};

std::string damaged(const HostTensor& t) { return damaged_surroundings({{"t", &t}}); }

TEST(HostTensor, NoticesWritesAroundItsElements) {
  const HostTensor strided(kBF16, {2, 3, 5}, {40, 8, 1});
  for (std::int64_t n = 0; n < strided.num_elements(); ++n) {
    strided.set(n, 1);
  }
  EXPECT_EQ(damaged(strided), "");
  std::memset(strided.address(4) + 2, 0, 1);  // the gap after the first vector
  EXPECT_EQ(damaged(strided), "t");

  const HostTensor compact(kF32, {7});
  EXPECT_EQ(damaged(compact), "");
  std::memset(compact.address(0) - 1, 0, 1);
  EXPECT_EQ(damaged(compact), "t");
}

TEST(HostTensorDeathTest, TrapsAccessPastItsEnd) {
  const HostTensor t(kF32, {7});
  EXPECT_DEATH(
      {
        volatile std::byte x = *(t.address(6) + 4);
        (void)x;
      },
      "");
}

TEST(HostTensor, PartsOfOneBufferShareNoGaps) {
  const auto buffer = std::make_shared<Buffer>(std::size_t{4 * 6});
  const HostTensor a(kF32, {2, 1}, {3, 1}, buffer, 0);
  const HostTensor b(kF32, {2, 1}, {3, 1}, buffer, 1);
  a.set(1, 5);
  b.set(1, 6);
  EXPECT_EQ(damaged_surroundings({{"a", &a}, {"b", &b}}), "");
  EXPECT_EQ(damaged_surroundings({{"a", &a}}), "a");  // without b, its elements are gaps
  EXPECT_THROW(HostTensor(kF32, {3}, {1}, buffer, 4), std::logic_error);
}

TEST(HostTensor, SparseMemoryOfHugeStrides) {
  const HostTensor t(kF32, {1000, 2}, {std::int64_t{1} << 22, 1});  // spans 16 GB
  EXPECT_TRUE(t.buffer()->sparse());
  EXPECT_TRUE(std::isnan(t.get(1999)));
  t.set(1999, 3);
  EXPECT_EQ(t.get(1999), 3);
  EXPECT_EQ(damaged(t), "");
  std::memset(t.address(41) + 4, 0, 4);
  EXPECT_EQ(damaged(t), "t");
}

TEST(HostTensor, DigestTellsBits) {
  const HostTensor a(kF32, {4, 3}, {9, 1});
  const HostTensor b(kF32, {4, 3});
  for (std::int64_t n = 0; n < 12; ++n) {
    a.set(n, static_cast<double>(n));
    b.set(n, static_cast<double>(n));
  }
  EXPECT_EQ(a.digest(), b.digest());
  b.set(0, -0.0);
  EXPECT_NE(a.digest(), b.digest());
}

TEST(WorkspaceMemory, NoticesWritesBeforeItAndStaysDirty) {
  WorkspaceMemory memory;
  auto* begin = static_cast<std::byte*>(memory.resize(100, true));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(begin) % 2, 1U);
  std::memset(begin, 7, 100);
  EXPECT_TRUE(memory.guards_intact());
  EXPECT_EQ(memory.resize(100, true), begin);
  EXPECT_EQ(begin[99], std::byte{7});
  begin[-1] = std::byte{0};
  EXPECT_FALSE(memory.guards_intact());
}

// A case that the reference backend has computed, to be spoilt.
struct Spoil : testing::Test {
  Case spec = [] {
    // The last 2 rows and the last 3 keys of the packed tensors belong to no sequence; the first 2
    // rows of a sequence see nothing.
    Case c = parse_shape("hq=4,hkv=2,cu_q=0:9:18,cu_kv=0:7:14,sq=20,sk=17,d=16");
    c.mask.right = 0;
    c.dtype = DType::kBF16;
    return c;
  }();
  CaseRunner runner{spec};

  void SetUp() override {
    const CaseResult r = runner.run({.backend = "reference"});
    ASSERT_TRUE(r.ok()) << r.message;
    ASSERT_EQ(r.outputs.size(), 5U);
  }

  // The names of the outputs that are refused now.
  std::string refused() {
    fg_options o = make_options(spec);
    std::string names;
    for (const OutputResult& r : judge(runner.tensors().c_tensors(), o, false).outputs) {
      if (!r.ok) {
        EXPECT_FALSE(r.reason.empty());
        names += names.empty() ? "" : " ";
        names += r.name;
      }
    }
    return names;
  }
};

TEST_F(Spoil, NothingSpoilt) { EXPECT_EQ(refused(), ""); }

TEST_F(Spoil, NanAndInfInOtherPlaces) {
  for (const double x : {kNaN, kInf, -kInf}) {
    const double before = runner.tensors().dq.get(500);
    runner.tensors().dq.set(500, x);
    EXPECT_EQ(refused(), "dq");
    runner.tensors().dq.set(500, before);
  }
}

TEST_F(Spoil, NotZeroWhereNothingIsVisible) {
  CallTensors& t = runner.tensors();
  const std::int64_t width = 4 * 16;
  t.out.set(0, 1e-30);  // row 0 sees nothing
  EXPECT_EQ(refused(), "out");
  t.out.set(0, -0.0);
  t.dq.set(width + 3, 1e-30);  // nor does row 1
  EXPECT_EQ(refused(), "dq");
  t.dq.set(width + 3, 0);
  t.dq.set(18 * width, 1e-30);  // a row of no sequence
  t.dk.set(14 * width / 2 + 5, 1e-30);
  t.dv.set(16 * width / 2 + 5, 1e-30);
  EXPECT_EQ(refused(), "dq dk dv");
}

TEST_F(Spoil, LseOfEmptyAndUnusedRows) {
  CallTensors& t = runner.tensors();
  for (const std::int64_t row : {0, 19}) {
    EXPECT_EQ(t.lse.get(row), -kInf);
    t.lse.set(row, -1e30);
    EXPECT_EQ(refused(), "lse");
    t.lse.set(row, kInf);
    EXPECT_EQ(refused(), "lse");
    t.lse.set(row, -kInf);
  }
  const double lse = t.lse.get(5);
  t.lse.set(5, lse + 3e-5 * (1 + std::abs(lse)));
  EXPECT_EQ(refused(), "lse");
}

// |x - o| <= 1e-5 * (1 + |o|).
TEST_F(Spoil, LseBeyondItsBound) {
  const HostTensor& lse = runner.tensors().lse;
  const std::int64_t last = 4 * 20 - 3;  // the last row of the last sequence, last head
  const double value = lse.get(last);
  ASSERT_TRUE(std::isfinite(value));
  lse.set(last, value + 0.9e-5 * (1 + std::abs(value)));
  EXPECT_EQ(refused(), "");
  lse.set(last, value - 1.1e-5 * (1 + std::abs(value)));
  EXPECT_EQ(refused(), "lse");
}

TEST(Expected, SampleOfALargeCallStillSeesErrors) {
  Case c = parse_shape("hq=1,sq=300,sk=400,d=16");
  c.dtype = DType::kF32;
  CaseRunner runner(c, 1e6);
  const CaseResult r = runner.run({.backend = "reference"});
  EXPECT_TRUE(r.ok());
  EXPECT_NE(r.coverage.find("rows"), std::string::npos) << r.coverage;
  CallTensors& t = runner.tensors();
  ExpectedOptions options;
  options.max_flops = 1e6;
  t.dv.set(0, t.dv.get(0) + 0.1);  // the first key is always chosen
  t.dq.set(299 * 16, 7);           // and the last row
  t.dk.set(200 * 16, kNaN);        // not finite anywhere
  std::string names;
  for (const OutputResult& o : judge(t.c_tensors(), make_options(c), false, options).outputs) {
    names += o.ok ? "" : o.name + " ";
  }
  EXPECT_EQ(names, "dq dk dv ");
}

std::string refused(CallTensors& t, const Case& c, bool given_out_lse) {
  std::string names;
  for (const OutputResult& r : judge(t.c_tensors(), make_options(c), given_out_lse).outputs) {
    if (!r.ok) {
      names += r.name + " ";
    }
  }
  return names;
}

// The largest error of all heads allows too much for a small one: its direction must be right.
TEST(Judge, DirectionOfASmallHead) {
  Case c = parse_shape("hq=2,sq=32,sk=32,d=16");
  c.dtype = DType::kBF16;
  CallTensors t = make_tensors(c);
  const auto of_second_head = [](std::int64_t n) { return n / 16 % 2 == 1; };
  for (std::int64_t n = 0; n < t.dout.num_elements(); ++n) {
    t.dout.set(n, t.dout.get(n) / (of_second_head(n) ? 4096 : 1));
  }
  WorkspaceMemory memory;
  fg_options o = make_options(c);
  o.backend = "reference";
  ASSERT_EQ(run_pass(FG_FORWARD, t, o, Workspace::kMinimum, memory).status, FG_OK);
  ASSERT_EQ(run_pass(FG_BACKWARD, t, o, Workspace::kMinimum, memory).status, FG_OK);
  EXPECT_EQ(refused(t, c, false), "");
  for (std::int64_t n = 0; n < t.dv.num_elements(); ++n) {
    t.dv.set(n, t.dv.get(n) * (of_second_head(n) ? -1 : 1));
  }
  EXPECT_EQ(refused(t, c, false), "dv ");
}

// The tensors of a case after both passes of a backend.
CallTensors after(const Case& c, const char* backend) {
  CallTensors t = make_tensors(c);
  WorkspaceMemory memory;
  fg_options o = make_options(c);
  o.backend = backend;
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    EXPECT_EQ(run_pass(pass, t, o, Workspace::kMinimum, memory).status, FG_OK);
  }
  return t;
}

// Of so few elements naive may round all to its advantage, as here: its bound is under one ulp of
// the largest. p and the result, each rounded once, may cost that; they can't cost three.
TEST(Judge, FewElementsMayLoseWhatTheContractRounds) {
  for (HostTensor CallTensors::*const output : {&CallTensors::out, &CallTensors::dv}) {
    const bool is_out = output == &CallTensors::out;
    Case c = parse_shape(is_out ? "hq=1,sq=4,sk=4,d=4" : "hq=1,sq=2,sk=2,d=8");
    c.dtype = DType::kBF16;
    c.seed = is_out ? 68 : 47;
    CallTensors t = after(c, "reference");
    HostTensor& x = t.*output;
    std::int64_t largest = 0;
    for (std::int64_t n = 0; n < x.num_elements(); ++n) {
      largest = std::abs(x.get(n)) > std::abs(x.get(largest)) ? n : largest;
    }
    const double value = x.get(largest);
    const double ulp = std::exp2(std::ilogb(value) - 7);
    const auto refused_with = [&](double changed) {
      x.set(largest, changed);
      return refused(t, c, false).find(is_out ? "out " : "dv ") != std::string::npos;
    };
    EXPECT_FALSE(refused_with(value));
    // The nearer of the two neighbours.
    EXPECT_FALSE(refused_with(value - ulp) && refused_with(value + ulp));
    EXPECT_TRUE(refused_with(value - 3 * ulp));
    EXPECT_TRUE(refused_with(value + 3 * ulp));
  }
}

// dP overflows f16 in the naive formula, and f32 takes its place; but out and the gradients are
// f16, and a backward that is exact but for that must pass. One that is off by 1 % must not.
TEST(Judge, OverflowOfTheNaiveFormula) {
  Case c = parse_shape("hq=2,hkv=1,sq=33,sk=65,d=16,v=10000n");
  c.dtype = DType::kF16;
  c.mask.right = 0;
  for (const int seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    c.seed = static_cast<std::uint64_t>(seed);
    CallTensors t = after(c, "reference");
    EXPECT_EQ(refused(t, c, false), "") << "seed " << seed;
    for (std::int64_t n = 0; n < t.dk.num_elements(); ++n) {
      t.dk.set(n, t.dk.get(n) * 1.01);
    }
    EXPECT_EQ(refused(t, c, false), "dk ") << "seed " << seed;
  }
}

// What the arithmetic costs an element is no licence: in a call of ordinary numbers none may be off
// by a few times the bound of its output.
TEST(Judge, RoundingsOfAnOrdinaryCallAreSmall) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Case c = parse_shape("hq=2,hkv=1,sq=48,sk=64,d=64");
    c.dtype = dtype;
    c.mask.right = 0;
    CallTensors t = after(c, "cpu");
    const std::vector<OutputResult> right = judge(t.c_tensors(), make_options(c), false).outputs;
    struct Tensor {
      std::string name;
      HostTensor* tensor;
    };
    for (const auto& [output, x] :
         {Tensor{"out", &t.out}, Tensor{"lse", &t.lse}, Tensor{"dq", &t.dq}, Tensor{"dk", &t.dk},
          Tensor{"dv", &t.dv}}) {
      const auto same = [&name = output](const OutputResult& r) { return r.name == name; };
      const double bound = std::find_if(right.begin(), right.end(), same)->bound;
      for (std::int64_t n = 0; n < x->num_elements(); n += x->num_elements() / 3) {
        const double before = x->get(n);
        const double scale = output == "lse" ? 1 + std::abs(before) : 1;
        x->set(n, before + 3 * bound * scale);
        EXPECT_EQ(refused(t, c, false), output + " ") << name(dtype) << " element " << n;
        x->set(n, before);
      }
    }
  }
}

// Calls whose naive results are near the oracle's by luck, or where the rule's other terms know
// nothing of what is lost: sums of logits that cancel, a softcap far below the logits, delta of an
// out that has been rounded, an lse of thousands. A right backend must pass; one that is off by
// `factor` in the named output must not.
TEST(Judge, RoundingsOfTheArithmetic) {
  struct Rounded {
    const char* shape;
    DType dtype;
    double scale;
    double softcap;
    std::uint64_t seed;
    const char* backend;
    HostTensor CallTensors::*output;
    const char* name;
    double factor;
  };
  const double no_scale = std::numeric_limits<double>::quiet_NaN();
  for (const Rounded& r : {
           Rounded{"b=3,hq=4,hkv=1,sq=33,sk=31,d=192,dv=5,k=100,dout=3n", DType::kF16, -1, 0, 2243,
                   "cpu", &CallTensors::lse, "lse ", 1.1},
           Rounded{"sq=100,sk=128,d=72,dlse=n,sinks=n", DType::kF32, -0.3, 1e-3, 1707, "cpu",
                   &CallTensors::dq, "dq ", 1.1},
           Rounded{"hq=6,hkv=3,sq=33,sk=64,d=32,q=20,k=-7,dout=1000", DType::kF16, 30, 0, 1156,
                   "reference", &CallTensors::lse, "lse ", 1.01},
           Rounded{"hq=6,hkv=3,sq=7,sk=128,d=1,q=100,k=100,v=0.5,sinks=10", DType::kF16, no_scale,
                   0, 2112, "reference", &CallTensors::dv, "dv ", 1.1},
           Rounded{"hq=4,hkv=2,sq=65,sk=130,d=1,dv=80,q=20,dlse=n,sinks=-10", DType::kBF16, 0.1, 0,
                   296, "cpu", &CallTensors::dk, "dk ", 1.1},
       }) {
    Case c = parse_shape(r.shape);
    c.dtype = r.dtype;
    c.scale = r.scale;
    c.softcap = r.softcap;
    c.seed = r.seed;
    CallTensors t = after(c, r.backend);
    EXPECT_EQ(refused(t, c, false), "") << r.shape;
    HostTensor& x = t.*r.output;
    for (std::int64_t n = 0; n < x.num_elements(); ++n) {
      x.set(n, x.get(n) * r.factor);
    }
    EXPECT_NE(refused(t, c, false).find(r.name), std::string::npos) << r.shape;
  }
}

// Sinks that outweigh all keys leave an out of denormal f16 numbers, of whose products with dout a
// tensor core drops bits; bf16 has no such numbers there.
TEST(Judge, DsinksOfADenormalOut) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Case c = parse_shape("hq=1,sq=15,sk=64,d=111,sinks=18");
    c.dtype = dtype;
    CallTensors t = after(c, "reference");
    EXPECT_EQ(refused(t, c, false), "");
    const double dsink = t.dsinks.get(0);
    t.dsinks.set(0, dsink * (1 + 2e-5));
    EXPECT_EQ(refused(t, c, false), dtype == DType::kF16 ? "" : "dsinks ");
    t.dsinks.set(0, dsink * (1 + 1e-4));
    EXPECT_EQ(refused(t, c, false), "dsinks ");
  }
}

// Where one key outweighs all others ds is all rounding of delta and lse, which are f32: its
// direction says nothing.
TEST(Judge, DirectionOfWhatRoundingLeaves) {
  const Case c = parse_shape("hq=2,hkv=1,sq=3,sk=3,d=16,q=30n,k=10n");
  CallTensors t = after(c, "cpu");
  EXPECT_EQ(refused(t, c, false), "");
}

// out and lse that come from elsewhere (the other parts of a longer sequence) are what the
// gradients are judged by.
TEST(Judge, TakesGivenOutAndLse) {
  const Case c = parse_shape("hq=2,sq=20,sk=30,d=16");
  CallTensors t = make_tensors(c);
  WorkspaceMemory memory;
  fg_options o = make_options(c);
  o.backend = "reference";
  ASSERT_EQ(run_pass(FG_FORWARD, t, o, Workspace::kMinimum, memory).status, FG_OK);
  for (std::int64_t n = 0; n < t.lse.num_elements(); ++n) {
    t.lse.set(n, t.lse.get(n) + 0.7);  // as if there were as many keys again
  }
  ASSERT_EQ(run_pass(FG_BACKWARD, t, o, Workspace::kMinimum, memory).status, FG_OK);
  EXPECT_EQ(refused(t, c, true), "");
  EXPECT_EQ(refused(t, c, false), "lse dq dk dv ");
}

TEST(ParseShape, FillsInWhatIsLeftOut) {
  const Case c = parse_shape("hq=8,sq=512,d=64");
  EXPECT_EQ(c.batch, 1);
  EXPECT_EQ(c.heads_kv, 8);
  EXPECT_EQ(c.seqlen_kv, 512);
  EXPECT_EQ(c.head_dim_v, 64);
  const Case packed = parse_shape("hq=2,cu_q=0:3:5,cu_kv=1:4:9,d=8");
  EXPECT_EQ(packed.batch, 2);
  EXPECT_EQ(packed.seqlen_q, 5);
  EXPECT_EQ(packed.seqlen_kv, 9);
}

TEST(ParseShape, RefusesWhatMakesNoSense) {
  for (const char* text :
       {"", "hq", "hq=", "hq=x", "hq=0", "b=-1", "hq=2,hq=3", "colour=red", "cu_q=0:1",
        "sq=4,used_kv=1:2", "hq=1,cu_q=0:3:2,cu_kv=0:1:2", "sq=4,used_q=5", "sq=3,q_offset=1:2",
        "layout=round", "null=x", "dout=none", "hq=99999999999999999999"}) {
    EXPECT_THROW((void)parse_shape(text), std::invalid_argument) << text;
  }
}

TEST(MakeTensors, SeedsTellCasesApartAndRepeat) {
  Case c = parse_shape("hq=2,sq=20,d=16");
  const std::uint64_t one = make_tensors(c).q.digest();
  EXPECT_EQ(make_tensors(c).q.digest(), one);
  EXPECT_NE(make_tensors(c).k.digest(), one);
  c.seed = 2;
  EXPECT_NE(make_tensors(c).q.digest(), one);
  c.layout = Layout::kOwnStrides;
  EXPECT_EQ(make_tensors(c).q.digest(), make_tensors([&] {
                                          Case compact = c;
                                          compact.layout = Layout::kCompact;
                                          return compact;
                                        }())
                                            .q.digest());
  c.q = "purple";
  EXPECT_THROW((void)make_tensors(c), std::invalid_argument);
}

TEST(MakeTensors, HidesWhatNothingReads) {
  Case c = parse_shape("hq=1,sq=6,sk=4,d=2,dlse=n,used_kv=3");
  c.mask.right = 0;  // with 3 keys, the first 3 rows see nothing
  const CallTensors t = make_tensors(c);
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(std::isnan(t.q.get(2 * i)), i < 3) << i;
    EXPECT_EQ(std::isnan(t.dout.get(2 * i)), i < 3) << i;
    EXPECT_EQ(std::isnan(t.dlse.get(i)), i < 3) << i;
  }
  for (std::int64_t j = 0; j < 4; ++j) {
    EXPECT_EQ(std::isnan(t.k.get(2 * j)), j == 3) << j;
    EXPECT_EQ(std::isnan(t.v.get(2 * j)), j == 3) << j;
  }
}

}  // namespace
}  // namespace flashgrad::check
