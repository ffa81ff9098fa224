// SPDX-License-Identifier: Apache-2.0
// Every refusal of the argument checks: its code and its message, which says what, got and want.
// Each case spoils one thing of a correct call.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "api/validate.hpp"
#include "call_builder.hpp"

namespace flashgrad {
namespace {

using C = TestCall;
using Spoil = void (*)(C&);
using Parts = std::initializer_list<const char*>;

constexpr Layout kFixed = Layout::kFixed;
constexpr Layout kPacked = Layout::kPacked;
constexpr Pass kForward = Pass::kForward;
constexpr Pass kBackward = Pass::kBackward;

// The message begins with the first part and contains the others.
void expect_refused(const Status& status, fg_status code, Parts parts) {
  EXPECT_EQ(status.code, code) << status.message;
  EXPECT_EQ(status.message.rfind(*parts.begin(), 0), 0U)
      << status.message << " does not begin with: " << *parts.begin();
  for (const char* part : parts) {
    EXPECT_NE(status.message.find(part), std::string::npos)
        << part << " is not in: " << status.message;
  }
}

void refused_with(fg_status code, Layout layout, Pass pass, Spoil spoil, Parts parts) {
  SCOPED_TRACE(*parts.begin());
  for (const bool with_data : {false, true}) {
    C call(layout);
    spoil(call);
    expect_refused(call.judge(pass, with_data), code, parts);
  }
}

// By queries and by the call itself, as invalid.
void refused(Layout layout, Pass pass, Spoil spoil, Parts parts) {
  refused_with(FG_INVALID_ARGUMENT, layout, pass, spoil, parts);
}

// Meaningful, but nothing that this library serves.
void not_served(Layout layout, Pass pass, Spoil spoil, Parts parts) {
  refused_with(FG_UNSUPPORTED, layout, pass, spoil, parts);
}

// Queries never look at memory, so only the call can refuse these.
void refused_by_calls(Layout layout, Pass pass, Spoil spoil, Parts parts) {
  SCOPED_TRACE(*parts.begin());
  C call(layout);
  spoil(call);
  const Status query = call.judge(pass, false);
  EXPECT_TRUE(query.ok()) << query.message;
  expect_refused(call.judge(pass, true), FG_INVALID_ARGUMENT, parts);
}

TEST(Refused, Missing) {
  refused(kFixed, kForward, [](C& c) { c.q.given = false; }, {"q:", "null", "required"});
  refused(kFixed, kForward, [](C& c) { c.k.given = false; }, {"k:", "null", "required"});
  refused(kFixed, kForward, [](C& c) { c.v.given = false; }, {"v:", "null", "required"});
  refused(kFixed, kForward, [](C& c) { c.out.given = false; }, {"out:", "null", "required"});
  refused(kFixed, kBackward, [](C& c) { c.out.given = false; }, {"out:", "null", "required"});
  refused(kPacked, kBackward, [](C& c) { c.lse.given = false; }, {"lse:", "null", "required"});
  refused(kFixed, kBackward, [](C& c) { c.dout.given = c.dlse.given = false; },
          {"dout:", "null", "dlse"});
  refused(kFixed, kBackward, [](C& c) { c.sinks.given = false; }, {"dsinks:", "without sinks"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_kv.given = false; },
          {"cu_seqlens_kv:", "null", "both"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_q.given = false; },
          {"cu_seqlens_q:", "null", "both"});
  refused_by_calls(kFixed, kForward, [](C& c) { c.q.null_data = true; },
                   {"q:", "null data", "(2, 3, 4, 8)"});
  refused_by_calls(kFixed, kBackward, [](C& c) { c.lse.null_data = true; },
                   {"lse:", "null data", "(2, 4, 3)"});
  refused_by_calls(kPacked, kForward, [](C& c) { c.cu_seqlens_kv.null_data = true; },
                   {"cu_seqlens_kv:", "null data", "(3)"});
}

TEST(Refused, Shapes) {
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_q.given = c.cu_seqlens_kv.given = false; },
          {"q:", "3 dimensions", "want 4", "cu_seqlens"});
  refused(kFixed, kForward, [](C& c) { c.cu_seqlens_q.given = c.cu_seqlens_kv.given = true; },
          {"q:", "4 dimensions", "want 3", "cu_seqlens"});
  refused(kFixed, kForward, [](C& c) { c.k.shape.push_back(1); }, {"k:", "5 dimensions", "want"});
  refused(kFixed, kForward,
          [](C& c) {
            c.out.shape = {6, 24};
          },
          {"out:", "(6, 24)", "want (2, 3, 4, 6)"});
  refused(kFixed, kForward, [](C& c) { c.q.shape[1] = -3; },
          {"q:", "(2, -3, 4, 8)", "want sizes from 0"});
  refused(kFixed, kForward, [](C& c) { c.q.shape[1] = INT64_MAX; },
          {"q:", "9223372036854775807", "want"});
  refused(kFixed, kForward,
          [](C& c) {
            c.q.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40, 4, 8};
            c.q.strides = {0, 0, 0, 1};
          },
          {"q:", "(1099511627776, 1099511627776, 4, 8)", "2^59"});
  refused(kFixed, kForward,
          [](C& c) {
            c.k.strides = {INT64_MIN, 16, 8, 1};
          },
          {"k:", "(2, 5, 2, 8)", "2^59"});
  refused(kFixed, kForward,
          [](C& c) {
            c.k.strides = {std::int64_t{1} << 56, std::int64_t{1} << 55, 8, 1};
          },
          {"k:", "(2, 5, 2, 8)", "2^59"});
  refused(kFixed, kForward, [](C& c) { c.k.shape[0] = 3; },
          {"k:", "(3, 5, 2, 8)", "want (2, 5, 2, 8)", "(batch, seqlen_kv, heads_kv, head_dim)"});
  refused(kFixed, kForward, [](C& c) { c.k.shape[3] = 7; },
          {"k:", "(2, 5, 2, 7)", "want (2, 5, 2, 8)"});
  refused(kFixed, kForward, [](C& c) { c.v.shape[1] = 4; },
          {"v:", "(2, 4, 2, 6)", "want (2, 5, 2, 6)"});
  refused(kPacked, kForward, [](C& c) { c.v.shape[1] = 4; },
          {"v:", "(10, 4, 6)", "want (10, 2, 6)", "(total_kv, heads_kv, head_dim_v)"});
  refused(kPacked, kForward, [](C& c) { c.out.shape[2] = 8; },
          {"out:", "(6, 4, 8)", "want (6, 4, 6)", "(total_q, heads_q, head_dim_v)"});
  refused(kFixed, kForward,
          [](C& c) {
            c.lse.shape = {2, 3, 4};
          },
          {"lse:", "(2, 3, 4)", "want (2, 4, 3)", "(batch, heads_q, seqlen_q)"});
  refused(kPacked, kForward,
          [](C& c) {
            c.lse.shape = {6, 4};
          },
          {"lse:", "(6, 4)", "want (4, 6)", "(heads_q, total_q)"});
  refused(kFixed, kBackward, [](C& c) { c.dout.shape[3] = 8; },
          {"dout:", "(2, 3, 4, 8)", "want (2, 3, 4, 6)"});
  refused(kFixed, kBackward, [](C& c) { c.dlse.shape[2] = 4; },
          {"dlse:", "(2, 4, 4)", "want (2, 4, 3)"});
  refused(kFixed, kBackward, [](C& c) { c.dq.shape[2] = 2; },
          {"dq:", "(2, 3, 2, 8)", "want (2, 3, 4, 8)"});
  refused(kFixed, kBackward, [](C& c) { c.dk.shape[2] = 4; },
          {"dk:", "(2, 5, 4, 8)", "want (2, 5, 2, 8)"});
  refused(kPacked, kBackward, [](C& c) { c.dv.shape[0] = 9; },
          {"dv:", "(9, 2, 6)", "want (10, 2, 6)"});
  refused(kFixed, kForward, [](C& c) { c.sinks.shape = {2}; },
          {"sinks:", "(2)", "want (4)", "(heads_q)"});
  refused(kFixed, kBackward,
          [](C& c) {
            c.dsinks.shape = {4, 1};
          },
          {"dsinks:", "(4, 1)", "want (4)"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_q.shape = {0}; },
          {"cu_seqlens_q:", "(0)", "want (batch + 1)"});
  refused(kPacked, kForward,
          [](C& c) {
            c.cu_seqlens_q.shape = {3, 1};
          },
          {"cu_seqlens_q:", "(3, 1)", "want (batch + 1)"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_kv.shape = {4}; },
          {"cu_seqlens_kv:", "(4)", "want (3)", "(batch + 1)"});
  refused(kFixed, kForward, [](C& c) { c.seqused_q.shape = {3}; },
          {"seqused_q:", "(3)", "want (2)", "(batch)"});
  refused(kPacked, kForward, [](C& c) { c.seqused_kv.shape = {3}; },
          {"seqused_kv:", "(3)", "want (2)", "(batch)"});
  refused(kFixed, kForward, [](C& c) { c.q_offset.shape = {}; },
          {"q_offset:", "()", "want (2)", "(batch)"});
  refused(kFixed, kForward, [](C& c) { c.k.shape[2] = c.v.shape[2] = 3; },
          {"q: heads_q 4", "want a multiple of 3"});
  refused(kFixed, kForward, [](C& c) { c.q.shape[2] = c.out.shape[2] = 1; },
          {"q: heads_q 1", "want a multiple of 2"});
  refused(kFixed, kForward, [](C& c) { c.q.shape[2] = 0; }, {"q: heads_q 0", "want 1 or more"});
  refused(kPacked, kForward, [](C& c) { c.k.shape[1] = 0; }, {"k: heads_kv 0", "want 1 or more"});
  refused(kFixed, kForward, [](C& c) { c.q.shape[3] = 0; }, {"q: head_dim 0", "want 1 to 256"});
  refused(kFixed, kForward, [](C& c) { c.v.shape[3] = 0; }, {"v: head_dim_v 0", "want 1 to 256"});
  not_served(kFixed, kForward, [](C& c) { c.q.shape[3] = 257; }, {"q: head_dim 257", "1 to 256"});
  not_served(kFixed, kForward, [](C& c) { c.v.shape[3] = 257; }, {"v: head_dim_v 257", "1 to 256"});
}

