// SPDX-License-Identifier: Apache-2.0
// Devices as data: figures, sources, refusals.
#include "plan/device.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace flashgrad::plan {
namespace {

TEST(PlanDevice, EveryFigureHasASource) {
  ASSERT_EQ(devices().size(), 4U);
  for (const Device& device : devices()) {
    EXPECT_EQ(device.sources.size(), std::size(kDeviceFields)) << device.name;
  }
}

// The products per clock, the clock and the SMs make the data sheet's rate.
TEST(PlanDevice, PeakRatesAreThoseOfTheDataSheets) {
  EXPECT_NEAR(find_device("a100").mma_flop_per_s() / 312e12, 1, 0.01);
  EXPECT_NEAR(find_device("h100").mma_flop_per_s() / 989e12, 1, 0.01);
  EXPECT_NEAR(find_device("b200").mma_flop_per_s() / 2250e12, 1, 0.01);
}

TEST(PlanDevice, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(find_device("h20"), std::invalid_argument);
  EXPECT_THROW(parse_device("{"), std::invalid_argument);
  EXPECT_THROW(parse_device(R"({"name": "x", "what": "x", "figures": {}})"), std::invalid_argument);
  std::string figures;
  for (const DeviceField& field : kDeviceFields) {
    figures += (figures.empty() ? "" : ", ") + ('"' + std::string(field.key)) +
               R"(": {"value": 1, "source": "a test"})";
  }
  const auto text = [](const std::string& f) {
    return R"({"name": "x", "what": "a test", "figures": {)" + f + "}}";
  };
  EXPECT_EQ(parse_device(text(figures)).sm_count, 1);
  EXPECT_THROW(parse_device(text(figures + R"(, "wings": {"value": 2, "source": "a test"})")),
               std::invalid_argument);
  const std::size_t at = figures.find("a test");
  EXPECT_THROW(parse_device(text(figures.replace(at, 6, ""))), std::invalid_argument);
}

// Whatever a file says, the refusal names the figure, in one line.
TEST(PlanDevice, NamesTheFigureThatIsDamaged) {
  const auto refusal = [](const std::string& key, const std::string& value,
                          const std::string& source = "\"a test\"") -> std::string {
    std::string figures;
    for (const DeviceField& field : kDeviceFields) {
      const bool damaged = key == field.key;
      figures += (figures.empty() ? "" : ", ") + ('"' + std::string(field.key)) +
                 R"(": {"value": )" + (damaged ? value : "1") + R"(, "source": )" +
                 (damaged ? source : "\"a test\"") + "}";
    }
    try {
      parse_device(R"({"name": "x", "what": "a test", "figures": {)" + figures + "}}");
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  for (const char* const value : {"0", "-1", "null", "true", "\"1\"", "[]", "1e300", "1e-300"}) {
    EXPECT_EQ(refusal("clock_mhz", value),
              "device 'x': clock_mhz: must be a number from 0.001 to 1e+18")
        << value;
  }
  EXPECT_EQ(refusal("dsmem_bytes_per_clk", "0"), "");
  EXPECT_EQ(refusal("dsmem_bytes_per_clk", "null"), "");
  EXPECT_EQ(refusal("dsmem_bytes_per_clk", "-1"),
            "device 'x': dsmem_bytes_per_clk: must be null, 0 or a number from 0.001 to 1e+18");
  EXPECT_EQ(refusal("sm_count", "1.5"), "device 'x': sm_count: must be a whole number");
  EXPECT_EQ(refusal("power_w", "1", "7"), "device 'x': power_w: source must be a text");
  EXPECT_NE(refusal("power_w", "1", R"("a\nb")").find("power_w: source must have"),
            std::string::npos);
  for (const char* const text : {"", "[]", "null", "7", "{\"name\": 7}", "\xff"}) {
    try {
      parse_device(text);
      ADD_FAILURE() << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()).find("device file: "), 0U) << error.what();
    }
  }
}

TEST(PlanDevice, ThisCpuHasThreadsAndMemory) {
  const Cpu cpu = this_cpu();
  EXPECT_FALSE(cpu.instruction_set.empty());
  EXPECT_GE(cpu.threads, 1);
  EXPECT_GT(cpu.memory_bytes, 0);
}

}  // namespace
}  // namespace flashgrad::plan
