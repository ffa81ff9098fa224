// SPDX-License-Identifier: Apache-2.0
// Timelines and accounts as SVG files.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "plan/account.hpp"
#include "plan/schedule.hpp"

namespace flashgrad::plan {

std::string gantt_svg(const Timeline& timeline, const std::string& title, int max_processors) {
  constexpr double kWidth = 900;
  constexpr double kRow = 9;
  constexpr double kTop = 26;
  int processors = 0;
  for (const Interval& interval : timeline.intervals) {
    processors = std::max(processors, interval.processor + 1);
  }
  processors = std::min(processors, max_processors);
  const double height = kTop + kRow * processors + 22;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n<text x=\"4\" y=\"16\">{2}</text>\n",
      kWidth, height, title);
  const double scale = kWidth / std::max(timeline.makespan, 1.0);
  for (const Interval& interval : timeline.intervals) {
    if (interval.processor >= processors) {
      continue;
    }
    const double y = kTop + kRow * interval.processor;
    const double x = interval.begin * scale;
    const double wait = interval.waiting * scale;
    const double width = (interval.end - interval.begin) * scale - wait;
    // Neighbouring units differ in hue.
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"8\" "
        "fill=\"hsl({},55%,65%)\"/>\n",
        x, y, width, interval.unit * 137 % 360);
    if (wait >= 0.05) {
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"8\" fill=\"#333\"/>\n",
          x + width, y, wait);
    }
  }
  return svg +
         fmt::format(
             "<text x=\"4\" y=\"{:.0f}\">{} processors of {:.0f} thousand cycles; a colour is "
             "a head; dark: waiting for a turn</text>\n</svg>\n",
             height - 6, processors, timeline.makespan / 1000);
}

std::string bars_svg(const std::vector<Kernel>& kernels, const Device& device) {
  constexpr double kWidth = 760;
  constexpr double kNames = 190;
  constexpr double kBar = 11;
  constexpr double kGroup = 3 * kBar + 10;
  constexpr double kTop = 30;
  double longest = 1;
  for (const Kernel& kernel : kernels) {
    const Account a = account(kernel, device);
    longest = std::max({longest, a.mma, a.exp, a.shared});
  }
  const double height = kTop + kGroup * static_cast<double>(kernels.size()) + 4;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
      "<text x=\"4\" y=\"16\">{2}: cycles of a CTA for a tile; blue products, orange exp, green "
      "shared "
      "memory</text>\n",
      kWidth, height, device.name);
  double y = kTop;
  for (const Kernel& kernel : kernels) {
    const Account a = account(kernel, device);
    svg += fmt::format("<text x=\"4\" y=\"{:.0f}\">{}</text>\n", y + 2 * kBar, kernel.name);
    double bar = y;
    for (const auto& [cycles, colour] :
         {std::pair{a.mma, "#4878d0"}, {a.exp, "#ee854a"}, {a.shared, "#6acc64"}}) {
      const double width = cycles / longest * (kWidth - kNames - 50);
      svg += fmt::format(
          "<rect x=\"{}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"/>\n"
          "<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"10\">{:.0f}</text>\n",
          kNames, bar, width, kBar - 1, colour, kNames + width + 4, bar + kBar - 2, cycles);
      bar += kBar;
    }
    y += kGroup;
  }
  return svg + "</svg>\n";
}

}  // namespace flashgrad::plan
