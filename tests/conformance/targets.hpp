// SPDX-License-Identifier: Apache-2.0
// What the conformance tests run on: every backend that this machine has, the CPU backend once per
// instruction set.
#pragma once

#include <string>
#include <vector>

namespace flashgrad::check {

struct Target {
  std::string backend;
  std::string instruction_set;  // of the CPU backend; empty for others
  // Cases of more operations are left to faster targets.
  double max_flops = 0;

  [[nodiscard]] std::string name() const;
};

// Fastest first, the reference last.
const std::vector<Target>& targets();

// Instruction sets of this build that the machine lacks, and backends that can't run here with the
// reason.
const std::vector<std::string>& untested();

// Makes the CPU backend use the target's instruction set while it lives.
class UseTarget {
 public:
  explicit UseTarget(const Target& target);
  ~UseTarget();
  UseTarget(const UseTarget&) = delete;
  UseTarget& operator=(const UseTarget&) = delete;
};

}  // namespace flashgrad::check
