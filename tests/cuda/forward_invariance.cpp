// SPDX-License-Identifier: Apache-2.0
// Implements forward_invariance.hpp.
#include "forward_invariance.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "cuda/sm90/sm90_backend.hpp"

namespace flashgrad {
namespace {

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("CUDA: %s\n", cudaGetErrorString(error));
    std::exit(2);
  }
}

struct Lengths {
  int q, kv;
};

struct Shape {
  DType dtype;
  int head_dim, head_dim_v;
  int heads_q, heads_kv;
  BandMask mask;
  double softcap;
  bool sinks;
};

// The sequences of a call, packed one after the other (with this bound of their lengths) or in
// `padded` rows each.
struct Placement {
  std::string name;
  std::vector<int> sequences;
  bool packed;
  Lengths padded_or_most;
};

// Sequences whose elements are the same in every placement.
class Sequences {
 public:
  Sequences(const Shape& shape, std::vector<Lengths> lengths)
      : shape_(shape), lengths_(std::move(lengths)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const Lengths& own : lengths_) {
      const auto make = [&](int rows, int width) {
        std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows * width));
        std::generate(bits.begin(), bits.end(),
                      [&] { return narrow(2 * normal(random), shape_.dtype); });
        return bits;
      };
      q_.push_back(make(own.q, shape_.heads_q * shape_.head_dim));
      k_.push_back(make(own.kv, shape_.heads_kv * shape_.head_dim));
      v_.push_back(make(own.kv, shape_.heads_kv * shape_.head_dim_v));
    }
  }

  // Words of out and lse of each sequence of the placement.
  [[nodiscard]] std::vector<std::vector<std::uint32_t>> forward(const Placement& place) const {
    Problem p;
    p.dtype = shape_.dtype;
    p.device_type = DeviceType::kCuda;
    p.batch = static_cast<std::int64_t>(place.sequences.size());
    p.packed = place.packed;
    p.heads_q = shape_.heads_q;
    p.heads_kv = shape_.heads_kv;
    p.head_dim = shape_.head_dim;
    p.head_dim_v = shape_.head_dim_v;
    p.wants_lse = true;
    p.has_sinks = shape_.sinks;
    p.mask = shape_.mask;
    p.softcap = shape_.softcap;
    p.scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim));
    std::vector<std::int32_t> offsets_q{0};
    std::vector<std::int32_t> offsets_kv{0};
    std::vector<std::int32_t> used_q;
    std::vector<std::int32_t> used_kv;
    std::vector<std::uint16_t> q;
    std::vector<std::uint16_t> k;
    std::vector<std::uint16_t> v;
    for (const int s : place.sequences) {
      const auto i = static_cast<std::size_t>(s);
      const Lengths& own = lengths_[i];
      used_q.push_back(own.q);
      used_kv.push_back(own.kv);
      offsets_q.push_back(offsets_q.back() + own.q);
      offsets_kv.push_back(offsets_kv.back() + own.kv);
      const auto append = [&](std::vector<std::uint16_t>& to,
                              const std::vector<std::uint16_t>& own_bits, int padded, int width) {
        to.insert(to.end(), own_bits.begin(), own_bits.end());
        const int missing = place.packed ? 0 : padded * width - static_cast<int>(own_bits.size());
        to.insert(to.end(), static_cast<std::size_t>(missing), 0x7fffU);  // NaN
      };
      append(q, q_[i], place.padded_or_most.q, shape_.heads_q * shape_.head_dim);
      append(k, k_[i], place.padded_or_most.kv, shape_.heads_kv * shape_.head_dim);
      append(v, v_[i], place.padded_or_most.kv, shape_.heads_kv * shape_.head_dim_v);
    }
    p.seqlen_q = p.packed ? offsets_q.back() : place.padded_or_most.q;
    p.seqlen_kv = p.packed ? offsets_kv.back() : place.padded_or_most.kv;
    p.max_seqlen_q = place.padded_or_most.q;
    p.max_seqlen_kv = place.padded_or_most.kv;
    for (std::size_t i = 0; i < used_q.size() && !p.packed; ++i) {
      p.has_seqused_q |= used_q[i] != p.seqlen_q;
      p.has_seqused_kv |= used_kv[i] != p.seqlen_kv;
    }

    DeviceMemory memory;
    const auto tensor = [&](const std::vector<std::uint16_t>& bits, std::int64_t rows,
                            std::int64_t heads, std::int64_t width) {
      return Tensor{memory.copy(bits), p.dtype, p.packed ? 0 : rows * heads * width,
                    heads * width,     width,   1};
    };
    Args args;
    args.q = tensor(q, p.seqlen_q, p.heads_q, p.head_dim);
    args.k = tensor(k, p.seqlen_kv, p.heads_kv, p.head_dim);
    args.v = tensor(v, p.seqlen_kv, p.heads_kv, p.head_dim_v);
    const std::int64_t rows = (p.packed ? 1 : p.batch) * p.seqlen_q;
    std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * p.heads_q * p.head_dim_v),
                                   0x7fffU);
    args.out = tensor(out, p.seqlen_q, p.heads_q, p.head_dim_v);
    std::vector<std::uint32_t> lse(static_cast<std::size_t>(rows * p.heads_q), 0x7fffffffU);
    args.lse = {
        memory.copy(lse), DType::kF32, p.packed ? 0 : p.heads_q * p.seqlen_q, 1, p.seqlen_q, 1};
    if (p.packed) {
      args.cu_seqlens_q = memory.copy(offsets_q);
      args.cu_seqlens_kv = memory.copy(offsets_kv);
    }
    if (p.has_seqused_q) {
      args.seqused_q = memory.copy(used_q);
    }
    if (p.has_seqused_kv) {
      args.seqused_kv = memory.copy(used_kv);
    }
    if (p.has_sinks) {
      args.sinks = memory.copy(std::vector<float>(static_cast<std::size_t>(p.heads_q), 0.5F));
    }
    args.workspace_bytes = sm90_backend.workspace_size(p, Pass::kForward).preferred;
    args.workspace = memory.copy(std::vector<std::uint8_t>(args.workspace_bytes, 0xff));
    const Status status = sm90_backend.forward(p, args);
    if (!status.ok()) {
      std::printf("%s\n", status.message.c_str());
      return {};
    }
    check_cuda(cudaMemcpy(out.data(), args.out.data, out.size() * 2, cudaMemcpyDeviceToHost));
    check_cuda(cudaMemcpy(lse.data(), args.lse.data, lse.size() * 4, cudaMemcpyDeviceToHost));
    std::vector<std::vector<std::uint32_t>> words;
    for (std::size_t n = 0; n < place.sequences.size(); ++n) {
      std::vector<std::uint32_t>& own = words.emplace_back();
      const auto b = p.packed ? 0 : static_cast<std::int64_t>(n);
      const std::int64_t first = p.packed ? offsets_q[n] : 0;
      for (std::int64_t row = first; row < first + used_q[n]; ++row) {
        for (std::int64_t h = 0; h < p.heads_q; ++h) {
          own.push_back(lse[static_cast<std::size_t>((b * p.heads_q + h) * p.seqlen_q + row)]);
          const auto begin = out.begin() + ((b * p.seqlen_q + row) * p.heads_q + h) * p.head_dim_v;
          own.insert(own.end(), begin, begin + p.head_dim_v);
        }
      }
    }
    return words;
  }

 private:
  Shape shape_;
  std::vector<Lengths> lengths_;
  std::vector<std::vector<std::uint16_t>> q_, k_, v_;
};

}  // namespace

