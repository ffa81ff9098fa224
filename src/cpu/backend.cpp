// SPDX-License-Identifier: Apache-2.0
// The CPU backend's entry points: they pick the instruction set and hand over.
#include "core/refusals.hpp"
#include "cpu/cpu_backend.hpp"
#include "cpu/dispatch.hpp"

namespace flashgrad {
namespace {

const cpu::Kernels& kernels(const Problem& p) {
  const cpu::InstructionSet& set = *cpu::selected_instruction_set();
  return p.dtype == DType::kBF16 ? *set.bf16 : *set.other;
}

const char* detail() {
  const cpu::InstructionSet* set = cpu::selected_instruction_set();
  return set != nullptr ? set->name
                        : "FLASHGRAD_CPU_ISA names an instruction set that is unknown or that this "
                          "machine lacks";
}

bool available() { return cpu::selected_instruction_set() != nullptr; }

Status supports(const Problem& p, Pass /*pass*/) {
  FG_RETURN_IF_ERROR(want_device(p, DeviceType::kCpu));
  FG_RETURN_IF_ERROR(want_dtype(p, {DType::kF32, DType::kBF16, DType::kF16}));
  if (!available()) {
    return invalid(cpu::selection_error());
  }
  return {};
}

WorkspaceSize workspace_size(const Problem& p, Pass pass) {
  return kernels(p).workspace_size(p, pass);
}

Status forward(const Problem& p, const Args& args) {
  kernels(p).forward(p, args);
  return {};
}

Status backward(const Problem& p, const Args& args) {
  kernels(p).backward(p, args);
  return {};
}

}  // namespace

const Backend cpu_backend = {"cpu", detail, available, supports, workspace_size, forward, backward};

}  // namespace flashgrad
