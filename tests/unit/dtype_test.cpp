// SPDX-License-Identifier: Apache-2.0
// The scalar conversions against the formats' definitions: all 65536 values, and every place where
// rounding decides.
#include "core/dtype.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace flashgrad {
namespace {

// Storage for one element of any dtype: the compiler sees the cases of the other dtypes, too.
using Element = std::array<std::uint16_t, 4>;

// A 16-bit format and the functions under test.
struct Format {
  DType dtype;
  int mantissa_bits;
  int exponent_bits;
  float (*to_f32)(std::uint16_t);
  std::uint16_t (*from_f32)(float);

  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }

  // What the bits mean, for magnitudes below infinity.
  [[nodiscard]] double value(int magnitude) const {
    const int exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    return exponent == 0
               ? std::ldexp(mantissa, 1 - bias() - mantissa_bits)
               : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
  }

  [[nodiscard]] std::uint16_t from_f64(double x) const {
    Element element{};
    store_f64(element.data(), dtype, 0, x);
    return element[0];
  }

  [[nodiscard]] double to_f64(std::uint16_t bits) const {
    const Element element{bits};
    return load_f64(element.data(), dtype, 0);
  }
};

class SixteenBit : public ::testing::TestWithParam<Format> {};

INSTANTIATE_TEST_SUITE_P(Dtype, SixteenBit,
                         ::testing::Values(Format{DType::kBF16, 7, 8, bf16_to_f32, f32_to_bf16},
                                           Format{DType::kF16, 10, 5, f16_to_f32, f32_to_f16}),
                         [](const auto& param) { return std::string(name(param.param.dtype)); });

TEST_P(SixteenBit, EveryValueMeansWhatItsBitsSayAndComesBack) {
  const Format f = GetParam();
  for (int bits = 0; bits < 65536; ++bits) {
    const auto x = static_cast<std::uint16_t>(bits);
    const int magnitude = bits & 0x7fff;
    const bool negative = bits >= 0x8000;
    const float widened = f.to_f32(x);
    ASSERT_EQ(std::signbit(widened), negative) << bits;
    if (magnitude > f.infinity()) {
      ASSERT_TRUE(std::isnan(widened)) << bits;
      const float back = f.to_f32(f.from_f32(widened));
      ASSERT_TRUE(std::isnan(back) && std::signbit(back) == negative) << bits;
      continue;
    }
    const double meant =
        magnitude == f.infinity() ? std::numeric_limits<double>::infinity() : f.value(magnitude);
    ASSERT_EQ(std::abs(static_cast<double>(widened)), meant) << bits;
    ASSERT_EQ(f.to_f64(x), static_cast<double>(widened)) << bits;
    ASSERT_EQ(f.from_f32(widened), x) << bits;
    ASSERT_EQ(f.from_f64(widened), x) << bits;
  }
}

// Between each two neighbours (the last pair is the largest finite value and infinity): the halfway
// point goes to the even one, the closest numbers on its two sides go to theirs. In f64 those sides
// are nearer than f32 can tell from halfway.
TEST_P(SixteenBit, RoundsToNearestEvenBetweenAllNeighbours) {
  const Format f = GetParam();
  const double infinity = std::numeric_limits<double>::infinity();
  for (int low = 0; low < f.infinity(); ++low) {
    const int high = low + 1;
    const int even = low % 2 == 0 ? low : high;
    const double below = f.value(low);
    // The step past the largest value is the step before it.
    const double step = high == f.infinity() ? below - f.value(low - 1) : f.value(high) - below;
    const double halfway = below + step / 2;
    for (const int sign : {0, 0x8000}) {
      const double s = sign == 0 ? 1 : -1;
      const auto bits = [sign](int magnitude) {
        return static_cast<std::uint16_t>(magnitude | sign);
      };
      ASSERT_EQ(f.from_f64(s * halfway), bits(even)) << low;
      ASSERT_EQ(f.from_f64(s * std::nextafter(halfway, 0.0)), bits(low)) << low;
      ASSERT_EQ(f.from_f64(s * std::nextafter(halfway, infinity)), bits(high)) << low;
      ASSERT_EQ(f.from_f64(s * (below + step / 4)), bits(low)) << low;
      ASSERT_EQ(f.from_f64(s * (below + 3 * step / 4)), bits(high)) << low;

      const auto halfway_f32 = static_cast<float>(halfway);
      ASSERT_EQ(static_cast<double>(halfway_f32), halfway) << "f32 holds every halfway point";
      const auto sf = static_cast<float>(s);
      ASSERT_EQ(f.from_f32(sf * halfway_f32), bits(even)) << low;
      ASSERT_EQ(f.from_f32(sf * std::nextafter(halfway_f32, 0.0F)), bits(low)) << low;
      ASSERT_EQ(
          f.from_f32(sf * std::nextafter(halfway_f32, std::numeric_limits<float>::infinity())),
          bits(high))
          << low;
    }
  }
}

