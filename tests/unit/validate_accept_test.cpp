// SPDX-License-Identifier: Apache-2.0
// What docs/semantics.md allows must pass the argument checks, and a Problem says what was asked.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/validate.hpp"
#include "call_builder.hpp"

namespace flashgrad {
namespace {

using C = TestCall;

constexpr Layout kFixed = Layout::kFixed;
constexpr Layout kPacked = Layout::kPacked;
constexpr Pass kForward = Pass::kForward;
constexpr Pass kBackward = Pass::kBackward;

void accepted(Pass pass, C& call) {
  for (const bool with_data : {false, true}) {
    const Status status = call.judge(pass, with_data);
    EXPECT_TRUE(status.ok()) << status.message;
  }
}

void set_dtype(C& c, DLDataType dtype) {
  for (TestTensor* t : {&c.q, &c.k, &c.v, &c.out, &c.dout, &c.dq, &c.dk, &c.dv}) {
    t->dtype = dtype;
  }
}

// Three rows of 60 f32 per sequence hold several tensors side by side; this one begins at `offset`.
void slice(TestTensor& t, std::vector<float>& buffer, std::int64_t offset,
           std::int64_t head_stride) {
  t.data = buffer.data();
  t.strides = {180, 60, head_stride, 1};
  t.byte_offset = static_cast<std::uint64_t>(4 * offset);
}

TEST(Accepted, FixedForward) {
  C c(kFixed);
  accepted(kForward, c);
}

TEST(Accepted, FixedBackward) {
  C c(kFixed);
  accepted(kBackward, c);
}

TEST(Accepted, PackedForward) {
  C c(kPacked);
  accepted(kForward, c);
}

TEST(Accepted, PackedBackward) {
  C c(kPacked);
  accepted(kBackward, c);
}

// In 16 bits head_dim 8 has aligned rows, head_dim_v 6 has none.
TEST(Accepted, SaysWhatTheCopyEngineCannotAddress) {
  C c(kFixed);
  set_dtype(c, kBF16Type);
  Call call;
  ASSERT_TRUE(c.judge(kBackward, false, &call).ok());
  const Problem& p = call.problem;
  EXPECT_FALSE(p.unaligned_q || p.unaligned_k || p.unaligned_dq || p.unaligned_dk);
  EXPECT_TRUE(p.unaligned_v && p.unaligned_out && p.unaligned_dout && p.unaligned_dv);

  c.q.strides = {97, 32, 8, 1};    // a batch entry begins anywhere
  c.k.strides = {80, 16, 0, 1};    // heads that are one
  c.v.strides = {80, 16, 8, 1};    // room behind each vector
  c.dout.strides = {0, 0, 0, 0};   // the gradient of a sum
  c.dq.strides = {96, -32, 8, 1};  // rows in reverse order
  ASSERT_TRUE(c.judge(kBackward, false, &call).ok());
  EXPECT_TRUE(p.unaligned_q && p.unaligned_dout && p.unaligned_dq);
  EXPECT_FALSE(p.unaligned_k || p.unaligned_v || p.unaligned_dk);

  c.v.byte_offset = 16;
  c.k.byte_offset = 2;  // the address decides as well, where there is one
  c.dk.null_data = true;
  ASSERT_TRUE(c.judge(kBackward, false, &call).ok());
  EXPECT_TRUE(p.unaligned_k);
  EXPECT_FALSE(p.unaligned_v || p.unaligned_dk);
}

TEST(Accepted, OnlyWhatForwardNeeds) {
  C c(kFixed);
  for (TestTensor* t : {&c.lse, &c.sinks, &c.seqused_q, &c.seqused_kv, &c.q_offset, &c.dout,
                        &c.dlse, &c.dq, &c.dk, &c.dv, &c.dsinks})
    t->given = false;
  accepted(kForward, c);
}

TEST(Accepted, ForwardLooksAtNoGradient) {
  C c(kFixed);
  c.dq.shape = {1};
  c.dout.dtype = kI32Type;
  c.dsinks.null_data = true;
  accepted(kForward, c);
}

TEST(Accepted, NoGradientWanted) {
  C c(kFixed);
  c.dq.given = c.dk.given = c.dv.given = c.dsinks.given = false;
  accepted(kBackward, c);
}

TEST(Accepted, OnlyDq) {
  C c(kFixed);
  c.dk.given = c.dv.given = c.dsinks.given = false;
  accepted(kBackward, c);
}

TEST(Accepted, DlseWithoutDout) {
  C c(kFixed);
  c.dout.given = false;
  accepted(kBackward, c);
}

TEST(Accepted, DoutWithoutDlse) {
  C c(kPacked);
  c.dlse.given = false;
  accepted(kBackward, c);
}

TEST(Accepted, SinksWithoutDsinks) {
  C c(kFixed);
  c.dsinks.given = false;
  accepted(kBackward, c);
}

TEST(Accepted, HeadMajor) {
  C c(kFixed);
  c.q.strides = {96, 8, 24, 1};
  c.out.strides = {72, 6, 18, 1};
  accepted(kForward, c);
}

TEST(Accepted, Size1TakesAnyStride) {
  C c(kFixed);
  for (TestTensor* t : {&c.q, &c.k, &c.v, &c.out}) {
    t->shape[3] = 1;
    t->strides = {t->shape[1] * t->shape[2], t->shape[2], 1, INT64_MAX};
  }
  accepted(kForward, c);
}

TEST(Accepted, InputsMayRepeat) {
  C c(kFixed);
  c.k.strides = {0, 16, 8, 1};
  c.v.strides = {60, 0, 0, 1};
  accepted(kForward, c);
}

TEST(Accepted, NegativeStrides) {
  C c(kFixed);
  c.q.strides = {96, -32, 8, 1};
  c.q.byte_offset = 256;  // the row that the strides count back from
  accepted(kForward, c);
}

TEST(Accepted, NegativeStridesOfOut) {
  C c(kFixed);
  c.out.strides = {-72, 24, 6, 1};
  c.out.byte_offset = 288;
  accepted(kForward, c);
}

TEST(Accepted, DoutOfASum) {
  C c(kFixed);
  c.dout.strides = {0, 0, 0, 0};
  c.dlse.strides = {0, 0, 0};
  accepted(kBackward, c);
}

TEST(Accepted, DoutOfASumOverRows) {
  C c(kPacked);
  c.dout.strides = {0, 6, 1};
  accepted(kBackward, c);
}

TEST(Accepted, QKVOfOneBuffer) {
  C c(kFixed);
  std::vector<float> buffer(512);
  c.k.shape[1] = c.v.shape[1] = 3;
  c.seqused_kv.given = false;
  slice(c.q, buffer, 0, 8);
  slice(c.k, buffer, 32, 8);
  slice(c.v, buffer, 48, 6);
  accepted(kForward, c);
}

TEST(Accepted, GradientsOfOneBuffer) {
  C c(kFixed);
  std::vector<float> buffer(512);
  for (TestTensor* t : {&c.k, &c.v, &c.dk, &c.dv}) t->shape[1] = 3;
  c.seqused_kv.given = false;
  slice(c.dq, buffer, 0, 8);
  slice(c.dk, buffer, 32, 8);
  slice(c.dv, buffer, 48, 6);
  accepted(kBackward, c);
}

TEST(Accepted, GradientsInterleavedByHead) {
  C c(kFixed);
  std::vector<float> buffer(512);
  for (TestTensor* t : {&c.k, &c.v, &c.dk, &c.dv}) t->shape[1] = 3;
  c.seqused_kv.given = false;
  slice(c.dk, buffer, 0, 20);
  slice(c.dv, buffer, 8, 20);
  accepted(kBackward, c);
}

TEST(Accepted, OutTouchesQ) {
  C c(kFixed);
  c.out.data = c.q.storage.data();
  c.out.byte_offset = 768;  // q's end
  accepted(kForward, c);
}

TEST(Accepted, InputsMayShare) {
  C c(kFixed);
  c.v.shape[3] = 8;
  c.out.shape[3] = 8;
  c.v.data = c.k.storage.data();
  accepted(kForward, c);
}

TEST(Accepted, F64) {
  C c(kFixed);
  set_dtype(c, kF64Type);
  for (TestTensor* t : {&c.lse, &c.dlse, &c.sinks, &c.dsinks}) t->dtype = kF64Type;
  accepted(kBackward, c);
}

TEST(Accepted, BF16) {
  C c(kFixed);
  set_dtype(c, kBF16Type);
  accepted(kBackward, c);
}

TEST(Accepted, F16) {
  C c(kPacked);
  set_dtype(c, kF16Type);
  accepted(kBackward, c);
}

TEST(Accepted, F32GradientsOfBF16) {
  C c(kFixed);
  set_dtype(c, kBF16Type);
  c.dq.dtype = c.dv.dtype = kF32Type;
  accepted(kBackward, c);
}

TEST(Accepted, PinnedHostMemory) {
  C c(kFixed);
  for (TestTensor* t :
       {&c.q, &c.k, &c.v, &c.out, &c.lse, &c.sinks, &c.seqused_q, &c.seqused_kv, &c.q_offset})
    t->device = {kDLCUDAHost, 0};
  accepted(kForward, c);
}

TEST(Accepted, PinnedBesidePlainHostMemory) {
  C c(kFixed);
  c.k.device = c.out.device = {kDLCUDAHost, 0};
  accepted(kForward, c);
}

TEST(Accepted, NoBatch) {
  C c(kFixed);
  for (TestTensor* t : {&c.q, &c.k, &c.v, &c.out, &c.lse, &c.dout, &c.dlse, &c.dq, &c.dk, &c.dv,
                        &c.seqused_q, &c.seqused_kv, &c.q_offset}) {
    t->shape[0] = 0;
    t->null_data = true;
  }
  accepted(kBackward, c);
}

TEST(Accepted, NoRows) {
  C c(kFixed);
  c.q.shape[1] = c.out.shape[1] = c.lse.shape[2] = 0;
  c.seqused_q.given = false;
  accepted(kForward, c);
}

TEST(Accepted, NoKeys) {
  C c(kFixed);
  c.k.shape[1] = c.v.shape[1] = 0;
  c.seqused_kv.given = false;
  c.k.null_data = c.v.null_data = true;
  accepted(kForward, c);
}

// As NumPy describes an array without elements.
TEST(Accepted, EmptyTensorsOfAnyStride) {
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-7}, INT64_MAX}) {
    C c(kFixed);
    for (TestTensor* t : {&c.q, &c.out, &c.dout, &c.dq, &c.k, &c.v, &c.dk, &c.dv}) {
      t->shape[1] = 0;
      t->strides.assign(4, stride);
    }
    for (TestTensor* t : {&c.lse, &c.dlse}) {
      t->shape[2] = 0;
      t->strides.assign(3, stride);
    }
    c.seqused_q.fill<std::int32_t>({0, 0});
    c.seqused_kv.fill<std::int32_t>({0, 0});
    accepted(kForward, c);
    accepted(kBackward, c);
  }
}

