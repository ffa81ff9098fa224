// SPDX-License-Identifier: Apache-2.0
// The forward pass of the CPU backend on every instruction set that this machine has: what depends
// on how it cuts its work, which the conformance tests see only by chance.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "cpu/dispatch.hpp"

namespace flashgrad {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A fixed-length problem of random tensors, (batch, seqlen, heads, dim), and its results.
class Attention {
 public:
  Attention(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t heads_q,
            std::int64_t heads_kv, std::int64_t dim)
      : dim_(dim) {
    p.dtype = dtype;
    p.batch = 1;
    p.seqlen_q = p.max_seqlen_q = seqlen_q;
    p.seqlen_kv = p.max_seqlen_kv = seqlen_kv;
    p.heads_q = heads_q;
    p.heads_kv = heads_kv;
    p.head_dim = p.head_dim_v = dim;
    p.scale = 1 / std::sqrt(static_cast<double>(dim));
    p.wants_lse = true;
    p.num_threads = 2;
    fill(q, seqlen_q * heads_q);
    fill(k, seqlen_kv * heads_kv);
    fill(v, seqlen_kv * heads_kv);
    out.resize(q.size());
    lse.resize(static_cast<std::size_t>(seqlen_q * heads_q));
  }

  // Runs with `bytes` of workspace, or with the preferred size if negative.
  void run(const cpu::InstructionSet& set, std::int64_t bytes = -1) {
    const cpu::Kernels& kernels = p.dtype == DType::kBF16 ? *set.bf16 : *set.other;
    const std::size_t size = bytes < 0 ? kernels.workspace_size(p, Pass::kForward).preferred
                                       : static_cast<std::size_t>(bytes);
    constexpr std::size_t kGuard = 67;  // no multiple of any alignment
    std::vector<unsigned char> workspace(size + 2 * kGuard, 0xff);
    std::fill(out.begin(), out.end(), std::uint8_t{0xff});
    std::fill(lse.begin(), lse.end(), kNan);
    Args args;
    args.q = tensor(q, p.heads_q);
    args.k = tensor(k, p.heads_kv);
    args.v = tensor(v, p.heads_kv);
    args.out = tensor(out, p.heads_q);
    args.lse = {lse.data(), DType::kF32, 0, p.heads_q, 1, 1};
    args.workspace = workspace.data() + kGuard;
    args.workspace_bytes = size;
    kernels.forward(p, args);
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(workspace[i], 0xff);
      ASSERT_EQ(workspace[size + kGuard + i], 0xff);
    }
  }

  [[nodiscard]] std::int64_t index(std::int64_t i, std::int64_t head, std::int64_t heads,
                                   std::int64_t c) const {
    return (i * heads + head) * dim_ + c;
  }
  [[nodiscard]] double out_at(std::int64_t i, std::int64_t head, std::int64_t c) const {
    return load_f64(out.data(), p.dtype, index(i, head, p.heads_q, c));
  }
  void set_v(std::int64_t j, std::int64_t head, std::int64_t c, double x) {
    store_f64(v.data(), p.dtype, index(j, head, p.heads_kv, c), x);
  }

  Problem p;
  std::vector<std::uint8_t> q, k, v, out;
  std::vector<float> lse;

 private:
  void fill(std::vector<std::uint8_t>& t, std::int64_t rows) {
    std::normal_distribution<double> normal;
    t.resize(static_cast<std::size_t>(rows * dim_ * size_bytes(p.dtype)));
    for (std::int64_t e = 0; e < rows * dim_; ++e) {
      store_f64(t.data(), p.dtype, e, normal(random_));
    }
  }
  Tensor tensor(std::vector<std::uint8_t>& t, std::int64_t heads) const {
    return {t.data(),     p.dtype, static_cast<std::int64_t>(t.size()) / size_bytes(p.dtype),
            heads * dim_, dim_,    1};
  }

  std::int64_t dim_;
  std::mt19937_64 random_{1};
};

template <class F>
void for_each_target(F&& f) {
  for (const cpu::InstructionSet& set : cpu::instruction_sets()) {
    if (!set.available()) {
      continue;
    }
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(std::string(set.name) + " " + name(dtype));
      f(set, dtype);
    }
  }
}

TEST(CpuForward, AnyWorkspaceAndAnyThreadsGiveTheSameBits) {
  for_each_target([](const cpu::InstructionSet& set, DType dtype) {
    Attention a(dtype, 300, 700, 6, 3, 40);
    a.p.mask.right = 0;
    a.run(set);
    const auto out = a.out;
    const auto lse = a.lse;
    for (const int threads : {1, 2, 5}) {
      a.p.num_threads = threads;
      const cpu::Kernels& kernels = dtype == DType::kBF16 ? *set.bf16 : *set.other;
      const WorkspaceSize size = kernels.workspace_size(a.p, Pass::kForward);
      ASSERT_LE(size.minimum, size.preferred);
      for (std::size_t step = 0; step <= 8; ++step) {
        a.run(set,
              static_cast<std::int64_t>(size.minimum + (size.preferred - size.minimum) * step / 8));
        EXPECT_EQ(a.out, out) << threads << " threads, step " << step;
        EXPECT_EQ(a.lse, lse) << threads << " threads, step " << step;
      }
    }
  });
}

