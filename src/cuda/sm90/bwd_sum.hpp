// SPDX-License-Identifier: Apache-2.0
// dk and dv of key heads whose query heads were divided among several tiles (bwd_plan.hpp): the
// sums of the parts.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/status.hpp"

namespace flashgrad::sm90 {

struct BwdSumParams {
  // (batch * rows, heads_kv, parts, columns) f32, compact
  struct Gradient {
    const float* parts;
    Tensor sum;  // (batch, rows, heads_kv, columns); null: not wanted
    std::int32_t columns;
  };
  Gradient dk, dv;
  std::int32_t parts;     // of each head, added in their order
  std::uint32_t heads;    // heads_kv
  std::uint32_t rows;     // of a batch entry
  std::int64_t num_rows;  // of all
};

// Writes dk and dv, each element rounded once, from what the kernel before in the stream has left.
Status launch_bwd_sum(DType dtype, const BwdSumParams& params, void* stream);

}  // namespace flashgrad::sm90
