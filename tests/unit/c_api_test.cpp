// SPDX-License-Identifier: Apache-2.0
// The C functions themselves: choice of the backend, workspace, messages, calls from several
// threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "call_builder.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad {
namespace {

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (std::int32_t i = 0; i < fg_backend_count(); ++i) {
    fg_backend info = FG_BACKEND_INIT;
    EXPECT_EQ(fg_backend_info(i, &info), FG_OK);
    names.emplace_back(info.name);
  }
  return names;
}

std::string first_that_serves(fg_pass pass, const fg_tensors& tensors) {
  for (const std::string& name : backend_names()) {
    fg_options options = FG_OPTIONS_INIT;
    options.backend = name.c_str();
    if (fg_supports(pass, &tensors, &options, nullptr) == FG_OK) {
      return name;
    }
  }
  return "none";
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The environment of one test.
class BackendVariable {
 public:
  explicit BackendVariable(const char* value) { setenv("FLASHGRAD_BACKEND", value, 1); }
  ~BackendVariable() { unsetenv("FLASHGRAD_BACKEND"); }
  BackendVariable(const BackendVariable&) = delete;
  BackendVariable& operator=(const BackendVariable&) = delete;
};

TEST(CApi, PassIsChecked) {
  TestCall call(Layout::kFixed);
  const fg_tensors tensors = call.assemble();
  for (const int pass : {-1, 2, INT32_MAX}) {
    EXPECT_EQ(fg_supports(fg_pass{pass}, &tensors, nullptr, nullptr), FG_INVALID_ARGUMENT);
    EXPECT_EQ(fg_last_error(),
              "pass: " + std::to_string(pass) + ", want FG_FORWARD or FG_BACKWARD");
    EXPECT_EQ(fg_workspace_size(fg_pass{pass}, &tensors, nullptr, nullptr, nullptr),
              FG_INVALID_ARGUMENT);
  }
}

TEST(CApi, ForwardHasNoNeedOfOptionsAndTellsWhoRuns) {
  TestCall call(Layout::kFixed);
  const fg_tensors tensors = call.assemble();
  const char* backend = nullptr;
  ASSERT_EQ(fg_supports(FG_FORWARD, &tensors, nullptr, &backend), FG_OK) << fg_last_error();
  EXPECT_EQ(backend, first_that_serves(FG_FORWARD, tensors)) << "the fastest that can";
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, nullptr, nullptr), FG_OK);
}

// A backend that the build leaves out is told apart from one that does not exist.
TEST(CApi, TheBackendsAreTheSameInEveryBuild) {
  EXPECT_EQ(backend_names(), (std::vector<std::string>{"sm90", "cpu", "reference"}));
  TestCall call(Layout::kFixed);
  const fg_tensors tensors = call.assemble();
  call.options.backend = "sm90";
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_UNSUPPORTED);
  EXPECT_TRUE(mentions(fg_last_error(), "no backend serves this call: sm90: ")) << fg_last_error();
  fg_backend info = FG_BACKEND_INIT;
  ASSERT_EQ(fg_backend_info(0, &info), FG_OK);
  EXPECT_STRNE(info.detail, "");
}

TEST(CApi, EveryBackendCanBeAskedForByName) {
  TestCall call(Layout::kPacked);
  const fg_tensors tensors = call.assemble();
  for (const std::string& name : backend_names()) {
    call.options.backend = name.c_str();
    const char* backend = nullptr;
    const fg_status status = fg_supports(FG_BACKWARD, &tensors, &call.options, &backend);
    if (status == FG_OK) {
      EXPECT_EQ(backend, name);
    } else {
      EXPECT_EQ(status, FG_UNSUPPORTED);
      EXPECT_TRUE(mentions(fg_last_error(), name + ": ")) << fg_last_error();
    }
  }
}

TEST(CApi, UnknownBackendsAreRefusedWithTheNames) {
  TestCall call(Layout::kFixed);
  const fg_tensors tensors = call.assemble();
  call.options.backend = "abacus";
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fg_last_error()).rfind("backend: \"abacus\", want one of", 0), 0U)
      << fg_last_error();
  for (const std::string& name : backend_names()) {
    EXPECT_TRUE(mentions(fg_last_error(), name)) << fg_last_error();
  }
}

// The message stays one short line of ASCII, whatever the caller's bytes.
TEST(CApi, AMessageQuotesNamesPrintably) {
  TestCall call(Layout::kFixed);
  const fg_tensors tensors = call.assemble();
  call.options.backend = "a\n\x1b[31m\xff";
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions(fg_last_error(), "backend: \"a??[31m?\", want one of")) << fg_last_error();
  const std::string long_name(100000, 'x');
  call.options.backend = long_name.c_str();
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions(fg_last_error(), std::string(64, 'x') + "...\", want")) << fg_last_error();
  EXPECT_LT(std::strlen(fg_last_error()), 200U);
}