bool forward_is_invariant(const Kernel& kernel) {
  const std::vector<Lengths> lengths = {
      {64, 64},     {1, 1},     {37, 61},   {128, 100},  {200, 256},  {17, 0},  {256, 130},
      {1024, 1024}, {300, 451}, {1, 700},   {2000, 900}, {200, 2100}, {64, 64}, {1, 2999},
      {16, 1700},   {3, 801},   {16, 1279}, {9, 2100},   {17, 1599}};
  const std::vector<int> few = {0, 1, 2, 3, 4, 5, 6, 12};           // up to 256 rows and keys
  const std::vector<int> of_few_rows = {13, 1, 14, 15, 16, 17, 9};  // up to 16
  std::vector<int> all;
  std::vector<Placement> alone;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    all.push_back(static_cast<int>(i));
    alone.push_back({"alone", {all.back()}, false, lengths[i]});
  }
  std::vector<int> many;  // tiles for more than one round of the device
  for (int i = 0; i < 12; ++i) {
    many.insert(many.end(), all.begin(), all.end());
  }
  const std::vector<Placement> batches = {{"two of a length", {0, 12}, false, {64, 64}},
                                          {"padded to the longest", all, false, {2000, 2999}},
                                          {"padded to 256", few, false, {256, 256}},
                                          {"packed", all, true, {2000, 2999}},
                                          {"packed, many", many, true, {2000, 2999}},
                                          {"packed, short", few, true, {256, 256}},
                                          {"packed, short, no bound", few, true, {703, 612}},
                                          {"few rows, padded", of_few_rows, false, {16, 2999}},
                                          {"few rows, packed", of_few_rows, true, {16, 2999}}};
  struct Masked {
    const char* name;
    BandMask mask;
    double softcap;
    bool sinks;
  };
  const std::vector<Masked> masks = {
      {"full", {}, 0, false},
      {"causal, sinks", {.right = 0}, 0, true},
      {"window", {.left = 70, .right = 30}, 0, false},
      {"top-left causal, softcap", {.right = 0, .alignment = Alignment::kTopLeft}, 10, false}};
  bool right = true;
  for (const Masked& m : masks) {
    const Sequences sequences(
        {kernel.dtype, kernel.head_dim, kernel.head_dim_v, 4, 2, m.mask, m.softcap, m.sinks},
        lengths);
    std::vector<std::vector<std::uint32_t>> want;
    for (const Placement& place : alone) {
      for (std::vector<std::uint32_t>& words : sequences.forward(place)) {
        want.push_back(std::move(words));
      }
    }
    std::string wrong = want.size() == lengths.size() ? "" : "no result";
    for (const Placement& place : batches) {
      const std::vector<std::vector<std::uint32_t>> got = sequences.forward(place);
      for (std::size_t n = 0; n < place.sequences.size() && wrong.empty(); ++n) {
        const auto s = static_cast<std::size_t>(place.sequences[n]);
        if (n >= got.size() || got[n] != want[s]) {
          wrong = place.name + ": sequence " + std::to_string(n) + " (" +
                  std::to_string(lengths[s].q) + " x " + std::to_string(lengths[s].kv) +
                  ") has other bits than alone";
        }
      }
    }
    std::printf("%s %-13s the same bits anywhere, %s %s\n", wrong.empty() ? "ok  " : "FAIL",
                kernel.name, m.name, wrong.c_str());
    std::fflush(stdout);
    right = right && wrong.empty();
  }
  return right;
}

}  // namespace flashgrad
