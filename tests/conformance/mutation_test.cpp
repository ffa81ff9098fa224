// SPDX-License-Identifier: Apache-2.0
// Proof that the comparison notices a wrong backend: the oracle's loops with one wrong equation,
// mask or operand must be refused by the acceptance rule, in every dtype; with nothing wrong they
// must pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "api/validate.hpp"
#include "check/call.hpp"
#include "check/expected.hpp"
#include "reference/reference.hpp"

namespace flashgrad::check {
namespace {

using reference::kBlock;
using Right = reference::Formula<double>;

struct LogitWithoutScale : Right {
  using Right::Right;
  double logit(double dot) const { return softcap * std::tanh(dot / softcap); }
};
struct LogitWithoutSoftcap : Right {
  using Right::Right;
  double logit(double dot) const { return scale * dot; }
};
struct NoSoftcapFactor : Right {
  using Right::Right;
  double dlogit(double, double p, double dp, double delta, double dlse) const {
    return p * (dp - delta + dlse);
  }
};
struct NoDelta : Right {
  using Right::Right;
  double dlogit(double s, double p, double dp, double, double dlse) const {
    return Right::dlogit(s, p, dp, 0, dlse);
  }
};
struct NoDlse : Right {
  using Right::Right;
  double dlogit(double s, double p, double dp, double delta, double) const {
    return Right::dlogit(s, p, dp, delta, 0);
  }
};
struct DlseWithWrongSign : Right {
  using Right::Right;
  double dlogit(double s, double p, double dp, double delta, double dlse) const {
    return Right::dlogit(s, p, dp, delta, -dlse);
  }
};
struct DqWithoutScale : Right {
  using Right::Right;
  double dq(double sum) const { return sum; }
};
struct DkWithoutScale : Right {
  using Right::Right;
  double dk(double sum) const { return sum; }
};
struct DvTooSmall : Right {
  using Right::Right;
  double dv(double sum) const { return 0.97 * sum; }
};

struct DsinkWithoutDelta : Right {
  using Right::Right;
  double dsink(double p, double, double dlse) const { return p * dlse; }
};
struct DsinkWithoutDlse : Right {
  using Right::Right;
  double dsink(double p, double delta, double) const { return -p * delta; }
};

// What goes wrong around the equations.
struct Around {
  std::int64_t more_left = 0;  // keys that the band shows beyond its left edge
  std::int64_t more_right = 0;
  std::int64_t fewer_keys = 0;  // of the end of each sequence
  std::int64_t fewer_rows_for_keys = 0;
  bool other_kv_head = false;
  bool no_sink = false;
};

// A call whose tensors a wrong backend fills.
class Harness {
 public:
  explicit Harness(DType dtype) {
    case_ = parse_shape("b=2,hq=4,hkv=2,sq=61,sk=83,d=40,dv=24,sinks=0.5:1:-1:2,dlse=n,q=2n,k=2n");
    case_.dtype = dtype;
    case_.mask = {25, 3};
    case_.softcap = 4;
    case_.scale = 0.3;
    tensors_ = make_tensors(case_);
    const fg_tensors t = tensors_.c_tensors();
    const fg_options o = make_options(case_);
    const flashgrad::Scratch workspace;
    const Status status = validate(Pass::kBackward, &t, &o, &workspace, &call_);
    EXPECT_TRUE(status.ok()) << status.message;
    expected_ = std::make_unique<Expected>(call_.problem, call_.args, ExpectedOptions{});
  }

  // The outputs that the rule refuses: "dq dk".
  template <class F>
  std::string refused(const Around& around = {}) {
    fill<F>(around);
    std::string names;
    for (const OutputResult& r : expected_->compare(call_.args, true, true)) {
      if (!r.ok) {
        names += (names.empty() ? "" : " ") + r.name;
      }
    }
    return names;
  }

 private:
  static std::vector<std::int64_t> block(std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> rows;
    for (std::int64_t i = begin; i < std::min(end, begin + kBlock); ++i) {
      rows.push_back(i);
    }
    return rows;
  }

  static void store(const Tensor& t, std::int64_t offset, std::int64_t size, const double* from) {
    for (std::int64_t c = 0; c < size; ++c) {
      store_f64(t.data, t.dtype, offset + c, from[c]);
    }
  }

