// SPDX-License-Identifier: Apache-2.0
// Times the sm90 forward, whole calls, in the two regimes of the design notes: cool (launches 40 ms
// apart, median) and sustained (0.9 s of launches after 0.4 s of warm-up, with the clock and the
// energy). Random normals, 16k tokens in all, hidden size 2048, no framework.
//   sm90_forward_bench [--cool] KERNEL SHAPE...
// KERNEL: d64, d96, d128, d192v128, d192, d256, with _f16 behind for f16. SHAPE: a length, f (full)
// or c (causal), and g for 4 query heads a key head: 16384f 4096c 4096cg.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "cuda/sm90/fwd_launch.hpp"

namespace flashgrad {
namespace {

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("CUDA: %s\n", cudaGetErrorString(error));
    std::exit(2);
  }
}

// Clock and energy of device 0, by NVML; zeros where there is none.
class Meter {
 public:
  Meter() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) {
      return;
    }
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto find = reinterpret_cast<int (*)(unsigned, void**)>(
        dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
    energy_ = reinterpret_cast<Energy>(dlsym(library, "nvmlDeviceGetTotalEnergyConsumption"));
    clock_ = reinterpret_cast<Clock>(dlsym(library, "nvmlDeviceGetClockInfo"));
    if (init == nullptr || find == nullptr || init() != 0 || find(0, &device_) != 0) {
      device_ = nullptr;
    }
  }
  double joules() const {
    unsigned long long millijoules = 0;
    if (device_ != nullptr && energy_ != nullptr) {
      energy_(device_, &millijoules);
    }
    return static_cast<double>(millijoules) * 1e-3;
  }
  unsigned sm_megahertz() const {
    constexpr int kSmClock = 1;
    unsigned clock = 0;
    if (device_ != nullptr && clock_ != nullptr) {
      clock_(device_, kSmClock, &clock);
    }
    return clock;
  }

 private:
  using Energy = int (*)(void*, unsigned long long*);
  using Clock = int (*)(void*, int, unsigned*);
  void* device_ = nullptr;
  Energy energy_ = nullptr;
  Clock clock_ = nullptr;
};

struct Kernel {
  DType dtype = DType::kBF16;
  int head_dim = 0;
  int head_dim_v = 0;
};

Kernel parse_kernel(const char* text) {
  Kernel kernel;
  if (std::sscanf(text, "d%dv%d", &kernel.head_dim, &kernel.head_dim_v) < 2) {
    std::sscanf(text, "d%d", &kernel.head_dim);
    kernel.head_dim_v = kernel.head_dim;
  }
  if (std::strstr(text, "_f16") != nullptr) {
    kernel.dtype = DType::kF16;
  }
  return kernel;
}

