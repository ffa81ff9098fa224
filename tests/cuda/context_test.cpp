// SPDX-License-Identifier: Apache-2.0
// What a GPU call promises of its surroundings: it runs on the caller's stream, can be captured
// into a graph (so it neither waits nor allocates: a capture refuses both), may run in several
// threads at once, and gives the same bits a thousand times.
#include <memory>
#include <thread>

#include "device_call.hpp"

namespace flashgrad::check {
namespace {

// One of each way through the kernels.
std::vector<Case> cases() {
  std::vector<Case> result;
  const auto add = [&](const char* shape, DType dtype, BandMask mask) {
    Case c = parse_shape(shape);
    c.dtype = dtype;
    c.mask = mask;
    c.deterministic = true;
    result.push_back(c);
  };
  constexpr BandMask kFull;
  constexpr BandMask kCausal{.right = 0};
  add("b=2,hq=4,sq=513,sk=700,d=128", DType::kBF16, kFull);
  add("b=2,hq=4,hkv=2,sq=513,d=128", DType::kBF16, kCausal);
  add("hq=4,hkv=1,cu_q=0:300:300:901,cu_kv=0:200:250:800,d=64,sinks=n,dlse=n", DType::kF16,
      kCausal);
  add("b=2,hq=2,sq=300,d=192,dv=128", DType::kBF16, {.left = 100, .right = 5});
  add("b=1,hq=3,sq=257,d=256", DType::kF16, kCausal);
  add("b=1,hq=2,sq=200,d=59,layout=own", DType::kBF16, kFull);
  result.back().softcap = 5;
  return result;
}

class Stream {
 public:
  Stream() { require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)
  void wait() const { require_cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

TEST(Context, AGraphReplaysTheCall) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(command_line(c));
    const DeviceCall call(c, "sm90");
    SharedWorkspace workspace;
    workspace.reserve(call.workspace_bytes());
    const Stream stream;
    call.enqueue(workspace, stream);
    stream.wait();
    const Snapshot direct(call);

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    call.enqueue(workspace, stream);
    require_cuda(cudaStreamEndCapture(stream, &graph));
    require_cuda(cudaGraphInstantiate(&executable, graph, 0));
    for (int replay = 0; replay < 2; ++replay) {
      require_cuda(cudaGraphLaunch(executable, stream));
      direct.compare({}, stream);
    }
    stream.wait();
    EXPECT_EQ(direct.num_differences(), 0U);
    require_cuda(cudaGraphExecDestroy(executable));
    require_cuda(cudaGraphDestroy(graph));
  }
}

TEST(Context, ThreadsOnStreamsOfTheirOwn) {
  const std::vector<Case> specs = cases();
  const auto run = [](const Case& c) {
    const DeviceCall call(c, "sm90");
    SharedWorkspace workspace;
    workspace.reserve(call.workspace_bytes());
    const Stream stream;
    call.enqueue(workspace, stream);
    stream.wait();
    const Snapshot first(call);
    for (int n = 0; n < 50; ++n) {
      call.enqueue(workspace, stream);
      first.compare({}, stream);
    }
    stream.wait();
    EXPECT_EQ(first.num_differences(), 0U) << command_line(c);
  };
  std::vector<std::thread> threads;
  for (const Case& c : specs) {
    threads.emplace_back(run, c);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// The caller's current device and the runtime's last error stay as they are.
TEST(Context, LeavesTheCallersStateAlone) {
  int count = 0;
  require_cuda(cudaGetDeviceCount(&count));
  const DeviceCall call(cases().front(), "sm90");
  SharedWorkspace workspace;
  workspace.reserve(call.workspace_bytes());
  require_cuda(cudaSetDevice(count - 1));
  call.enqueue(workspace, nullptr);
  int current = -1;
  require_cuda(cudaGetDevice(&current));
  EXPECT_EQ(current, count - 1);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  require_cuda(cudaSetDevice(0));
  require_cuda(cudaDeviceSynchronize());
}

// Without `deterministic` the order in which dq is summed is free, with it nothing is: not after
// other shapes either, which leave the workspace dirty.
void expect_thousand_repeats(std::vector<Case> specs, bool deterministic) {
  std::vector<std::unique_ptr<DeviceCall>> calls;
  std::vector<Snapshot> first;
  SharedWorkspace workspace;
  for (Case& c : specs) {
    c.deterministic = deterministic;
    calls.push_back(std::make_unique<DeviceCall>(c, "sm90"));
    workspace.reserve(calls.back()->workspace_bytes());
  }
  const Stream stream;
  for (const auto& call : calls) {
    call->enqueue(workspace, stream);
    stream.wait();
    first.emplace_back(*call);
  }
  const std::vector<std::string> free =
      deterministic ? std::vector<std::string>{} : std::vector<std::string>{"dq"};
  for (int n = 0; n < 1000; ++n) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      calls[i]->enqueue(workspace, stream);
      first[i].compare(free, stream);
    }
  }
  stream.wait();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(first[i].num_differences(), 0U) << command_line(calls[i]->spec());
  }
}

TEST(ThousandRepeats, OddLengths) {
  expect_thousand_repeats(find_cases("odd_lengths_race", Place::kCuda), false);
}

TEST(ThousandRepeats, OddLengthsDeterministic) {
  expect_thousand_repeats(find_cases("odd_lengths_race", Place::kCuda), true);
}

TEST(ThousandRepeats, OtherShapesInBetween) {
  std::vector<Case> specs = cases();
  for (const char* id : {"determinism", "determinism_gqa_dirty_semaphores",
                         "determinism_window_idle_blocks", "varlen_more_q_than_k"}) {
    for (const Case& c : find_cases(id, Place::kCuda)) {
      specs.push_back(c);
    }
  }
  expect_thousand_repeats(specs, true);
}

}  // namespace
}  // namespace flashgrad::check

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (std::int32_t n = 0; n < fg_backend_count(); ++n) {
    fg_backend backend = FG_BACKEND_INIT;
    fg_backend_info(n, &backend);
    if (std::string(backend.name) == "sm90" && backend.available == 0) {
      std::printf("skipped: %s\n", backend.detail);
      return 77;
    }
  }
  return RUN_ALL_TESTS();
}
