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
};

struct CaseResult {
  fg_status status = FG_OK;           // of the first call that failed; FG_UNSUPPORTED is no fault
  std::string message;                // its message, or what was damaged
  std::vector<OutputResult> outputs;  // empty if a call failed
  std::string coverage;               // what the oracle computed: "all of it" or a sample
  double forward_seconds = 0;
  double backward_seconds = 0;
  bool takes_less_workspace = false;  // than preferred, in one of the passes

  // Both calls succeeded, every output is within its bound and nothing outside the outputs was
  // written.
  [[nodiscard]] bool ok() const;
};

// A case with its tensors. Runs it on one backend after the other, on memory that the runs before
// left dirty, against an oracle that is computed once. Over `max_flops` the oracle computes a
// sample (ExpectedOptions).
class CaseRunner {
 public:
  explicit CaseRunner(Case c, double max_flops = 1e11);

  // Forward (twice, if the case does without lse) and backward, then the comparison, unless
  // `compare` is false.
  CaseResult run(const RunOptions& options, bool compare = true);

  // What the last run left.
  [[nodiscard]] CallTensors& tensors() { return tensors_; }
  [[nodiscard]] const Case& spec() const { return case_; }

 private:
  Case case_;
  double max_flops_;
  CallTensors tensors_;
  WorkspaceMemory memory_;
  std::vector<std::uint64_t> inputs_;  // digests
  std::unique_ptr<Expected> expected_;
};

// One case on one backend.
CaseResult run_case(const Case& c, const RunOptions& options, double max_flops = 1e11);

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
