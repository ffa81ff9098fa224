// SPDX-License-Identifier: Apache-2.0
// The result of everything that can be refused: a code of the C ABI and a message (what, got,
// want).
#pragma once

#include <string>
#include <utility>

#include "flashgrad/flashgrad.h"

namespace flashgrad {

struct [[nodiscard]] Status {
  fg_status code = FG_OK;
  std::string message;

  [[nodiscard]] bool ok() const { return code == FG_OK; }
};

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
