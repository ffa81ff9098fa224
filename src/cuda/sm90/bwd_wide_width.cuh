// SPDX-License-Identifier: Apache-2.0
// The launches of the kernels for one pair of padded widths; each pair is instantiated in a file of
// its own, since ptxas takes long over them.
#pragma once

#include <algorithm>

#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd_wide.cuh"
#include "cuda/sm90/bwd_wide_dq.cuh"

namespace flashgrad::sm90 {

// Where a CTA makes several tiles there are as many CTAs as run at a time.
template <int kD, int kDv, int kCluster, bool kSoftcap, class T>
Status launch_wide_keys(int num_multiprocessors, const BwdMaps& maps, const BwdParams& params,
                        const WidePass& pass, void* stream) {
  using Shared = WideShared<kD, kDv, kCluster, kSoftcap>;
  const std::int64_t num_tiles = pass.num_units * pass.num_key_tiles;
  const std::int64_t at_once =
      Shared::kAhead ? std::max(1, num_multiprocessors / kCluster) : num_tiles;
  const cuda::LaunchShape shape{.num_ctas = std::min(num_tiles, at_once) * kCluster,
                                .num_threads = kWideThreads,
                                .shared_bytes = Shared::kBytes,
                                .cluster_size = kCluster,
                                .overlaps_predecessor = true};
  return cuda::launch("sm90 backward, wide", bwd_wide<kD, kDv, kCluster, kSoftcap, T>, shape,
                      stream, maps, params, pass);
}

// As many CTAs as run at a time: each takes tiles until there are none, so that loads run under the
// end of the tile before.
template <int kD, int kCluster, class T>
Status launch_wide_queries(int num_multiprocessors, const BwdMaps& maps,
                           const BwdQueryParams& params, const WidePass& pass, void* stream) {
  const std::int64_t num_tiles = pass.num_units * params.group * params.num_q_tiles;
  const std::int64_t at_once = std::max(1, num_multiprocessors / kCluster);
  const cuda::LaunchShape shape{.num_ctas = std::min(num_tiles, at_once) * kCluster,
                                .num_threads = kWideDqThreads,
                                .shared_bytes = WideDqShared<kD, kCluster>::kBytes,
                                .cluster_size = kCluster,
                                .overlaps_predecessor = true};
  return cuda::launch("sm90 backward, wide dq", bwd_wide_dq<kD, kCluster, T>, shape, stream, maps,
                      params, pass);
}

template <int kD, int kDv, class T>
Status launch_wide_keys(int cluster, int num_multiprocessors, bool softcap, const BwdMaps& maps,
                        const BwdParams& params, const WidePass& pass, void* stream) {
  if (softcap) {
    return launch_wide_keys<kD, kDv, 1, true, T>(num_multiprocessors, maps, params, pass, stream);
  }
  return cluster == 2 ? launch_wide_keys<kD, kDv, 2, false, T>(num_multiprocessors, maps, params,
                                                               pass, stream)
                      : launch_wide_keys<kD, kDv, 1, false, T>(num_multiprocessors, maps, params,
                                                               pass, stream);
}

template <int kD, int kDv>
Status launch_bwd_wide(int cluster, int num_multiprocessors, bool softcap, DType dtype,
                       const BwdMaps& maps, const BwdParams& params, const WidePass& pass,
                       void* stream) {
  return dtype == DType::kBF16
             ? launch_wide_keys<kD, kDv, __nv_bfloat16>(cluster, num_multiprocessors, softcap, maps,
                                                        params, pass, stream)
             : launch_wide_keys<kD, kDv, __half>(cluster, num_multiprocessors, softcap, maps,
                                                 params, pass, stream);
}

template <int kD>
Status launch_bwd_wide_dq(int cluster, int num_multiprocessors, DType dtype, const BwdMaps& maps,
                          const BwdQueryParams& params, const WidePass& pass, void* stream) {
  const auto launch = dtype == DType::kBF16
                          ? (cluster == 2 ? launch_wide_queries<kD, 2, __nv_bfloat16>
                                          : launch_wide_queries<kD, 1, __nv_bfloat16>)
                          : (cluster == 2 ? launch_wide_queries<kD, 2, __half>
                                          : launch_wide_queries<kD, 1, __half>);
  return launch(num_multiprocessors, maps, params, pass, stream);
}

}  // namespace flashgrad::sm90
