// SPDX-License-Identifier: Apache-2.0
// The table of instruction sets and the choice among them.
#include "cpu/dispatch.hpp"

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashgrad::cpu {
namespace {

#if defined(__x86_64__)
bool read_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// Read once: in a virtual machine each cpuid leaves to the host, 30 us (measured: 60 us a call of
// fg_workspace_size without this, 1 us with it).
bool has_f16c() {
  static const bool kResult = read_f16c();
  return kResult;
}

// __builtin_cpu_supports also asks whether the operating system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

bool always() { return true; }

constexpr InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512_bf16", has_avx512_bf16, &kAvx512Bf16Kernels, &kAvx512Kernels},
    {"avx512", has_avx512, &kAvx512Kernels, &kAvx512Kernels},
    {"avx2", has_avx2, &kAvx2Kernels, &kAvx2Kernels},
#endif
    {"generic", always, &kGenericKernels, &kGenericKernels},
};

constexpr const char* kVariable = "FLASHGRAD_CPU_ISA";

// The forced name, or empty.
std::string_view forced() {
  const char* value = std::getenv(kVariable);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

}  // namespace

std::span<const InstructionSet> instruction_sets() { return kInstructionSets; }

const InstructionSet* selected_instruction_set() {
  const std::string_view name = forced();
  for (const InstructionSet& set : kInstructionSets) {
    if ((name.empty() || name == set.name) && set.available()) {
      return &set;
    }
  }
  return nullptr;
}

std::string selection_error() {
  std::string message =
      std::string(kVariable) + ": " + quoted(forced()) + ", want one that this machine has:";
  for (const InstructionSet& set : kInstructionSets) {
    if (set.available()) {
      message += std::string(" ") + set.name;
    }
  }
  return message;
}

}  // namespace flashgrad::cpu
