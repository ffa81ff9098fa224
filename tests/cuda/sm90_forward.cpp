// SPDX-License-Identifier: Apache-2.0
// Checks the sm90 forward against a float64 textbook on the host: out, lse, zeros, NaN, padding,
// and the same bits twice and wherever a sequence lies. Calls the backend itself, so it needs no
// library and no framework.
//   sm90_forward [check|split|short] [KERNEL...]   all cases, split_cases() or short_cases(); names
//   of kKernels, default: all
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/sm90/sm90_backend.hpp"
#include "forward_call.hpp"
#include "forward_invariance.hpp"
#include "forward_textbook.hpp"

namespace flashgrad {
namespace {

constexpr Kernel kKernels[] = {
    {"d64", DType::kBF16, 64, 64},       {"d96", DType::kBF16, 96, 96},
    {"d128", DType::kBF16, 128, 128},    {"d192v128", DType::kBF16, 192, 128},
    {"d192", DType::kBF16, 192, 192},    {"d256", DType::kBF16, 256, 256},
    {"d64_f16", DType::kF16, 64, 64},    {"d96_f16", DType::kF16, 96, 96},
    {"d128_f16", DType::kF16, 128, 128}, {"d192v128_f16", DType::kF16, 192, 128},
    {"d192_f16", DType::kF16, 192, 192}, {"d256_f16", DType::kF16, 256, 256},
};

// Runs one case; prints a line; returns whether it is right.
bool run_case(const Kernel& kernel, const Case& c) {
  ForwardCall call(kernel, c);
  const std::string wrong = call.run();
  if (!wrong.empty()) {
    std::printf("FAIL %-13s %s: %s\n", kernel.name, c.name, wrong.c_str());
    return false;
  }
  const ForwardErrors errors = compare_with_textbook(call);
  // Rounding p and out to the dtype costs about 2.3e-3 in bf16 and an eighth of that in f16.
  const double bar = kernel.dtype == DType::kBF16 ? 4e-3 : 6e-4;
  const bool right = !errors.misplaced && errors.out < bar && errors.lse < 1e-5;
  std::printf("%s %-13s %-38s out %.2e lse %.1e%s\n", right ? "ok  " : "FAIL", kernel.name, c.name,
              errors.out, errors.lse, errors.misplaced ? " misplaced NaN, Inf or 0" : "");
  return right;
}

}  // namespace
}  // namespace flashgrad

int main(int argc, char** argv) {
  if (!flashgrad::sm90_backend.available()) {
    std::printf("skipped: %s\n", flashgrad::sm90_backend.detail());
    return 77;
  }
  const auto asks = [&](const char* mode) { return argc > 1 && std::strcmp(argv[1], mode) == 0; };
  const bool is_short = asks("short");
  const bool is_split = asks("split");
  char** const names = argv + (is_short || is_split || asks("check") ? 2 : 1);
  char** const end = argv + argc;
  std::vector<flashgrad::Case> list = is_short   ? flashgrad::short_cases()
                                      : is_split ? flashgrad::split_cases()
                                                 : flashgrad::cases();
  if (!is_short && !is_split) {
    const std::vector<flashgrad::Case> split = flashgrad::split_cases();
    list.insert(list.end(), split.begin(), split.end());
  }
  int failed = 0;
  int count = 0;
  for (const auto& kernel : flashgrad::kKernels) {
    if (names != end && std::none_of(names, end, [&](const char* name) {
          return std::strcmp(name, kernel.name) == 0;
        })) {
      continue;
    }
    for (const flashgrad::Case& c : list) {
      failed += flashgrad::run_case(kernel, c) ? 0 : 1;
      ++count;
      std::fflush(stdout);
    }
    if (!is_short) {
      failed += flashgrad::forward_is_invariant(kernel) ? 0 : 1;
      ++count;
    }
  }
  std::printf("%d of %d cases failed\n", failed, count);
  return failed == 0 && count > 0 ? 0 : 1;
}
