// SPDX-License-Identifier: Apache-2.0
// Sentences of docs/semantics.md that neither the table of known faults nor the grids' oracle would
// miss: what certain values mean, what a bound on the lengths changes, what a call leaves alone.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "conformance.hpp"

namespace flashgrad::check {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Case of_shape(const std::string& shape, DType dtype = DType::kF32) {
  Case c = parse_shape(shape);
  c.dtype = dtype;
  return as_taken(c);
}

void run(fg_pass pass, const Case& c, const Target& target, CallTensors& t) {
  WorkspaceMemory memory;
  run_on(target, pass, c, t, memory);
}

// Calls f(target, tensors after both passes) on each target; `prepare` changes the inputs.
template <class Prepare, class F>
void on_each_target(const Case& c, Prepare&& prepare, F&& f) {
  for (const Target& target : affordable(c)) {
    SCOPED_TRACE(target.name());
    const Announce announce(c, target);
    const UseTarget use(target);
    CallTensors t = make_tensors(c);
    prepare(t);
    run(FG_FORWARD, c, target, t);
    run(FG_BACKWARD, c, target, t);
    f(target, t);
  }
}

void expect_zero(const HostTensor& t, const char* name) {
  for (std::int64_t n = 0; n < t.num_elements(); ++n) {
    ASSERT_EQ(t.get(n), 0) << name << " element " << n;
  }
}

TEST(Contract, AScaleMayBeZeroOrNegative) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const double scale : {0.0, -0.7}) {
      for (const double softcap : {0.0, 2.0}) {
        Case c = of_shape("hq=4,hkv=2,sq=50,sk=70,d=40,dlse=n,sinks=n", dtype);
        c.scale = scale;
        c.softcap = softcap;
        c.mask.right = 0;
        expect_right(c);
      }
    }
  }
}

TEST(Contract, ASinkOfMinusInfinityIsNone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case with = of_shape("hq=4,hkv=2,sq=50,sk=30,d=40,dlse=n,sinks=-inf", dtype);
    with.mask.right = 0;  // the first rows see nothing
    with.deterministic = true;
    Case without = with;
    without.sinks = "none";
    for (const Target& target : affordable(with)) {
      Bits bits = run_bits(with, target);
      bits.back() = 0;  // dsinks
      EXPECT_EQ(bits, run_bits(without, target)) << target.name();
    }
    on_each_target(
        with, [](CallTensors&) {},
        [](const Target&, CallTensors& t) { expect_zero(t.dsinks, "dsinks"); });
  }
}

TEST(Contract, AVisibleLogitOfInfinityMakesItsRowNaN) {
  constexpr std::int64_t kRow = 20;
  constexpr std::int64_t kDim = 16;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c = of_shape("hq=1,sq=40,sk=40,d=16", dtype);
    c.mask.right = 0;
    on_each_target(
        c,
        [](CallTensors& t) {
          t.q.set(kRow * kDim, kInf);
          for (std::int64_t j = 0; j < 40; ++j) {
            t.k.set(j * kDim, j == 0 ? 1 : -1);  // one logit of +inf, the others -inf
          }
        },
        [](const Target&, CallTensors& t) {
          for (std::int64_t i = 0; i < 40; ++i) {
            EXPECT_EQ(std::isnan(t.lse.get(i)), i == kRow) << i;
            for (std::int64_t e = 0; e < kDim; ++e) {
              EXPECT_EQ(std::isnan(t.out.get(i * kDim + e)), i == kRow) << i;
            }
          }
        });
  }
}

// +inf would call the rows empty, and their gradients 0.
TEST(Contract, LogitsBeyondF32MakeTheirRowsNaN) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c = of_shape("hq=1,sq=5,sk=7,d=1,dv=8,q=1e19,k=1e19", dtype);
    c.scale = 100;
    on_each_target(
        c, [](CallTensors&) {},
        [](const Target&, CallTensors& t) {
          for (const HostTensor* x : {&t.lse, &t.out, &t.dq, &t.dk, &t.dv}) {
            for (std::int64_t n = 0; n < x->num_elements(); ++n) {
              EXPECT_TRUE(std::isnan(x->get(n))) << x->get(n);
            }
          }
        });
    expect_right(c);
  }
}

TEST(Contract, RowsOfInfiniteLseAddNothingNotEvenToDsinks) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c = of_shape("hq=4,hkv=2,sq=50,sk=70,d=40,dlse=n,sinks=n", dtype);
    for (const double lse : {kInf, -kInf}) {
      on_each_target(
          c, [](CallTensors&) {},
          [&](const Target& target, CallTensors& t) {
            for (std::int64_t n = 0; n < t.lse.num_elements(); ++n) {
              t.lse.set(n, lse);
            }
            run(FG_BACKWARD, c, target, t);
            expect_zero(t.dq, "dq");
            expect_zero(t.dk, "dk");
            expect_zero(t.dv, "dv");
            expect_zero(t.dsinks, "dsinks");
          });
    }
  }
}

