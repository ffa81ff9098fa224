// SPDX-License-Identifier: Apache-2.0
// The backward's large kernels behind plain functions, so that each compiles in a file of its own.
#pragma once

#include <cuda.h>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

struct BwdMaps {
  CUtensorMap q, k, v, dout;
};

// Launches variant number `variant` of variants.def.
Status launch_bwd_main(int variant, DType dtype, const BwdMaps& maps, const BwdParams& params,
                       void* stream);
// dk and dv of head dims up to 256.
Status launch_bwd_wide(bool softcap, DType dtype, const BwdMaps& maps, const BwdParams& params,
                       void* stream);
// dq alone, for head dims padded to `padded_head_dim`: 64, 128 or 256.
Status launch_bwd_query(int padded_head_dim, bool softcap, DType dtype, const BwdMaps& maps,
                        const BwdQueryParams& params, void* stream);

}  // namespace flashgrad::sm90
