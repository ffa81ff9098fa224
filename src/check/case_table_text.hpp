// SPDX-License-Identifier: Apache-2.0
// The text of tests/conformance/known_faults.jsonl, compiled in.
#pragma once

namespace flashgrad::check {

extern const char* const kCaseTable;

}  // namespace flashgrad::check
