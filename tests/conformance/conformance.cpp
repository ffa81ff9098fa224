// SPDX-License-Identifier: Apache-2.0
// The program: shared checks, what runs on what, and the message of a crash.
#include "conformance.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flashgrad::check {
namespace {

// The command that repeats the running case, for the handler of a crash.
std::array<char, 2000> current_case;

void on_crash(int signal) {
  constexpr const char* kText = "\ncrashed in: ";
  (void)!write(STDERR_FILENO, kText, std::strlen(kText));
  (void)!write(STDERR_FILENO, current_case.data(), std::strlen(current_case.data()));
  (void)!write(STDERR_FILENO, "\n", 1);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

std::string command_on(const Case& c, const Target& target) {
  const std::string variable =
      target.instruction_set.empty() ? "" : "FLASHGRAD_CPU_ISA=" + target.instruction_set + " ";
  return variable + command_line(c) + " --backend " + target.backend;
}

std::string text_of(const CaseResult& r) {
  std::string text = r.message;
  for (const OutputResult& o : r.outputs) {
    if (!o.ok) {
      std::array<char, 80> numbers;
      std::snprintf(numbers.data(), numbers.size(), ": error %.4g, bound %.4g; ", o.error, o.bound);
      text += "\n  " + o.name + numbers.data() + o.reason;
    }
  }
  return text;
}

bool all_finite(const HostTensor& t) {
  for (std::int64_t n = 0; t.given() && n < t.num_elements(); ++n) {
    if (!std::isfinite(t.get(n))) {
      return false;
    }
  }
  return true;
}

void check_result(const CaseResult& r, const CallTensors& t, const Expectation& expectation) {
  if (!expectation.finite_gradients) {
    EXPECT_TRUE(r.ok()) << text_of(r);
    return;
  }
  EXPECT_TRUE(r.status == FG_OK && r.message.empty()) << r.message;
  for (const OutputResult& o : r.outputs) {
    if (o.name == "out" || o.name == "lse") {
      EXPECT_TRUE(o.ok) << text_of(r);
    }
  }
  EXPECT_TRUE(all_finite(t.dq) && all_finite(t.dk) && all_finite(t.dv));
}

// Whether running the case some more times on the target costs next to nothing.
bool is_small(const Case& c, const Target& target) {
  const std::int64_t rows =
      (c.seqlen_q * c.heads_q + c.seqlen_kv * c.heads_kv) * (c.packed() ? 1 : c.batch);
  return flops(c) <= target.max_flops / 100 && rows * (c.head_dim + c.head_dim_v) <= 1000000;
}

}  // namespace

Announce::Announce(const Case& c, const Target& target)
    : trace_(__FILE__, __LINE__, command_on(c, target)) {
  const std::string text = command_on(c, target);
  std::snprintf(current_case.data(), current_case.size(), "%s", text.c_str());
}

Announce::~Announce() { current_case[0] = '\0'; }

Bits bits_of(const CallTensors& tensors) {
  Bits bits;
  for (const HostTensor* t :
       {&tensors.out, &tensors.lse, &tensors.dq, &tensors.dk, &tensors.dv, &tensors.dsinks}) {
    bits.push_back(t->given() ? t->digest() : 0);
  }
  return bits;
}

Bits fixed_bits(const CallTensors& tensors, const Case& c) {
  Bits bits = bits_of(tensors);
  if (tested_place() == Place::kCuda && !c.deterministic) {
    bits[2] = 0;
    if (c.heads_q != c.heads_kv) {
      bits[3] = bits[4] = 0;
    }
  }
  return bits;
}

void require_device(fg_status status, const std::string& message) {
  if (status == FG_DEVICE_ERROR) {
    std::fprintf(stderr, "%s\n", message.c_str());
    std::abort();
  }
}

void run_on(const Target& target, fg_pass pass, const Case& c, CallTensors& t,
            WorkspaceMemory& memory) {
  fg_options o = make_options(c);
  o.backend = target.backend.c_str();
  o.num_threads = 2;
  const PassResult r = run_pass(pass, t, o, Workspace::kPreferred, memory);
  require_device(r.status, r.message);
  EXPECT_EQ(r.status, FG_OK) << target.name() << ": " << r.message;
}

std::vector<Target> affordable(const Case& c) {
  const double cost = flops(c);
  std::vector<Target> result;
  for (const Target& target : targets()) {
    if (cost <= target.max_flops && target.takes(c.dtype)) {
      result.push_back(target);
    }
  }
  return result;
}

void expect_right(const Case& c, const Expectation& expectation) {
  CaseRunner runner(c, kOracleFlops);
  int ran = 0;
  for (const Target& target : affordable(c)) {
    const Announce announce(c, target);
    const UseTarget use(target);
    RunOptions options;
    options.backend = target.backend;
    options.num_threads = 2;
    const CaseResult first = runner.run(options);
    require_device(first.status, first.message);
    ++ran;
    check_result(first, runner.tensors(), expectation);
    // Repeating a large case is left to the first target, and not done on a GPU, where it may be
    // larger still.
    const bool may_repeat = ran == 1 && tested_place() == Place::kHost;
    if (first.status != FG_OK || !(may_repeat || is_small(c, target))) {
      continue;
    }
    const Bits bits = fixed_bits(runner.tensors(), c);
    for (const int threads : {1, 3}) {
      options.num_threads = threads;
      runner.run(options, false);
      EXPECT_EQ(fixed_bits(runner.tensors(), c), bits)
          << "other bits in run " << threads << " (with as many threads)";
    }
    if (!first.takes_less_workspace) {
      continue;
    }
    for (const Workspace workspace : {Workspace::kMinimum, Workspace::kBetween}) {
      options.workspace = workspace;
      options.num_threads = 2;
      const testing::ScopedTrace with(
          __FILE__, __LINE__,
          workspace == Workspace::kMinimum ? "minimum workspace" : "workspace between");
      check_result(runner.run(options), runner.tensors(), expectation);
    }
  }
  EXPECT_GT(ran, 0) << "no target ran this case";
}

Bits run_bits(const Case& c, const Target& target, int num_threads) {
  const Announce announce(c, target);
  const UseTarget use(target);
  Case deterministic = c;
  deterministic.deterministic = true;
  CaseRunner runner(deterministic);
  RunOptions options;
  options.backend = target.backend;
  options.num_threads = num_threads;
  const CaseResult result = runner.run(options, false);
  require_device(result.status, result.message);
  EXPECT_TRUE(result.ok()) << target.name() << ": " << result.message;
  return bits_of(runner.tensors());
}

namespace {

void print_what_runs() {
  std::printf("targets:");
  for (const Target& target : targets()) {
    std::printf(" [%s, cases up to %.0e operations]", target.name().c_str(), target.max_flops);
  }
  std::printf("\n");
  for (const std::string& text : untested()) {
    std::printf("untested: %s\n", text.c_str());
  }
  for (const TableEntry& entry : table()) {
    if (tested_place() == Place::kCuda) {
      if (cases_on(entry, Place::kCuda).front().dtype != entry.cases.front().dtype) {
        std::printf("bf16 for f32: %s\n", entry.id.c_str());
      }
    } else if (!entry.not_on_a_cpu.empty()) {
      std::printf("GPU only: %s (%s)\n", entry.id.c_str(), entry.not_on_a_cpu.c_str());
    } else if (!entry.shrunk.empty()) {
      std::printf("shrunk for a CPU: %s (%s)\n", entry.id.c_str(), entry.shrunk.c_str());
    }
  }
}

}  // namespace
}  // namespace flashgrad::check

// conformance_test [--backend GPU_BACKEND] and GoogleTest's options. Exit status 77: no such GPU.
int main(int argc, char** argv) {
  // Waiting threads give way: the machine may have fewer cores than the tests use threads.
  setenv("OMP_WAIT_POLICY", "passive", 0);
  testing::InitGoogleTest(&argc, argv);
  if (argc == 3 && std::strcmp(argv[1], "--backend") == 0) {
    if (const std::string why = flashgrad::check::choose_gpu_backend(argv[2]); !why.empty()) {
      std::printf("skipped: %s: %s\n", argv[2], why.c_str());
      return 77;
    }
  }
  if (!testing::GTEST_FLAG(list_tests)) {
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGILL}) {
      std::signal(signal, flashgrad::check::on_crash);
    }
    flashgrad::check::print_what_runs();
  }
  return RUN_ALL_TESTS();
}