void run_shape(const Kernel& kernel, const std::string& shape, bool sustained, const Meter& meter) {
  const std::int64_t seqlen = std::atoi(shape.c_str());
  const bool causal = shape.find('c') != std::string::npos;
  const std::int64_t heads = 2048 / kernel.head_dim_v;
  Problem p;
  p.dtype = kernel.dtype;
  p.device_type = DeviceType::kCuda;
  p.batch = 16384 / seqlen;
  p.seqlen_q = p.seqlen_kv = p.max_seqlen_q = p.max_seqlen_kv = seqlen;
  p.heads_q = heads;
  p.heads_kv = shape.find('g') != std::string::npos ? heads / 4 : heads;
  p.head_dim = kernel.head_dim;
  p.head_dim_v = kernel.head_dim_v;
  p.wants_lse = true;
  p.scale = 1 / std::sqrt(static_cast<double>(kernel.head_dim));
  if (causal) {
    p.mask.right = 0;
  }

  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(std::size_t{1} << 20);
  for (std::uint16_t& x : pool) {
    x = kernel.dtype == DType::kBF16 ? f32_to_bf16(normal(random)) : f32_to_f16(normal(random));
  }
  std::vector<void*> allocated;
  const auto allocate = [&](std::int64_t bytes) {
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, static_cast<std::size_t>(bytes)));
    allocated.push_back(pointer);
    return pointer;
  };
  const auto make = [&](std::int64_t num_heads, std::int64_t columns) {
    std::vector<std::uint16_t> host(
        static_cast<std::size_t>(p.batch * seqlen * num_heads * columns));
    // The pool again and again, each time from another place.
    for (std::size_t i = 0; i < host.size();) {
      const std::size_t from = random() % pool.size();
      const std::size_t count = std::min(pool.size() - from, host.size() - i);
      std::copy_n(pool.data() + from, count, host.data() + i);
      i += count;
    }
    Tensor t;
    t.data = allocate(static_cast<std::int64_t>(host.size()) * 2);
    check_cuda(cudaMemcpy(t.data, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
    t.dtype = kernel.dtype;
    t.head_stride = columns;
    t.row_stride = num_heads * columns;
    t.batch_stride = t.row_stride * seqlen;
    return t;
  };
  Args args;
  args.q = make(heads, kernel.head_dim);
  args.k = make(p.heads_kv, kernel.head_dim);
  args.v = make(p.heads_kv, kernel.head_dim_v);
  args.out = make(heads, kernel.head_dim_v);
  args.lse.data = allocate(p.batch * heads * seqlen * 4);
  args.lse.batch_stride = heads * seqlen;
  args.lse.head_stride = seqlen;
  args.lse.row_stride = 1;
  args.workspace_bytes = sm90::forward_workspace_size(p).preferred;
  args.workspace = allocate(static_cast<std::int64_t>(args.workspace_bytes));

  const double flops = 2.0 * static_cast<double>(p.batch * heads) * static_cast<double>(seqlen) *
                       static_cast<double>(seqlen) *
                       static_cast<double>(kernel.head_dim + kernel.head_dim_v) *
                       (causal ? 0.5 : 1);
  cudaEvent_t begin{};
  cudaEvent_t end{};
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  const auto milliseconds = [&](int launches) {
    check_cuda(cudaEventRecord(begin));
    for (int i = 0; i < launches; ++i) {
      if (const Status status = sm90::launch_forward(p, args); !status.ok()) {
        std::printf("%s\n", status.message.c_str());
        std::exit(3);
      }
    }
    check_cuda(cudaEventRecord(end));
    check_cuda(cudaEventSynchronize(end));
    float result = 0;
    check_cuda(cudaEventElapsedTime(&result, begin, end));
    return static_cast<double>(result);
  };
  milliseconds(1);
  std::vector<double> cool;
  for (int i = 0; i < 11; ++i) {
    usleep(40000);
    cool.push_back(milliseconds(1));
  }
  std::nth_element(cool.begin(), cool.begin() + 5, cool.end());
  std::printf("%-8s d%d/%d %s cool %6.1f", shape.c_str(), kernel.head_dim, kernel.head_dim_v,
              name(kernel.dtype), flops / cool[5] * 1e-9);
  if (sustained) {
    milliseconds(std::max(1, static_cast<int>(400 / cool[5])));
    const int launches = std::max(1, static_cast<int>(900 / cool[5]));
    const double joules = meter.joules();
    const double elapsed = milliseconds(launches);
    std::printf(" sustained %6.1f TFLOP/s, %u MHz, %.3f J/TFLOP", flops * launches / elapsed * 1e-9,
                meter.sm_megahertz(), (meter.joules() - joules) / (flops * launches * 1e-12));
  }
  std::printf("\n");
  std::fflush(stdout);
  for (void* pointer : allocated) {
    check_cuda(cudaFree(pointer));
  }
  check_cuda(cudaEventDestroy(begin));
  check_cuda(cudaEventDestroy(end));
}

}  // namespace
}  // namespace flashgrad

int main(int argc, char** argv) {
  const bool cool_only = argc > 1 && std::strcmp(argv[1], "--cool") == 0;
  const int first = cool_only ? 2 : 1;
  if (argc < first + 2) {
    std::printf("usage: sm90_forward_bench [--cool] KERNEL SHAPE...\n");
    return 1;
  }
  const flashgrad::Kernel kernel = flashgrad::parse_kernel(argv[first]);
  const flashgrad::Meter meter;
  for (int i = first + 1; i < argc; ++i) {
    flashgrad::run_shape(kernel, argv[i], !cool_only, meter);
  }
  return 0;
}
