// SPDX-License-Identifier: Apache-2.0
// Implements forward_call.hpp.
#include "forward_call.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>

#include "core/mask.hpp"
#include "cuda/sm90/sm90_backend.hpp"

namespace flashgrad {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("CUDA: %s\n", cudaGetErrorString(error));
    std::exit(2);
  }
}

Problem make_problem(const Kernel& kernel, const Case& c) {
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
  p.head_dim = kernel.head_dim - c.narrower;
  p.head_dim_v = kernel.head_dim_v - c.narrower;
  p.packed = packed;
  p.has_seqused_q = !c.seqused_q.empty();
  p.has_seqused_kv = !c.seqused_kv.empty();
  p.has_q_offset = !c.q_offset.empty();
  p.has_sinks = c.sinks;
  p.wants_lse = c.lse;
  p.mask = c.mask;
  p.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(p.head_dim)) : c.scale;
  p.softcap = c.softcap;
  const int gap = c.odd_strides ? kOddGap : 0;
  p.unaligned_q = p.unaligned_k = c.odd_addresses || (p.head_dim + gap) % 8 != 0;
  p.unaligned_v = p.unaligned_out = c.odd_addresses || (p.head_dim_v + gap) % 8 != 0;
  return p;
}

template <class Generate>
void fill(HostTensor& t, const Generate& generate) {
  for (std::int64_t b = 0; b < t.entries; ++b) {
    for (std::int64_t i = 0; i < t.rows; ++i) {
      for (std::int64_t h = 0; h < t.heads; ++h) {
        std::generate_n(&t.bits[t.at(b, i, h)], t.columns, generate);
      }
    }
  }
}

// `read`: of each row of each entry.
void poison_unread(HostTensor& t, const std::vector<char>& read) {
  const std::uint16_t bad[] = {narrow(kInf, t.on_device.dtype), narrow(kNan, t.on_device.dtype)};
  for (std::int64_t i = 0; i < t.entries * t.rows; ++i) {
    for (std::int64_t h = 0; h < t.heads && read[static_cast<std::size_t>(i)] == 0; ++h) {
      std::uint16_t* const row = &t.bits[t.at(i / t.rows, i % t.rows, h)];
      for (std::int64_t e = 0; e < t.columns; ++e) {
        row[e] = bad[e % 2];
      }
    }
  }
}

}  // namespace

DeviceMemory::~DeviceMemory() {
  for (void* pointer : pointers_) {
    static_cast<void>(cudaFree(pointer));
  }
}

void* DeviceMemory::allocate(std::size_t bytes) {
  void* pointer = nullptr;
  check_cuda(cudaMalloc(&pointer, std::max<std::size_t>(bytes, 16)));
  pointers_.push_back(pointer);
  return pointer;
}

void* DeviceMemory::copy(const void* data, std::size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  void* const pointer = allocate(bytes);
  check_cuda(cudaMemcpy(pointer, data, bytes, cudaMemcpyHostToDevice));
  return pointer;
}