TEST_P(SixteenBit, BeyondTheRange) {
  const Format f = GetParam();
  const auto negative = [](std::uint16_t bits) {
    return static_cast<std::uint16_t>(bits | 0x8000);
  };
  for (const double huge : {1e39, 1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(f.from_f64(huge), f.infinity());
    EXPECT_EQ(f.from_f64(-huge), negative(f.infinity()));
  }
  EXPECT_EQ(f.from_f32(std::numeric_limits<float>::max()), f.infinity());
  EXPECT_EQ(f.from_f32(std::numeric_limits<float>::infinity()), f.infinity());
  for (const double tiny : {0.0, std::numeric_limits<double>::denorm_min(), 1e-300, 1e-50}) {
    EXPECT_EQ(f.from_f64(tiny), 0);
    EXPECT_EQ(f.from_f64(-tiny), 0x8000) << "the sign of zero stays";
  }
  for (const double nan :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::signaling_NaN()}) {
    EXPECT_TRUE(std::isnan(f.to_f32(f.from_f64(nan))));
  }
  // A NaN whose payload lies only in the bits that are cut off must not become infinity.
  EXPECT_TRUE(std::isnan(f.to_f32(f.from_f32(std::bit_cast<float>(0x7f800001U)))));
  EXPECT_TRUE(std::isnan(f.to_f32(f.from_f32(std::bit_cast<float>(0xff800001U)))));
}

TEST(Dtype, F32AndF64AreStoredAsTheLanguageConverts) {
  const std::vector<double> values = {0.1,  -1.0 / 3,    1e-45,
                                      3e38, 1 + 0x1p-24, 1 + 0x1p-24 + 0x1p-50};
  std::vector<float> f32(values.size());
  std::vector<double> f64(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_f64(f32.data(), DType::kF32, static_cast<std::int64_t>(i), values[i]);
    store_f64(f64.data(), DType::kF64, static_cast<std::int64_t>(i), values[i]);
  }
  EXPECT_EQ(f64, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(f32[i], static_cast<float>(values[i]));
    EXPECT_EQ(load_f64(f32.data(), DType::kF32, static_cast<std::int64_t>(i)),
              static_cast<double>(f32[i]));
    EXPECT_EQ(load_f64(f64.data(), DType::kF64, static_cast<std::int64_t>(i)), values[i]);
  }
  EXPECT_EQ(f32[4], 1.0F) << "halfway between 1 and 1 + 2^-23 goes to the even one";
  EXPECT_EQ(f32[5], 1 + 0x1p-23F);
}

TEST(Dtype, SizesAndNames) {
  EXPECT_EQ(size_bytes(DType::kF64), 8);
  EXPECT_EQ(size_bytes(DType::kF32), 4);
  EXPECT_EQ(size_bytes(DType::kBF16), 2);
  EXPECT_EQ(size_bytes(DType::kF16), 2);
  EXPECT_STREQ(name(DType::kF64), "f64");
  EXPECT_STREQ(name(DType::kF32), "f32");
  EXPECT_STREQ(name(DType::kBF16), "bf16");
  EXPECT_STREQ(name(DType::kF16), "f16");
}

}  // namespace
}  // namespace flashgrad