TEST(Accepted, NoSequences) {
  C c(kPacked);
  c.cu_seqlens_q.shape = c.cu_seqlens_kv.shape = {1};
  c.seqused_q.given = c.seqused_kv.given = c.q_offset.given = false;
  accepted(kForward, c);
}

TEST(Accepted, EmptySequences) {
  C c(kPacked);
  c.seqused_q.given = c.seqused_kv.given = false;
  c.cu_seqlens_q.fill<std::int32_t>({0, 0, 6});
  c.cu_seqlens_kv.fill<std::int32_t>({10, 10, 10});
  accepted(kForward, c);
}

TEST(Accepted, OffsetsStartLateAndEndEarly) {
  C c(kPacked);
  c.seqused_q.given = c.seqused_kv.given = false;
  c.cu_seqlens_q.fill<std::int32_t>({1, 2, 4});
  c.cu_seqlens_kv.fill<std::int32_t>({3, 3, 9});
  accepted(kForward, c);
}

TEST(Accepted, MaxSeqlenExact) {
  C c(kPacked);
  c.seqused_q.given = c.seqused_kv.given = false;
  c.options.max_seqlen_q = 3;
  c.options.max_seqlen_kv = 5;
  accepted(kForward, c);
}

TEST(Accepted, MaxSeqlenOfWhatIsUsed) {
  C c(kPacked);
  c.seqused_q.fill<std::int32_t>({2, 1});
  c.options.max_seqlen_q = 2;
  accepted(kForward, c);
}

