// SPDX-License-Identifier: Apache-2.0
// Runs cases and judges what came out.
#include "check/check.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "api/validate.hpp"

namespace flashgrad::check {
namespace {

flashgrad::Call validated(Pass pass, const fg_tensors& tensors, const fg_options& options) {
  flashgrad::Call call;
  const flashgrad::Scratch workspace;
  const Status status = validate(pass, &tensors, &options, &workspace, &call);
  if (!status.ok()) {
    throw std::invalid_argument(status.message);
  }
  return call;
}

bool wants_backward(const fg_tensors& t) { return t.dout != nullptr || t.dlse != nullptr; }

std::vector<std::uint64_t> digests(const std::vector<NamedTensor>& tensors) {
  std::vector<std::uint64_t> result;
  for (const NamedTensor& t : tensors) {
    result.push_back(t.tensor->given() ? t.tensor->digest() : 0);
  }
  return result;
}

}  // namespace

bool CaseResult::ok() const {
  return status == FG_OK && message.empty() &&
         std::all_of(outputs.begin(), outputs.end(), [](const OutputResult& r) { return r.ok; });
}

CaseRunner::CaseRunner(Case c, double max_flops)
    : case_(std::move(c)),
      max_flops_(max_flops),
      tensors_(make_tensors(case_)),
      inputs_(digests(tensors_.inputs())) {}

CaseResult CaseRunner::run(const RunOptions& options, bool compare) {
  CaseResult result;
  fg_options o = make_options(case_);
  o.backend = options.backend.c_str();
  o.num_threads = options.num_threads;
  bool inputs_are_there = false;  // on the device, since an earlier pass
  const auto run = [&](fg_pass pass, double* seconds) {
    const PassResult r =
        run_pass(pass, tensors_, o, options.workspace, memory_, {!inputs_are_there, false});
    inputs_are_there = true;
    result.status = r.status;
    result.message = r.message;
    result.takes_less_workspace |= r.minimum_bytes < r.preferred_bytes;
    *seconds = r.seconds;
    return r.status == FG_OK;
  };
  std::uint64_t out_alone = 0;
  if (!case_.wants_lse) {
    // lse may be null in forward; that must not change out. The backward needs it.
    HostTensor lse;
    std::swap(lse, tensors_.lse);
    const bool ok = run(FG_FORWARD, &result.forward_seconds);
    std::swap(lse, tensors_.lse);
    if (!ok) {
      return result;
    }
    out_alone = tensors_.out.digest();
  }
  if (!run(FG_FORWARD, &result.forward_seconds)) {
    return result;
  }
  if (!case_.wants_lse && out_alone != tensors_.out.digest()) {
    result.message = "out has other bits without lse";
    return result;
  }
  if (wants_backward(tensors_.c_tensors()) && !run(FG_BACKWARD, &result.backward_seconds)) {
    return result;
  }
  if (place_of(options.backend) == Place::kCuda) {
    tensors_.download_inputs();
  }
  if (const std::string name = damaged_surroundings(tensors_.all()); !name.empty()) {
    result.message = "wrote outside the elements of " + name;
  } else if (!memory_.guards_intact()) {
    result.message = "wrote outside the workspace";
  } else if (inputs_ != digests(tensors_.inputs())) {
    result.message = "changed an input";
  }
  if (!compare) {
    return result;
  }
  const fg_tensors t = tensors_.c_tensors();
  const Pass pass = wants_backward(t) ? Pass::kBackward : Pass::kForward;
  const flashgrad::Call call = validated(pass, t, o);
  if (expected_ == nullptr) {
    ExpectedOptions expected;
    expected.max_flops = max_flops_;
    expected.seed = case_.seed;
    expected_ = std::make_unique<Expected>(call.problem, call.args, expected);
  }
  result.outputs = expected_->compare(call.args, true, true);
  result.coverage = expected_->coverage();
  return result;
}

CaseResult run_case(const Case& c, const RunOptions& options, double max_flops) {
  return CaseRunner(c, max_flops).run(options);
}

Judgement judge(const fg_tensors& tensors, const fg_options& options, bool given_out_lse,
                const ExpectedOptions& expected_options) {
  const Pass pass = wants_backward(tensors) ? Pass::kBackward : Pass::kForward;
  const flashgrad::Call call = validated(pass, tensors, options);
  ExpectedOptions o = expected_options;
  o.given_out_lse = given_out_lse;
  if (o.num_threads == 0) {
    o.num_threads = options.num_threads;
  }
  const Expected expected(call.problem, call.args, o);
  return {expected.compare(call.args, true, true), expected.coverage()};
}

}  // namespace flashgrad::check
