// SPDX-License-Identifier: Apache-2.0
// Errors and words of the command line: exit statuses, number parsing, sizes and names fit for one
// line of a terminal.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flashgrad::tool {

// The exit statuses of every subcommand.
inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitUnsupported = 3;

// Ends the program with one line on stderr and `exit_status`.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, int exit_status = kExitBadInput)
      : std::runtime_error(message), exit_status_(exit_status) {}
  [[nodiscard]] int exit_status() const { return exit_status_; }

 private:
  int exit_status_;
};

// Text from a file or a command line, made safe to print: nothing but characters that a terminal
// shows (a file could hold escapes, line breaks or what turns the direction of writing), the other
// bytes as \xNN, and cut after about `max_bytes`.
std::string printable(std::string_view text, std::size_t max_bytes = 80);

// Parse all of `text` or throw an Error that begins with `what`. Numbers are decimal; nan and inf,
// trailing characters and values out of range are refused.
std::int64_t parse_integer(std::string_view text, const std::string& what, std::int64_t minimum,
                           std::int64_t maximum);
double parse_real(std::string_view text, const std::string& what);

// Writes to standard output and makes sure that it arrived; throws Error if not.
void print_out(std::string_view text);

// "1.50 MiB".
std::string format_bytes(double bytes);

// "1.23 ms".
std::string format_seconds(double seconds);

}  // namespace flashgrad::tool