TEST(Contract, TighterBoundsNeedLessWorkspaceAndChangeNothing) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case loose =
        of_shape("hq=4,hkv=2,cu_q=0:30:100:700:1300,cu_kv=0:50:90:600:1400,d=40,dlse=n", dtype);
    loose.mask.right = 0;
    loose.deterministic = true;
    Case tight = loose;
    tight.max_seqlen_q = 600;
    tight.max_seqlen_kv = 800;
    for (const Target& target : affordable(loose)) {
      const UseTarget use(target);
      const WorkspaceQuery of_loose = query_workspace(loose, target.backend);
      const WorkspaceQuery of_tight = query_workspace(tight, target.backend);
      for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
        EXPECT_LE(of_tight.preferred[pass], of_loose.preferred[pass]) << target.name();
        EXPECT_LE(of_tight.minimum[pass], of_loose.minimum[pass]) << target.name();
      }
      if (target.backend == "cpu") {  // the others have room for the tensors' rows as they are
        EXPECT_LT(of_tight.preferred[FG_BACKWARD], of_loose.preferred[FG_BACKWARD])
            << target.name();
      }
    }
    for (const Target& target : affordable(loose)) {
      EXPECT_EQ(run_bits(loose, target), run_bits(tight, target)) << target.name();
    }
  }
}

// The gradient of sum(lse) is one element, expanded.
TEST(Contract, DlseMayHaveStridesOfZero) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c = of_shape("b=2,hq=4,hkv=2,sq=50,sk=70,d=40,dlse=0.75", dtype);
    c.deterministic = true;
    std::vector<Bits> compact;
    on_each_target(
        c, [](CallTensors&) {},
        [&](const Target&, CallTensors& t) { compact.push_back(bits_of(t)); });
    std::size_t at = 0;
    on_each_target(
        c,
        [](CallTensors& t) {
          t.dlse = HostTensor(t.dlse.dtype(), t.dlse.shape(), {0, 0, 0});
          t.dlse.set(0, 0.75);
        },
        [&](const Target&, CallTensors& t) { EXPECT_EQ(bits_of(t), compact.at(at++)); });
  }
}

TEST(Contract, NullStridesMeanCompact) {
  if (tested_place() == Place::kCuda) {
    GTEST_SKIP() << "calls on host memory";
  }
  const Case c = of_shape("b=2,hq=4,hkv=2,sq=50,sk=70,d=40,dv=24,dlse=n,sinks=n");
  for (const Target& target : affordable(c)) {
    SCOPED_TRACE(target.name());
    const Bits with_strides = run_bits(c, target);
    const Announce announce(c, target);
    const UseTarget use(target);
    CallTensors t = make_tensors(c);
    fg_tensors tensors = t.c_tensors();
    std::vector<DLTensor> copies;
    copies.reserve(12);
    for (const DLTensor** field :
         {&tensors.q, &tensors.k, &tensors.v, &tensors.out, &tensors.lse, &tensors.dout,
          &tensors.dlse, &tensors.dq, &tensors.dk, &tensors.dv, &tensors.dsinks, &tensors.sinks}) {
      copies.push_back(**field);
      copies.back().strides = nullptr;
      *field = &copies.back();
    }
    fg_options o = make_options(c);
    o.backend = target.backend.c_str();
    for (const auto& [pass, call] :
         {std::pair{FG_FORWARD, &fg_forward}, std::pair{FG_BACKWARD, &fg_backward}}) {
      std::size_t preferred = 0;
      ASSERT_EQ(fg_workspace_size(pass, &tensors, &o, nullptr, &preferred), FG_OK);
      std::vector<std::byte> workspace(preferred);
      ASSERT_EQ(call(&tensors, &o, workspace.data(), workspace.size(), nullptr), FG_OK);
    }
    EXPECT_EQ(bits_of(t), with_strides);
  }
}

// Neither a call that runs nor one that is refused; the refusal's message takes some bytes. (Of GPU
// calls a capture into a graph says it: tests/cuda/context_test.cpp.)
TEST(Contract, ACallPrintsAndAllocatesNothing) {
  if (tested_place() == Place::kCuda) {
    GTEST_SKIP() << "calls on host memory";
  }
  const Case c = of_shape("b=2,hq=4,hkv=2,sq=300,sk=500,d=64,dlse=n,sinks=n", DType::kBF16);
  for (const Target& target : affordable(c)) {
    SCOPED_TRACE(target.name());
    const Announce announce(c, target);
    const UseTarget use(target);
    CallTensors t = make_tensors(c);
    const fg_tensors tensors = t.c_tensors();
    fg_options o = make_options(c);
    o.backend = target.backend.c_str();
    o.num_threads = 2;
    for (const auto& [pass, call] :
         {std::pair{FG_FORWARD, &fg_forward}, std::pair{FG_BACKWARD, &fg_backward}}) {
      std::size_t preferred = 0;
      ASSERT_EQ(fg_workspace_size(pass, &tensors, &o, nullptr, &preferred), FG_OK);
      std::vector<std::byte> workspace(preferred);
      testing::internal::CaptureStdout();
      testing::internal::CaptureStderr();
      const std::size_t before = allocated_bytes();
      const fg_status status = call(&tensors, &o, workspace.data(), workspace.size(), nullptr);
      const fg_status refused = call(&tensors, &o, workspace.data(), 1, nullptr);
      const std::size_t bytes = allocated_bytes() - before;
      EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
      EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
      EXPECT_EQ(status, FG_OK);
      EXPECT_EQ(refused, FG_WORKSPACE_TOO_SMALL);
      EXPECT_LT(bytes, 2000U);
    }
  }
}

}  // namespace
}  // namespace flashgrad::check