  template <class F>
  void fill(const Around& around) {
    const Problem& p = call_.problem;
    Args a = call_.args;
    if (around.other_kv_head) {
      for (Tensor* t : {&a.k, &a.v}) {
        t->data = static_cast<std::byte*>(t->data) + t->head_stride * size_bytes(t->dtype);
        t->head_stride = -t->head_stride;
      }
    }
    if (around.no_sink) {
      a.sinks = nullptr;
    }
    const F f(p);
    reference::Scratch<double> scratch;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      Sequence s = sequence(p, a, b);
      const std::int64_t seqlen_kv = s.band.seqlen_kv;
      s.band.lo -= around.more_left;
      s.band.hi += around.more_right;
      s.band.seqlen_kv -= around.fewer_keys;
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        const reference::Head head{p, a, s, h};
        for (std::int64_t begin = 0; begin < s.band.seqlen_q; begin += kBlock) {
          const std::vector<std::int64_t> rows = block(begin, s.band.seqlen_q);
          const int size = static_cast<int>(rows.size());
          reference::forward_rows(f, head, rows.data(), size, scratch);
          for (std::size_t r = 0; r < rows.size(); ++r) {
            store(a.out, head.q(a.out, rows[r]), p.head_dim_v, scratch.out[r].data());
            store(a.lse, head.q(a.lse, rows[r]), 1, &scratch.lse[r]);
          }
          reference::backward_rows(f, head, rows.data(), size, scratch);
          for (std::size_t r = 0; r < rows.size(); ++r) {
            store(a.dq, head.q(a.dq, rows[r]), p.head_dim, scratch.dq[r].data());
          }
        }
      }
      for (std::int64_t h = 0; h < p.heads_kv; ++h) {
        Sequence rows_dropped = s;
        rows_dropped.band.seqlen_q -= around.fewer_rows_for_keys;
        rows_dropped.band.seqlen_kv = seqlen_kv;
        const reference::Head head{p, a, rows_dropped, h * p.group()};
        for (std::int64_t begin = 0; begin < seqlen_kv; begin += kBlock) {
          const std::vector<std::int64_t> keys = block(begin, seqlen_kv);
          reference::backward_keys(f, head, keys.data(), static_cast<int>(keys.size()), scratch);
          for (std::size_t r = 0; r < keys.size(); ++r) {
            store(a.dk, head.kv(a.dk, keys[r]), p.head_dim, scratch.dk[r].data());
            store(a.dv, head.kv(a.dv, keys[r]), p.head_dim_v, scratch.dv[r].data());
          }
        }
      }
    }
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      double sum = 0;
      for (std::int64_t b = 0; b < p.batch; ++b) {
        sum += reference::backward_sink(f, reference::Head{p, a, sequence(p, a, b), h});
      }
      store_f64(a.dsinks, a.lse.dtype, h, sum);
    }
  }

  Case case_;
  CallTensors tensors_;
  flashgrad::Call call_;
  std::unique_ptr<Expected> expected_;
};

class Mutation : public testing::TestWithParam<DType> {
 protected:
  Harness harness{GetParam()};
};

TEST_P(Mutation, NoneIsAccepted) { EXPECT_EQ(harness.refused<Right>(), ""); }

TEST_P(Mutation, OfAnEquationIsRefused) {
  EXPECT_EQ(harness.refused<LogitWithoutScale>(), "out lse dq dk dv");
  EXPECT_EQ(harness.refused<LogitWithoutSoftcap>(), "out lse dq dk dv");
  EXPECT_EQ(harness.refused<NoSoftcapFactor>(), "dq dk");
  EXPECT_EQ(harness.refused<NoDelta>(), "dq dk");
  EXPECT_EQ(harness.refused<NoDlse>(), "dq dk");
  EXPECT_EQ(harness.refused<DlseWithWrongSign>(), "dq dk");
  EXPECT_EQ(harness.refused<DqWithoutScale>(), "dq");
  EXPECT_EQ(harness.refused<DkWithoutScale>(), "dk");
  EXPECT_EQ(harness.refused<DvTooSmall>(), "dv");
  EXPECT_EQ(harness.refused<DsinkWithoutDelta>(), "dsinks");
  EXPECT_EQ(harness.refused<DsinkWithoutDlse>(), "dsinks");
}

TEST_P(Mutation, OfTheMaskIsRefused) {
  for (const Around& around : {Around{.more_left = 1}, Around{.more_left = -1},
                               Around{.more_right = 1}, Around{.more_right = -1}}) {
    EXPECT_EQ(harness.refused<Right>(around), "out lse dq dk dv")
        << around.more_left << " " << around.more_right;
  }
  EXPECT_NE(harness.refused<Right>({.fewer_keys = 1}), "");
  EXPECT_EQ(harness.refused<Right>({.fewer_rows_for_keys = 1}), "dk dv");
}

TEST_P(Mutation, OfAnOperandIsRefused) {
  EXPECT_NE(harness.refused<Right>({.other_kv_head = true}), "");
  EXPECT_NE(harness.refused<Right>({.no_sink = true}), "");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Mutation,
                         testing::Values(DType::kF32, DType::kBF16, DType::kF16, DType::kF64),
                         [](const auto& test) { return std::string(name(test.param)); });

}  // namespace
}  // namespace flashgrad::check
