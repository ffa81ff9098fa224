// SPDX-License-Identifier: Apache-2.0
// Implements backward_bench.hpp.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "backward_bench.hpp"
#include "backward_case.hpp"
#include "backward_memory.cuh"
#include "cuda/sm90/sm90_backend.hpp"
#include "device_array.hpp"

namespace flashgrad {

void bench_backward(int d, int dv_columns, std::int64_t seqlen, const char* mask,
                    std::int64_t heads, std::int64_t heads_kv, DType dtype, bool deterministic) {
  const std::int64_t batch = std::max<std::int64_t>(1, 16384 / seqlen);
  Problem p = problem(dtype, batch, seqlen, seqlen, heads, heads_kv, d, dv_columns);
  const std::int64_t window = mask[0] == 'w' ? std::atoll(mask + 1) : 0;
  const bool causal = window > 0 || mask[0] == '1';
  p.mask = causal ? kCausal : kFull;
  if (window > 0) {
    p.mask.left = window;
  }
  p.deterministic = deterministic;
  char name[96];
  std::snprintf(name, sizeof(name), "%s d%d/%d %s %lldk %lld/%lld%s", ::flashgrad::name(dtype), d,
                dv_columns,
                window > 0 ? mask
                : causal   ? "causal"
                           : "full",
                static_cast<long long>(seqlen / 1024), static_cast<long long>(heads),
                static_cast<long long>(heads_kv), deterministic ? " det" : "");
  const Status supported = sm90_backend.supports(p, Pass::kBackward);
  if (!supported.ok()) {
    std::printf("%-28s refused: %s\n", name, supported.message.c_str());
    return;
  }
  const Layout q_layout{batch, seqlen, heads, d, 0, 0};
  const Layout k_layout{batch, seqlen, heads_kv, d, 0, 0};
  const Layout out_layout{batch, seqlen, heads, dv_columns, 0, 0};
  const Layout v_layout{batch, seqlen, heads_kv, dv_columns, 0, 0};
  const auto elements = static_cast<std::size_t>(q_layout.elements());
  const auto kv_elements = static_cast<std::size_t>(k_layout.elements());
  DeviceArray<std::uint16_t> q(elements), k(kv_elements), v(kv_elements), out(elements),
      dout(elements), dq(elements), dk(kv_elements), dv(kv_elements);
  std::vector<Line> lines;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < seqlen; ++i) {
      lines.push_back({static_cast<int>(b), 0, i, 0, 0, 1});
    }
  }
  DeviceArray<Line> device_lines(lines);
  const auto fill_one = [&](const Layout& layout, std::uint16_t* data, int seed, double scale) {
    fill<<<1024, 256>>>(layout.tensor(data, dtype), device_lines.data, batch * seqlen,
                        static_cast<int>(layout.heads), static_cast<int>(layout.columns),
                        static_cast<std::uint64_t>(seed), scale);
  };
  fill_one(q_layout, q.data, 1, 1);
  fill_one(k_layout, k.data, 2, 1);
  fill_one(v_layout, v.data, 3, 1);
  fill_one(out_layout, dout.data, 4, 1);
  fill_one(out_layout, out.data, 5, 0.05);
  // lse of random normals: log(count) + 1/2, near enough for the time.
  std::vector<float> host_lse(static_cast<std::size_t>(batch * heads * seqlen));
  for (std::size_t i = 0; i < host_lse.size(); ++i) {
    const auto row = static_cast<double>(i % static_cast<std::size_t>(seqlen));
    host_lse[i] = static_cast<float>(std::log(causal ? row + 1 : static_cast<double>(seqlen)) +
                                     (causal && row < 8 ? 2.0 : 0.5));
  }
  DeviceArray<float> lse(host_lse);
  Args args{};
  args.q = q_layout.tensor(q.data, dtype);
  args.k = k_layout.tensor(k.data, dtype);
  args.v = v_layout.tensor(v.data, dtype);
  args.out = out_layout.tensor(out.data, dtype);
  args.dout = out_layout.tensor(dout.data, dtype);
  args.dq = q_layout.tensor(dq.data, dtype);
  args.dk = k_layout.tensor(dk.data, dtype);
  args.dv = v_layout.tensor(dv.data, dtype);
  args.lse = {lse.data, DType::kF32, seqlen * heads, 1, seqlen, 1};
  const WorkspaceSize size = sm90_backend.workspace_size(p, Pass::kBackward);
  DeviceArray<unsigned char> workspace(size.preferred);
  args.workspace = workspace.data;
  args.workspace_bytes = size.preferred;
  // Of the visible pairs, S^2 / 2 of them if causal.
  double pairs = (causal ? 0.5 : 1.0) * static_cast<double>(seqlen) * static_cast<double>(seqlen);
  if (window > 0) {
    const Band band = Band::of(p.mask, seqlen, seqlen);
    pairs = 0;
    for (std::int64_t i = 0; i < seqlen; ++i) {
      pairs += static_cast<double>(band.kv_range(i, i + 1).size());
    }
  }
  const double flops = 2.0 * (3 * d + 2 * dv_columns) * static_cast<double>(batch * heads) * pairs;
  cudaEvent_t begin;
  cudaEvent_t end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  const auto call = [&] {
    const Status status = sm90_backend.backward(p, args);
    if (!status.ok()) {
      std::printf("%s: %s\n", name, status.message.c_str());
      std::exit(1);
    }
  };
  call();
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<double> cool;
  for (int i = 0; i < 11; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    CHECK_CUDA(cudaEventRecord(begin));
    call();
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    cool.push_back(ms);
  }
  std::sort(cool.begin(), cool.end());
  const double cool_ms = cool[cool.size() / 2];
  const auto loop = [&](double seconds) {
    const int count = std::max(2, static_cast<int>(seconds * 1e3 / cool_ms));
    CHECK_CUDA(cudaEventRecord(begin));
    for (int i = 0; i < count; ++i) {
      call();
    }
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms / count;
  };
  loop(0.25);
  const double sustained_ms = loop(0.5);
  std::printf("%-28s cool %.3f ms %.1f TFLOP/s, sustained %.3f ms %.1f TFLOP/s\n", name, cool_ms,
              flops / cool_ms * 1e-9, sustained_ms, flops / sustained_ms * 1e-9);
  std::fflush(stdout);
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
}

}  // namespace flashgrad
