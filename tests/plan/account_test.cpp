// SPDX-License-Identifier: Apache-2.0
// The account reproduces published figures from tiles and rates.
#include "plan/account.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace flashgrad::plan {
namespace {

double use(const Account& a, Use use) { return a.by_use[static_cast<std::size_t>(use)]; }

// FlashAttention-4's account, forward.
TEST(PlanAccount, Fa4Forward) {
  const Account a = account(find_kernel("fa4-forward"), find_device("b200"));
  EXPECT_EQ(a.mma, 1024);
  EXPECT_EQ(a.exp, 1024);
  EXPECT_EQ(a.shared, 768);
  EXPECT_EQ(a.tensor_columns, 512);
}

// Backward with tiles of 128 x 128 and head_dim 128.
TEST(PlanAccount, Fa4Backward) {
  const Account a = account(find_kernel("fa4-backward"), find_device("b200"));
  EXPECT_EQ(a.mma, 2560);
  EXPECT_EQ(a.exp, 1024);
  EXPECT_EQ(use(a, Use::kOperands), 2048);
  EXPECT_EQ(use(a, Use::kWritten), 256);  // dS
  EXPECT_EQ(use(a, Use::kStaged), 1024);  // dQ, written and read
  EXPECT_EQ(use(a, Use::kWritten) + use(a, Use::kStaged), 1280);
  EXPECT_EQ(a.shared, 3328);
  EXPECT_EQ(a.bottleneck, Account::Bottleneck::kShared);
  EXPECT_EQ(a.tensor_columns, 512);
}

TEST(PlanAccount, Fa4BackwardWithTwoCtas) {
  const Account a = account(find_kernel("fa4-backward-2cta"), find_device("b200"));
  EXPECT_EQ(a.mma, 2560);
  EXPECT_EQ(use(a, Use::kOperands), 1536);
  EXPECT_EQ(use(a, Use::kWritten), 256);    // dS: half in place, half for the peer
  EXPECT_EQ(use(a, Use::kExchanged), 384);  // 128 read to be sent, 256 landing
  EXPECT_EQ(use(a, Use::kStaged), 512);     // half of dQ's rows, written and read
  EXPECT_EQ(use(a, Use::kWritten) + use(a, Use::kExchanged) + use(a, Use::kStaged), 1152);
  EXPECT_EQ(a.shared, 2688);
  EXPECT_EQ(a.bottleneck, Account::Bottleneck::kBalanced);
  EXPECT_EQ(a.tensor_columns, 512);
  // Half the reductions of a CTA alone.
  EXPECT_EQ(2 * a.l2_reduce_bytes,
            account(find_kernel("fa4-backward"), find_device("b200")).l2_reduce_bytes);
}

struct HopperRow {
  const char* kernel;
  double mma, exp, shared, l2_bytes_per_clk;
  bool fits;
};

class PlanHopperTable : public testing::TestWithParam<HopperRow> {};

TEST_P(PlanHopperTable, Row) {
  const HopperRow& row = GetParam();
  const Account a = account(find_kernel(row.kernel), find_device("h200"));
  EXPECT_EQ(a.mma, row.mma);
  EXPECT_EQ(a.exp, row.exp);
  EXPECT_EQ(a.shared, row.shared);
  EXPECT_NEAR(a.l2_bytes_per_clk, row.l2_bytes_per_clk, 0.05);
  EXPECT_EQ(a.overflows.empty(), row.fits);
}

// docs/model.md has this table. Four of its rows overflow the registers: dq of all columns at once
// is too much for a third warpgroup beside two consumers that keep S and dP apart.
INSTANTIATE_TEST_SUITE_P(
    All, PlanHopperTable,
    testing::Values(HopperRow{"hopper-d64", 2560, 1024, 3072, 25.6, true},
                    HopperRow{"hopper-d64-dq-warpgroup", 2560, 1024, 2816, 25.6, false},
                    HopperRow{"hopper-d64-cluster", 2560, 1024, 2688, 12.8, true},
                    HopperRow{"hopper-d64-direct", 2560, 1024, 2304, 25.6, false},
                    HopperRow{"hopper-d64-direct-transposed", 2560, 1024, 2176, 25.6, false},
                    HopperRow{"fa3-backward", 2560, 512, 2944, 25.6, true},
                    HopperRow{"hopper-d128-dq-warpgroup", 2560, 512, 2304, 25.6, false},
                    HopperRow{"hopper-d128-cluster", 2560, 512, 2560, 12.8, true},
                    HopperRow{"hopper-d128-workspace", 2048, 512, 2048, 16.0, true},
                    HopperRow{"fa3-backward-d256", 3200, 320, 4128, 41.0, true},
                    HopperRow{"hopper-d256-cluster", 3200, 320, 4208, 20.5, true},
                    HopperRow{"hopper-d256-workspace", 2560, 320, 3568, 25.6, true},
                    HopperRow{"sm90-backward-D64", 2560, 1024, 2432, 12.8, true},
                    HopperRow{"sm90-backward-D96", 1920, 512, 1792, 25.6, true},
                    HopperRow{"sm90-backward-D128", 2560, 512, 2432, 25.6, true},
                    HopperRow{"sm90-backward-D128Cluster", 2560, 512, 2560, 12.8, true},
                    HopperRow{"sm90-backward-wide-D192V128", 1280, 256, 1280, 16.0, true},
                    HopperRow{"sm90-backward-wide-D192", 1536, 256, 1664, 16.0, true},
                    HopperRow{"sm90-backward-wide-D256", 2048, 256, 2176, 16.0, true},
                    HopperRow{"sm90-backward-wide-dq-D192", 768, 0, 832, 16.0, true},
                    HopperRow{"sm90-backward-wide-dq-D256", 1024, 0, 1024, 16.0, true}),
    [](const testing::TestParamInfo<HopperRow>& param) {
      std::string name = param.param.kernel;
      for (char& c : name) {
        c = c == '-' ? '_' : c;
      }
      return name;
    });

// What each generation was limited by, and what the next one took away.
TEST(PlanAccount, BottleneckOfEachGeneration) {
  using Bottleneck = Account::Bottleneck;
  const auto bottleneck = [](const char* kernel, const char* device) {
    return account(find_kernel(kernel), find_device(device)).bottleneck;
  };
  EXPECT_EQ(bottleneck("standard-forward", "a100"), Bottleneck::kHbm);
  EXPECT_EQ(bottleneck("fa1-forward", "a100"), Bottleneck::kHbm);
  EXPECT_EQ(bottleneck("fa2-forward", "a100"), Bottleneck::kIdleTensorCores);
  EXPECT_EQ(bottleneck("fa2-forward", "h100"), Bottleneck::kIdleTensorCores);
  EXPECT_EQ(bottleneck("fa3-backward", "h100"), Bottleneck::kShared);
  // Tensor cores twice as fast, all else as before.
  EXPECT_EQ(bottleneck("fa3-forward", "b200"), Bottleneck::kExpAndShared);
  EXPECT_EQ(bottleneck("fa4-forward", "b200"), Bottleneck::kBalanced);
  EXPECT_EQ(bottleneck("fa4-backward", "b200"), Bottleneck::kShared);
  EXPECT_EQ(bottleneck("fa4-backward-2cta", "b200"), Bottleneck::kBalanced);
}

// The library's kernels fit the device they run on, by their own layouts.
TEST(PlanAccount, Sm90KernelsFit) {
  for (const Kernel& kernel : sm90_kernels()) {
    EXPECT_NO_THROW(require_fit(kernel, find_device("h200"))) << kernel.name;
  }
}

TEST(PlanAccount, SaysWhatOverflows) {
  const auto refusal = [](const Kernel& kernel, const char* device) -> std::string {
    try {
      require_fit(kernel, find_device(device));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "it fits";
  };
  // dK and dV of 128 keys alone take 256 registers of a consumer at head_dim 256.
  const std::string wide = refusal(hopper_backward({.head_dim = 256}), "h200");
  EXPECT_NE(wide.find("registers of a thread of consumer 0: 344, the device has 255"),
            std::string::npos)
      << wide;
  EXPECT_NE(wide.find("shared memory: bytes"), std::string::npos) << wide;
  const std::string tensor = refusal(fa4_backward(192, 1), "b200");
  EXPECT_NE(tensor.find("tensor memory: columns 640, the device has 512"), std::string::npos)
      << tensor;
  EXPECT_NE(refusal(fa4_forward(128), "h200").find("tensor memory"), std::string::npos);
}

// At head_dim 256 the reductions of 64 queries take longer than
// the products.
TEST(PlanAccount, ReductionsCountWhereTheRateIsKnown) {
  const Kernel& kernel = find_kernel("fa3-backward-d256");
  EXPECT_NEAR(account(kernel, find_device("h200")).l2_reduce, 64 * 256 * 4 / 17.0, 1e-9);
  EXPECT_EQ(account(kernel, find_device("h100")).l2_reduce, 0);
}

TEST(PlanAccount, SearchFindsTilesForHeadDim192) {
  const Device& h200 = find_device("h200");
  for (const int cluster : {1, 2}) {
    const std::vector<Kernel> found = search_hopper_backward(h200, 192, cluster);
    ASSERT_FALSE(found.empty()) << cluster;
    for (const Kernel& kernel : found) {
      EXPECT_TRUE(account(kernel, h200).overflows.empty());
      EXPECT_GE(account(kernel, h200).bound / kernel.pairs(),
                account(found.front(), h200).bound / found.front().pairs());
    }
  }
}

}  // namespace
}  // namespace flashgrad::plan
