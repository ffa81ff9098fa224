// SPDX-License-Identifier: Apache-2.0
// What the conformance tests share: a case on every target, in several thread counts and
// workspaces.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "check/check.hpp"
#include "targets.hpp"

namespace flashgrad::check {

// The oracle computes no more than this for a case; over it, a sample.
inline constexpr double kOracleFlops = 5e8;

// Remembers the case for the message of a crash, and prints it with each failure.
class Announce {
 public:
  Announce(const Case& c, const Target& target);
  ~Announce();
  Announce(const Announce&) = delete;
  Announce& operator=(const Announce&) = delete;

 private:
  testing::ScopedTrace trace_;
};

// The digests of out, lse, dq, dk, dv, dsinks; 0 for absent ones.
using Bits = std::vector<std::uint64_t>;
Bits bits_of(const CallTensors& tensors);

// Those of them that the next run must give again: on a GPU without `deterministic` the order in
// which dq is summed is free, and that of dk and dv over the query heads of a group.
Bits fixed_bits(const CallTensors& tensors, const Case& c);

// A GPU that has reported an error reports it to every later call: ends the program, with the
// running case in its message.
void require_device(fg_status status, const std::string& message);

// A pass of `c` on a target, with two threads; the test fails where the call does.
void run_on(const Target& target, fg_pass pass, const Case& c, CallTensors& t,
            WorkspaceMemory& memory);

struct Expectation {
  // Gradients need only be finite, as where p may be wrong because the logits are beyond f32.
  bool finite_gradients = false;
};

// Runs the case on every target that takes its dtype and can afford it: with 2 threads against the
// oracle; with 1 and 3 threads for the same bits; with the least workspace and one between against
// the oracle.
void expect_right(const Case& c, const Expectation& expectation = {});

// Runs a case of compact tensors too large for the host on a GPU (copies.cpp).
void expect_right_copies(const Case& c, const Target& target);

// The bits that a target gives a case in deterministic mode, after checking that the calls succeed.
Bits run_bits(const Case& c, const Target& target, int num_threads = 2);

// The targets that take its dtype and can afford it.
std::vector<Target> affordable(const Case& c);

}  // namespace flashgrad::check
