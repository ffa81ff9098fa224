// SPDX-License-Identifier: Apache-2.0
// Launches bwd_wide.cuh.
#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd_wide.cuh"

namespace flashgrad::sm90 {
namespace {

template <bool kSoftcap, class T>
Status launch_one(const BwdMaps& maps, const BwdParams& params, void* stream) {
  const cuda::LaunchShape shape{.num_ctas = params.num_units * params.num_kv_blocks,
                                .num_threads = kWideThreads,
                                .shared_bytes = WideShared<kSoftcap>::kBytes,
                                .overlaps_predecessor = true};
  return cuda::launch("sm90 backward, wide", bwd_wide<kSoftcap, T>, shape, stream, maps, params);
}

}  // namespace

Status launch_bwd_wide(bool softcap, DType dtype, const BwdMaps& maps, const BwdParams& params,
                       void* stream) {
  if (dtype == DType::kBF16) {
    return softcap ? launch_one<true, __nv_bfloat16>(maps, params, stream)
                   : launch_one<false, __nv_bfloat16>(maps, params, stream);
  }
  return softcap ? launch_one<true, __half>(maps, params, stream)
                 : launch_one<false, __half>(maps, params, stream);
}

}  // namespace flashgrad::sm90