// Of these a workspace's size would not fit 64 bits. Strides of 0 make them possible.
TEST(Refused, MoreRowsThanAWorkspaceCanBeFor) {
  const auto rows = [](TestTensor& t, std::size_t k, std::int64_t n) {
    t.shape[k] = n;
    t.strides.assign(t.shape.size(), 0);
    t.strides.back() = 1;
  };
  C c(kFixed);
  c.seqused_q.given = false;
  for (const auto& [n, code] :
       {std::pair{std::int64_t{1} << 50, FG_OK}, {(std::int64_t{1} << 50) + 1, FG_UNSUPPORTED}}) {
    for (TestTensor* t : {&c.q, &c.out, &c.dout, &c.dq}) {
      rows(*t, 1, n);
    }
    for (TestTensor* t : {&c.lse, &c.dlse}) {
      rows(*t, 2, n);
    }
    const Status status = c.judge(kBackward, false);
    EXPECT_EQ(status.code, code) << status.message;
  }
  not_served(kPacked, kForward, [](C& x) { x.k.shape[0] = std::int64_t{1} << 52; },
             {"k: 4503599627370496 rows of 2 heads", "2^52"});
}

TEST(Refused, Types) {
  not_served(kFixed, kForward, [](C& c) { c.q.dtype = kI32Type; },
             {"q: dtype i32", "f32, bf16, f16"});
  not_served(kFixed, kForward,
             [](C& c) {
               c.q.dtype = {kDLFloat, 32, 4};
             },
             {"q: dtype f32x4", "f32, bf16, f16"});
  not_served(kFixed, kForward,
             [](C& c) {
               c.q.dtype = {kDLFloat, 8, 1};
             },
             {"q: dtype f8", "f32, bf16, f16"});
  refused(kFixed, kForward, [](C& c) { c.k.dtype = kBF16Type; },
          {"k: dtype bf16", "want f32 (q's)"});
  refused(kFixed, kForward, [](C& c) { c.v.dtype = kF16Type; }, {"v: dtype f16", "want f32 (q's)"});
  refused(kFixed, kForward, [](C& c) { c.q.dtype = c.k.dtype = c.v.dtype = kF16Type; },
          {"out: dtype f32", "want f16 (q's)"});
  refused(kFixed, kForward, [](C& c) { c.lse.dtype = kF16Type; }, {"lse: dtype f16", "want f32"});
  refused(kFixed, kForward,
          [](C& c) { c.q.dtype = c.k.dtype = c.v.dtype = c.out.dtype = kF64Type; },
          {"lse: dtype f32", "want f64"});
  refused(kFixed, kBackward, [](C& c) { c.dout.dtype = kF16Type; },
          {"dout: dtype f16", "want f32 (q's)"});
  refused(kFixed, kBackward, [](C& c) { c.dlse.dtype = kBF16Type; },
          {"dlse: dtype bf16", "want f32"});
  refused(kFixed, kBackward, [](C& c) { c.dq.dtype = kF16Type; },
          {"dq: dtype f16", "want f32 (q's)"});
  refused(kFixed, kForward, [](C& c) { c.sinks.dtype = kF16Type; },
          {"sinks: dtype f16", "want f32"});
  refused(kFixed, kBackward, [](C& c) { c.dsinks.dtype = kF16Type; },
          {"dsinks: dtype f16", "want f32"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_q.dtype = kI64Type; },
          {"cu_seqlens_q: dtype i64", "want i32"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_kv.dtype = kI64Type; },
          {"cu_seqlens_kv: dtype i64", "want i32"});
  refused(kFixed, kForward, [](C& c) { c.seqused_q.dtype = kI64Type; },
          {"seqused_q: dtype i64", "want i32"});
  refused(kFixed, kForward,
          [](C& c) {
            c.seqused_kv.dtype = {kDLUInt, 32, 1};
          },
          {"seqused_kv: dtype u32", "want i32"});
  refused(kFixed, kForward, [](C& c) { c.q_offset.dtype = kI32Type; },
          {"q_offset: dtype i32", "want i64"});
  not_served(kFixed, kForward,
             [](C& c) {
               c.q.device = {kDLMetal, 0};
             },
             {"q: is on", "CPU", "CUDA"});
  refused(kFixed, kForward,
          [](C& c) {
            c.k.device = {kDLCUDA, 1};
          },
          {"k: is on cuda:1", "want cpu (q's)"});
  refused(kFixed, kForward,
          [](C& c) {
            c.q.device = c.k.device = c.v.device = {kDLCUDA, 1};
            c.out.device = {kDLCUDA, 0};
          },
          {"out: is on cuda:0", "want cuda:1 (q's)"});
  refused(kPacked, kForward,
          [](C& c) {
            c.cu_seqlens_q.device = {kDLCUDA, 0};
          },
          {"cu_seqlens_q: is on cuda:0", "want cpu (q's)"});
}