TEST(Accepted, MaxSeqlenLarger) {
  C c(kPacked);
  c.options.max_seqlen_q = INT64_MAX;
  c.options.max_seqlen_kv = 1000;
  accepted(kForward, c);
}

TEST(Accepted, ScaleZero) {
  C c(kFixed);
  c.options.scale = 0;
  accepted(kForward, c);
}

TEST(Accepted, ScaleNegative) {
  C c(kFixed);
  c.options.scale = -2;
  accepted(kForward, c);
}

TEST(Accepted, WindowExtremes) {
  C c(kFixed);
  c.options.window_left = INT64_MIN;
  c.options.window_right = INT64_MIN;
  accepted(kForward, c);
}

TEST(Accepted, HeadDim256And1) {
  C c(kFixed);
  c.q.shape = {1, 1, 1, 256};
  c.k.shape = {1, 1, 1, 256};
  c.v.shape = c.out.shape = {1, 1, 1, 1};
  c.lse.shape = {1, 1, 1};
  c.sinks.shape = c.seqused_q.shape = c.seqused_kv.shape = c.q_offset.shape = {1};
  c.seqused_q.fill<std::int32_t>({1});
  c.seqused_kv.fill<std::int32_t>({1});
  accepted(kForward, c);
}

TEST(Accepted, OlderOptionsStruct) {
  C c(kFixed);
  c.options.struct_size = offsetof(fg_options, num_threads) + sizeof(std::int32_t);
  accepted(kForward, c);
}

