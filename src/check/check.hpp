// SPDX-License-Identifier: Apache-2.0
// Runs a case on a backend through the C interface and judges it; judges a call that somebody else
// has run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check/call.hpp"
#include "check/case.hpp"
#include "check/expected.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad::check {

struct RunOptions {
  std::string backend = "reference";
  int num_threads = 0;  // 0: OpenMP's own number
  Workspace workspace = Workspace::kPreferred;
  double max_flops = 1e11;  // over it, the oracle computes a sample (ExpectedOptions)
};

struct CaseResult {
  fg_status status =
      FG_OK;            // of the first call that failed; FG_UNSUPPORTED means refused, not wrong
  std::string message;  // its message, or what was damaged
  std::vector<OutputResult> outputs;  // empty if a call failed
  std::string coverage;               // what the oracle computed: "all of it" or a sample
  double forward_seconds = 0;
  double backward_seconds = 0;

  // Both calls succeeded, every output is within its bound and nothing outside the outputs was
  // written.
  [[nodiscard]] bool ok() const;
};

// Generates the tensors, runs forward and backward and compares.
CaseResult run_case(const Case& c, const RunOptions& options);

// Judges calls that the caller has run on host tensors: out and lse (unless `given_out_lse`: then
// they were inputs) and, if dout or dlse is given, the gradients that are not null. `options` are
// those of the calls. Throws std::invalid_argument if the library would refuse the call.
struct Judgement {
  std::vector<OutputResult> outputs;
  std::string coverage;
};
Judgement judge(const fg_tensors& tensors, const fg_options& options, bool given_out_lse,
                const ExpectedOptions& expected = {});

}  // namespace flashgrad::check
