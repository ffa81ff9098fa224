// SPDX-License-Identifier: Apache-2.0
// What `flashgrad plan` prints, as SVG files.
#pragma once

#include <string>
#include <vector>

#include "plan/account.hpp"
#include "plan/memory.hpp"
#include "plan/schedule.hpp"
#include "plan/simulator.hpp"

namespace flashgrad::plan {

// Processors as rows, tiles as bars in the colour of their unit, waiting dark before and behind
// them; clusters that serve a unit are white.
std::string gantt_svg(const Timeline& timeline, const std::string& title, int max_processors = 40);

// Cycles of products, exponentials and shared memory of each kernel as bars.
std::string bars_svg(const std::vector<Kernel>& kernels, const Device& device);

// How long the tensor cores are busy at best, and what binds: a row for each kernel, a column for
// each device.
std::string generations_svg(const std::vector<Kernel>& kernels, const std::vector<Device>& devices);

// Each buffer as a bar, on a logarithmic scale.
std::string memory_svg(const MemoryPlan& standard, const MemoryPlan& recomputing);

// Roles, tensor pipes and copies as rows, what they do in the order in which it happened, in the
// colour of its tile.
std::string trace_svg(const Program& program, const std::vector<TraceEvent>& trace);

// Measured along, predicted upwards, both in powers of ten; grey: 15 % to either side.
struct PredictedPoint {
  double measured;
  double predicted;
  int series;  // its colour
};
std::string scatter_svg(const std::vector<PredictedPoint>& points,
                        const std::vector<std::string>& series);

}  // namespace flashgrad::plan
