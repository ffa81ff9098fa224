// SPDX-License-Identifier: Apache-2.0
// A whole call with memory of its own, correct to begin with, that a test can spoil piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/validate.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad {

inline constexpr DLDataType kF32Type{kDLFloat, 32, 1};
inline constexpr DLDataType kF64Type{kDLFloat, 64, 1};
inline constexpr DLDataType kF16Type{kDLFloat, 16, 1};
inline constexpr DLDataType kBF16Type{kDLBfloat, 16, 1};
inline constexpr DLDataType kI32Type{kDLInt, 32, 1};
inline constexpr DLDataType kI64Type{kDLInt, 64, 1};

// A tensor whose parts may be set to anything. `dl` is made from them when the call is put
// together.
struct TestTensor {
  DLDataType dtype = kF32Type;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // empty: null strides, compact
  DLDevice device{kDLCPU, 0};
  std::uint64_t byte_offset = 0;
  bool given = true;
  std::vector<std::byte> storage = std::vector<std::byte>(4096);  // aligned for every dtype
  void* data = nullptr;  // null: the storage, unless null_data
  bool null_data = false;
  DLTensor dl{};

  const DLTensor* assemble() {
    if (!given) {
      return nullptr;
    }
    dl.data = null_data ? nullptr : data != nullptr ? data : storage.data();
    dl.device = device;
    dl.ndim = static_cast<int>(shape.size());
    dl.dtype = dtype;
    dl.shape = shape.data();
    dl.strides = strides.empty() ? nullptr : strides.data();
    dl.byte_offset = byte_offset;
    return &dl;
  }

  template <class Int>
  void fill(const std::vector<Int>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      reinterpret_cast<Int*>(storage.data())[i] = values[i];
    }
  }
};

enum class Layout : std::uint8_t { kFixed, kPacked };

// Fixed length: batch 2, seqlen_q 3, seqlen_kv 5, heads 4/2, head_dim 8, head_dim_v 6. Packed: the
// same sequences one after the other. Everything optional is given.
struct TestCall {
  explicit TestCall(Layout layout) {
    const bool packed = layout == Layout::kPacked;
    const auto rows = [packed](std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
      return packed ? std::vector<std::int64_t>{2 * seqlen, heads, dim}
                    : std::vector<std::int64_t>{2, seqlen, heads, dim};
    };
    q.shape = dq.shape = rows(3, 4, 8);
    k.shape = dk.shape = rows(5, 2, 8);
    v.shape = dv.shape = rows(5, 2, 6);
    out.shape = dout.shape = rows(3, 4, 6);
    lse.shape = dlse.shape =
        packed ? std::vector<std::int64_t>{4, 6} : std::vector<std::int64_t>{2, 4, 3};
    sinks.shape = dsinks.shape = {4};
    for (TestTensor* t : {&cu_seqlens_q, &cu_seqlens_kv}) {
      t->dtype = kI32Type;
      t->shape = {3};
      t->given = packed;
    }
    cu_seqlens_q.fill<std::int32_t>({0, 3, 6});
    cu_seqlens_kv.fill<std::int32_t>({0, 5, 10});
    for (TestTensor* t : {&seqused_q, &seqused_kv}) {
      t->dtype = kI32Type;
      t->shape = {2};
    }
    seqused_q.fill<std::int32_t>({2, 3});
    seqused_kv.fill<std::int32_t>({5, 4});
    q_offset.dtype = kI64Type;
    q_offset.shape = {2};
    q_offset.fill<std::int64_t>({0, 1});
  }

  fg_tensors assemble() {
    fg_tensors t = FG_TENSORS_INIT;
    t.q = q.assemble();
    t.k = k.assemble();
    t.v = v.assemble();
    t.out = out.assemble();
    t.lse = lse.assemble();
    t.dout = dout.assemble();
    t.dlse = dlse.assemble();
    t.dq = dq.assemble();
    t.dk = dk.assemble();
    t.dv = dv.assemble();
    t.sinks = sinks.assemble();
    t.dsinks = dsinks.assemble();
    t.cu_seqlens_q = cu_seqlens_q.assemble();
    t.cu_seqlens_kv = cu_seqlens_kv.assemble();
    t.seqused_q = seqused_q.assemble();
    t.seqused_kv = seqused_kv.assemble();
    t.q_offset = q_offset.assemble();
    return t;
  }

  // As a query sees the call (shapes and types only), or as the call itself.
  Status judge(Pass pass, bool with_data, Call* result) {
    const fg_tensors tensors = assemble();
    std::vector<std::byte> workspace(64);
    const Scratch scratch{workspace.data(), workspace.size()};
    return validate(pass, &tensors, &options, with_data ? &scratch : nullptr, result);
  }

  Status judge(Pass pass, bool with_data) {
    Call result;
    return judge(pass, with_data, &result);
  }

  TestTensor q, k, v, out, lse, dout, dlse, dq, dk, dv, sinks, dsinks;
  TestTensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, q_offset;
  fg_options options = FG_OPTIONS_INIT;
};

}  // namespace flashgrad
