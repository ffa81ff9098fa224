// SPDX-License-Identifier: Apache-2.0
// What the `right` sentences of the table say of memory: the workspace that a backend asks for at
// the table's full sizes. Nothing is run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "conformance.hpp"

namespace flashgrad::check {
namespace {

const Case& full_size_case(std::string_view id) {
  return std::find_if(table().begin(), table().end(), [&](const auto& e) { return e.id == id; })
      ->full_size.front();
}

TEST(Right, GqaMemory) {
  const Case& c = full_size_case("gqa_memory");
  EXPECT_EQ(c.batch, 24);
  const double heads_q_copy = 24.0 * 12288 * 16 * 256 * 2 * 2;  // dk and dv in bf16
  for (const Target& target : targets()) {
    const UseTarget use(target);
    const WorkspaceQuery query = query_workspace(c, target.backend);
    ASSERT_EQ(query.status, FG_OK) << query.message;
    EXPECT_LT(static_cast<double>(query.preferred[FG_BACKWARD]), heads_q_copy / 2) << target.name();
  }
}

TEST(Right, Int64Workspace) {
  const Case& c = full_size_case("int64_workspace");
  EXPECT_EQ(c.batch, 44);
  Case twice = c;
  for (auto* cu : {&twice.cu_seqlens_q, &twice.cu_seqlens_kv}) {
    for (std::int32_t& offset : *cu) {
      offset *= 2;
    }
  }
  twice.seqlen_q *= 2;
  twice.seqlen_kv *= 2;
  Case huge = small_cases("sequence_4m").front();
  // Where an S^2 or 32 bits would show; a GPU's tensor maps count rows in 32 bits.
  const int log2_rows = tested_place() == Place::kCuda ? 29 : 40;
  huge.seqlen_q = huge.seqlen_kv = std::int64_t{1} << log2_rows;
  huge.id.clear();
  for (const Target& target : targets()) {
    const UseTarget use(target);
    const WorkspaceQuery one = query_workspace(c, target.backend);
    const WorkspaceQuery two = query_workspace(twice, target.backend);
    const WorkspaceQuery most = query_workspace(huge, target.backend);
    ASSERT_EQ(one.status, FG_OK) << one.message;
    ASSERT_EQ(two.status, FG_OK) << two.message;
    ASSERT_EQ(most.status, FG_OK) << most.message;
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      EXPECT_LE(one.minimum[pass], one.preferred[pass]);
      EXPECT_LE(static_cast<double>(two.preferred[pass]),
                2.1 * static_cast<double>(one.preferred[pass]) + 1e7)
          << target.name();
      EXPECT_LT(static_cast<double>(most.preferred[pass]), std::ldexp(32.0 * 4 * 20, log2_rows))
          << target.name();
    }
  }
}

}  // namespace
}  // namespace flashgrad::check
