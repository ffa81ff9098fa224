// SPDX-License-Identifier: Apache-2.0
// The shapes that `flashgrad bench` measures: benchmarks/shapes/*.json, compiled in, or a file like
// them.
#pragma once

#include <string>
#include <vector>

#include "attention_call.hpp"
#include "check/case.hpp"

namespace flashgrad::tool {

// A suite as CMake found it.
struct SuiteText {
  const char* name;
  const char* json;
};
extern const std::vector<SuiteText> kSuiteTexts;

std::string suite_names();

// All shapes, dtypes and masks of the suite of that name, or of the file of that path.
std::vector<check::Case> load_suite(const std::string& name_or_path);

// Throws unless the case is no more than sizes and packed lengths: nothing else is measured here.
void require_plain(const check::Case& c);

// The tensors of a plain case. No memory but that of the offsets is written yet.
AttentionCall make_shapes(const check::Case& c, bool grad_f32);

// The same with random numbers in q, k, v and dout.
AttentionCall make_call(const check::Case& c, bool grad_f32);

}  // namespace flashgrad::tool
