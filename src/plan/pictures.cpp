// SPDX-License-Identifier: Apache-2.0
// Implements pictures.hpp.
#include "plan/pictures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace flashgrad::plan {
namespace {

// Names may come from a file.
std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    safe += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return safe;
}

std::string svg_head(double width, double height, const std::string& title) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n<text x=\"4\" y=\"16\">{2}</text>\n",
      width, height, escaped(title));
}

// Neighbouring numbers differ in hue.
std::string colour_of(std::int64_t number) {
  return fmt::format("hsl({},55%,65%)", number * 137 % 360);
}

}  // namespace

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
  std::string svg = svg_head(kWidth, height, title);
  const double scale = kWidth / std::max(timeline.makespan, 1.0);
  for (const Interval& interval : timeline.intervals) {
    if (interval.processor >= processors) {
      continue;
    }
    const double y = kTop + kRow * interval.processor;
    const double x = interval.begin * scale;
    const double wait_before = interval.waiting_before * scale;
    const double wait = interval.waiting * scale - wait_before;
    const double width = (interval.end - interval.begin) * scale - wait - wait_before;
    svg +=
        fmt::format("<rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"8\" fill=\"{}\"/>\n",
                    x + wait_before, y, width,
                    interval.serves ? "#fff\" stroke=\"#000" : colour_of(interval.unit));
    for (const auto& [at, length] : {std::pair{x, wait_before}, {x + wait_before + width, wait}}) {
      if (length >= 0.05) {
        svg += fmt::format(
            "<rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"8\" fill=\"#333\"/>\n", at,
            y, length);
      }
    }
  }
  return svg +
         fmt::format(
             "<text x=\"4\" y=\"{:.0f}\">{} processors of {:.0f} thousand cycles; a colour is "
             "a head; dark: waiting; white: serves a unit</text>\n</svg>\n",
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
  std::string svg = svg_head(
      kWidth, height,
      device.name + ": cycles of a CTA for a tile; blue products, orange exp, green shared memory");
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

std::string generations_svg(const std::vector<Kernel>& kernels,
                            const std::vector<Device>& devices) {
  constexpr double kNames = 140;
  constexpr double kColumn = 190;
  constexpr double kBar = 170;  // all of the time
  constexpr double kRow = 34;
  constexpr double kTop = 50;
  std::string svg =
      svg_head(kNames + kColumn * static_cast<double>(devices.size()),
               kTop + kRow * static_cast<double>(kernels.size()) + 4,
               "share of the time in which the tensor cores are busy, and what binds");
  double x = kNames;
  for (const Device& device : devices) {
    svg += fmt::format("<text x=\"{:.0f}\" y=\"38\" font-weight=\"bold\">{}</text>\n", x,
                       escaped(device.name));
    double y = kTop;
    for (const Kernel& kernel : kernels) {
      if (x == kNames) {
        svg += fmt::format("<text x=\"4\" y=\"{:.0f}\">{}</text>\n", y + 12, kernel.name);
      }
      const Account a = account(kernel, device);
      const bool fits = a.overflows.empty();
      svg += fmt::format(
          "<rect x=\"{0:.0f}\" y=\"{1:.0f}\" width=\"{2}\" height=\"12\" fill=\"#eee\"/>\n<rect "
          "x=\"{0:.0f}\" y=\"{1:.0f}\" width=\"{3:.1f}\" height=\"12\" fill=\"#4878d0\"/>\n<text "
          "x=\"{0:.0f}\" y=\"{4:.0f}\" font-size=\"10\">{5}</text>\n",
          x, y, kBar, fits ? a.busy() * kBar : 0, y + 23,
          fits ? fmt::format("{:.0f} %, {}", 100 * a.busy(), name_of(a.bottleneck))
               : std::string("does not fit"));
      y += kRow;
    }
    x += kColumn;
  }
  return svg + "</svg>\n";
}

std::string memory_svg(const MemoryPlan& standard, const MemoryPlan& recomputing) {
  constexpr double kWidth = 760;
  constexpr double kNames = 170;
  constexpr double kRow = 16;
  constexpr double kDecade = 55;  // bytes: of ten times as many
  const auto rows = static_cast<double>(standard.lines.size() + recomputing.lines.size() + 2);
  std::string svg =
      svg_head(kWidth, 30 + kRow * rows,
               "memory of a backward pass, a bar for each buffer, on a logarithmic scale");
  double y = 26;
  for (const auto& [name, plan] :
       {std::pair{"P stored", &standard}, std::pair{"P made again", &recomputing}}) {
    svg += fmt::format("<text x=\"4\" y=\"{:.0f}\" font-weight=\"bold\">{}</text>\n", y + 12, name);
    y += kRow;
    for (const MemoryLine& line : plan->lines) {
      const double width = kDecade * std::log10(std::max(line.bytes / 1e3, 1.0));
      svg += fmt::format(
          "<text x=\"14\" y=\"{:.0f}\">{}</text>\n<rect x=\"{}\" y=\"{:.0f}\" width=\"{:.1f}\" "
          "height=\"12\" fill=\"#4878d0\"/>\n<text x=\"{:.0f}\" y=\"{:.0f}\">{:.3g} GB</text>\n",
          y + 12, escaped(line.buffer), kNames, y + 2, width, kNames + width + 4, y + 12,
          line.bytes / 1e9);
      y += kRow;
    }
  }
  return svg + "</svg>\n";
}

std::string trace_svg(const Program& program, const std::vector<TraceEvent>& trace) {
  constexpr double kNames = 190;
  constexpr double kStep = 6;
  constexpr double kRow = 18;
  constexpr double kTop = 26;
  const auto roles = static_cast<int>(program.roles.size());
  const auto name_of_lane = [&](int lane) -> std::string {
    if (lane >= 2 * roles) {
      return "tensor pipe " + std::to_string(lane - 2 * roles);
    }
    const Role& role = program.roles[static_cast<std::size_t>(lane % roles)];
    return role.name + " of CTA " + std::to_string(role.cta) + (lane < roles ? "" : ": copies");
  };
  std::vector<int> rows(static_cast<std::size_t>(2 * roles + program.pipes), -1);
  for (const TraceEvent& event : trace) {
    rows[static_cast<std::size_t>(event.lane)] = 0;
  }
  int row = 0;
  std::string names;
  for (std::size_t lane = 0; lane < rows.size(); ++lane) {
    if (rows[lane] == 0) {
      names += fmt::format("<text x=\"4\" y=\"{:.0f}\">{}</text>\n", kTop + kRow * row + 12,
                           escaped(name_of_lane(static_cast<int>(lane))));
      rows[lane] = row++;
    }
  }
  const double width = kNames + kStep * static_cast<double>(trace.size()) + 10;
  std::string svg =
      svg_head(width, kTop + kRow * row + 8,
               program.name + ": what happened, in its order; a colour is a tile of queries");
  svg += names;
  double x = kNames;
  for (const TraceEvent& event : trace) {
    svg += fmt::format(
        "<rect x=\"{:.0f}\" y=\"{:.0f}\" width=\"{:.0f}\" height=\"14\" fill=\"{}\"><title>{}, "
        "tile "
        "{}</title></rect>\n",
        x, kTop + kRow * rows[static_cast<std::size_t>(event.lane)], kStep, colour_of(event.step),
        escaped(event.name), event.step);
    x += kStep;
  }
  return svg + "</svg>\n";
}

std::string scatter_svg(const std::vector<PredictedPoint>& points,
                        const std::vector<std::string>& series) {
  constexpr double kSide = 520;
  constexpr double kLegend = 14;
  double low = 1;
  double high = 1e-9;
  for (const PredictedPoint& point : points) {
    low = std::min({low, point.measured, point.predicted});
    high = std::max({high, point.measured, point.predicted});
  }
  const double first = std::floor(std::log10(low));
  const double decades = std::max(std::ceil(std::log10(high)) - first, 1.0);
  const double height = kSide + 50 + kLegend * static_cast<double>(series.size());
  const auto place = [&](double seconds) {
    return kSide * (std::log10(seconds) - first) / decades;
  };
  std::string svg = svg_head(kSide + 60, height,
                             "predicted (up) against measured (along) seconds; grey: within 15 %");
  const auto x = [&](double seconds) { return 50 + place(seconds); };
  const auto y = [&](double seconds) { return 34 + kSide - place(seconds); };
  const double begin = std::pow(10, first);
  const double end = std::pow(10, first + decades);
  svg += fmt::format(
      "<polygon points=\"{:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f}\" "
      "fill=\"#ddd\"/>\n",
      x(begin), y(begin * 1.15), x(end), y(end * 1.15), x(end), y(end * 0.85), x(begin),
      y(begin * 0.85));
  for (double decade = first; decade <= first + decades; ++decade) {
    const double seconds = std::pow(10, decade);
    svg += fmt::format(
        "<text x=\"4\" y=\"{0:.1f}\">{1:g}</text>\n<path d=\"M50 {0:.1f}H{2:.1f}M{3:.1f} "
        "24V{4:.1f}\" "
        "stroke=\"#bbb\"/>\n",
        y(seconds), seconds, 50 + kSide, x(seconds), 34 + kSide);
  }
  for (const PredictedPoint& point : points) {
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\" fill=\"{}\"/>\n",
                       x(point.measured), y(point.predicted), colour_of(point.series));
  }
  for (std::size_t i = 0; i < series.size(); ++i) {
    const double at = kSide + 44 + kLegend * static_cast<double>(i + 1);
    svg += fmt::format(
        "<circle cx=\"10\" cy=\"{:.0f}\" r=\"4\" fill=\"{}\"/><text x=\"20\" "
        "y=\"{:.0f}\">{}</text>\n",
        at - 4, colour_of(static_cast<std::int64_t>(i)), at, escaped(series[i]));
  }
  return svg + "</svg>\n";
}

}  // namespace flashgrad::plan