// However many sequences without rows there are, dsinks is zeros and nothing follows their number.
TEST(CApi, AHugeBatchOfNothingNeedsNoMoreThanNone) {
  std::vector<std::size_t> sizes;
  for (const std::int64_t batch : {std::int64_t{0}, std::int64_t{1} << 50}) {
    TestCall call(Layout::kFixed);
    for (TestTensor* t : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.dout, &call.dlse,
                          &call.dq, &call.dk, &call.dv}) {
      t->shape[0] = batch;
      t->shape[t == &call.lse || t == &call.dlse ? 2 : 1] = 0;
    }
    for (TestTensor* t : {&call.seqused_q, &call.seqused_kv, &call.q_offset}) {
      t->given = false;
    }
    call.dsinks.storage.assign(call.dsinks.storage.size(), std::byte{7});
    const fg_tensors tensors = call.assemble();
    std::size_t minimum = 0;
    ASSERT_EQ(fg_workspace_size(FG_BACKWARD, &tensors, &call.options, &minimum, nullptr), FG_OK)
        << fg_last_error();
    sizes.push_back(minimum);
    std::vector<std::byte> workspace(sizes[0]);
    ASSERT_EQ(fg_backward(&tensors, &call.options, workspace.data(), workspace.size(), nullptr),
              FG_OK)
        << fg_last_error();
    for (int h = 0; h < 4; ++h) {
      EXPECT_EQ(reinterpret_cast<const float*>(call.dsinks.storage.data())[h], 0);
    }
  }
  EXPECT_EQ(sizes[1], sizes[0]);
}

TEST(CApi, TheEnvironmentForcesABackendUnlessTheCallerDoes) {
  TestCall call(Layout::kFixed);
  const fg_tensors tensors = call.assemble();
  const char* backend = nullptr;
  {
    const BackendVariable variable("reference");
    ASSERT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, &backend), FG_OK);
    EXPECT_STREQ(backend, "reference");
  }
  {
    const BackendVariable variable("abacus");
    EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fg_last_error()).rfind("FLASHGRAD_BACKEND: \"abacus\", want one of", 0),
              0U)
        << fg_last_error();
    call.options.backend = "reference";
    EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_OK) << fg_last_error();
    call.options.backend = nullptr;
  }
  for (const char* any : {"", "auto"}) {
    const BackendVariable variable(any);
    ASSERT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, &backend), FG_OK);
    EXPECT_EQ(backend, first_that_serves(FG_FORWARD, tensors));
  }
}

TEST(CApi, WhatABackendLacksIsUnsupportedAndSaysWhy) {
  TestCall call(Layout::kFixed);
  for (TestTensor* t : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.sinks,
                        &call.seqused_q, &call.seqused_kv, &call.q_offset}) {
    t->device = {kDLCUDA, 0};
  }
  const fg_tensors tensors = call.assemble();
  call.options.backend = "reference";
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_UNSUPPORTED);
  EXPECT_TRUE(mentions(fg_last_error(), "reference: q: is on cuda:0, want cpu")) << fg_last_error();
  call.options.backend = nullptr;
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_UNSUPPORTED);
  EXPECT_TRUE(mentions(fg_last_error(), "; cpu: q: is on cuda:0, want cpu;")) << fg_last_error();
  EXPECT_TRUE(mentions(fg_last_error(), "left out of this build") ||
              mentions(fg_last_error(), "sm90: q: dtype f32 on cuda:0, want bf16 or f16;"))
      << fg_last_error();
}

TEST(CApi, TheGpuBackendWantsTensorsOfAGpu) {
  TestCall call(Layout::kFixed);
  call.options.backend = "sm90";
  const fg_tensors tensors = call.assemble();
  EXPECT_EQ(fg_supports(FG_BACKWARD, &tensors, &call.options, nullptr), FG_UNSUPPORTED);
  EXPECT_TRUE(mentions(fg_last_error(), "left out of this build") ||
              mentions(fg_last_error(), "sm90: q: is on cpu, want a CUDA device"))
      << fg_last_error();
}

TEST(CApi, F64GoesToTheReference) {
  TestCall call(Layout::kFixed);
  for (TestTensor* t : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.sinks}) {
    t->dtype = kF64Type;
  }
  const fg_tensors tensors = call.assemble();
  const char* backend = nullptr;
  ASSERT_EQ(fg_supports(FG_FORWARD, &tensors, nullptr, &backend), FG_OK) << fg_last_error();
  EXPECT_STREQ(backend, "reference");
  call.options.backend = "cpu";
  EXPECT_EQ(fg_supports(FG_FORWARD, &tensors, &call.options, nullptr), FG_UNSUPPORTED);
  EXPECT_TRUE(mentions(fg_last_error(), "cpu: q: dtype f64 on cpu, want f32, bf16 or f16"))
      << fg_last_error();
}