// Heads of a group that share an item, because the sequence is short, against the same heads apart.
TEST(CpuForward, HeadsThatShareAnItemKeepTheirBits) {
  for_each_target([](const cpu::InstructionSet& set, DType dtype) {
    for (const std::int64_t seqlen_q : {1, 7, 20, 32}) {
      Attention together(dtype, seqlen_q, 600, 8, 1, 24);
      together.p.mask.right = 0;
      Attention apart(dtype, seqlen_q, 600, 8, 8, 24);
      apart.p.mask.right = 0;
      apart.q = together.q;
      for (std::int64_t j = 0; j < 600; ++j) {
        for (std::int64_t head = 0; head < 8; ++head) {
          for (std::int64_t c = 0; c < 24; ++c) {
            const std::int64_t to = apart.index(j, head, 8, c);
            const std::int64_t from = together.index(j, 0, 1, c);
            store_f64(apart.k.data(), dtype, to, load_f64(together.k.data(), dtype, from));
            store_f64(apart.v.data(), dtype, to, load_f64(together.v.data(), dtype, from));
          }
        }
      }
      together.run(set);
      apart.run(set);
      EXPECT_EQ(together.out, apart.out) << seqlen_q;
      EXPECT_EQ(together.lse, apart.lse) << seqlen_q;
    }
  });
}

// Keys at the edges of pairs, tiles, panels and blocks, in a band whose two sides cross them.
TEST(CpuForward, ValuesThatAreNotFiniteReachOnlyTheRowsThatSeeThem) {
  for_each_target([](const cpu::InstructionSet& set, DType dtype) {
    constexpr std::int64_t kLength = 301;
    constexpr std::int64_t kDim = 20;
    Attention a(dtype, kLength, kLength, 1, 1, kDim);
    a.p.mask = {70, 2, Alignment::kTopLeft};
    a.run(set);
    const Attention clean = a;
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      for (const std::int64_t key :
           {0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 127, 254, 255, 256, 257, 299, 300}) {
        a.v = clean.v;
        a.set_v(key, 0, 13, bad);
        a.run(set);
        for (std::int64_t i = 0; i < kLength; ++i) {
          const bool sees = key >= i - 70 && key <= i + 2;
          for (std::int64_t c = 0; c < kDim; ++c) {
            if (sees && c == 13) {
              ASSERT_FALSE(std::isfinite(a.out_at(i, 0, c))) << "key " << key << " row " << i;
              ASSERT_EQ(std::isnan(a.out_at(i, 0, c)), std::isnan(bad))
                  << "key " << key << " row " << i;
            } else {
              // Such blocks are added up in another order.
              ASSERT_NEAR(a.out_at(i, 0, c), clean.out_at(i, 0, c),
                          dtype == DType::kF32 ? 1e-6 : 2e-2)
                  << "key " << key << " row " << i << " column " << c;
            }
          }
        }
        EXPECT_EQ(a.lse, clean.lse);
      }
    }
  });
}

// Rows that all see the same keys, from or to the middle of a pair: only its other half is to stay
// unseen.
TEST(CpuForward, ValuesBesideTheFirstOrLastKeyStayUnseen) {
  for_each_target([](const cpu::InstructionSet& set, DType dtype) {
    struct Case {
      std::int64_t first, last, unseen;
    };
    for (const Case& c : {Case{1, 3, 0}, Case{2, 4, 5}}) {
      Attention a(dtype, 1, 9, 4, 1, 20);
      a.p.mask = {-c.first, c.last, Alignment::kTopLeft};
      a.run(set);
      const Attention clean = a;
      a.set_v(c.unseen, 0, 13, kNan);
      a.run(set);
      for (std::int64_t head = 0; head < 4; ++head) {
        for (std::int64_t column = 0; column < 20; ++column) {
          ASSERT_NEAR(a.out_at(0, head, column), clean.out_at(0, head, column),
                      dtype == DType::kF32 ? 1e-6 : 2e-2)
              << "key " << c.unseen << " head " << head << " column " << column;
        }
      }
    }
  });
}

TEST(CpuForward, MinimumWorkspaceDoesNotGrowWithTheKeys) {
  for_each_target([](const cpu::InstructionSet& set, DType dtype) {
    Attention a(dtype, 1, 1, 4, 2, 64);
    const cpu::Kernels& kernels = dtype == DType::kBF16 ? *set.bf16 : *set.other;
    const auto size = [&](std::int64_t seqlen) {
      a.p.seqlen_q = a.p.max_seqlen_q = a.p.seqlen_kv = a.p.max_seqlen_kv = seqlen;
      return kernels.workspace_size(a.p, Pass::kForward);
    };
    const WorkspaceSize short_size = size(std::int64_t{1} << 12);
    const WorkspaceSize long_size = size(std::int64_t{1} << 24);
    EXPECT_EQ(short_size.minimum, long_size.minimum);
    // Two kv heads' keys and values in f32, and a little.
    EXPECT_LT(long_size.preferred, (std::size_t{1} << 24) * 2 * 2 * 64 * 4 * 33 / 32);
  });
}

}  // namespace
}  // namespace flashgrad
