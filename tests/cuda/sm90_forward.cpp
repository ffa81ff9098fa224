// SPDX-License-Identifier: Apache-2.0
// Checks the sm90 forward against a float64 textbook on the host: out, lse, zeros, NaN, padding,
// and the same bits twice and wherever a sequence lies. Calls launch_forward itself, so it needs no
// library and no framework.
//   sm90_forward [check|short] [KERNEL...]   cases() or short_cases(); names of kKernels, default:
//   all
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.hpp"
#include "core/mask.hpp"
#include "cuda/sm90/fwd_launch.hpp"
#include "cuda/sm90/sm90_backend.hpp"
#include "forward_case.hpp"
#include "forward_invariance.hpp"

namespace flashgrad {
namespace {

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("CUDA: %s\n", cudaGetErrorString(error));
    std::exit(2);
  }
}

// A native width of the kernels, in one dtype.
struct Kernel {
  const char* name;
  DType dtype;
  int head_dim;
  int head_dim_v;
};

constexpr Kernel kKernels[] = {
    {"d64", DType::kBF16, 64, 64},       {"d96", DType::kBF16, 96, 96},
    {"d128", DType::kBF16, 128, 128},    {"d192v128", DType::kBF16, 192, 128},
    {"d192", DType::kBF16, 192, 192},    {"d256", DType::kBF16, 256, 256},
    {"d64_f16", DType::kF16, 64, 64},    {"d96_f16", DType::kF16, 96, 96},
    {"d128_f16", DType::kF16, 128, 128}, {"d192v128_f16", DType::kF16, 192, 128},
    {"d192_f16", DType::kF16, 192, 192}, {"d256_f16", DType::kF16, 256, 256},
};

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float widen(std::uint16_t x, DType dtype) {
  return dtype == DType::kBF16 ? bf16_to_f32(x) : f16_to_f32(x);
}
std::uint16_t narrow(float x, DType dtype) {
  return dtype == DType::kBF16 ? f32_to_bf16(x) : f32_to_f16(x);
}

// A tensor on both sides. Everything between its elements is NaN.
struct HostTensor {
  Tensor on_device;
  std::vector<std::uint16_t> bits;
  std::vector<float> values;  // of `bits`