TEST(Refused, Strides) {
  refused(kFixed, kForward,
          [](C& c) {
            c.q.strides = {96, 32, 1, 4};
          },
          {"q:", "last stride 4", "want 1"});
  refused(kFixed, kForward,
          [](C& c) {
            c.k.strides = {80, 16, 8, 0};
          },
          {"k:", "last stride 0", "want 1"});
  refused(kFixed, kForward,
          [](C& c) {
            c.out.strides = {72, 24, 6, 0};
          },
          {"out:", "last stride 0", "want 1"});
  refused(kFixed, kForward,
          [](C& c) {
            c.lse.strides = {12, 1, 4};
          },
          {"lse:", "last stride 4", "want 1"});
  refused(kFixed, kBackward,
          [](C& c) {
            c.dout.strides = {144, 48, 12, 2};
          },
          {"dout:", "last stride 2", "want 1 or 0"});
  refused(kFixed, kBackward,
          [](C& c) {
            c.dq.strides = {96, 32, 8, -1};
          },
          {"dq:", "last stride -1", "want 1"});
  refused(kFixed, kForward, [](C& c) { c.sinks.strides = {2}; },
          {"sinks:", "last stride 2", "want 1"});
  refused(kPacked, kForward, [](C& c) { c.cu_seqlens_q.strides = {2}; },
          {"cu_seqlens_q:", "last stride 2", "want 1"});
  refused_by_calls(kFixed, kForward, [](C& c) { c.v.byte_offset = 2; },
                   {"v:", "not aligned", "4 bytes"});
}

