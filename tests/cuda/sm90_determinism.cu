// SPDX-License-Identifier: Apache-2.0
// Checks the promise of `deterministic` on the sm90 backward: the same bits run after run, and for
// a sequence alone, in a batch, in a padded batch and in a packed batch.
//
//   sm90_determinism [repeats]     exit status 1 if a bit differs
//
// A sequence's elements are random normals of (sequence, row, head, column) alone, so that it is
// the same wherever it lies. Rows of no sequence, outputs and workspace are full of NaN before each
// call.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cuda/sm90/sm90_backend.hpp"
#include "device_array.hpp"

using namespace flashgrad;

namespace {

// A row of a tensor: row `row` of sequence `sequence`, or of none (-1).
struct Row {
  int sequence;
  int row;
};

__global__ void fill(std::uint16_t* data, bool bf16, const Row* rows, std::int64_t num_rows,
                     int heads, int columns, std::uint64_t seed) {
  const std::int64_t total = num_rows * heads * columns;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const Row row = rows[i / columns / heads];
    if (row.sequence < 0) {
      continue;
    }
    const auto key =
        ((static_cast<std::uint64_t>(row.sequence) << 20) + static_cast<std::uint64_t>(row.row)) *
            static_cast<std::uint64_t>(heads * columns) +
        static_cast<std::uint64_t>(i % (heads * columns));
    std::uint64_t z = (key + 1) * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    const float u = (static_cast<float>(z >> 40) + 0.5F) / 16777216.0F;
    const float x =
        sqrtf(-2 * logf(u)) * cospif(2 * static_cast<float>(z & 0xffffffU) / 16777216.0F);
    data[i] = bf16 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
  }
}

__global__ void count_differences(const std::uint32_t* a, const std::uint32_t* b, std::size_t words,
                                  unsigned* count) {
  unsigned differences = 0;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < words;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    differences += a[i] != b[i] ? 1 : 0;
  }
  if (differences > 0) {
    atomicAdd(count, differences);
  }
}

struct Shape {
  const char* name;
  DType dtype;
  int head_dim;
  int heads_q, heads_kv;
  BandMask mask;
  double softcap;
  int head_dim_v = 0;  // 0: head_dim

  // Of tensor i of a call.
  [[nodiscard]] int columns(int i) const {
    const bool of_v = i == 1 || i == 2 || i == 4 || i == 7;
    return of_v && head_dim_v != 0 ? head_dim_v : head_dim;
  }
};

struct Lengths {
  int q, kv;
};

// How sequences lie: packed one after the other, or each in `padded` rows of its own.
struct Placement {
  bool packed;
  Lengths padded;                // if not packed
  std::vector<int> sequences;    // numbers of the sequences, in order
  std::vector<Lengths> lengths;  // of each
};

