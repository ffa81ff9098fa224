// SPDX-License-Identifier: Apache-2.0
// The oracle against central finite differences of its own forward, in float64, feature by feature;
// and the edges of docs/semantics.md that have one right answer in numbers.
#include "reference/reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/call.hpp"
#include "check/case.hpp"

namespace flashgrad::check {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Case small(const std::string& shape) {
  Case c = parse_shape(shape);
  c.dtype = DType::kF64;
  c.seed = 7;
  return c;
}

void run(fg_pass pass, const Case& c, CallTensors& t, WorkspaceMemory& memory) {
  fg_options o = make_options(c);
  o.backend = "reference";
  o.num_threads = 1;
  const PassResult r = run_pass(pass, t, o, Workspace::kMinimum, memory);
  ASSERT_EQ(r.status, FG_OK) << r.message;
}

// sum(dout * out) + sum(dlse * lse), over the rows that see something.
double loss(const Case& c, CallTensors& t, WorkspaceMemory& memory) {
  run(FG_FORWARD, c, t, memory);
  double sum = 0;
  for (std::int64_t n = 0; t.dout.given() && n < t.out.num_elements(); ++n) {
    sum += t.out.get(n) != 0 ? t.out.get(n) * t.dout.get(n) : 0;
  }
  for (std::int64_t n = 0; t.dlse.given() && n < t.lse.num_elements(); ++n) {
    sum += std::isfinite(t.lse.get(n)) ? t.lse.get(n) * t.dlse.get(n) : 0;
  }
  return sum;
}

struct Feature {
  const char* name;
  const char* shape;
  BandMask mask;
  double scale = kNaN;
  double softcap = 0;
};

void PrintTo(const Feature& f, std::ostream* os) { *os << f.name; }

class FiniteDifferences : public testing::TestWithParam<Feature> {};

TEST_P(FiniteDifferences, EqualTheGradients) {
  const Feature& feature = GetParam();
  Case c = small(feature.shape);
  c.mask = feature.mask;
  c.scale = feature.scale;
  c.softcap = feature.softcap;
  CallTensors t = make_tensors(c);
  WorkspaceMemory memory;
  run(FG_FORWARD, c, t, memory);
  run(FG_BACKWARD, c, t, memory);
  double largest = 0;
  const auto compare = [&](const char* name, const HostTensor& input, const HostTensor& gradient) {
    for (std::int64_t n = 0; n < input.num_elements(); ++n) {
      const double x = input.get(n);
      const double got = gradient.get(n);
      if (!std::isfinite(x)) {  // hidden from every row, or no sink
        EXPECT_EQ(got, 0) << name << " " << n;
        continue;
      }
      constexpr double kStep = 1e-4;
      double slope = 0;
      // The five-point rule: an error of step^4.
      for (const auto& [steps, weight] : {std::pair{-2, 1.0}, {-1, -8.0}, {1, 8.0}, {2, -1.0}}) {
        input.set(n, x + steps * kStep);
        slope += weight * loss(c, t, memory) / (12 * kStep);
      }
      input.set(n, x);
      EXPECT_NEAR(got, slope, 1e-9 * (1 + std::abs(slope))) << name << " " << n;
      largest = std::max(largest, std::abs(got));
    }
  };
  compare("dq", t.q, t.dq);
  compare("dk", t.k, t.dk);
  compare("dv", t.v, t.dv);
  if (t.sinks.given()) {
    compare("dsinks", t.sinks, t.dsinks);
  }
  EXPECT_GT(largest, 0.01) << "the gradients are too small to prove anything";
}

constexpr std::int64_t kOpen = kUnbounded;
constexpr Alignment kTopLeft = Alignment::kTopLeft;

INSTANTIATE_TEST_SUITE_P(
    Reference, FiniteDifferences,
    testing::Values(Feature{"full", "b=2,hq=2,sq=4,sk=5,d=3", {}},
                    Feature{"causal", "hq=2,sq=5,sk=7,d=3", {kOpen, 0}},
                    Feature{"causal_top_left", "hq=2,sq=5,sk=7,d=3", {kOpen, 0, kTopLeft}},
                    Feature{"causal_more_rows_than_keys", "hq=2,sq=7,sk=4,d=3", {kOpen, 0}},
                    Feature{"window", "hq=2,sq=9,sk=9,d=3", {2, 1}},
                    Feature{"band_off_the_diagonal", "hq=2,sq=8,sk=9,d=3", {-1, 4}},
                    Feature{"empty_band", "hq=2,sq=8,sk=9,d=3,sinks=n,dlse=n", {-1, 3, kTopLeft}},
                    Feature{"gqa", "b=2,hq=6,hkv=2,sq=4,sk=4,d=3", {}},
                    Feature{"own_width_of_v", "hq=2,sq=4,sk=5,d=3,dv=6", {}},
                    Feature{"scale", "hq=2,sq=4,sk=5,d=3", {}, 1.7},
                    Feature{"negative_scale", "hq=2,sq=4,sk=5,d=3", {}, -0.6},
                    Feature{"softcap", "hq=2,sq=4,sk=5,d=3,q=3n,k=3n", {}, kNaN, 2.0},
                    Feature{"sinks", "hq=4,hkv=2,sq=4,sk=5,d=3,sinks=0.5:-inf:2:-1", {kOpen, 0}},
                    Feature{"dlse", "hq=2,sq=4,sk=5,d=3,dlse=n", {}},
                    Feature{"dlse_alone", "hq=2,sq=4,sk=5,d=3,dlse=n,dout=none", {}},
                    Feature{"packed", "hq=2,cu_q=0:3:3:7,cu_kv=0:2:6:9,d=3", {kOpen, 0}},
                    Feature{"packed_with_gaps",
                            "hq=2,cu_q=1:4:7,cu_kv=1:5:7,used_q=3:2,used_kv=2:1,sq=9,sk=8,d=3",
                            {}},
                    Feature{"q_offset", "b=2,hq=2,sq=3,sk=8,d=3,q_offset=2:5", {2, 0}},
                    Feature{"own_strides", "b=2,hq=4,hkv=2,sq=4,sk=5,d=3,layout=own", {kOpen, 0}},
                    Feature{"everything",
                            "hq=4,hkv=2,cu_q=1:4:4:9,cu_kv=0:4:6:12,used_kv=3:2:6,sq=10,sk=13,d=3,"
                            "dv=5,sinks=n,dlse=n,layout=own",
                            {3, 1},
                            -0.8,
                            1.5}),
    [](const auto& test) { return std::string(test.param.name); });

// forward_rows, backward_rows and backward_keys give chosen rows and keys the bits that the backend
// gives them, for any number of threads.
TEST(Reference, ChosenRowsAndKeysEqualTheWhole) {
  Case c = small("hq=4,hkv=2,sq=37,sk=41,d=19,dv=7,dlse=n");
  c.mask = {20, 3};
  CallTensors t = make_tensors(c);
  WorkspaceMemory memory;
  run(FG_FORWARD, c, t, memory);
  run(FG_BACKWARD, c, t, memory);

  Problem p;
  p.dtype = DType::kF64;
  p.batch = 1;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_kv = c.seqlen_kv;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.mask = c.mask;
  p.scale = 1 / std::sqrt(19.0);
  const auto tensor = [](const HostTensor& h) {
    const bool rows_last = h.shape().size() == 3;  // lse
    Tensor x;
    x.data = h.buffer()->data();
    x.dtype = DType::kF64;
    x.head_stride = rows_last ? h.strides()[1] : h.strides()[2];
    x.row_stride = rows_last ? h.strides()[2] : h.strides()[1];
    return x;
  };
  Args a;
  a.q = tensor(t.q);
  a.k = tensor(t.k);
  a.v = tensor(t.v);
  a.out = tensor(t.out);
  a.lse = tensor(t.lse);
  a.dout = tensor(t.dout);
  a.dlse = tensor(t.dlse);
  const reference::Formula<double> f(p);
  const std::vector<std::int64_t> chosen = {0, 3, 4, 17, 30, 36};
  const int size = static_cast<int>(chosen.size());
  reference::Scratch<double> scratch;
  for (std::int64_t h = 0; h < c.heads_q; ++h) {
    const reference::Head head{p, a, sequence(p, a, 0), h};
    reference::forward_rows(f, head, chosen.data(), size, scratch);
    reference::backward_rows(f, head, chosen.data(), size, scratch);
    for (std::size_t r = 0; r < chosen.size(); ++r) {
      const std::int64_t i = chosen[r];
      EXPECT_EQ(scratch.lse[r], t.lse.get(h * 37 + i));
      EXPECT_EQ(scratch.out[r][6], t.out.get((i * 4 + h) * 7 + 6));
      EXPECT_EQ(scratch.dq[r][18], t.dq.get((i * 4 + h) * 19 + 18));
    }
    if (h % p.group() == 0) {
      reference::backward_keys(f, head, chosen.data(), size, scratch);
      for (std::size_t r = 0; r < chosen.size(); ++r) {
        const std::int64_t j = chosen[r];
        EXPECT_EQ(scratch.dk[r][18], t.dk.get((j * 2 + h / 2) * 19 + 18));
        EXPECT_EQ(scratch.dv[r][6], t.dv.get((j * 2 + h / 2) * 7 + 6));
      }
    }
  }

  std::vector<std::uint64_t> bits;
  for (const int threads : {1, 2, 5}) {
    fg_options o = make_options(c);
    o.backend = "reference";
    o.num_threads = threads;
    ASSERT_EQ(run_pass(FG_FORWARD, t, o, Workspace::kPreferred, memory).status, FG_OK);
    ASSERT_EQ(run_pass(FG_BACKWARD, t, o, Workspace::kPreferred, memory).status, FG_OK);
    std::vector<std::uint64_t> now;
    for (const NamedTensor& output : t.all()) {
      now.push_back(output.tensor->given() ? output.tensor->digest() : 0);
    }
    EXPECT_TRUE(bits.empty() || bits == now) << threads << " threads";
    bits = now;
  }
}

struct Edge : testing::Test {
  CallTensors t;
  WorkspaceMemory memory;