  void upload() {
    check_cuda(cudaMemcpy(on_device.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
    values.resize(bits.size());
    std::transform(bits.begin(), bits.end(), values.begin(),
                   [this](std::uint16_t x) { return widen(x, on_device.dtype); });
  }
  std::size_t at(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return static_cast<std::size_t>(on_device.offset(b, i, h));
  }
};

// Frees at the end what it allocated.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* pointer : pointers_) {
      static_cast<void>(cudaFree(pointer));
    }
  }
  void* allocate(std::size_t bytes) {
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, std::max<std::size_t>(bytes, 16)));
    pointers_.push_back(pointer);
    return pointer;
  }
  template <class T>
  T* copy(const std::vector<T>& values) {
    if (values.empty()) {
      return nullptr;
    }
    void* pointer = allocate(values.size() * sizeof(T));
    check_cuda(
        cudaMemcpy(pointer, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T*>(pointer);
  }

 private:
  std::vector<void*> pointers_;
};

struct Result {
  double squared_error = 0;
  double squared_norm = 0;
  double lse_error = 0;
};

// Runs one case; prints a line; returns whether it is right.
bool run_case(const Kernel& kernel, const Case& c) {
  const int head_dim = kernel.head_dim - c.narrower;
  const int head_dim_v = kernel.head_dim_v - c.narrower;
  const bool packed = !c.cu_seqlens_q.empty();
  Problem p;
  p.dtype = kernel.dtype;
  p.device_type = DeviceType::kCuda;
  p.batch = packed ? static_cast<int>(c.cu_seqlens_q.size()) - 1 : c.batch;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_kv = c.seqlen_kv;
  p.max_seqlen_q = c.max_seqlen > 0 ? c.max_seqlen : c.seqlen_q;
  p.max_seqlen_kv = c.max_seqlen > 0 ? c.max_seqlen : c.seqlen_kv;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.packed = packed;
  p.has_seqused_q = !c.seqused_q.empty();
  p.has_seqused_kv = !c.seqused_kv.empty();
  p.has_q_offset = !c.q_offset.empty();
  p.has_sinks = c.sinks;
  p.wants_lse = c.lse;
  p.mask = c.mask;
  p.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(head_dim)) : c.scale;
  p.softcap = c.softcap;

  DeviceMemory memory;
  const std::int64_t entries = packed ? 1 : c.batch;
  const auto make = [&](std::int64_t rows, std::int64_t heads, std::int64_t columns) {
    HostTensor t;
    const std::int64_t width = columns + (c.odd_strides ? 3 : 0);
    t.on_device.dtype = kernel.dtype;
    t.on_device.head_stride = c.heads_outside ? width * rows : width;
    t.on_device.row_stride = c.heads_outside ? width : width * heads;
    t.on_device.batch_stride = packed ? 0 : width * rows * heads;
    t.bits.assign(static_cast<std::size_t>(entries * rows * heads * width),
                  narrow(kNan, kernel.dtype));
    t.on_device.data = memory.allocate(t.bits.size() * 2);
    return t;
  };
  std::mt19937 random(static_cast<unsigned>(1234 + c.seqlen_q * 7 + c.seqlen_kv));
  std::normal_distribution<float> normal;
  const auto fill = [&](HostTensor& t, std::int64_t rows, std::int64_t heads, int columns,
                        float amplitude) {
    for (std::int64_t b = 0; b < entries; ++b) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t h = 0; h < heads; ++h) {
          std::generate_n(&t.bits[t.at(b, i, h)], columns,
                          [&] { return narrow(amplitude * normal(random), kernel.dtype); });
        }
      }
    }
  };
  HostTensor q = make(c.seqlen_q, c.heads_q, head_dim);
  HostTensor k = make(c.seqlen_kv, c.heads_kv, head_dim);
  HostTensor v = make(c.seqlen_kv, c.heads_kv, head_dim_v);
  HostTensor out = make(c.seqlen_q, c.heads_q, head_dim_v);
  fill(q, c.seqlen_q, c.heads_q, head_dim, c.amplitude);
  fill(k, c.seqlen_kv, c.heads_kv, head_dim, c.amplitude);
  fill(v, c.seqlen_kv, c.heads_kv, head_dim_v, 1);
  std::vector<float> sinks;
  if (c.sinks) {
    sinks.resize(static_cast<std::size_t>(c.heads_q));
    std::generate(sinks.begin(), sinks.end(), [&] { return 3 * normal(random); });
    sinks.back() = -kInf;
  }

  Args host;
  host.cu_seqlens_q = c.cu_seqlens_q.data();
  host.cu_seqlens_kv = c.cu_seqlens_kv.data();
  host.seqused_q = c.seqused_q.data();
  host.seqused_kv = c.seqused_kv.data();
  host.q_offset = c.q_offset.data();
  std::vector<Sequence> sequences;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    sequences.push_back(sequence(p, host, b));
  }
  std::vector<char> row_used(static_cast<std::size_t>(entries * c.seqlen_q), 0);
  std::vector<char> key_read(static_cast<std::size_t>(entries * c.seqlen_kv), 0);
  for (const Sequence& s : sequences) {
    for (std::int64_t i = 0; i < s.band.seqlen_q; ++i) {
      row_used[static_cast<std::size_t>(s.batch_index * c.seqlen_q + s.q_begin + i)] = 1;
      const Range keys = s.band.kv_range(i, i + 1);
      for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        key_read[static_cast<std::size_t>(s.batch_index * c.seqlen_kv + s.kv_begin + j)] = 1;
      }
    }
  }
  const auto poison_unread = [&](HostTensor& t, const std::vector<char>& read, std::int64_t rows,
                                 std::int64_t heads, int columns) {
    for (std::int64_t i = 0; i < entries * rows; ++i) {
      for (std::int64_t h = 0; h < heads && read[static_cast<std::size_t>(i)] == 0; ++h) {
        for (int e = 0; e < columns; ++e) {
          t.bits[t.at(i / rows, i % rows, h) + static_cast<std::size_t>(e)] =
              narrow(e % 2 == 0 ? kInf : kNan, kernel.dtype);
        }
      }
    }
  };
  if (c.poison == Poison::kUnread) {
    poison_unread(q, row_used, c.seqlen_q, c.heads_q, head_dim);
    poison_unread(k, key_read, c.seqlen_kv, c.heads_kv, head_dim);
    poison_unread(v, key_read, c.seqlen_kv, c.heads_kv, head_dim_v);
  } else if (c.poison == Poison::kQuery) {
    q.bits[q.at(0, c.seqlen_q / 2, 0) + 3] = narrow(kNan, kernel.dtype);
  } else if (c.poison == Poison::kValue) {
    v.bits[v.at(0, c.seqlen_kv / 2, 0) + 3] = narrow(kNan, kernel.dtype);
  }
  for (HostTensor* t : {&q, &k, &v}) {
    t->upload();
  }

  Args args;
  args.q = q.on_device;
  args.k = k.on_device;
  args.v = v.on_device;
  args.out = out.on_device;
  std::vector<float> lse(static_cast<std::size_t>(entries * c.heads_q * c.seqlen_q), kNan);
  if (c.lse) {
    args.lse.data = memory.copy(lse);
    args.lse.row_stride = 1;
    args.lse.head_stride = c.seqlen_q;
    args.lse.batch_stride = packed ? 0 : static_cast<std::int64_t>(c.heads_q) * c.seqlen_q;
  }
  args.cu_seqlens_q = memory.copy(c.cu_seqlens_q);
  args.cu_seqlens_kv = memory.copy(c.cu_seqlens_kv);
  args.seqused_q = memory.copy(c.seqused_q);
  args.seqused_kv = memory.copy(c.seqused_kv);
  args.q_offset = memory.copy(c.q_offset);
  args.sinks = memory.copy(sinks);
  // Not a byte more than asked for, aligned to nothing, mostly full of NaN.
  const WorkspaceSize size = sm90::forward_workspace_size(p);
  args.workspace_bytes = c.least_workspace ? size.minimum : size.preferred;
  auto* const workspace = static_cast<std::uint8_t*>(memory.allocate(args.workspace_bytes + 1));
  if (!c.unwritten_workspace) {
    check_cuda(cudaMemset(workspace, 0xff, args.workspace_bytes + 1));
  }
  args.workspace = workspace + 1;

  std::string wrong;
  std::vector<std::uint16_t> first;
  for (int run = 0; run < 2 && wrong.empty(); ++run) {
    out.upload();
    Status status = sm90::supports_forward(p);
    if (status.ok()) {
      status = sm90::launch_forward(p, args);
    }
    if (!status.ok()) {
      wrong = status.message;
      break;
    }
    check_cuda(cudaDeviceSynchronize());
    std::vector<std::uint16_t> got(out.bits.size());
    check_cuda(cudaMemcpy(got.data(), out.on_device.data, got.size() * 2, cudaMemcpyDeviceToHost));
    if (run == 0) {
      first = got;
    } else if (got != first) {
      wrong = "two runs differ";
    }
  }
  if (c.lse) {
    check_cuda(cudaMemcpy(lse.data(), args.lse.data, lse.size() * 4, cudaMemcpyDeviceToHost));
  }
  if (!wrong.empty()) {
    std::printf("FAIL %-13s %s: %s\n", kernel.name, c.name, wrong.c_str());
    return false;
  }

  // The textbook, row by row.
  std::atomic<bool> misplaced = false;  // a NaN, an Inf or a 0 where it should not be
  const unsigned num_threads = std::max(1U, std::thread::hardware_concurrency());
  std::vector<Result> results(num_threads);
  const auto check_row = [&](const Sequence& s, std::int64_t i, std::int64_t h, Result& result) {
    const Range keys = s.band.kv_range(i, i + 1);
    const std::int64_t head_kv = h / p.group();
    const double sink = c.sinks ? sinks[static_cast<std::size_t>(h)] : -kInf;
    std::vector<double> scores(static_cast<std::size_t>(keys.size()));
    double top = sink;
    const float* q_row = &q.values[q.at(s.batch_index, s.q_begin + i, h)];
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const float* k_row = &k.values[k.at(s.batch_index, s.kv_begin + j, head_kv)];
      double x = 0;
      for (int e = 0; e < head_dim; ++e) {
        x += static_cast<double>(q_row[e]) * k_row[e];
      }
      x *= p.scale;
      x = p.softcap > 0 ? p.softcap * std::tanh(x / p.softcap) : x;
      scores[static_cast<std::size_t>(j - keys.begin)] = x;
      top = x > top || std::isnan(x) ? x : top;
    }
    double sum = sink > -kInf ? std::exp(sink - top) : 0;
    for (const double x : scores) {
      sum += std::exp(x - top);
    }
    const double want_lse = keys.empty() && !(sink > -kInf) ? -kInf : top + std::log(sum);
    std::vector<double> want(static_cast<std::size_t>(head_dim_v), 0.0);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const float* v_row = &v.values[v.at(s.batch_index, s.kv_begin + j, head_kv)];
      const double probability =
          std::exp(scores[static_cast<std::size_t>(j - keys.begin)] - want_lse);
      for (int e = 0; e < head_dim_v; ++e) {
        want[static_cast<std::size_t>(e)] += probability * v_row[e];
      }
    }
    const std::size_t at = out.at(s.batch_index, s.q_begin + i, h);
    for (std::size_t e = 0; e < want.size(); ++e) {
      const double got = widen(first[at + e], kernel.dtype);
      if (std::isfinite(got) != std::isfinite(want[e]) || (keys.empty() && got != 0)) {
        misplaced = true;
      } else if (std::isfinite(got)) {
        result.squared_error += (got - want[e]) * (got - want[e]);
        result.squared_norm += want[e] * want[e];
      }
    }
    if (c.lse) {
      const double got = lse[static_cast<std::size_t>((s.batch_index * c.heads_q + h) * c.seqlen_q +
                                                      s.q_begin + i)];
      if (std::isnan(got) != std::isnan(want_lse) || std::isinf(got) != std::isinf(want_lse)) {
        misplaced = true;
      } else if (std::isfinite(got)) {
        result.lse_error =
            std::max(result.lse_error, std::abs(got - want_lse) / (1 + std::abs(want_lse)));
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      std::int64_t n = 0;
      for (const Sequence& s : sequences) {
        for (std::int64_t i = 0; i < s.band.seqlen_q * c.heads_q; ++i, ++n) {
          if (n % num_threads == t) {
            check_row(s, i / c.heads_q, i % c.heads_q, results[t]);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::int64_t i = 0; i < entries * c.seqlen_q; ++i) {
    for (std::int64_t h = 0; h < c.heads_q; ++h) {
      const std::size_t at = out.at(i / c.seqlen_q, i % c.seqlen_q, h);
      for (int e = 0; e < head_dim_v + (c.odd_strides ? 3 : 0); ++e) {
        const float got = widen(first[at + static_cast<std::size_t>(e)], kernel.dtype);
        if (e >= head_dim_v ? !std::isnan(got)
                            : row_used[static_cast<std::size_t>(i)] == 0 && got != 0) {
          misplaced = true;
        }
      }
      if (c.lse && row_used[static_cast<std::size_t>(i)] == 0 &&
          lse[static_cast<std::size_t>((i / c.seqlen_q * c.heads_q + h) * c.seqlen_q +
                                       i % c.seqlen_q)] != -kInf) {
        misplaced = true;
      }
    }
  }
  Result total;
  for (const Result& r : results) {
    total.squared_error += r.squared_error;
    total.squared_norm += r.squared_norm;
    total.lse_error = std::max(total.lse_error, r.lse_error);
  }
  const double error =
      total.squared_norm > 0 ? std::sqrt(total.squared_error / total.squared_norm) : 0;
  // Rounding p and out to the dtype costs about 2.3e-3 in bf16 and an eighth of that in f16.
  const bool right =
      !misplaced && error < (kernel.dtype == DType::kBF16 ? 4e-3 : 6e-4) && total.lse_error < 1e-5;
  std::printf("%s %-13s %-38s out %.2e lse %.1e%s\n", right ? "ok  " : "FAIL", kernel.name, c.name,
              error, total.lse_error, misplaced ? " misplaced NaN, Inf or 0" : "");
  return right;
}

}  // namespace
}  // namespace flashgrad

int main(int argc, char** argv) {
  if (!flashgrad::sm90_backend.available()) {
    std::printf("skipped: %s\n", flashgrad::sm90_backend.detail());
    return 77;
  }
  const bool is_short = argc > 1 && std::strcmp(argv[1], "short") == 0;
  char** const names =
      argv + (is_short || (argc > 1 && std::strcmp(argv[1], "check") == 0) ? 2 : 1);
  char** const end = argv + argc;
  int failed = 0;
  int count = 0;
  for (const auto& kernel : flashgrad::kKernels) {
    if (names != end && std::none_of(names, end, [&](const char* name) {
          return std::strcmp(name, kernel.name) == 0;
        })) {
      continue;
    }
    for (const auto& c : is_short ? flashgrad::short_cases() : flashgrad::cases()) {
      failed += flashgrad::run_case(kernel, c) ? 0 : 1;
      ++count;
      std::fflush(stdout);
    }
    if (!is_short) {
      failed += flashgrad::forward_is_invariant(kernel.name, kernel.dtype, kernel.head_dim,
                                                kernel.head_dim_v)
                    ? 0
                    : 1;
      ++count;
    }
  }
  std::printf("%d of %d cases failed\n", failed, count);
  return failed == 0 && count > 0 ? 0 : 1;
}
