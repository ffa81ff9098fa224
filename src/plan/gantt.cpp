// SPDX-License-Identifier: Apache-2.0
// A timeline as an SVG file.
#include <fmt/format.h>

#include <algorithm>

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

}  // namespace flashgrad::plan