  void forward(const Case& c) {
    t = make_tensors(c);
    run(FG_FORWARD, c, t, memory);
  }
};

TEST_F(Edge, RowThatSeesNothing) {
  Case c = small("sq=3,sk=2,d=2");
  c.mask.right = 0;
  forward(c);
  run(FG_BACKWARD, c, t, memory);
  EXPECT_EQ(t.lse.get(0), -kInf);
  EXPECT_EQ(t.out.get(0), 0);
  EXPECT_EQ(t.out.get(1), 0);
  EXPECT_EQ(t.dq.get(0), 0);
  EXPECT_TRUE(std::isnan(t.q.get(0)) && std::isnan(t.dout.get(0)));  // and yet all else is finite
  for (std::int64_t n = 0; n < t.dk.num_elements(); ++n) {
    EXPECT_TRUE(std::isfinite(t.dk.get(n)) && std::isfinite(t.dv.get(n)));
  }
}

TEST_F(Edge, RowThatSeesOnlyItsSink) {
  Case c = small("hq=2,sq=3,sk=2,d=2,sinks=0.75:-inf,dlse=3");
  c.mask.right = 0;
  forward(c);
  EXPECT_EQ(t.lse.get(0), 0.75);
  EXPECT_EQ(t.lse.get(3), -kInf);  // a sink of -inf is none
  EXPECT_EQ(t.out.get(0), 0);
  double want = 3;  // dlse of the row that sees only the sink
  for (std::int64_t i = 1; i < 3; ++i) {
    double delta = 0;
    for (std::int64_t x = 0; x < 2; ++x) {
      delta += t.out.get(i * 4 + x) * t.dout.get(i * 4 + x);
    }
    want += std::exp(0.75 - t.lse.get(i)) * (3 - delta);
  }
  run(FG_BACKWARD, c, t, memory);
  EXPECT_NEAR(t.dsinks.get(0), want, 1e-14);
  EXPECT_EQ(t.dsinks.get(1), 0);
}

TEST_F(Edge, InfiniteLseMarksAnEmptyRow) {
  for (const double infinite : {kInf, -kInf}) {
    const Case c = small("sq=2,sk=2,d=2,sinks=n,dlse=n");
    forward(c);
    t.lse.set(0, infinite);
    t.dout.set(0, kNaN);
    run(FG_BACKWARD, c, t, memory);
    EXPECT_EQ(t.dq.get(0), 0);
    EXPECT_EQ(t.dq.get(1), 0);
    const double p10 = t.dv.get(0) / t.dout.get(2);
    EXPECT_NEAR(t.dv.get(1), p10 * t.dout.get(3), 1e-14);  // row 1 alone
    EXPECT_TRUE(std::isfinite(t.dsinks.get(0)));
  }
}

// Beside such a logit lse has no room for the log of how many there are.
TEST_F(Edge, EqualLogitsShareTheRowHoweverLargeTheyAre) {
  for (const char* k : {"1e35", "-1e35"}) {
    Case c = small(std::string("sq=1,sk=4,d=1,q=1,v=n,k=") + k);
    c.scale = 1;
    forward(c);
    EXPECT_EQ(t.lse.get(0), t.k.get(0));
    EXPECT_NEAR(t.out.get(0), (t.v.get(0) + t.v.get(1) + t.v.get(2) + t.v.get(3)) / 4, 1e-15);
  }
}

TEST_F(Edge, HugeAndInfiniteLogits) {
  Case c = small("sq=1,sk=2,d=1,q=1,k=-100000,v=n");
  c.scale = 1;
  forward(c);
  EXPECT_NEAR(t.lse.get(0), -100000 + std::log(2.0), 1e-9);
  EXPECT_NEAR(t.out.get(0), (t.v.get(0) + t.v.get(1)) / 2, 1e-11);

  t.k.set(0, kInf);  // a visible logit of +inf
  run(FG_FORWARD, c, t, memory);
  EXPECT_TRUE(std::isnan(t.lse.get(0)));
  EXPECT_TRUE(std::isnan(t.out.get(0)));

  t.k.set(0, -kInf);  // one of -inf is a key of weight 0
  run(FG_FORWARD, c, t, memory);
  EXPECT_EQ(t.lse.get(0), -100000);
  EXPECT_EQ(t.out.get(0), t.v.get(1));
}

TEST_F(Edge, ScaleOfZeroIsTheMean) {
  Case c = small("sq=2,sk=3,d=2");
  c.scale = 0;
  forward(c);
  EXPECT_NEAR(t.lse.get(0), std::log(3.0), 1e-15);
  EXPECT_NEAR(t.out.get(0), (t.v.get(0) + t.v.get(2) + t.v.get(4)) / 3, 1e-15);
}

TEST_F(Edge, LseGradientAloneLeavesDvZero) {
  const Case c = small("sq=2,sk=3,d=2,dlse=n,dout=none");
  forward(c);
  run(FG_BACKWARD, c, t, memory);
  for (std::int64_t n = 0; n < t.dv.num_elements(); ++n) {
    EXPECT_EQ(t.dv.get(n), 0);
  }
}

}  // namespace
}  // namespace flashgrad::check
