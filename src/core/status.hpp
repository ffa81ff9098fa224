// SPDX-License-Identifier: Apache-2.0
// The result of everything that can be refused: a code of the C ABI and a message (what, got,
// want).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "flashgrad/flashgrad.h"

namespace flashgrad {

struct [[nodiscard]] Status {
  fg_status code = FG_OK;
  std::string message;

  [[nodiscard]] bool ok() const { return code == FG_OK; }
};

// A caller's text as a part of a message: in quotes, one line of ASCII, not longer than what it
// could rightly be.
inline std::string quoted(std::string_view text) {
  constexpr std::size_t kMaxBytes = 64;
  std::string result = "\"";
  for (const char c : text.substr(0, kMaxBytes)) {
    result += c >= ' ' && c <= '~' ? c : '?';
  }
  return result + (text.size() > kMaxBytes ? "...\"" : "\"");
}

inline Status invalid(std::string message) { return {FG_INVALID_ARGUMENT, std::move(message)}; }
inline Status unsupported(std::string message) { return {FG_UNSUPPORTED, std::move(message)}; }

}  // namespace flashgrad

// Returns from the enclosing function if the expression is not ok.
#define FG_RETURN_IF_ERROR(expression)                                     \
  do {                                                                     \
    if (::flashgrad::Status fg_status_ = (expression); !fg_status_.ok()) { \
      return fg_status_;                                                   \
    }                                                                      \
  } while (false)