void HostTensor::upload() {
  check_cuda(cudaMemcpy(on_device.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
  values.resize(bits.size());
  std::transform(bits.begin(), bits.end(), values.begin(),
                 [this](std::uint16_t x) { return widen(x, on_device.dtype); });
}

std::vector<std::uint16_t> HostTensor::download() const {
  std::vector<std::uint16_t> result(bits.size());
  check_cuda(cudaMemcpy(result.data(), on_device.data, result.size() * 2, cudaMemcpyDeviceToHost));
  return result;
}

ForwardCall::ForwardCall(const Kernel& kernel, const Case& c)
    : spec(c),
      problem(make_problem(kernel, c)),
      q(make_tensor(1, problem.seqlen_q, problem.heads_q, problem.head_dim)),
      k(make_tensor(2, problem.seqlen_kv, problem.heads_kv, problem.head_dim)),
      v(make_tensor(3, problem.seqlen_kv, problem.heads_kv, problem.head_dim_v)),
      out(make_tensor(4, problem.seqlen_q, problem.heads_q, problem.head_dim_v)),
      lse(static_cast<std::size_t>(q.entries * problem.heads_q * problem.seqlen_q), kNan) {
  std::mt19937 random(static_cast<unsigned>(1234 + c.seqlen_q * 7 + c.seqlen_kv));
  std::normal_distribution<float> normal;
  const auto times = [&](float amplitude) {
    return [&, amplitude] { return narrow(amplitude * normal(random), problem.dtype); };
  };
  fill(q, times(c.amplitude));
  fill(k, times(c.amplitude));
  fill(v, times(1));
  if (c.sinks) {
    sinks.resize(static_cast<std::size_t>(c.heads_q));
    std::generate(sinks.begin(), sinks.end(), [&] { return 3 * normal(random); });
    sinks.back() = -kInf;
  }
  find_sequences();
  poison();
  for (HostTensor* t : {&q, &k, &v}) {
    t->upload();
  }
  make_args();
}

HostTensor ForwardCall::make_tensor(int number, std::int64_t rows, std::int64_t heads,
                                    std::int64_t columns) {
  HostTensor t;
  t.entries = problem.packed ? 1 : problem.batch;
  t.rows = rows;
  t.heads = heads;
  t.columns = columns;
  const std::int64_t width = columns + (spec.odd_strides ? kOddGap : 0);
  t.on_device.dtype = problem.dtype;
  t.on_device.head_stride = spec.heads_outside ? width * rows : width;
  t.on_device.row_stride = spec.heads_outside ? width : width * heads;
  t.on_device.batch_stride = problem.packed ? 0 : width * rows * heads;
  t.bits.assign(static_cast<std::size_t>(t.entries * rows * heads * width),
                narrow(kNan, problem.dtype));
  const std::size_t before = spec.odd_addresses ? static_cast<std::size_t>(number) : 0;
  auto* const start = static_cast<std::uint16_t*>(memory.allocate((t.bits.size() + before) * 2));
  check_cuda(cudaMemset(start, 0xff, before * 2));
  t.on_device.data = start + before;
  return t;
}

void ForwardCall::find_sequences() {
  Args host;
  host.cu_seqlens_q = spec.cu_seqlens_q.data();
  host.cu_seqlens_kv = spec.cu_seqlens_kv.data();
  host.seqused_q = spec.seqused_q.data();
  host.seqused_kv = spec.seqused_kv.data();
  host.q_offset = spec.q_offset.data();
  row_used.assign(static_cast<std::size_t>(q.entries * q.rows), 0);
  key_read.assign(static_cast<std::size_t>(k.entries * k.rows), 0);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = sequence(problem, host, b);
    for (std::int64_t i = 0; i < s.band.seqlen_q; ++i) {
      row_used[static_cast<std::size_t>(s.batch_index * q.rows + s.q_begin + i)] = 1;
      const Range keys = s.band.kv_range(i, i + 1);
      for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        key_read[static_cast<std::size_t>(s.batch_index * k.rows + s.kv_begin + j)] = 1;
      }
    }
    sequences.push_back(s);
  }
}

void ForwardCall::poison() {
  switch (spec.poison) {
    case Poison::kNone:
      break;
    case Poison::kUnread:
      poison_unread(q, row_used);
      poison_unread(k, key_read);
      poison_unread(v, key_read);
      break;
    case Poison::kQuery:
      q.bits[q.at(0, q.rows / 2, 0) + 3] = narrow(kNan, problem.dtype);
      break;
    case Poison::kValue:
      v.bits[v.at(0, v.rows / 2, 0) + 3] = narrow(kNan, problem.dtype);
      break;
  }
}

void ForwardCall::make_args() {
  args_.q = q.on_device;
  args_.k = k.on_device;
  args_.v = v.on_device;
  args_.out = out.on_device;
  if (problem.wants_lse) {
    args_.lse.data = memory.copy(lse);
    args_.lse.row_stride = 1;
    args_.lse.head_stride = problem.seqlen_q;
    args_.lse.batch_stride = problem.packed ? 0 : problem.heads_q * problem.seqlen_q;
  }
  args_.cu_seqlens_q = memory.copy(spec.cu_seqlens_q);
  args_.cu_seqlens_kv = memory.copy(spec.cu_seqlens_kv);
  args_.seqused_q = memory.copy(spec.seqused_q);
  args_.seqused_kv = memory.copy(spec.seqused_kv);
  args_.q_offset = memory.copy(spec.q_offset);
  args_.sinks = memory.copy(sinks);
  // Not a byte more than asked for, aligned to nothing, mostly full of NaN.
  const WorkspaceSize size = sm90_backend.workspace_size(problem, Pass::kForward);
  args_.workspace_bytes = spec.least_workspace ? size.minimum : size.preferred;
  auto* const workspace = static_cast<std::uint8_t*>(memory.allocate(args_.workspace_bytes + 1));
  if (!spec.unwritten_workspace) {
    check_cuda(cudaMemset(workspace, 0xff, args_.workspace_bytes + 1));
  }
  args_.workspace = workspace + 1;
}

std::string ForwardCall::run() {
  const std::vector<std::uint16_t> before = out.bits;
  for (int i = 0; i < 2; ++i) {
    const std::vector<std::uint16_t> first = out.bits;
    out.bits = before;
    out.upload();
    Status status = sm90_backend.supports(problem, Pass::kForward);
    if (status.ok()) {
      status = sm90_backend.forward(problem, args_);
    }
    if (!status.ok()) {
      return status.message;
    }
    check_cuda(cudaDeviceSynchronize());
    out.bits = out.download();
    if (i > 0 && out.bits != first) {
      return "two runs differ";
    }
  }
  if (problem.wants_lse) {
    check_cuda(cudaMemcpy(lse.data(), args_.lse.data, lse.size() * 4, cudaMemcpyDeviceToHost));
  }
  return "";
}

}  // namespace flashgrad
