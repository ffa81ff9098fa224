// SPDX-License-Identifier: Apache-2.0
// Launches bwd_query.cuh.
#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd_query.cuh"

namespace flashgrad::sm90 {
namespace {

template <int kD, bool kSoftcap, class T>
Status launch_one(const BwdMaps& maps, const BwdQueryParams& params, void* stream) {
  const cuda::LaunchShape shape{.num_ctas = params.num_units * params.num_q_tiles,
                                .num_threads = kQueryThreads,
                                .shared_bytes = QueryShared<kD>::kBytes,
                                .overlaps_predecessor = false};
  return cuda::launch("sm90 backward, dq", bwd_query<kD, kSoftcap, T>, shape, stream, maps, params);
}

template <int kD>
Status launch_width(bool softcap, DType dtype, const BwdMaps& maps, const BwdQueryParams& params,
                    void* stream) {
  if (dtype == DType::kBF16) {
    return softcap ? launch_one<kD, true, __nv_bfloat16>(maps, params, stream)
                   : launch_one<kD, false, __nv_bfloat16>(maps, params, stream);
  }
  return softcap ? launch_one<kD, true, __half>(maps, params, stream)
                 : launch_one<kD, false, __half>(maps, params, stream);
}

}  // namespace

Status launch_bwd_query(int padded_head_dim, bool softcap, DType dtype, const BwdMaps& maps,
                        const BwdQueryParams& params, void* stream) {
  switch (padded_head_dim) {
    case 64:
      return launch_width<64>(softcap, dtype, maps, params, stream);
    case 128:
      return launch_width<128>(softcap, dtype, maps, params, stream);
    case 256:
      return launch_width<256>(softcap, dtype, maps, params, stream);
    default:
      return {FG_INTERNAL_ERROR, "sm90 backward: no dq kernel for this head_dim"};
  }
}

}  // namespace flashgrad::sm90