// Tensors and gradients of one backward call.
class Call {
 public:
  Call(const Shape& shape, const Placement& placement)
      : shape_(shape), placement_(placement), rows_(make_rows()) {
    const auto elements = [&](const std::vector<Row>& rows, int columns) {
      return rows.size() * static_cast<std::size_t>(columns);
    };
    const DeviceArray<Row> q_rows(rows_[0]);
    const DeviceArray<Row> kv_rows(rows_[1]);
    for (int i = 0; i < 8; ++i) {
      const bool of_q = kOfQ[i];
      const int heads = of_q ? shape.heads_q : shape.heads_kv;
      tensors_.push_back(std::make_unique<DeviceArray<std::uint16_t>>(
          elements(rows_[of_q ? 0 : 1], heads * shape.columns(i))));
      if (i < 5) {
        const DeviceArray<Row>& of = of_q ? q_rows : kv_rows;
        fill<<<256, 256>>>(tensors_.back()->data, shape.dtype == DType::kBF16, of.data,
                           static_cast<std::int64_t>(of.count), heads, shape.columns(i),
                           static_cast<std::uint64_t>(i));
      }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    make_problem();
  }

  [[nodiscard]] std::size_t workspace_bytes() const {
    return sm90_backend.workspace_size(problem_, Pass::kBackward).preferred;
  }
  void poison_gradients() const {
    for (int i = 5; i < 8; ++i) {
      tensors_[static_cast<std::size_t>(i)]->poison();
    }
  }
  // Returns "" or what went wrong.
  [[nodiscard]] std::string run(DeviceArray<unsigned char>& workspace) {
    args_.workspace = workspace.data;
    args_.workspace_bytes = workspace.count;
    const Status status = sm90_backend.backward(problem_, args_);
    return status.ok() ? "" : status.message;
  }
  // dq (0), dk (1) or dv (2).
  [[nodiscard]] const DeviceArray<std::uint16_t>& gradient(int i) const {
    return *tensors_[static_cast<std::size_t>(5 + i)];
  }
  // The bits of the used rows of sequence number `sequence` of the placement.
  [[nodiscard]] std::vector<std::uint16_t> gradient_of(int i, int sequence) const {
    const bool of_q = i == 0;
    const std::vector<std::uint16_t> all = gradient(i).host();
    const auto width =
        static_cast<std::size_t>((of_q ? shape_.heads_q : shape_.heads_kv) * shape_.columns(5 + i));
    std::vector<std::uint16_t> bits;
    const std::vector<Row>& rows = rows_[of_q ? 0 : 1];
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].sequence == sequence) {
        bits.insert(bits.end(), all.begin() + static_cast<std::ptrdiff_t>(r * width),
                    all.begin() + static_cast<std::ptrdiff_t>((r + 1) * width));
      }
    }
    return bits;
  }

 private:
  // q, dout, out, k, v, dq, dk, dv
  static constexpr bool kOfQ[8] = {true, true, true, false, false, true, false, false};

  [[nodiscard]] std::vector<std::vector<Row>> make_rows() const {
    std::vector<std::vector<Row>> rows(2);
    for (int side = 0; side < 2; ++side) {
      for (std::size_t s = 0; s < placement_.sequences.size(); ++s) {
        const Lengths& own = placement_.lengths[s];
        const int used = side == 0 ? own.q : own.kv;
        const int all = placement_.packed ? used
                        : side == 0       ? placement_.padded.q
                                          : placement_.padded.kv;
        for (int r = 0; r < all; ++r) {
          rows[static_cast<std::size_t>(side)].push_back(r < used ? Row{placement_.sequences[s], r}
                                                                  : Row{-1, 0});
        }
      }
    }
    return rows;
  }

  void make_problem() {
    Problem& p = problem_;
    p.dtype = p.dq_dtype = p.dk_dtype = p.dv_dtype = shape_.dtype;
    p.device_type = DeviceType::kCuda;
    p.batch = static_cast<std::int64_t>(placement_.sequences.size());
    p.packed = placement_.packed;
    p.seqlen_q = p.packed ? static_cast<std::int64_t>(rows_[0].size()) : placement_.padded.q;
    p.seqlen_kv = p.packed ? static_cast<std::int64_t>(rows_[1].size()) : placement_.padded.kv;
    p.max_seqlen_q = p.seqlen_q;
    p.max_seqlen_kv = p.seqlen_kv;
    p.heads_q = shape_.heads_q;
    p.heads_kv = shape_.heads_kv;
    p.head_dim = shape_.columns(0);
    p.head_dim_v = shape_.columns(4);
    p.has_dout = p.wants_dq = p.wants_dk = p.wants_dv = true;
    p.scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim));
    p.softcap = shape_.softcap;
    p.mask = shape_.mask;
    p.deterministic = true;
    std::vector<std::int32_t> offsets[2] = {{0}, {0}};
    std::vector<std::int32_t> used[2];
    for (const Lengths& own : placement_.lengths) {
      const int lengths[2] = {own.q, own.kv};
      for (int side = 0; side < 2; ++side) {
        offsets[side].push_back(offsets[side].back() + lengths[side]);
        used[side].push_back(lengths[side]);
      }
      p.has_seqused_q |= !p.packed && own.q != placement_.padded.q;
      p.has_seqused_kv |= !p.packed && own.kv != placement_.padded.kv;
    }
    for (int side = 0; side < 2; ++side) {
      offsets_.push_back(std::make_unique<DeviceArray<std::int32_t>>(offsets[side]));
      used_.push_back(std::make_unique<DeviceArray<std::int32_t>>(used[side]));
    }
    const auto tensor = [&](int i) {
      const bool of_q = kOfQ[i];
      const std::int64_t columns = shape_.columns(i);
      const std::int64_t row = (of_q ? p.heads_q : p.heads_kv) * columns;
      return Tensor{tensors_[static_cast<std::size_t>(i)]->data,
                    p.dtype,
                    p.packed ? 0 : row * (of_q ? p.seqlen_q : p.seqlen_kv),
                    row,
                    columns,
                    1};
    };
    args_.q = tensor(0);
    args_.dout = tensor(1);
    args_.out = tensor(2);
    args_.k = tensor(3);
    args_.v = tensor(4);
    args_.dq = tensor(5);
    args_.dk = tensor(6);
    args_.dv = tensor(7);
    args_.cu_seqlens_q = p.packed ? offsets_[0]->data : nullptr;
    args_.cu_seqlens_kv = p.packed ? offsets_[1]->data : nullptr;
    args_.seqused_q = p.has_seqused_q ? used_[0]->data : nullptr;
    args_.seqused_kv = p.has_seqused_kv ? used_[1]->data : nullptr;
    // (batch, heads_q, seqlen_q), near that of random normals.
    const std::int64_t entries = p.packed ? 1 : p.batch;
    std::vector<float> lse(static_cast<std::size_t>(entries * p.heads_q * p.seqlen_q));
    for (std::size_t r = 0; r < rows_[0].size(); ++r) {
      float value = NAN;
      if (rows_[0][r].sequence >= 0) {
        const auto at = std::find(placement_.sequences.begin(), placement_.sequences.end(),
                                  rows_[0][r].sequence);
        const Lengths& own =
            placement_.lengths[static_cast<std::size_t>(at - placement_.sequences.begin())];
        const Band band = Band::of(p.mask, own.q, own.kv);
        const std::int64_t visible = band.kv_range(rows_[0][r].row, rows_[0][r].row + 1).size();
        value = visible > 0 ? std::log(static_cast<float>(visible)) + 0.5F : -INFINITY;
      }
      const auto entry = static_cast<std::int64_t>(r) / p.seqlen_q;
      const auto row = static_cast<std::int64_t>(r) % p.seqlen_q;
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        lse[static_cast<std::size_t>((entry * p.heads_q + h) * p.seqlen_q + row)] = value;
      }
    }
    lse_ = std::make_unique<DeviceArray<float>>(lse);
    args_.lse = {lse_->data, DType::kF32, p.packed ? 0 : p.heads_q * p.seqlen_q, 1, p.seqlen_q, 1};
  }

  Shape shape_;
  Placement placement_;
  std::vector<std::vector<Row>> rows_;  // of q, of keys
  std::vector<std::unique_ptr<DeviceArray<std::uint16_t>>> tensors_;
  std::vector<std::unique_ptr<DeviceArray<std::int32_t>>> offsets_, used_;
  std::unique_ptr<DeviceArray<float>> lse_;
  Problem problem_;
  Args args_{};
};

