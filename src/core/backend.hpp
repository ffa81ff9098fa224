// SPDX-License-Identifier: Apache-2.0
// What a backend is: a struct of functions. src/api/registry.cpp lists them, fastest first,
// reference last.
#pragma once

#include <cstddef>
#include <span>

#include "core/problem.hpp"

namespace flashgrad {

struct WorkspaceSize {
  std::size_t minimum = 0;    // with less, a call is refused
  std::size_t preferred = 0;  // more brings nothing
};

struct Backend {
  const char* name;
  // The instruction set or device it uses, or why it can't run on this machine.
  const char* (*detail)();
  bool (*available)();
  // Why this problem is refused, or ok. Reads nothing but the problem (and the machine).
  Status (*supports)(const Problem&, Pass);
  WorkspaceSize (*workspace_size)(const Problem&, Pass);
  // Called with a supported problem, validated arguments and at least the minimum workspace (any
  // alignment). Every element of every wanted output is written, also with empty sequences.
  Status (*forward)(const Problem&, const Args&);
  Status (*backward)(const Problem&, const Args&);
};

// All backends, those that were left out of this build included.
std::span<const Backend* const> backends();

}  // namespace flashgrad
