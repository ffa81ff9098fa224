// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU backend uses. A new set is one file in isa/ and one line in
// dispatch.cpp.
#pragma once

#include "core/backend.hpp"

namespace flashgrad::cpu {

// What a translation unit of isa/ offers.
struct Kernels {
  WorkspaceSize (*workspace_size)(const Problem&, Pass);
  void (*forward)(const Problem&, const Args&);
  void (*backward)(const Problem&, const Args&);
};

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
#endif

struct InstructionSet {
  const char* name;
  bool (*available)();   // on this machine, by cpuid
  const Kernels* bf16;   // for bf16 tensors
  const Kernels* other;  // for f32 and f16 tensors
};

// All sets of this build, best first; the last one is available everywhere.
std::span<const InstructionSet> instruction_sets();

// The best available set, or the one that the environment variable FLASHGRAD_CPU_ISA names; null if
// it names one that is unknown or that this machine lacks.
const InstructionSet* selected_instruction_set();

// Why `selected_instruction_set()` is null.
std::string selection_error();

}  // namespace flashgrad::cpu