TEST(Refused, Overlaps) {
  refused_by_calls(kFixed, kForward, [](C& c) { c.out.data = c.q.storage.data(); },
                   {"out:", "overlaps q"});
  refused_by_calls(kFixed, kForward,
                   [](C& c) {
                     c.out.data = c.v.storage.data();
                     c.out.byte_offset = 476;
                   },
                   {"out:", "overlaps v"});
  refused_by_calls(kFixed, kForward, [](C& c) { c.lse.data = c.k.storage.data() + 72; },
                   {"lse:", "overlaps k"});
  refused_by_calls(kFixed, kForward, [](C& c) { c.lse.data = c.out.storage.data(); },
                   {"out:", "overlaps lse"});
  refused_by_calls(kPacked, kForward, [](C& c) { c.out.data = c.cu_seqlens_kv.storage.data(); },
                   {"out:", "overlaps cu_seqlens_kv"});
  refused_by_calls(kFixed, kBackward, [](C& c) { c.dv.data = c.dk.storage.data(); },
                   {"dk:", "overlaps dv"});
  refused_by_calls(kFixed, kBackward, [](C& c) { c.dq.data = c.dout.storage.data(); },
                   {"dq:", "overlaps dout"});
  refused_by_calls(kFixed, kBackward, [](C& c) { c.dq.data = c.q.storage.data(); },
                   {"dq:", "overlaps q"});
  refused_by_calls(kFixed, kBackward, [](C& c) { c.dsinks.data = c.sinks.storage.data(); },
                   {"dsinks:", "overlaps sinks"});
  refused_by_calls(kFixed, kForward,
                   [](C& c) {
                     c.out.strides = {24, 0, 6, 1};
                   },
                   {"out:", "share memory", "strides"});
  refused_by_calls(kFixed, kBackward,
                   [](C& c) {
                     c.dq.strides = {96, 32, 7, 1};
                   },
                   {"dq:", "share memory", "strides"});
}