const char* const kNames[3] = {"dq", "dk", "dv"};

// Each sequence alone, then among others.
bool invariant(const Shape& shape) {
  const std::vector<Lengths> lengths = {
      {1024, 1024}, {300, 451}, {1, 700},   {2100, 2100}, {64, 64},   {451, 300}, {1500, 257},
      {1024, 1024}, {30, 20},   {256, 128}, {17, 77},     {400, 200}, {700, 120}};
  std::vector<std::vector<std::uint16_t>> alone[3];
  std::string wrong;
  const auto run = [&](Call& call) {
    DeviceArray<unsigned char> workspace(call.workspace_bytes());
    wrong = call.run(workspace);
    CHECK_CUDA(cudaDeviceSynchronize());
  };
  std::vector<int> numbers;
  for (std::size_t s = 0; s < lengths.size() && wrong.empty(); ++s) {
    const int number = static_cast<int>(s);
    numbers.push_back(number);
    Call call(shape, {false, lengths[s], {number}, {lengths[s]}});
    run(call);
    for (int i = 0; i < 3; ++i) {
      alone[i].push_back(call.gradient_of(i, number));
    }
  }
  struct Batch {
    const char* name;
    Placement placement;
  };
  std::vector<Batch> batches = {{"batch", {false, lengths[0], {0, 7}, {lengths[0], lengths[7]}}},
                                {"padded batch", {false, {2111, 2222}, numbers, lengths}},
                                {"packed", {true, {}, numbers, lengths}},
                                {"packed, one", {true, {}, {3}, {lengths[3]}}},
                                {"large batch", {false, lengths[0], {0}, {lengths[0]}}}};
  // Its heads run in several sections.
  Placement& large = batches.back().placement;
  for (int i = 0; i < 60; ++i) {
    large.sequences.push_back(100 + i);
  }
  large.sequences.push_back(7);
  large.lengths.assign(large.sequences.size(), lengths[0]);
  for (const Batch& batch : batches) {
    if (!wrong.empty()) {
      break;
    }
    Call call(shape, batch.placement);
    run(call);
    for (const int s : batch.placement.sequences) {
      for (int i = 0; i < 3 && s < 100 && wrong.empty(); ++i) {
        if (call.gradient_of(i, s) != alone[i][static_cast<std::size_t>(s)]) {
          wrong = std::string(batch.name) + ": " + kNames[i] + " of sequence " + std::to_string(s) +
                  " has other bits than alone";
        }
      }
    }
  }
  std::printf("%-34s %s %s\n", shape.name, wrong.empty() ? "ok" : "FAIL", wrong.c_str());
  std::fflush(stdout);
  return wrong.empty();
}

