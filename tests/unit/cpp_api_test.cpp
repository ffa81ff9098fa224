// SPDX-License-Identifier: Apache-2.0
// What flashgrad.hpp adds to the C functions.
#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <utility>

#include "flashgrad/flashgrad.hpp"

namespace flashgrad {
namespace {

TEST(Workspace, GrowsAndIsKept) {
  Workspace workspace;
  const std::span<std::byte> first = workspace.at_least(100);
  EXPECT_GE(first.size(), 100U);
  EXPECT_EQ(workspace.at_least(10).data(), first.data());
  EXPECT_GE(workspace.at_least(1000).size(), 1000U);
}

// As after an allocation that failed, there is no memory, whatever there was before.
TEST(Workspace, IsUsableAfterItWasMovedFrom) {
  Workspace workspace;
  const std::byte* const memory = workspace.at_least(100).data();
  Workspace other = std::move(workspace);
  EXPECT_EQ(other.at_least(100).data(), memory);
  // NOLINTNEXTLINE(bugprone-use-after-move): a program may do so, too
  const std::span<std::byte> again = workspace.at_least(10);
  ASSERT_NE(again.data(), nullptr);
  EXPECT_GE(again.size(), 10U);
  EXPECT_NE(again.data(), memory);
}

}  // namespace
}  // namespace flashgrad
