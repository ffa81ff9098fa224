// SPDX-License-Identifier: Apache-2.0
// Memory of standard against recomputing backward.
#include "plan/memory.hpp"

#include <gtest/gtest.h>

namespace flashgrad::plan {
namespace {

constexpr double kTokens = 512.0 * 1024;

// One head of 512K tokens, bf16: P and dP are 2 bytes for each of 2^38 pairs.
TEST(PlanMemory, OneHeadOf512K) {
  const MemoryShape shape{.seqlen_q = kTokens, .seqlen_kv = kTokens};
  const double standard = standard_backward_memory(shape).total();
  EXPECT_GT(standard, 1e12);
  EXPECT_LT(standard, 1.2e12);
  const double recomputing = recomputing_backward_memory(shape).total();
  EXPECT_GT(recomputing, 1e9);
  EXPECT_LT(recomputing, 2e9);
}

TEST(PlanMemory, GrowsWithTheSquareOrWithTheLength) {
  const MemoryShape once{.heads_q = 8, .heads_kv = 2, .seqlen_q = kTokens, .seqlen_kv = kTokens};
  MemoryShape twice = once;
  twice.seqlen_q *= 2;
  twice.seqlen_kv *= 2;
  EXPECT_NEAR(standard_backward_memory(twice).total() / standard_backward_memory(once).total(), 4,
              0.02);
  EXPECT_EQ(recomputing_backward_memory(twice).total(),
            2 * recomputing_backward_memory(once).total());
}

TEST(PlanMemory, IsSharedByGpus) {
  const MemoryShape one{.heads_q = 32, .heads_kv = 8, .seqlen_q = 4e6, .seqlen_kv = 4e6};
  MemoryShape eight = one;
  eight.gpus = 8;
  const double alone = recomputing_backward_memory(one).total();
  const double share = recomputing_backward_memory(eight).total();
  EXPECT_GT(share, alone / 8);  // keys that pass through
  EXPECT_LT(share, alone / 4);
}

}  // namespace
}  // namespace flashgrad::plan