TEST(CApi, TooSmallAWorkspaceIsRefusedAndNothingWritten) {
  TestCall call(Layout::kFixed);
  for (const std::string& name : backend_names()) {
    call.options.backend = name.c_str();
    const fg_tensors tensors = call.assemble();
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      std::size_t minimum = 0;
      std::size_t preferred = 0;
      if (fg_workspace_size(pass, &tensors, &call.options, &minimum, &preferred) != FG_OK ||
          minimum == 0) {
        continue;  // there is no such thing as too small for this backend
      }
      EXPECT_LE(minimum, preferred);
      std::vector<std::byte> workspace(minimum);
      for (TestTensor* t : {&call.out, &call.lse, &call.dq}) {
        t->storage.assign(t->storage.size(), std::byte{7});
      }
      const auto run = pass == FG_FORWARD ? fg_forward : fg_backward;
      for (void* data : {static_cast<void*>(workspace.data()), static_cast<void*>(nullptr)}) {
        const std::size_t bytes = data == nullptr ? minimum : minimum - 1;
        EXPECT_EQ(run(&tensors, &call.options, data, bytes, nullptr), FG_WORKSPACE_TOO_SMALL);
        EXPECT_EQ(std::string(fg_last_error())
                      .rfind("workspace: " +
                                 (data == nullptr ? "null" : std::to_string(bytes) + " bytes"),
                             0),
                  0U)
            << fg_last_error();
        EXPECT_TRUE(mentions(fg_last_error(), "want " + std::to_string(minimum)))
            << fg_last_error();
      }
      const std::vector<std::byte> untouched(call.out.storage.size(), std::byte{7});
      EXPECT_EQ(call.out.storage, untouched);
      EXPECT_EQ(call.lse.storage, untouched);
      EXPECT_EQ(call.dq.storage, untouched);
      EXPECT_EQ(run(&tensors, &call.options, workspace.data(), minimum, nullptr), FG_OK)
          << fg_last_error();
    }
  }
}

TEST(CApi, MessagesBelongToTheirThread) {
  ASSERT_EQ(fg_forward(nullptr, nullptr, nullptr, 0, nullptr), FG_INVALID_ARGUMENT);
  EXPECT_STREQ(fg_last_error(), "tensors: null");
  std::thread([] {
    EXPECT_STREQ(fg_last_error(), "") << "nothing failed in this thread";
    EXPECT_EQ(fg_backend_info(-1, nullptr), FG_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fg_last_error()).rfind("index: -1, want 0 to", 0), 0U) << fg_last_error();
  }).join();
  EXPECT_STREQ(fg_last_error(), "tensors: null");
}

TEST(CApi, BackendInfoChecksItsStruct) {
  EXPECT_EQ(fg_backend_info(0, nullptr), FG_INVALID_ARGUMENT);
  EXPECT_STREQ(fg_last_error(), "info: null");
  fg_backend info = FG_BACKEND_INIT;
  info.struct_size = 8;
  EXPECT_EQ(fg_backend_info(0, &info), FG_INVALID_ARGUMENT);
  EXPECT_EQ(fg_last_error(), "info: struct_size 8, want " + std::to_string(sizeof(fg_backend)));
}

// Forward and backward of one call, in a workspace of its own; the outputs as bytes.
std::vector<std::byte> run_whole_call(float offset) {
  TestCall call(Layout::kFixed);
  for (TestTensor* t : {&call.q, &call.k, &call.v, &call.dout, &call.dlse, &call.sinks}) {
    auto* values = reinterpret_cast<float*>(t->storage.data());
    for (int i = 0; i < 256; ++i) {
      values[i] = static_cast<float>((i * 37) % 29) / 29 - offset;
    }
  }
  call.options.num_threads = 2;
  const fg_tensors tensors = call.assemble();
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    std::size_t bytes = 0;
    EXPECT_EQ(fg_workspace_size(pass, &tensors, &call.options, nullptr, &bytes), FG_OK);
    std::vector<std::byte> workspace(bytes + 1);
    const auto run = pass == FG_FORWARD ? fg_forward : fg_backward;
    EXPECT_EQ(run(&tensors, &call.options, workspace.data(), bytes, nullptr), FG_OK)
        << fg_last_error();
  }
  std::vector<std::byte> outputs;
  for (const TestTensor* t : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv, &call.dsinks}) {
    outputs.insert(outputs.end(), t->storage.begin(), t->storage.end());
  }
  return outputs;
}

TEST(CApi, CallsMayRunInSeveralThreadsAtOnce) {
  constexpr std::size_t kCallers = 4;
  std::vector<std::vector<std::byte>> together(kCallers);
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < kCallers; ++i) {
    callers.emplace_back(
        [&together, i] { together[i] = run_whole_call(static_cast<float>(i) / 8); });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (std::size_t i = 0; i < kCallers; ++i) {
    const std::vector<std::byte> alone = run_whole_call(static_cast<float>(i) / 8);
    ASSERT_EQ(alone.size(), together[i].size());
    EXPECT_EQ(std::memcmp(alone.data(), together[i].data(), alone.size()), 0) << "caller " << i;
  }
}

// GNU's OpenMP waits for ever for the parent's threads in such a child. (Not among CApi's: a child
// that starts threads is nothing for ThreadSanitizer.)
TEST(Fork, AChildComputesTheSameBits) {
  for (const char* name : {"cpu", "reference"}) {
    const BackendVariable backend(name);
    const std::vector<std::byte> parent = run_whole_call(0.5F);
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      const std::vector<std::byte> bytes = run_whole_call(0.5F);
      _exit(bytes == parent ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << name;  // exit status 0, no signal
  }
}

}  // namespace
}  // namespace flashgrad
