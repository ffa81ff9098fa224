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

TEST(PlanDevice, ThisCpuHasThreadsAndMemory) {
  const Cpu cpu = this_cpu();
  EXPECT_FALSE(cpu.instruction_set.empty());
  EXPECT_GE(cpu.threads, 1);
  EXPECT_GT(cpu.memory_bytes, 0);
}

}  // namespace
}  // namespace flashgrad::plan
