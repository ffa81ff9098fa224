// SPDX-License-Identifier: Apache-2.0
// Implements bwd_wide_launch.hpp.
#include "cuda/sm90/bwd_wide_launch.hpp"

#include <algorithm>

#include "cuda/sm90/bwd_arguments.hpp"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/wide_tile.cuh"

namespace flashgrad::sm90 {

Status launch_wide(const Problem& p, const Args& args, const WidePlan& plan,
                   const RowStatistics& rows, std::uint32_t* ticket, std::uint8_t* room,
                   const cuda::DeviceProperties& device) {
  const bool softcap = p.softcap > 0;
  // Clusters halve the traffic with the L2, but walk the query blocks that either CTA needs, which
  // costs windows a step; tiles of a packed batch would go to waste.
  const bool window = p.mask.left < kUnboundedFrom && p.mask.right < kUnboundedFrom;
  const int key_cluster = p.packed || window || softcap ? 1 : 2;
  const int query_cluster = p.packed || window ? 1 : 2;

  BwdParams keys = key_params(p, args, rows);
  keys.ticket = ticket;
  BwdQueryParams queries = query_params(p, args, rows, kWideDqRows * query_cluster);
  queries.ticket = ticket;
  queries.section = wide_dq_section(p, device.l2_bytes);

  // With a cluster each CTA loads half the rows of a tile that both use.
  BwdMaps key_maps{};
  BwdMaps query_maps{};
  FG_RETURN_IF_ERROR(make_maps(p, args, kBlockM / key_cluster, kWideKeys, cuda::MapKind::k4d,
                               &key_maps, &keys.mapped));
  FG_RETURN_IF_ERROR(cuda::make_map(args.k, cuda::k_extents(p), kWideKeys / query_cluster,
                                    cuda::MapKind::k4d, kMapK, &query_maps.k, &queries.mapped));

  const std::int64_t section = wide_key_section(p, device.l2_bytes);
  for (const WidePass& pass : wide_passes(p, plan, key_cluster, section, room,
                                          reinterpret_cast<float*>(room + plan.ds_bytes))) {
    const auto launch_keys = padded_head_dim(p) == 256 ? launch_bwd_wide<256, 256>
                             : p.head_dim_v <= 128     ? launch_bwd_wide<192, 128>
                                                       : launch_bwd_wide<192, 192>;
    FG_RETURN_IF_ERROR(launch_keys(key_cluster, device.num_multiprocessors, softcap, p.dtype,
                                   key_maps, keys, pass, args.stream));
    if (plan.keeps_ds) {
      const auto launch_queries =
          padded_head_dim(p) == 256 ? launch_bwd_wide_dq<256> : launch_bwd_wide_dq<192>;
      FG_RETURN_IF_ERROR(launch_queries(query_cluster, device.num_multiprocessors, p.dtype,
                                        query_maps, queries, pass, args.stream));
    }
  }
  return {};
}

}  // namespace flashgrad::sm90
