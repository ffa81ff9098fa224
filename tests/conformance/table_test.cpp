// SPDX-License-Identifier: Apache-2.0
// Every case of the table of known faults on every target, against the oracle. right_test.cpp holds
// what their `right` says besides.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conformance.hpp"

namespace flashgrad::check {
namespace {

// How GoogleTest names and prints an entry.
struct Entry {
  const TableEntry* entry;
};
void PrintTo(const Entry& e, std::ostream* os) { *os << e.entry->right; }

std::vector<Entry> entries(bool on_a_cpu) {
  std::vector<Entry> result;
  for (const TableEntry& entry : table()) {
    if (entry.not_on_a_cpu.empty() == on_a_cpu) {
      result.push_back({&entry});
    }
  }
  return result;
}

class KnownFault : public testing::TestWithParam<Entry> {};

TEST_P(KnownFault, OnEveryTarget) {
  const TableEntry& entry = *GetParam().entry;
  const std::vector<Case> cases = cases_on(entry, tested_place());
  ASSERT_FALSE(cases.empty());
  for (const Case& c : cases) {
    expect_right(
        c, {.finite_gradients = entry.id == "one_huge_key" && tested_place() == Place::kCuda});
  }
}

INSTANTIATE_TEST_SUITE_P(Table, KnownFault, testing::ValuesIn(entries(true)),
                         [](const auto& test) { return test.param.entry->id; });

class GpuOnly : public testing::TestWithParam<Entry> {};

TEST_P(GpuOnly, IsRight) {
  for (const Case& c : cases_on(*GetParam().entry, tested_place())) {
    for (const Target& target : affordable(c)) {
      expect_right_copies(c, target);
    }
  }
}

// What a CPU can say of a case that is too large for it: the library takes it and asks for little
// workspace.
TEST_P(GpuOnly, IsAcceptedAtFullSize) {
  for (const Case& c : GetParam().entry->full_size) {
    EXPECT_GT(flops(c), 1e11);
    for (const Target& target : targets()) {
      const UseTarget use(target);
      const WorkspaceQuery query = query_workspace(c, target.backend);
      EXPECT_EQ(query.status, FG_OK) << target.name() << ": " << query.message;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GpuOnly, testing::ValuesIn(entries(false)),
                         [](const auto& test) { return test.param.entry->id; });

TEST(Table, HasItsLinesAndVariants) {
  EXPECT_EQ(table().size(), 59U);
  const auto count = [](const char* id) { return find_cases(id).size(); };
  EXPECT_EQ(count("big_logits"), 5U * 3U * 2U);
  EXPECT_EQ(count("odd_lengths_race"), 6U * 2U * 2U);
  EXPECT_EQ(count("grid_limits"), 2U);
  EXPECT_EQ(count("empty_dims"), 4U);
  EXPECT_EQ(find_cases("big_logits/30").front().seqlen_q, 128);
  EXPECT_EQ(find_cases("window_equals_causal").front().mask.left, 1023);
  EXPECT_THROW(find_cases("no_such_case"), std::invalid_argument);
  EXPECT_THROW(find_cases("over_2_31_elements"), std::invalid_argument);
  EXPECT_EQ(find_cases("over_2_31_elements/2", Place::kCuda).front().seqlen_q, 10496);
  EXPECT_EQ(find_cases("gqa_memory", Place::kCuda).front().batch, 24);
  EXPECT_EQ(find_cases("nan_in_query", Place::kCuda).front().dtype, DType::kBF16);
  EXPECT_THROW(parse_entry(R"({"id":"x","source":"","right":"","dtype":"f32","unknown":1})"),
               std::invalid_argument);
}

}  // namespace
}  // namespace flashgrad::check
