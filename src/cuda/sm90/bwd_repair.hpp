// SPDX-License-Identifier: Apache-2.0
// The end of a backward under a band: rows and keys whose gradients are NaN though nothing that
// they see is.
#pragma once

#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

struct BwdRepairParams {
  Sequences sequences;
  std::int64_t heads_kv;
  std::int64_t group;  // query heads per key head
  std::int64_t head_dim;
  std::int64_t head_dim_v;
  Tensor q, k, v;     // (batch, seqlen, heads, dim), any strides
  Tensor dout;        // likewise; null: 0
  Tensor dq, dk, dv;  // as written by the kernels before; null: not wanted
  RowStatistics rows;
  Scales scales;
  // The marks were complete before the kernel before started: they can be read while it runs.
  bool looks_early;
};

Status launch_bwd_repair(bool softcap, DType dtype, int num_multiprocessors,
                         const BwdRepairParams& params, void* stream);

}  // namespace flashgrad::sm90