TEST(Refused, Lengths) {
  refused_by_calls(kPacked, kForward,
                   [](C& c) {
                     c.cu_seqlens_q.fill<std::int32_t>({-1, 3, 6});
                   },
                   {"cu_seqlens_q:", "-1", "want 0 or more"});
  refused_by_calls(kPacked, kForward,
                   [](C& c) {
                     c.cu_seqlens_kv.fill<std::int32_t>({0, 7, 6});
                   },
                   {"cu_seqlens_kv:", "6", "want 7 or more"});
  refused_by_calls(kPacked, kBackward,
                   [](C& c) {
                     c.cu_seqlens_q.fill<std::int32_t>({0, INT32_MIN, 6});
                   },
                   {"cu_seqlens_q:", "-2147483648", "want 0 or more"});
  refused_by_calls(kPacked, kForward,
                   [](C& c) {
                     c.cu_seqlens_kv.fill<std::int32_t>({0, 5, 11});
                   },
                   {"cu_seqlens_kv:", "11", "want at most 10"});
  refused_by_calls(kFixed, kForward,
                   [](C& c) {
                     c.seqused_q.fill<std::int32_t>({2, -1});
                   },
                   {"seqused_q:", "entry 1 is -1", "want 0 to 3"});
  refused_by_calls(kFixed, kForward,
                   [](C& c) {
                     c.seqused_kv.fill<std::int32_t>({6, 1});
                   },
                   {"seqused_kv:", "entry 0 is 6", "want 0 to 5"});
  refused_by_calls(kPacked, kForward,
                   [](C& c) {
                     c.cu_seqlens_q.fill<std::int32_t>({0, 1, 6});
                   },
                   {"seqused_q:", "entry 0 is 2", "want 0 to 1"});
  refused_by_calls(kPacked, kForward,
                   [](C& c) {
                     c.seqused_q.given = false;
                     c.options.max_seqlen_q = 2;
                   },
                   {"max_seqlen_q: 2", "length 3"});
  refused_by_calls(kPacked, kBackward,
                   [](C& c) {
                     c.seqused_kv.given = false;
                     c.options.max_seqlen_kv = 4;
                   },
                   {"max_seqlen_kv: 4", "length 5"});
  refused_by_calls(kPacked, kForward,
                   [](C& c) {
                     c.seqused_kv.given = false;
                     c.cu_seqlens_kv.fill<std::int32_t>({0, 4, 10});
                     c.options.max_seqlen_kv = 5;
                   },
                   {"max_seqlen_kv: 5", "length 6"});
}

