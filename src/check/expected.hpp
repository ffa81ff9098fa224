// SPDX-License-Identifier: Apache-2.0
// The right answer to a call and how far from it an output may be: the float64 oracle, the naive
// computation in the input dtype, and the acceptance rule of docs/semantics.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "reference/reference.hpp"

namespace flashgrad::check {

struct OutputResult {
  std::string name;    // out, lse, dq, dk, dv, dsinks
  double error = 0;    // max |x - o|; for lse relative to 1 + |o|. Infinite if NaN or Inf stand in
                       // other places than o's
  double bound = 0;    // what `error` may be
  bool ok = false;     // error <= bound, and all that the rule asks besides
  std::string reason;  // why not ok
};

struct ExpectedOptions {
  // A larger call (in floating-point operations of forward and backward) is computed for chosen
  // heads, rows and keys only.
  double max_flops = 1e11;
  std::uint64_t seed = 1;  // of the choice
  int num_threads = 0;     // 0: OpenMP's own number
  // True: args.out and args.lse are inputs of the backward, as a user gives them. False: the
  // oracle's own.
  bool given_out_lse = false;
};

class Expected {
 public:
  // Of the outputs that `problem` wants: forward's, and backward's if it has dout or dlse. When the
  // call is too large to be computed whole, the sampled dk, dv and the dsinks rest on args.out and
  // args.lse, which must then hold a forward's results.
  Expected(const Problem& problem, const Args& args, const ExpectedOptions& options);
  ~Expected();
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;

  // Judges the outputs that `produced` holds, out and lse only with `forward`, gradients only with
  // `backward`.
  [[nodiscard]] std::vector<OutputResult> compare(const Args& produced, bool forward,
                                                  bool backward) const;

  // "all of it", or what was chosen.
  [[nodiscard]] const std::string& coverage() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashgrad::check
