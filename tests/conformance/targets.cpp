// SPDX-License-Identifier: Apache-2.0
// Finds the targets, and sets the environment that makes the library take one of them.
#include "targets.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "cpu/dispatch.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad::check {
namespace {

constexpr const char* kVariable = "FLASHGRAD_CPU_ISA";

struct Found {
  std::vector<Target> targets;
  std::vector<std::string> untested;
};

std::string gpu_backend;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

Found find() {
  Found found;
  if (!gpu_backend.empty()) {
    found.targets.push_back({gpu_backend, "", 1e17});
    return found;
  }
  for (std::int32_t n = 0; n < fg_backend_count(); ++n) {
    fg_backend backend = FG_BACKEND_INIT;
    fg_backend_info(n, &backend);
    const std::string name = backend.name;
    if (place_of(name) != Place::kHost) {
      continue;  // has tests of its own
    }
    if (name == "cpu") {
      for (const cpu::InstructionSet& set : cpu::instruction_sets()) {
        if (set.available()) {
          // What is not AVX-512 is some times slower.
          const bool fast = std::string(set.name).starts_with("avx512");
          found.targets.push_back({name, set.name, fast ? 2e11 : 2e10});
        } else {
          found.untested.push_back("cpu on " + std::string(set.name) + ": this machine lacks it");
        }
      }
    } else if (backend.available != 0) {
      found.targets.push_back({name, "", 5e8});
    } else {
      found.untested.push_back(name + ": " + backend.detail);
    }
  }
  return found;
}

const Found& found() {
  static const Found kResult = find();
  return kResult;
}

}  // namespace

std::string Target::name() const {
  return instruction_set.empty() ? backend : backend + " " + instruction_set;
}

bool Target::takes(DType dtype) const {
  return place_of(backend) == Place::kCuda ? size_bytes(dtype) == 2
                                           : dtype != DType::kF64 || backend == "reference";
}

std::string choose_gpu_backend(const std::string& name) {
  for (std::int32_t n = 0; n < fg_backend_count(); ++n) {
    fg_backend backend = FG_BACKEND_INIT;
    fg_backend_info(n, &backend);
    if (backend.name == name && place_of(name) == Place::kCuda) {
      gpu_backend = name;
      return backend.available != 0 ? "" : backend.detail;
    }
  }
  return "no such GPU backend in this build";
}

const std::vector<Target>& targets() { return found().targets; }

Place tested_place() { return place_of(targets().front().backend); }

Case as_taken(Case c) {
  if (c.dtype == DType::kF32 && !targets().front().takes(DType::kF32)) {
    c.dtype = DType::kBF16;
  }
  return c;
}

std::vector<Case> small_cases(const std::string& id) {
  std::vector<Case> cases = find_cases(id);
  std::transform(cases.begin(), cases.end(), cases.begin(), as_taken);
  return cases;
}

const std::vector<std::string>& untested() { return found().untested; }

UseTarget::UseTarget(const Target& target) {
  if (!target.instruction_set.empty()) {
    setenv(kVariable, target.instruction_set.c_str(), 1);
  }
}

UseTarget::~UseTarget() { unsetenv(kVariable); }

}  // namespace flashgrad::check
