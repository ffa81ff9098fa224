// SPDX-License-Identifier: Apache-2.0
// Implements bwd_wide_launch.hpp.
#include "cuda/sm90/bwd_wide_launch.hpp"

#include <algorithm>

#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/wide_pass.hpp"

namespace flashgrad::sm90 {
namespace {

// A map of the tensor if the copy engine can address it; `bit` of `mapped` says so.
Status make_map(const Tensor& tensor, const cuda::Extents& extents, int box_rows, std::uint32_t bit,
                CUtensorMap* map, std::uint32_t* mapped) {
  if (!cuda::can_map(tensor, extents)) {
    return {};
  }
  *mapped |= bit;
  return cuda::encode_map(tensor, extents, box_rows, map);
}

}  // namespace

Status launch_wide(const Problem& p, const Args& args, const WidePlan& plan,
                   const RowStatistics& rows, const Scales& scales, std::uint32_t* ticket,
                   std::uint8_t* room, const cuda::DeviceProperties& device) {
  const WideExtent e(p);
  const std::int64_t batch = p.packed ? 1 : p.batch;
  const bool softcap = p.softcap > 0;
  // Clusters halve the traffic with the L2, but walk the query blocks that either CTA needs, which
  // costs windows a step; tiles of a packed batch would go to waste.
  const bool window = p.mask.left < kUnboundedFrom && p.mask.right < kUnboundedFrom;
  const int key_cluster = p.packed || window || softcap ? 1 : 2;
  const int query_cluster = p.packed || window ? 1 : 2;

  BwdParams key_params{};
  key_params.sequences = make_sequences(p, args);
  key_params.heads_kv = p.heads_kv;
  key_params.group = p.group();
  key_params.head_dim = p.head_dim;
  key_params.head_dim_v = p.head_dim_v;
  key_params.num_kv_blocks =
      num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_kv, kWideKeys * key_cluster);
  key_params.num_units = e.units;
  key_params.section = 1;
  key_params.round = 1;
  key_params.q = args.q;
  key_params.k = args.k;
  key_params.v = args.v;
  key_params.dout = args.dout;
  key_params.dk = p.wants_dk ? args.dk : Tensor{};
  key_params.dv = p.wants_dv ? args.dv : Tensor{};
  key_params.rows = rows;
  key_params.ticket = ticket;
  key_params.scale = scales.scale;
  key_params.scale_log2 = scales.log2;
  key_params.scale_softcap = scales.softcap;

  BwdQueryParams query_params{};
  query_params.sequences = key_params.sequences;
  query_params.heads_q = p.heads_q;
  query_params.group = p.group();
  query_params.head_dim = p.head_dim;
  query_params.head_dim_v = p.head_dim_v;
  query_params.num_q_tiles =
      num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_q, 128 * query_cluster);
  query_params.k = args.k;
  query_params.dq = args.dq;
  query_params.num_blocks = rows.num_blocks;
  query_params.neg_lse_log2 = rows.neg_lse_log2;
  query_params.ticket = ticket;
  query_params.scale = scales.scale;

  BwdMaps key_maps{};
  BwdMaps query_maps{};
  const cuda::Extents q_extents{batch, p.seqlen_q, p.heads_q, p.head_dim};
  const cuda::Extents k_extents{batch, p.seqlen_kv, p.heads_kv, p.head_dim};
  const cuda::Extents v_extents{batch, p.seqlen_kv, p.heads_kv, p.head_dim_v};
  const cuda::Extents do_extents{batch, p.seqlen_q, p.heads_q, p.head_dim_v};
  // With a cluster each CTA loads half the rows of a shared tile.
  FG_RETURN_IF_ERROR(
      make_map(args.q, q_extents, kBlockM / key_cluster, kMapQ, &key_maps.q, &key_params.mapped));
  FG_RETURN_IF_ERROR(
      make_map(args.k, k_extents, kWideKeys, kMapK, &key_maps.k, &key_params.mapped));
  FG_RETURN_IF_ERROR(
      make_map(args.v, v_extents, kWideKeys, kMapV, &key_maps.v, &key_params.mapped));
  FG_RETURN_IF_ERROR(make_map(args.dout, do_extents, kBlockM / key_cluster, kMapDout,
                              &key_maps.dout, &key_params.mapped));
  FG_RETURN_IF_ERROR(make_map(args.k, k_extents, kWideKeys / query_cluster, kMapK, &query_maps.k,
                              &query_params.mapped));

  // Units whose q and dout stay in the L2 together.
  const std::int64_t unit_bytes = p.group() * p.seqlen_q * 2 * (p.head_dim + p.head_dim_v);
  const std::int64_t section = std::max<std::int64_t>(
      1, device.l2_bytes * std::int64_t{8} / 15 / std::max<std::int64_t>(1, unit_bytes));
  query_params.section = wide_dq_section(p, device.l2_bytes);
  for (const WidePass& pass : wide_passes(p, plan, key_cluster, section, room,
                                          reinterpret_cast<float*>(room + plan.ds_bytes))) {
    const auto keys = padded_head_dim(p) == 256 ? launch_bwd_wide<256, 256>
                      : p.head_dim_v <= 128     ? launch_bwd_wide<192, 128>
                                                : launch_bwd_wide<192, 192>;
    FG_RETURN_IF_ERROR(keys(key_cluster, device.num_multiprocessors, softcap, p.dtype, key_maps,
                            key_params, pass, args.stream));
    if (plan.keeps_ds) {
      const auto queries =
          padded_head_dim(p) == 256 ? launch_bwd_wide_dq<256> : launch_bwd_wide_dq<192>;
      FG_RETURN_IF_ERROR(queries(query_cluster, device.num_multiprocessors, p.dtype, query_maps,
                                 query_params, pass, args.stream));
    }
  }
  return {};
}

}  // namespace flashgrad::sm90
