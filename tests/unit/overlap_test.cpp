// SPDX-License-Identifier: Apache-2.0
// The overlap test against a list of all bytes, on random small lattices and on the shapes of real
// tensors.
#include "api/overlap.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace flashgrad {
namespace {

// The address of each element, in index order.
std::vector<std::int64_t> elements(const ByteLattice& a) {
  std::vector<std::int64_t> addresses = {static_cast<std::int64_t>(a.base)};
  for (std::size_t k = 0; k < static_cast<std::size_t>(a.ndim); ++k) {
    std::vector<std::int64_t> longer;
    for (const std::int64_t address : addresses) {
      for (std::int64_t i = 0; i < a.shape[k]; ++i) {
        longer.push_back(address + i * a.stride_bytes[k]);
      }
    }
    addresses = longer;
  }
  return addresses;
}

std::set<std::int64_t> bytes(const ByteLattice& a) {
  std::set<std::int64_t> result;
  for (const std::int64_t address : elements(a)) {
    for (std::int64_t byte = 0; byte < a.element_bytes; ++byte) {
      result.insert(address + byte);
    }
  }
  return result;
}

bool share_bytes(const ByteLattice& a, const ByteLattice& b) {
  const std::set<std::int64_t> of_b = bytes(b);
  for (const std::int64_t byte : bytes(a)) {
    if (of_b.contains(byte)) {
      return true;
    }
  }
  return false;
}

bool repeats_an_element(const ByteLattice& a) {
  const std::vector<std::int64_t> all = elements(a);
  return std::set<std::int64_t>(all.begin(), all.end()).size() != all.size();
}

std::string describe(const ByteLattice& a) {
  std::string s = "base " + std::to_string(a.base) + " width " + std::to_string(a.element_bytes);
  for (std::size_t k = 0; k < static_cast<std::size_t>(a.ndim); ++k) {
    s += " " + std::to_string(a.shape[k]) + "x" + std::to_string(a.stride_bytes[k]);
  }
  return s;
}

ByteLattice random_lattice(std::mt19937_64& rng) {
  const auto pick = [&rng](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
  };
  ByteLattice a;
  a.element_bytes = std::int64_t{1} << pick(0, 3);
  a.base = static_cast<std::uintptr_t>(1000 + a.element_bytes * pick(0, 40));
  a.ndim = static_cast<int>(pick(0, 4));
  for (std::size_t k = 0; k < static_cast<std::size_t>(a.ndim); ++k) {
    a.shape[k] = pick(0, 9) == 0 ? 0 : pick(1, 4);
    a.stride_bytes[k] = a.element_bytes * pick(-12, 12);
  }
  return a;
}

TEST(Overlap, RandomLattices) {
  constexpr std::uint64_t kSeed = 20240607;
  std::mt19937_64 rng(kSeed);
  int shared = 0;
  int repeated = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    const ByteLattice a = random_lattice(rng);
    const ByteLattice b = random_lattice(rng);
    const bool truth = share_bytes(a, b);
    ASSERT_EQ(overlap(a, b), truth ? Overlap::kShared : Overlap::kNone)
        << "seed " << kSeed << " round " << round << ": " << describe(a) << " and " << describe(b);
    const bool repeats = repeats_an_element(a);
    ASSERT_EQ(self_overlap(a), repeats ? Overlap::kShared : Overlap::kNone)
        << "seed " << kSeed << " round " << round << ": " << describe(a);
    shared += truth ? 1 : 0;
    repeated += repeats ? 1 : 0;
  }
  EXPECT_GT(shared, kRounds / 10);
  EXPECT_LT(shared, kRounds * 9 / 10);
  EXPECT_GT(repeated, kRounds / 10);
  EXPECT_LT(repeated, kRounds * 9 / 10);
}

// (batch 70000, rows 4096, heads 32, dim 128) of bf16: three slices of one buffer, head-major and
// row-major.
TEST(Overlap, SlicesOfOneHugeBuffer) {
  const auto slice = [](std::int64_t begin, std::int64_t head_stride) {
    return ByteLattice{
        static_cast<std::uintptr_t>(1 << 20) + static_cast<std::uintptr_t>(2 * begin),
        4,
        {70000, 4096, 32, 128},
        {std::int64_t{2} * 4096 * 12288, 24576, 2 * head_stride, 2},
        2};
  };
  EXPECT_EQ(overlap(slice(0, 128), slice(4096, 128)), Overlap::kNone) << "q and k side by side";
  EXPECT_EQ(overlap(slice(0, 384), slice(128, 384)), Overlap::kNone) << "interleaved by head";
  EXPECT_EQ(overlap(slice(0, 384), slice(127, 384)), Overlap::kShared)
      << "one element of each head";
  EXPECT_EQ(overlap(slice(0, 128), slice(0, 128)), Overlap::kShared);
  EXPECT_EQ(self_overlap(slice(0, 384)), Overlap::kNone);
  EXPECT_EQ(self_overlap(slice(0, 127)), Overlap::kShared) << "heads run into each other";
}

// Strides that no tensor has may be left undecided, but not take long.
TEST(Overlap, ContrivedStridesEndSoon) {
  const std::int64_t big = std::int64_t{1} << 28;
  const ByteLattice a{0, 4, {big, big, big, big}, {big + 1, big - 1, big + 3, big - 3}, 1};
  EXPECT_NE(self_overlap(a), Overlap::kNone);
  const ByteLattice b{static_cast<std::uintptr_t>(big / 2),
                      4,
                      {big, big, big, big},
                      {big, 2 * big, 4 * big, 8 * big},
                      1};
  const ByteLattice c{0, 4, {big, big, big, big}, {big, 2 * big, 4 * big, 8 * big}, 1};
  EXPECT_NE(overlap(b, c), Overlap::kShared);
}

}  // namespace
}  // namespace flashgrad