TEST(Refused, Options) {
  refused(kFixed, kForward, [](C& c) { c.options.alignment = fg_alignment{2}; },
          {"alignment: 2", "want FG_BOTTOM_RIGHT or FG_TOP_LEFT"});
  refused(kFixed, kForward, [](C& c) { c.options.scale = -HUGE_VAL; },
          {"scale:", "inf", "want a finite number"});
  refused(kFixed, kForward, [](C& c) { c.options.softcap = -1; },
          {"softcap: -1", "want a positive number"});
  refused(kFixed, kBackward, [](C& c) { c.options.scale = -1e39; },
          {"scale: -1e+39", "want a number in the range of f32"});
  refused(kFixed, kForward, [](C& c) { c.options.softcap = HUGE_VAL; },
          {"softcap: inf", "want a positive number"});
  refused(kFixed, kForward, [](C& c) { c.options.softcap = std::nan(""); },
          {"softcap:", "nan", "want a positive number"});
  refused(kFixed, kForward, [](C& c) { c.options.num_threads = -1; },
          {"num_threads: -1", "want 1 to"});
  refused(kFixed, kForward, [](C& c) { c.options.num_threads = INT32_MAX; },
          {"num_threads: 2147483647", "want 1 to"});
  refused(kPacked, kForward, [](C& c) { c.options.max_seqlen_q = -1; },
          {"max_seqlen_q: -1", "want"});
  refused(kPacked, kForward, [](C& c) { c.options.max_seqlen_kv = INT64_MIN; },
          {"max_seqlen_kv: -9223372036854775808", "want"});
  refused(kFixed, kForward, [](C& c) { c.options.struct_size = 0; },
          {"options: struct_size 0", "want", "FG_"});
  refused(kFixed, kForward, [](C& c) { c.options.struct_size = SIZE_MAX; },
          {"options: struct_size 18446744073709551615", "want", "FG_"});
  refused(kFixed, kForward, [](C& c) { c.options.struct_size = sizeof(fg_options) - 3; },
          {"options: struct_size", "want", "FG_"});
}

TEST(Validate, NullTensorsAreRefused) {
  Call result;
  const Status status = validate(Pass::kForward, nullptr, nullptr, nullptr, &result);
  EXPECT_EQ(status.code, FG_INVALID_ARGUMENT);
  EXPECT_EQ(status.message, "tensors: null");
}

TEST(Validate, AStructSizeOfTensorsThatCutsAFieldIsRefused) {
  TestCall call(kFixed);
  fg_tensors tensors = call.assemble();
  Call result;
  for (const std::size_t size :
       {std::size_t{0}, sizeof(std::size_t), sizeof(fg_tensors) - 4, std::size_t{1} << 40}) {
    tensors.struct_size = size;
    const Status status = validate(Pass::kForward, &tensors, nullptr, nullptr, &result);
    EXPECT_EQ(status.code, FG_INVALID_ARGUMENT) << size;
    EXPECT_EQ(status.message.rfind("tensors: struct_size " + std::to_string(size) + ", want", 0),
              0U)
        << status.message;
  }
}

// A caller built against a later header: fields it leaves alone are fine, fields it sets are not
// ours to ignore.
TEST(Validate, ALongerStructIsTakenIfTheRestIsZero) {
  struct Later {
    fg_options options = FG_OPTIONS_INIT;
    std::int64_t new_field = 0;
  };
  TestCall call(kFixed);
  const fg_tensors tensors = call.assemble();
  Later later;
  later.options.struct_size = sizeof(Later);
  Call result;
  EXPECT_TRUE(validate(Pass::kForward, &tensors, &later.options, nullptr, &result).ok());
  later.new_field = 1;
  const Status status = validate(Pass::kForward, &tensors, &later.options, nullptr, &result);
  EXPECT_EQ(status.code, FG_UNSUPPORTED);
  EXPECT_EQ(status.message.rfind("options: sets a field that this version", 0), 0U)
      << status.message;
}

TEST(Validate, TheWorkspaceMustNotOverlapATensor) {
  TestCall call(kFixed);
  const fg_tensors tensors = call.assemble();
  Call result;
  for (const auto& [data, name] :
       {std::pair{call.q.storage.data() + 24, "q"}, {call.out.storage.data() - 8, "out"}}) {
    const Scratch scratch{data, 64};
    const Status status = validate(Pass::kForward, &tensors, nullptr, &scratch, &result);
    EXPECT_EQ(status.code, FG_INVALID_ARGUMENT);
    EXPECT_NE(status.message.find("workspace"), std::string::npos) << status.message;
    EXPECT_NE(status.message.find(name), std::string::npos) << status.message;
  }
}

}  // namespace
}  // namespace flashgrad
