// SPDX-License-Identifier: Apache-2.0
// The backward's large kernels behind plain functions, so that each compiles in a file of its own.
#pragma once

#include <cuda.h>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/wide_pass.hpp"

namespace flashgrad::sm90 {

struct BwdMaps {
  CUtensorMap q, k, v, dout;
};

// Launches variant number `variant` of variants.def.
Status launch_bwd_main(int variant, DType dtype, const BwdMaps& maps, const BwdParams& params,
                       void* stream);
// One pass of dk and dv, and dS where `pass` has room for it, for head dims padded to kD and of v
// to kDv: 256 and 256, 192 and 192, 192 and 128.
template <int kD, int kDv>
Status launch_bwd_wide(int cluster, int num_multiprocessors, bool softcap, DType dtype,
                       const BwdMaps& maps, const BwdParams& params, const WidePass& pass,
                       void* stream);
// What that pass gives to dq, from dS.
template <int kD>
Status launch_bwd_wide_dq(int cluster, int num_multiprocessors, DType dtype, const BwdMaps& maps,
                          const BwdQueryParams& params, const WidePass& pass, void* stream);
// dq alone, for head dims padded to `padded_head_dim`: 64, 128 or 256.
Status launch_bwd_query(int padded_head_dim, bool softcap, DType dtype, const BwdMaps& maps,
                        const BwdQueryParams& params, void* stream);

}  // namespace flashgrad::sm90
