// SPDX-License-Identifier: Apache-2.0
// What the conformance tests run on: every backend of the CPU, the cpu backend once per instruction
// set, or the one GPU backend that `--backend` names.
#pragma once

#include <string>
#include <vector>

#include "check/case.hpp"
#include "check/device_memory.hpp"

namespace flashgrad::check {

struct Target {
  std::string backend;
  std::string instruction_set;  // of the CPU backend; empty for others
  // Cases of more operations are left to faster targets.
  double max_flops = 0;

  [[nodiscard]] std::string name() const;
  // f64 is the reference backend's alone, and GPUs take 16 bits; all else is served, not refused.
  [[nodiscard]] bool takes(DType dtype) const;
};

// Before the first call of the functions below: test that GPU backend. Empty, or why it can't run.
std::string choose_gpu_backend(const std::string& name);

// Fastest first, the reference last.
const std::vector<Target>& targets();
// Where all of them take their tensors.
Place tested_place();

// The cases of a table id, of the host's size; where f32 is not taken, with bf16 for it.
std::vector<Case> small_cases(const std::string& id);
Case as_taken(Case c);

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
