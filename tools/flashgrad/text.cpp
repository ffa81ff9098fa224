// SPDX-License-Identifier: Apache-2.0
// Number parsing and formatting of the command line.
#include "text.hpp"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace flashgrad::tool {

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string result;
  for (const char c : text) {
    if (result.size() >= max_bytes) {
      return result + "...";
    }
    // Bytes from 0x80 on stay: they are UTF-8 where the header was valid JSON.
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
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
    const std::string wanted = maximum == INT64_MAX ? fmt::format("{} or more", minimum)
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
