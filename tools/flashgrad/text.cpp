// SPDX-License-Identifier: Apache-2.0
// Number parsing and formatting of the command line.
#include "text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace flashgrad::tool {

namespace {

// The bytes of the UTF-8 character that `text` begins with, if a terminal shows it and nothing else
// happens; 0 if not.
std::size_t visible_bytes(std::string_view text) {
  const auto byte = [text](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const unsigned first = byte(0);
  if (first < 0x80) {
    return first >= 0x20 && first != 0x7f ? 1 : 0;
  }
  const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  unsigned code = first & (0xffU >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) {
      return 0;
    }
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr std::array<unsigned, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  const auto within = [code](unsigned low, unsigned high) { return code >= low && code <= high; };
  const bool is_character = first >= 0xc0 && first <= 0xf4 && code >= kSmallest[size] &&
                            code <= 0x10ffff && !within(0xd800, 0xdfff);
  // Controls of the upper half (0x9b begins an escape sequence as ESC [ does), what has no width,
  // ends a line or turns the direction of writing.
  const bool acts = within(0x80, 0x9f) || within(0x200b, 0x200f) || within(0x2028, 0x202e) ||
                    within(0x2060, 0x206f) || code == 0x61c || code == 0xfeff;
  return is_character && !acts ? size : 0;
}

}  // namespace

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string result;
  while (!text.empty()) {
    if (result.size() >= max_bytes) {
      return result + "...";
    }
    const std::size_t visible = visible_bytes(text);
    if (visible > 0) {
      result += text.substr(0, visible);
    } else {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    }
    text.remove_prefix(std::max<std::size_t>(visible, 1));
  }
  return result;
}

std::int64_t parse_integer(std::string_view text, const std::string& what, std::int64_t minimum,
                           std::int64_t maximum) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error != std::errc::invalid_argument && end == text.data() + text.size();
  if (!is_number) {
    throw Error(fmt::format("{}: got '{}', want a whole number", what, printable(text)));
  }
  if (error == std::errc::result_out_of_range || value < minimum || value > maximum) {
    const bool too_small = text.starts_with('-') || (error == std::errc() && value < minimum);
    const std::string wanted = too_small && maximum == INT64_MAX
                                   ? fmt::format("{} or more", minimum)
                                   : fmt::format("{} to {}", minimum, maximum);
    throw Error(fmt::format("{}: got {}, want {}", what, printable(text), wanted));
  }
  return value;
}

double parse_real(std::string_view text, const std::string& what) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::invalid_argument || end != text.data() + text.size() ||
      (error == std::errc() && !std::isfinite(value))) {
    throw Error(fmt::format("{}: got '{}', want a finite number", what, printable(text)));
  }
  if (error == std::errc::result_out_of_range) {
    throw Error(fmt::format("{}: got {}, out of the range of a double", what, printable(text)));
  }
  return value;
}

void print_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw Error(fmt::format("can't write to standard output: {}", std::strerror(errno)));
  }
}

std::string format_bytes(double bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes)
                   : fmt::format("{:.{}f} {}", bytes, bytes < 10 ? 2 : 1, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) {
    return fmt::format("{:.1f} us", seconds * 1e6);
  }
  return seconds < 1 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

}  // namespace flashgrad::tool
