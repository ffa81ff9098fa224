// SPDX-License-Identifier: Apache-2.0
// The grids of other libraries' test suites, sampled. FLASHGRAD_GRID_SEED and FLASHGRAD_GRID_COUNT
// choose the sample.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "conformance.hpp"

namespace flashgrad::check {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

TEST(Grid, Sample) {
  const std::uint64_t seed = from_environment("FLASHGRAD_GRID_SEED", 20260101);
  const std::uint64_t count = from_environment("FLASHGRAD_GRID_COUNT", 250);
  std::printf("FLASHGRAD_GRID_SEED=%llu FLASHGRAD_GRID_COUNT=%llu\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(count));
  // Where one fails many do; a few tell enough.
  constexpr int kMaxFailures = 5;
  const testing::TestResult& result =
      *testing::UnitTest::GetInstance()->current_test_info()->result();
  for (std::uint64_t n = 0; n < count && result.total_part_count() < kMaxFailures; ++n) {
    Case c = as_taken(random_case(seed + n));
    expect_right(c);
    // f64 is the reference backend's alone.
    if (n % 8 == 0 && targets().back().takes(DType::kF64) &&
        flops(c) <= targets().back().max_flops) {
      c.dtype = DType::kF64;
      c.grad_f32 = false;
      expect_right(c);
    }
  }
}

// The printed command stands for the same case: its --shape reads back.
TEST(Grid, ShapeTextReadsBack) {
  for (std::uint64_t seed = 1; seed < 300; ++seed) {
    const Case c = random_case(seed);
    Case again = parse_shape(shape_text(c));
    EXPECT_EQ(shape_text(again), shape_text(c));
    again.dtype = c.dtype;
    again.grad_f32 = c.grad_f32;
    again.mask = c.mask;
    again.scale = c.scale;
    again.softcap = c.softcap;
    again.seed = c.seed;
    EXPECT_EQ(command_line(again), command_line(c));
    EXPECT_EQ(flops(again), flops(c));
  }
}

}  // namespace
}  // namespace flashgrad::check