TEST(Problem, WhatTheProblemHolds) {
  C call(kFixed);
  call.options.num_threads = 3;
  call.options.deterministic = 7;
  call.options.softcap = 15;
  call.options.window_left = 4;
  call.options.window_right = std::int64_t{1} << 31;
  call.options.alignment = FG_TOP_LEFT;
  call.dk.given = false;
  Call result;
  ASSERT_TRUE(call.judge(kBackward, true, &result).ok());
  const Problem& p = result.problem;
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.seqlen_q, 3);
  EXPECT_EQ(p.seqlen_kv, 5);
  EXPECT_EQ(p.heads_q, 4);
  EXPECT_EQ(p.heads_kv, 2);
  EXPECT_EQ(p.head_dim, 8);
  EXPECT_EQ(p.head_dim_v, 6);
  EXPECT_EQ(p.max_seqlen_q, 3);
  EXPECT_EQ(p.max_seqlen_kv, 5);
  EXPECT_FALSE(p.packed);
  EXPECT_TRUE(p.has_seqused_q && p.has_seqused_kv && p.has_q_offset && p.has_sinks && p.has_dout &&
              p.has_dlse);
  EXPECT_TRUE(p.wants_dq && !p.wants_dk && p.wants_dv && p.wants_dsinks);
  EXPECT_EQ(p.mask, (BandMask{4, kUnbounded, Alignment::kTopLeft}));
  EXPECT_EQ(p.scale, 1 / std::sqrt(8.0)) << "NaN, the default, means 1 / sqrt(head_dim)";
  EXPECT_EQ(p.softcap, 15);
  EXPECT_TRUE(p.deterministic);
  EXPECT_EQ(p.num_threads, 3);

  const Args& a = result.args;
  EXPECT_EQ(a.q.data, call.q.storage.data());
  EXPECT_EQ(a.q.offset(1, 2, 3), 96 + 2 * 32 + 3 * 8);
  EXPECT_EQ(a.lse.offset(1, 2, 3), 12 + 2 + 3 * 3) << "lse is (batch, heads_q, seqlen_q)";
  EXPECT_FALSE(a.dk);
  EXPECT_EQ(a.seqused_kv[1], 4);
}

// The factor scale / softcap would be 0 in f32, and the logits with it.
TEST(Problem, ACapThatF32CannotTellFromNoneIsNone) {
  C call(kFixed);
  Call result;
  for (const auto& [scale, softcap] : {std::pair{0.5, 1e300}, {-1e-20, 1e30}, {1e-50, 15.0}}) {
    call.options.scale = scale;
    call.options.softcap = softcap;
    ASSERT_TRUE(call.judge(kBackward, true, &result).ok());
    EXPECT_EQ(result.problem.softcap, 0) << scale << ", " << softcap;
    EXPECT_EQ(result.problem.scale, scale);
  }
  call.options.scale = -1e-37;
  call.options.softcap = 8;
  ASSERT_TRUE(call.judge(kBackward, true, &result).ok());
  EXPECT_EQ(result.problem.softcap, 8);
}

TEST(Problem, OpenMPsOwnNumberOfThreadsHasALimit) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(99999999);
  C call(kFixed);
  call.options.num_threads = 0;
  Call result;
  const Status status = call.judge(kForward, true, &result);
  omp_set_num_threads(before);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(result.problem.num_threads, 4096);
}

TEST(Problem, WhatAPackedProblemHolds) {
  C call(kPacked);
  call.options.max_seqlen_q = 4;
  call.options.max_seqlen_kv = 400;
  call.q.byte_offset = 8;
  call.options.num_threads = 0;
  Call result;
  ASSERT_TRUE(call.judge(kForward, true, &result).ok());
  const Problem& p = result.problem;
  EXPECT_TRUE(p.packed);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.seqlen_q, 6);
  EXPECT_EQ(p.seqlen_kv, 10);
  EXPECT_EQ(p.max_seqlen_q, 4);
  EXPECT_EQ(p.max_seqlen_kv, 10) << "never more than all rows together";
  EXPECT_GE(p.num_threads, 1);
  EXPECT_FALSE(p.has_dout || p.wants_dq || p.wants_dsinks) << "forward does not look at gradients";
  EXPECT_EQ(result.args.q.data, call.q.storage.data() + 8);
  EXPECT_EQ(result.args.lse.offset(0, 2, 3), 3 * 6 + 2) << "lse is (heads_q, total_q)";

  const Sequence s = sequence(p, result.args, 1);
  EXPECT_EQ(s.q_begin, 3);
  EXPECT_EQ(s.kv_begin, 5);
  EXPECT_EQ(s.band.seqlen_q, 3) << "seqused_q";
  EXPECT_EQ(s.band.seqlen_kv, 4) << "seqused_kv";
}

}  // namespace
}  // namespace flashgrad
