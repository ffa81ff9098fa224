// SPDX-License-Identifier: Apache-2.0
// What the launches of a backward call tell its kernels alike: the problem and the tensors as
// BwdParams and BwdQueryParams hold them, and tensor maps.
#pragma once

#include "core/problem.hpp"
#include "core/status.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/bwd_kernels.hpp"
#include "cuda/sm90/params.hpp"

namespace flashgrad::sm90 {

Scales make_scales(const Problem& p);

// Of kernels whose tiles are keys; what depends on the kernel is left at its default.
BwdParams key_params(const Problem& p, const Args& args, const RowStatistics& rows);

// Of kernels whose tiles are queries, `tile_rows` of them each.
BwdQueryParams query_params(const Problem& p, const Args& args, const RowStatistics& rows,
                            int tile_rows);

// Maps of q and dout in boxes of `q_rows`, of k and v of `kv_rows`; *mapped gets a bit of each that
// the copy engine can address.
Status make_maps(const Problem& p, const Args& args, int q_rows, int kv_rows, cuda::MapKind kind,
                 BwdMaps* maps, std::uint32_t* mapped);

}  // namespace flashgrad::sm90
