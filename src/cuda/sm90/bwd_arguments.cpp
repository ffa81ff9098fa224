// SPDX-License-Identifier: Apache-2.0
// Implements bwd_arguments.hpp.
#include "cuda/sm90/bwd_arguments.hpp"

#include <limits>

#include "cuda/sm90/sequences.cuh"

namespace flashgrad::sm90 {

Scales make_scales(const Problem& p) {
  constexpr double kLog2E = 1.4426950408889634;
  Scales scales{static_cast<float>(p.scale), static_cast<float>(p.scale * kLog2E), 0};
  if (p.softcap > 0) {
    scales.log2 = static_cast<float>(p.softcap * kLog2E);
    scales.softcap = static_cast<float>(p.scale / p.softcap);
  } else if (p.scale == 0) {
    // Not 0, so that a masked logit of infinity stays one.
    scales.log2 = std::numeric_limits<float>::min();
  }
  return scales;
}

BwdParams key_params(const Problem& p, const Args& args, const RowStatistics& rows) {
  const Scales scales = make_scales(p);
  BwdParams params{};
  params.sequences = make_sequences(p, args);
  params.heads_kv = p.heads_kv;
  params.group = p.group();
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.q = args.q;
  params.k = args.k;
  params.v = args.v;
  params.dout = args.dout;
  params.dk = p.wants_dk ? args.dk : Tensor{};
  params.dv = p.wants_dv ? args.dv : Tensor{};
  params.rows = rows;
  params.scale = scales.scale;
  params.scale_log2 = scales.log2;
  params.scale_softcap = scales.softcap;
  return params;
}

BwdQueryParams query_params(const Problem& p, const Args& args, const RowStatistics& rows,
                            int tile_rows) {
  const Scales scales = make_scales(p);
  BwdQueryParams params{};
  params.sequences = make_sequences(p, args);
  params.heads_q = p.heads_q;
  params.group = p.group();
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.num_q_tiles = num_blocks(p.packed, p.packed ? p.batch : 1, p.seqlen_q, tile_rows);
  params.num_units = (p.packed ? 1 : p.batch) * p.heads_q;
  params.q = args.q;
  params.k = args.k;
  params.v = args.v;
  params.dout = args.dout;
  params.dq = args.dq;
  params.num_blocks = rows.num_blocks;
  params.neg_lse_log2 = rows.neg_lse_log2;
  params.neg_delta = rows.neg_delta;
  params.scale = scales.scale;
  params.scale_log2 = scales.log2;
  params.scale_softcap = scales.softcap;
  return params;
}

Status make_maps(const Problem& p, const Args& args, int q_rows, int kv_rows, cuda::MapKind kind,
                 BwdMaps* maps, std::uint32_t* mapped) {
  FG_RETURN_IF_ERROR(
      cuda::make_map(args.q, cuda::q_extents(p), q_rows, kind, kMapQ, &maps->q, mapped));
  FG_RETURN_IF_ERROR(
      cuda::make_map(args.k, cuda::k_extents(p), kv_rows, kind, kMapK, &maps->k, mapped));
  FG_RETURN_IF_ERROR(
      cuda::make_map(args.v, cuda::v_extents(p), kv_rows, kind, kMapV, &maps->v, mapped));
  return cuda::make_map(args.dout, cuda::out_extents(p), q_rows, kind, kMapDout, &maps->dout,
                        mapped);
}

}  // namespace flashgrad::sm90