// Copies in a stream of their own, so that loads beside them come late and in another order.
class Traffic {
 public:
  Traffic() { CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Traffic() { cudaStreamDestroy(stream_); }
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;
  void add() const {
    CHECK_CUDA(
        cudaMemcpyAsync(to_.data, from_.data, from_.count, cudaMemcpyDeviceToDevice, stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  DeviceArray<unsigned char> from_{std::size_t{128} << 20};
  DeviceArray<unsigned char> to_{std::size_t{128} << 20};
};

// The same call again and again, in a workspace that the next shape's call has used in between, and
// with other traffic in memory.
bool repeatable(const std::vector<Shape>& shapes, int repeats) {
  std::vector<std::unique_ptr<Call>> calls;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const Lengths length = i % 2 == 0 ? Lengths{2048, 2048} : Lengths{1000, 1300};
    calls.push_back(std::make_unique<Call>(
        shapes[i], Placement{false, length, {0, 1, 2}, {length, length, length}}));
    bytes = std::max(bytes, calls.back()->workspace_bytes());
  }
  DeviceArray<unsigned char> workspace(bytes);
  DeviceArray<unsigned> differences(std::vector<unsigned>(shapes.size()));
  const Traffic traffic;
  std::vector<std::unique_ptr<DeviceArray<std::uint16_t>>> first;
  std::string wrong;
  for (int repeat = 0; repeat <= repeats && wrong.empty(); ++repeat) {
    for (std::size_t c = 0; c < calls.size() && wrong.empty(); ++c) {
      calls[c]->poison_gradients();
      if (repeat % 10 == 0) {
        workspace.poison();
      }
      traffic.add();
      wrong = calls[c]->run(workspace);
      for (int i = 0; i < 3; ++i) {
        const DeviceArray<std::uint16_t>& got = calls[c]->gradient(i);
        if (repeat == 0) {
          first.push_back(std::make_unique<DeviceArray<std::uint16_t>>(got.count));
          CHECK_CUDA(
              cudaMemcpy(first.back()->data, got.data, got.count * 2, cudaMemcpyDeviceToDevice));
        } else {
          count_differences<<<256, 256>>>(reinterpret_cast<const std::uint32_t*>(got.data),
                                          reinterpret_cast<const std::uint32_t*>(
                                              first[3 * c + static_cast<std::size_t>(i)]->data),
                                          got.count / 2, differences.data + c);
        }
      }
    }
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<unsigned> counts = differences.host();
  for (std::size_t c = 0; c < shapes.size(); ++c) {
    std::printf("%d repeats, %-26s %u words differ\n", repeats, shapes[c].name, counts[c]);
    if (counts[c] != 0) {
      wrong = "bits differ";
    }
  }
  if (!wrong.empty()) {
    std::printf("FAIL %s\n", wrong.c_str());
  }
  return wrong.empty();
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("sm90: %s\n", sm90_backend.detail());
  if (!sm90_backend.available()) {
    std::printf("skipped: no Hopper GPU\n");
    return 77;
  }
  const BandMask full{};
  const BandMask causal{kUnbounded, 0, Alignment::kBottomRight};
  const BandMask window{400, 100, Alignment::kBottomRight};
  const BandMask left{700, kUnbounded, Alignment::kBottomRight};
  constexpr DType kB = DType::kBF16;
  constexpr DType kH = DType::kF16;
  const std::vector<Shape> shapes = {{"d128 full", kB, 128, 2, 2, full, 0},
                                     {"d128 causal", kB, 128, 2, 2, causal, 0},
                                     {"d64 full", kB, 64, 2, 2, full, 0},
                                     {"d64 causal gqa 4/2", kB, 64, 4, 2, causal, 0},
                                     {"d96 full", kB, 96, 2, 2, full, 0},
                                     {"d80 window gqa 4/1", kH, 80, 4, 1, window, 0},
                                     {"d128 window gqa 4/1", kH, 128, 4, 1, window, 0},
                                     {"d128 full gqa 4/2", kB, 128, 4, 2, full, 0},
                                     {"d128 left", kB, 128, 2, 2, left, 0},
                                     {"d128 full softcap", kB, 128, 2, 2, full, 15},
                                     {"d96 causal softcap f16", kH, 96, 2, 2, causal, 15},
                                     {"d128 causal mqa 8/1", kB, 128, 8, 1, causal, 0},
                                     {"d64 full mqa 6/1", kB, 64, 6, 1, full, 0},
                                     {"d256 full", kB, 256, 2, 2, full, 0},
                                     {"d256 causal gqa 2/1", kB, 256, 2, 1, causal, 0},
                                     {"d192/128 full", kB, 192, 2, 2, full, 0, 128},
                                     {"d192/128 causal gqa 4/2", kH, 192, 4, 2, causal, 0, 128}};
  bool ok = true;
  for (const Shape& shape : shapes) {
    ok = invariant(shape) && ok;
  }
  // Heads enough to fill the device, whose loads then wait for each other's.
  std::vector<Shape> repeated = shapes;
  repeated.push_back({"d256 causal, 36 heads", kB, 256, 36, 36, causal, 0});
  repeated.push_back({"d192/128 causal, 36 heads", kB, 192, 36, 36, causal, 0, 128});
  repeated.push_back({"d128 causal, 36 heads", kB, 128, 36, 36, causal, 0});
  ok = repeatable(repeated, argc > 1 ? std::atoi(argv[1]) : 1000) && ok;
  std::printf("%s\n", ok ? "no bit differs" : "FAIL");
  return ok ? 0 : 1;
}
