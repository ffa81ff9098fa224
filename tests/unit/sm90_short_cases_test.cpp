// SPDX-License-Identifier: Apache-2.0
// The short table under compute-sanitizer (tests/cuda/sanitize.sh) reaches every backward kernel on
// a device of 132 multiprocessors.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "../cuda/backward_case.hpp"
#include "cuda/sm90/bwd_plan.hpp"
#include "cuda/sm90/bwd_short.hpp"

namespace flashgrad {
namespace {

TEST(Sm90ShortCases, ReachEveryKernel) {
  std::set<int> main_kernels, finished_widths;
  std::set<int> served;                     // main kernels whose tiles prepare and finish units
  std::set<std::pair<int, bool>> dq_alone;  // padded width, softcap
  std::set<std::pair<int, int>> wide;       // with room for dS and without it
  std::set<std::pair<int, int>> one_cta;    // ShortSize
  std::set<DType> summed;                   // dk and dv of key heads in parts
  for (const Case& c : short_cases()) {
    Problem p = c.p;
    if (!c.lens_q.empty()) {
      p.packed = true;
      p.batch = static_cast<std::int64_t>(c.lens_q.size());
      p.seqlen_q = p.seqlen_kv = 400;
      p.max_seqlen_q = p.max_seqlen_kv = c.max_seqlen > 0 ? c.max_seqlen : 400;
    }
    if (sm90::serves_short(p)) {
      const sm90::ShortSize size = sm90::short_size(p);
      one_cta.insert({size.head_dim, size.keys});
      continue;
    }
    const std::int64_t parts = sm90::head_parts(p, 132);
    if (parts > 1) {
      summed.insert(p.dtype);
    }
    p = sm90::divide_heads(p, parts);
    const sm90::BwdPlan plan = sm90::make_plan(p, 132);
    if (plan.has_main(p)) {
      main_kernels.insert(plan.variant);
    }
    if (plan.units.lag > 0 && plan.units.lead > 0) {
      served.insert(plan.variant);
      EXPECT_GT(sm90::num_units(p), plan.units.slots) << "no unit has its slot after another";
    } else if (plan.accumulates_dq(p) && !plan.ordered()) {
      finished_widths.insert(plan.padded_head_dim);
    }
    if (plan.separate_dq) {
      dq_alone.insert({plan.padded_head_dim, p.softcap > 0});
    }
    if (plan.variant < 0 && p.wants_dk) {
      wide.insert({static_cast<int>(p.head_dim), static_cast<int>(p.head_dim_v)});
    }
  }
  for (int i = 0; i < sm90::kNumVariants; ++i) {
    EXPECT_EQ(main_kernels.count(i), 1U) << "variant " << i;
    EXPECT_EQ(served.count(i), sm90::kBwdConfigs[i].serves_units() ? 1U : 0U) << "variant " << i;
  }
  EXPECT_EQ(finished_widths, (std::set<int>{64, 96, 128}));
  for (const int width : {64, 128, 256}) {
    for (const bool softcap : {false, true}) {
      EXPECT_EQ(dq_alone.count({width, softcap}), 1U) << width << (softcap ? " softcap" : "");
    }
  }
  EXPECT_EQ(summed, (std::set<DType>{DType::kBF16, DType::kF16}));
  EXPECT_EQ(one_cta,
            (std::set<std::pair<int, int>>{{64, 32}, {64, 64}, {64, 128}, {128, 32}, {128, 64}}));
  EXPECT_EQ(wide, (std::set<std::pair<int, int>>{{192, 128}, {192, 192}, {256, 256}}));
}

}  // namespace
}  // namespace flashgrad
