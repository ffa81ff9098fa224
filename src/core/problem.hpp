// SPDX-License-Identifier: Apache-2.0
// What a validated call asks for (Problem: comparable, no pointers) and where its data lies (Args).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/dtype.hpp"
#include "core/mask.hpp"
#include "core/status.hpp"

namespace flashgrad {

enum class Pass : std::uint8_t { kForward, kBackward };
enum class DeviceType : std::uint8_t { kCpu, kCuda };

// Of q and k, and of v: from 1 to this, independent of each other.
inline constexpr std::int64_t kMaxHeadDim = 256;

// Of lse, dlse, sinks and dsinks, with q of `dtype`.
constexpr DType statistics_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

struct Problem {
  DType dtype = DType::kF32;     // q, k, v, out, dout
  DType dq_dtype = DType::kF32;  // of the gradients: dtype or f32
  DType dk_dtype = DType::kF32;
  DType dv_dtype = DType::kF32;
  DeviceType device_type = DeviceType::kCpu;
  int device_id = 0;

  std::int64_t batch = 0;      // sequences
  std::int64_t seqlen_q = 0;   // rows of q: of a batch entry, or of all sequences if packed
  std::int64_t seqlen_kv = 0;  // rows of k and v, likewise
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  // No sequence has more rows or keys. Never 0 in a packed problem with rows.
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_kv = 0;
  bool packed = false;
  // By their strides and their address, vectors of columns that do not all start at multiples of 16
  // bytes, or have gaps between their elements: a GPU's copy engine can't address these tensors.
  bool unaligned_q = false;
  bool unaligned_k = false;
  bool unaligned_v = false;
  bool unaligned_out = false;
  bool unaligned_dout = false;
  bool unaligned_dq = false;
  bool unaligned_dk = false;
  bool unaligned_dv = false;

  bool has_seqused_q = false;
  bool has_seqused_kv = false;
  bool has_q_offset = false;
  bool has_sinks = false;
  bool has_dout = false;
  bool has_dlse = false;
  bool wants_lse = false;  // forward
  bool wants_dq = false;
  bool wants_dk = false;
  bool wants_dv = false;
  bool wants_dsinks = false;

  BandMask mask;
  double scale = 1;    // never NaN here
  double softcap = 0;  // 0: none
  bool deterministic = false;
  int num_threads = 0;  // never 0 for CPU tensors

  [[nodiscard]] std::int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }
  bool operator==(const Problem&) const = default;
};

// One line for people: shapes, dtype, mask.
std::string to_string(const Problem& problem);

// A tensor with rows of heads: element (b, i, h, c) lies at data + b * batch_stride + i *
// row_stride + h * head_stride + c * dim_stride elements. In a packed problem batch_stride is 0 and
// i counts over all sequences. dim_stride is 1 in all but dout.
struct Tensor {
  void* data = nullptr;  // null: not given
  DType dtype = DType::kF32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t dim_stride = 1;

  [[nodiscard]] FG_HOST_DEVICE constexpr std::int64_t offset(std::int64_t b, std::int64_t i,
                                                             std::int64_t h) const {
    return b * batch_stride + i * row_stride + h * head_stride;
  }
  FG_HOST_DEVICE constexpr explicit operator bool() const { return data != nullptr; }
};

// Where everything is. lse and dlse are Tensors too: (b, i, h), no dim. 1-d tensors are compact.
struct Args {
  Tensor q, k, v, out, lse, dout, dlse, dq, dk, dv;
  const void* sinks = nullptr;                  // (heads_q), of statistics_dtype
  void* dsinks = nullptr;                       // (heads_q), likewise
  const std::int32_t* cu_seqlens_q = nullptr;   // (batch + 1)
  const std::int32_t* cu_seqlens_kv = nullptr;  // (batch + 1)
  const std::int32_t* seqused_q = nullptr;      // (batch)
  const std::int32_t* seqused_kv = nullptr;     // (batch)
  const std::int64_t* q_offset = nullptr;       // (batch)
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  void* stream = nullptr;
};

// One sequence of the batch: its rows are q_begin + [0, band.seqlen_q) of batch entry `batch_index`
// (0 if packed), its keys likewise.
struct Sequence {
  std::int64_t batch_index = 0;
  std::int64_t q_begin = 0;
  std::int64_t kv_begin = 0;
  Band band;
};

// Host tensors only: reads cu_seqlens, seqused and q_offset in place.
inline Sequence sequence(const Problem& p, const Args& args, std::int64_t b) {
  Sequence s;
  s.batch_index = p.packed ? 0 : b;
  std::int64_t seqlen_q = p.seqlen_q;
  std::int64_t seqlen_kv = p.seqlen_kv;
  if (p.packed) {
    s.q_begin = args.cu_seqlens_q[b];
    s.kv_begin = args.cu_seqlens_kv[b];
    seqlen_q = args.cu_seqlens_q[b + 1] - s.q_begin;
    seqlen_kv = args.cu_seqlens_kv[b + 1] - s.kv_begin;
  }
  if (p.has_seqused_q) {
    seqlen_q = args.seqused_q[b];
  }
  if (p.has_seqused_kv) {
    seqlen_kv = args.seqused_kv[b];
  }
  s.band = Band::of(p.mask, seqlen_q, seqlen_kv, p.has_q_offset ? args.q_offset + b : nullptr);
  return s;
}

// Calls f(batch_index, Range of rows) for all rows of q (or keys) that belong to no sequence:
// before the first offset, past seqused, past the last offset.
template <class F>
void for_each_unused(const Problem& p, const std::int32_t* cu_seqlens, const std::int32_t* seqused,
                     std::int64_t rows, F&& f) {
  const auto emit = [&](std::int64_t batch_index, std::int64_t begin, std::int64_t end) {
    if (begin < end) {
      f(batch_index, Range{begin, end});
    }
  };
  if (p.packed) {
    emit(0, 0, cu_seqlens[0]);
  }
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t begin = p.packed ? cu_seqlens[b] : 0;
    const std::int64_t end = p.packed ? cu_seqlens[b + 1] : rows;
    if (seqused != nullptr) {
      emit(p.packed ? 0 : b, begin + seqused[b], end);
    }
  }
  if (p.packed) {
    emit(0, cu_seqlens[p.batch], rows);
  }
}
template <class F>
void for_each_unused_q(const Problem& p, const Args& args, F&& f) {
  for_each_unused(p, args.cu_seqlens_q, args.seqused_q, p.seqlen_q, f);
}
template <class F>
void for_each_unused_kv(const Problem& p, const Args& args, F&& f) {
  for_each_unused(p, args.cu_seqlens_kv, args.seqused_kv, p.seqlen_kv, f);
}

}  // namespace flashgrad
