// SPDX-License-Identifier: Apache-2.0
// The launches of the kernels for one pair of padded widths; each pair is instantiated in a file of
// its own, since ptxas takes long over them.
#pragma once

#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd_wide.cuh"
#include "cuda/sm90/bwd_wide_dq.cuh"

namespace flashgrad::sm90 {

template <int kD, int kDv, int kCluster, bool kSoftcap, class T>
Status launch_wide_keys(const BwdMaps& maps, const BwdParams& params, const WidePass& pass,
                        void* stream) {
  const cuda::LaunchShape shape{.num_ctas = pass.num_units * pass.num_key_tiles * kCluster,
                                .num_threads = kWideThreads,
                                .shared_bytes = WideShared<kD, kDv, kCluster, kSoftcap>::kBytes,
                                .cluster_size = kCluster,
                                .overlaps_predecessor = true};
  return cuda::launch("sm90 backward, wide", bwd_wide<kD, kDv, kCluster, kSoftcap, T>, shape,
                      stream, maps, params, pass);
}

template <int kD, int kCluster, class T>
Status launch_wide_queries(const BwdMaps& maps, const BwdQueryParams& params, const WidePass& pass,
                           void* stream) {
  const cuda::LaunchShape shape{
      .num_ctas = pass.num_units * params.group * params.num_q_tiles * kCluster,
      .num_threads = kWideDqThreads,
      .shared_bytes = WideUnitShared<kD, kCluster>::kBytes,
      .cluster_size = kCluster,
      .overlaps_predecessor = true};
  return cuda::launch("sm90 backward, wide dq", bwd_wide_dq<kD, kCluster, T>, shape, stream, maps,
                      params, pass);
}

template <int kD, int kDv, class T>
Status launch_wide_keys(int cluster, bool softcap, const BwdMaps& maps, const BwdParams& params,
                        const WidePass& pass, void* stream) {
  if (softcap) {
    return launch_wide_keys<kD, kDv, 1, true, T>(maps, params, pass, stream);
  }
  return cluster == 2 ? launch_wide_keys<kD, kDv, 2, false, T>(maps, params, pass, stream)
                      : launch_wide_keys<kD, kDv, 1, false, T>(maps, params, pass, stream);
}

template <int kD, int kDv>
Status launch_bwd_wide(int cluster, bool softcap, DType dtype, const BwdMaps& maps,
                       const BwdParams& params, const WidePass& pass, void* stream) {
  return dtype == DType::kBF16
             ? launch_wide_keys<kD, kDv, __nv_bfloat16>(cluster, softcap, maps, params, pass,
                                                        stream)
             : launch_wide_keys<kD, kDv, __half>(cluster, softcap, maps, params, pass, stream);
}

template <int kD>
Status launch_bwd_wide_dq(int cluster, DType dtype, const BwdMaps& maps,
                          const BwdQueryParams& params, const WidePass& pass, void* stream) {
  if (dtype == DType::kBF16) {
    return cluster == 2 ? launch_wide_queries<kD, 2, __nv_bfloat16>(maps, params, pass, stream)
                        : launch_wide_queries<kD, 1, __nv_bfloat16>(maps, params, pass, stream);
  }
  return cluster == 2 ? launch_wide_queries<kD, 2, __half>(maps, params, pass, stream)
                      : launch_wide_queries<kD, 1, __half>(maps, params, pass, stream);
}

}  // namespace flashgrad::sm90
