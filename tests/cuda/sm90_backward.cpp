// SPDX-License-Identifier: Apache-2.0
// Checks and times the sm90 backward by itself, against a float64 textbook computation on the same
// GPU.
//
//   sm90_backward check [name [least [largest]]]   every case of backward_cases.cpp and
//                                                  backward_short_sequences.cpp (whose name
//                                                  contains `name`, of head dims from `least` to
//                                                  `largest`); exit status 1 if one fails
//   sm90_backward short [name [least [largest]]]   those of backward_short_cases.cpp
//   sm90_backward bench [shapes]   whole calls, TFLOP/s cool and sustained, one line a shape
//
// Inputs are random normals; rows and keys that nothing visible depends on, the gaps between
// strided rows, the outputs and the workspace are full of NaN before each call (but of the short
// cases the workspace, which is left as it was allocated).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backward_bench.hpp"
#include "backward_call.hpp"
#include "backward_case.hpp"
#include "cuda/sm90/sm90_backend.hpp"

using namespace flashgrad;

namespace {

// `room`: how much of the workspace between minimum and preferred it gets, in percent.
// Its gradients go to *gradients. Prints a line; returns whether they are right.
bool run_case(Case c, int room, Gradients* gradients) {
  c.p.device_type = DeviceType::kCuda;
  const HostLines lines = make_lines(&c);
  BackwardCall call(c, lines);
  std::string report;
  std::string wrong = call.run(room);
  const cudaError_t error = cudaDeviceSynchronize();
  if (wrong.empty()) {
    wrong = call.compare_with_textbook(&report);
  }
  *gradients = call.gradients();
  std::printf("%3d/%-3d %-28s %3d %% %s%s%s\n", static_cast<int>(c.p.head_dim),
              static_cast<int>(c.p.head_dim_v), c.name, room, wrong.empty() ? "ok  " : "FAIL",
              report.c_str(), wrong.empty() ? "" : ("  " + wrong).c_str());
  std::fflush(stdout);
  if (error != cudaSuccess) {
    std::exit(1);  // what follows could not run
  }
  return wrong.empty();
}

// A case with all of the preferred workspace and with less, where that may be another plan. Above
// head dim 128 dk and dv have the same bits with any workspace, and dq has one of two: it depends
// only on whether dS is kept.
int run_with_workspaces(const Case& c) {
  Gradients preferred;
  int failures = run_case(c, 100, &preferred) ? 0 : 1;
  Gradients minimum;
  if (std::max(c.p.head_dim, c.p.head_dim_v) <= 128) {
    return failures + (c.p.group() == 1 || run_case(c, 99, &minimum) ? 0 : 1);
  }
  failures += run_case(c, 0, &minimum) ? 0 : 1;
  if (c.rooms.empty()) {
    return failures;
  }
  bool several_passes = false;
  for (const int room : c.rooms) {
    Gradients got;
    failures += run_case(c, room, &got) ? 0 : 1;
    several_passes = several_passes || got[0] == preferred[0];
    if (got[1] != preferred[1] || got[2] != preferred[2] ||
        (got[0] != preferred[0] && got[0] != minimum[0])) {
      std::printf("%-28s FAIL: other bits with %d %% of the room\n", c.name, room);
      ++failures;
    }
  }
  if (minimum[0] == preferred[0] || !several_passes || minimum[1] != preferred[1] ||
      minimum[2] != preferred[2]) {
    std::printf("%-28s FAIL: not the plans that it is meant to compare\n", c.name);
    ++failures;
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  std::printf("sm90: %s\n", sm90_backend.detail());
  if (!sm90_backend.available()) {
    std::printf("skipped: no Hopper GPU\n");
    return 77;
  }
  if (mode == "check" || mode == "short") {
    int failures = 0;
    int count = 0;
    std::vector<Case> all = mode == "check" ? cases() : short_cases();
    for (Case& c : mode == "check" ? short_sequence_cases() : std::vector<Case>{}) {
      all.push_back(std::move(c));
    }
    for (const Case& c : all) {
      if ((argc > 2 && std::string(c.name).find(argv[2]) == std::string::npos) ||
          (argc > 3 && std::max(c.p.head_dim, c.p.head_dim_v) < std::atoi(argv[3])) ||
          (argc > 4 && std::max(c.p.head_dim, c.p.head_dim_v) > std::atoi(argv[4]))) {
        continue;
      }
      failures += run_with_workspaces(c);
      ++count;
    }
    std::printf("%d cases, %d failures\n", count, failures);
    return failures == 0 && count > 0 ? 0 : 1;
  }
  if (mode == "bench") {
    // d, seqlen / 1024, mask (0 full, 1 causal, w1024 a window to the left), heads_q, heads_kv [,
    // dtype, deterministic]: groups of seven numbers.
    for (int i = 2; i + 6 < argc; i += 7) {
      const char* slash = std::strchr(argv[i], '/');  // 192/128: of v 128
      bench_backward(std::atoi(argv[i]), std::atoi(slash != nullptr ? slash + 1 : argv[i]),
                     1024 * std::atoll(argv[i + 1]), argv[i + 2], std::atoll(argv[i + 3]),
                     std::atoll(argv[i + 4]),
                     std::string(argv[i + 5]) == "f16" ? DType::kF16 : DType::kBF16,
                     std::atoi(argv[i + 6]) != 0);
    }
    return 0;
  }
  std::printf(
      "usage: sm90_backward check|short [name [least head_dim [largest]]] | bench (d k causal "
      "heads_q heads_kv dtype det)...\n");
  return 2;
}
