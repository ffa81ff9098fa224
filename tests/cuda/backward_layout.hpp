// SPDX-License-Identifier: Apache-2.0
// Strided tensors of a case of sm90_backward, and what each row of them meets.
#pragma once

#include <cstdint>
#include <vector>

#include "backward_case.hpp"
#include "core/problem.hpp"

namespace flashgrad {

// For every row of q, or key, of the tensors: what it meets.
struct Line {
  int batch_index;           // of the tensors
  int sequence;              // -1: none
  std::int64_t row;          // of the tensors, in its batch entry
  std::int64_t other_begin;  // first row of the sequence on the other side
  std::int64_t begin, end;   // visible, relative to that

  [[nodiscard]] bool meets_nothing() const { return begin >= end; }
};

struct Layout {
  std::int64_t batch, rows, heads, columns;
  int head_pad, row_pad;
  int first;  // elements before the tensor's own
  [[nodiscard]] Tensor tensor(void* data, DType dtype) const {
    const std::int64_t head = columns + head_pad;
    const std::int64_t row = head * heads + row_pad;
    return {static_cast<std::uint8_t*>(data) + first * size_bytes(dtype),
            dtype,
            row * rows,
            row,
            head,
            1};
  }
  [[nodiscard]] std::int64_t elements() const {
    return first + batch * rows * ((columns + head_pad) * heads + row_pad);
  }
};

// Sequences on the host, by the project's own definitions.
struct HostLines {
  std::vector<Line> q, kv;
  std::vector<std::int32_t> cu_q, cu_kv;
};

// Completes the problem of `c` with what follows from its lengths and strides.
HostLines make_lines(Case* c);

}  // namespace flashgrad
