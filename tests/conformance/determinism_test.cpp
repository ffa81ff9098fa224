// SPDX-License-Identifier: Apache-2.0
// The same bits: run after run on a workspace that other shapes have left dirty, and for a sequence
// whatever else is in its batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "conformance.hpp"

namespace flashgrad::check {
namespace {

struct Running {
  Case spec;
  CallTensors tensors;
  Bits bits;
};

// Repeats the cases in turn on one workspace, so that each finds what the others left. The fastest
// target of the CPU repeats them all; the others at most ten times, and leave the largest out. (A
// GPU has ThousandRepeats in tests/cuda, which compares on the device.)
void expect_repeatable(const std::vector<Case>& cases, int repeats_of_first) {
  for (const Target& target : targets()) {
    const bool first = &target == &targets().front();
    const bool many = first && target.backend == "cpu";
    const int repeats = many ? repeats_of_first : std::min(repeats_of_first, 10);
    const UseTarget use(target);
    WorkspaceMemory memory;
    std::vector<Running> running;
    for (const Case& c : cases) {
      if (first || flops(c) * repeats <= target.max_flops / 2) {
        running.push_back({c, make_tensors(c), {}});
        running.back().spec.deterministic = true;
      }
    }
    for (int n = 0; n < repeats; ++n) {
      for (Running& r : running) {
        const Announce announce(r.spec, target);
        fg_options o = make_options(r.spec);
        o.backend = target.backend.c_str();
        // More threads than CI has cores are slow: a few such repeats do.
        o.num_threads = 1 + (n < 20 ? n % 4 : n % 2);
        for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
          const PassResult result = run_pass(pass, r.tensors, o, Workspace::kPreferred, memory);
          require_device(result.status, result.message);
          ASSERT_EQ(result.status, FG_OK) << result.message;
        }
        const Bits bits = bits_of(r.tensors);
        ASSERT_TRUE(r.bits.empty() || r.bits == bits)
            << target.name() << " gave other bits in repeat " << n;
        r.bits = bits;
      }
    }
  }
}

TEST(Determinism, OddLengths) { expect_repeatable(small_cases("odd_lengths_race"), 100); }

TEST(Determinism, ManyRepeats) {
  Case c = small_cases("determinism").front();
  c.id.clear();
  c.batch = 1;
  c.heads_q = c.heads_kv = 1;
  Case other = c;
  other.seqlen_q = other.seqlen_kv = 130;
  other.dtype = DType::kBF16;
  expect_repeatable({c, other}, 100);
}

TEST(Determinism, DirtyWorkspaceOfOtherShapes) {
  std::vector<Case> cases = small_cases("determinism_gqa_dirty_semaphores");
  for (const Case& c : small_cases("determinism_window_idle_blocks")) {
    cases.push_back(c);
  }
  cases.push_back(small_cases("varlen_more_q_than_k").front());
  cases.push_back(small_cases("one_by_one").front());
  expect_repeatable(cases, 6);
}

// Rows [begin, begin + count) of a tensor (rows, heads, dim), or those of lse (heads, rows).
std::vector<double> rows_of(const HostTensor& t, std::int64_t begin, std::int64_t count) {
  std::vector<double> values;
  const std::int64_t width = t.shape()[1] * t.shape()[2];
  for (std::int64_t n = begin * width; n < (begin + count) * width; ++n) {
    values.push_back(t.get(n));
  }
  return values;
}

void copy_rows(const HostTensor& from, std::int64_t from_row, const HostTensor& to,
               std::int64_t to_row, std::int64_t count) {
  const std::size_t row = to.shape().size() - 3;
  const std::int64_t width = to.shape()[row + 1] * to.shape()[row + 2];
  for (std::int64_t n = 0; n < count * width; ++n) {
    to.set(to_row * width + n, from.get(from_row * width + n));
  }
}

// A sequence has the same gradients alone, packed with others and in a fixed-length batch.
TEST(Determinism, BatchInvariance) {
  struct Kind {
    DType dtype;
    const char* dims;
  };
  for (const auto& [dtype, dims] : {Kind{DType::kF32, ",d=64,dv=40"},
                                    {DType::kBF16, ",d=64,dv=40"},
                                    {DType::kF16, ",d=64,dv=40"},
                                    {DType::kBF16, ",d=128"},
                                    {DType::kBF16, ",d=192,dv=128"},
                                    {DType::kBF16, ",d=256"}}) {
    SCOPED_TRACE(dims);
    Case packed =
        parse_shape("hq=4,hkv=2,cu_q=0:300:813:820,cu_kv=0:700:1213:1300" + std::string(dims));
    packed.dtype = dtype;
    packed.deterministic = true;
    packed.mask.right = 0;
    Case alone = parse_shape("hq=4,hkv=2,sq=513,sk=513" + std::string(dims));
    alone.dtype = dtype;
    alone.deterministic = true;
    alone.mask.right = 0;
    Case batch = alone;
    batch.batch = 3;
    for (const Target& target : targets()) {
      if (!target.takes(dtype)) {
        continue;
      }
      SCOPED_TRACE(target.name());
      const UseTarget use(target);
      WorkspaceMemory memory;
      const auto run = [&](const Case& c, CallTensors& t) {
        const Announce announce(c, target);
        fg_options o = make_options(c);
        o.backend = target.backend.c_str();
        for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
          const PassResult r = run_pass(pass, t, o, Workspace::kPreferred, memory);
          require_device(r.status, r.message);
          EXPECT_EQ(r.status, FG_OK) << r.message;
        }
      };
      CallTensors in_pack = make_tensors(packed);
      CallTensors single = make_tensors(alone);
      CallTensors in_batch = make_tensors(batch);
      // The second sequence of the pack, alone and as the second entry of a batch.
      const auto copy = [&](const HostTensor& from, std::int64_t from_row, const HostTensor& one,
                            const HostTensor& many) {
        copy_rows(from, from_row, one, 0, 513);
        copy_rows(from, from_row, many, 513, 513);
      };
      copy(in_pack.q, 300, single.q, in_batch.q);
      copy(in_pack.k, 700, single.k, in_batch.k);
      copy(in_pack.v, 700, single.v, in_batch.v);
      copy(in_pack.dout, 300, single.dout, in_batch.dout);
      run(packed, in_pack);
      run(alone, single);
      run(batch, in_batch);
      const auto same = [&](const char* name, const HostTensor& p, std::int64_t row,
                            const HostTensor& s, const HostTensor& b) {
        std::vector<double> want = rows_of(p, row, 513);
        const std::int64_t width = s.shape()[2] * s.shape()[3];
        std::int64_t differ_alone = 0;
        std::int64_t differ_batch = 0;
        for (std::int64_t n = 0; n < 513 * width; ++n) {
          differ_alone += s.get(n) != want[static_cast<std::size_t>(n)] ? 1 : 0;
          differ_batch += b.get(513 * width + n) != want[static_cast<std::size_t>(n)] ? 1 : 0;
        }
        EXPECT_EQ(differ_alone, 0) << name << " alone, of " << 513 * width;
        EXPECT_EQ(differ_batch, 0) << name << " in a batch, of " << 513 * width;
      };
      same("out", in_pack.out, 300, single.out, in_batch.out);
      same("dq", in_pack.dq, 300, single.dq, in_batch.dq);
      same("dk", in_pack.dk, 700, single.dk, in_batch.dk);
      same("dv", in_pack.dv, 700, single.dv, in_batch.dv);
    }
  }
}

}  // namespace
}  // namespace flashgrad::check
