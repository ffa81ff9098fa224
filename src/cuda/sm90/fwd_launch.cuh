// SPDX-License-Identifier: Apache-2.0
// From a Problem and its Args to launches of the forward: workspace, tensor maps, parameters, grid.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/backend.hpp"
#include "core/problem.hpp"
#include "cuda/common/device.hpp"
#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/fwd.cuh"
#include "cuda/sm90/fwd_prepare.cuh"

namespace flashgrad::cuda {

// How the workspace is cut. Everything is 256-byte aligned.
struct FwdWorkspace {
  std::size_t next_work = 0;
  std::size_t schedule_size = 0;
  std::size_t schedule = 0;
  std::size_t copies = 0;  // of q, k, v that TMA cannot address
  std::size_t total = 0;   // without copies

  static constexpr std::size_t kAlignment = 256;
  static std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
};

inline std::int64_t num_query_blocks(const Problem& problem, int block_m) {
  return problem.packed ? problem.seqlen_q / block_m + problem.batch : (problem.seqlen_q + block_m - 1) / block_m;
}

inline FwdWorkspace make_workspace(const Problem& problem, int block_m) {
  FwdWorkspace w;
  w.next_work = 0;
  w.schedule_size = sizeof(std::uint32_t);
  w.schedule = FwdWorkspace::kAlignment;
  w.copies = w.schedule;
  if (problem.packed) {
    w.copies += FwdWorkspace::round_up(static_cast<std::size_t>(num_query_blocks(problem, block_m)) * sizeof(FwdScheduleEntry));
  }
  w.total = w.copies;
  return w;
}

inline std::size_t copy_bytes(const Extents& e) {
  return FwdWorkspace::round_up(static_cast<std::size_t>(e.batch * e.rows * e.heads * ((e.columns + 7) / 8 * 8) * 2));
}

inline Extents query_extents(const Problem& p) { return {p.packed ? 1 : p.batch, p.seqlen_q, p.heads_q, p.head_dim}; }
inline Extents key_extents(const Problem& p) { return {p.packed ? 1 : p.batch, p.seqlen_kv, p.heads_kv, p.head_dim}; }
inline Extents value_extents(const Problem& p) { return {p.packed ? 1 : p.batch, p.seqlen_kv, p.heads_kv, p.head_dim_v}; }

// Heads whose keys and values are in use at the same time: about half of the L2, the rest is for what streams through.
inline std::int64_t heads_per_section(const Problem& problem, int l2_bytes) {
  const std::int64_t bytes_per_head = std::max<std::int64_t>(1, problem.seqlen_kv * (problem.head_dim + problem.head_dim_v) * 2);
  return std::max<std::int64_t>(1, l2_bytes / 2 / bytes_per_head) * problem.group();
}

inline FwdParams make_params(const Problem& problem, const Args& args, int block_m, int l2_bytes) {
  FwdParams p{};
  p.out = args.out.data;
  p.lse = static_cast<float*>(args.lse.data);
  p.sinks = static_cast<const float*>(args.sinks);
  p.cu_seqlens_q = args.cu_seqlens_q;
  p.cu_seqlens_kv = args.cu_seqlens_kv;
  p.seqused_q = args.seqused_q;
  p.seqused_kv = args.seqused_kv;
  p.q_offset = args.q_offset;
  p.out_batch_stride = args.out.batch_stride;
  p.out_row_stride = args.out.row_stride;
  p.out_head_stride = args.out.head_stride;
  p.lse_batch_stride = args.lse.batch_stride;
  p.lse_row_stride = args.lse.row_stride;
  p.lse_head_stride = args.lse.head_stride;
  p.mask = problem.mask;
  p.batch = problem.batch;
  p.seqlen_q = static_cast<std::int32_t>(problem.seqlen_q);
  p.seqlen_kv = static_cast<std::int32_t>(problem.seqlen_kv);
  p.heads_q = static_cast<std::uint32_t>(problem.heads_q);
  p.group = static_cast<std::uint32_t>(problem.group());
  p.num_m_blocks = static_cast<std::uint32_t>(num_query_blocks(problem, block_m));
  p.num_heads = static_cast<std::uint32_t>((problem.packed ? 1 : problem.batch) * problem.heads_q);
  const auto sections = static_cast<std::uint32_t>(std::max<std::int64_t>(1, p.num_heads / heads_per_section(problem, l2_bytes)));
  p.section_heads = p.num_heads / sections;
  p.wide_sections = p.num_heads % sections;
  p.head_dim = static_cast<std::int32_t>(problem.head_dim);
  p.head_dim_v = static_cast<std::int32_t>(problem.head_dim_v);
  p.last_block_first = problem.mask.right < kUnboundedFrom;
  p.out_vectors = reinterpret_cast<std::uintptr_t>(args.out.data) % 16 == 0 && problem.head_dim_v % 8 == 0 &&
                  (args.out.batch_stride | args.out.row_stride | args.out.head_stride) % 8 == 0;
  constexpr double kLog2E = 1.4426950408889634;
  p.scale_log2 = static_cast<float>(problem.scale * kLog2E);
  if (problem.softcap > 0) {
    p.tanh_scale = static_cast<float>(problem.scale / problem.softcap);
    p.cap_log2 = static_cast<float>(problem.softcap * kLog2E);
  }
  return p;
}

// A tensor that TMA cannot address is copied into the workspace first.
inline Status make_addressable(const Extents& extents, void* stream, Tensor* tensor, std::uint8_t** copies, std::size_t* left) {
  if (can_map(*tensor, extents)) {
    return {};
  }
  const std::size_t bytes = copy_bytes(extents);
  if (bytes > *left) {
    return {FG_WORKSPACE_TOO_SMALL, "sm90 forward: a tensor whose base or strides are no multiples of 16 bytes needs the preferred workspace"};
  }
  const std::int64_t padded = (extents.columns + 7) / 8 * 8;
  CopyParams p{};
  p.source = static_cast<const std::uint16_t*>(tensor->data);
  p.destination = reinterpret_cast<std::uint16_t*>(*copies);
  p.rows = extents.rows;
  p.heads = extents.heads;
  p.columns = extents.columns;
  p.batch_stride = tensor->batch_stride;
  p.row_stride = tensor->row_stride;
  p.head_stride = tensor->head_stride;
  p.num_vectors = extents.batch * extents.rows * extents.heads;
  FG_RETURN_IF_ERROR(launch("copy for TMA", copy_compact_kernel, {std::min<std::int64_t>((p.num_vectors + 7) / 8, 4096), 256}, stream, p));
  tensor->data = *copies;
  tensor->head_stride = padded;
  tensor->row_stride = padded * extents.heads;
  tensor->batch_stride = tensor->row_stride * extents.rows;
  *copies += bytes;
  *left -= bytes;
  return {};
}

template <class Variant>
Status launch_fwd(const Problem& problem, const Args& args) {
  constexpr FwdConfig kConfig = Variant::kConfig;
  using T = typename Variant::Element;
  const std::int64_t rows = (problem.packed ? 1 : problem.batch) * problem.seqlen_q;
  if (rows == 0 || problem.heads_q == 0) {
    return {};
  }
  DeviceProperties device;
  FG_RETURN_IF_ERROR(device_properties(problem.device_id, &device));
  const FwdWorkspace w = make_workspace(problem, kConfig.block_m());
  const auto address = reinterpret_cast<std::uintptr_t>(args.workspace);
  const std::size_t skipped = (FwdWorkspace::kAlignment - address % FwdWorkspace::kAlignment) % FwdWorkspace::kAlignment;
  auto* const base = static_cast<std::uint8_t*>(args.workspace) + skipped;
  std::uint8_t* copies = base + w.copies;
  std::size_t left = args.workspace_bytes - std::min(args.workspace_bytes, skipped + w.total);

  Tensor q = args.q;
  Tensor k = args.k;
  Tensor v = args.v;
  CUtensorMap map_q{};
  CUtensorMap map_k{};
  CUtensorMap map_v{};
  if (problem.seqlen_kv > 0 && problem.batch > 0) {
    FG_RETURN_IF_ERROR(make_addressable(query_extents(problem), args.stream, &q, &copies, &left));
    FG_RETURN_IF_ERROR(make_addressable(key_extents(problem), args.stream, &k, &copies, &left));
    FG_RETURN_IF_ERROR(make_addressable(value_extents(problem), args.stream, &v, &copies, &left));
    FG_RETURN_IF_ERROR(encode_map(q, query_extents(problem), kConfig.block_m(), &map_q));
    FG_RETURN_IF_ERROR(encode_map(k, key_extents(problem), kConfig.block_n, &map_k));
    FG_RETURN_IF_ERROR(encode_map(v, value_extents(problem), kConfig.block_n, &map_v));
  }
  FwdParams p = make_params(problem, args, kConfig.block_m(), device.l2_bytes);
  auto* const schedule = problem.packed ? reinterpret_cast<FwdScheduleEntry*>(base + w.schedule) : nullptr;
  auto* const schedule_size = reinterpret_cast<std::uint32_t*>(base + w.schedule_size);
  auto* const next_work = reinterpret_cast<std::uint32_t*>(base + w.next_work);
  const bool fill = problem.packed || problem.has_seqused_q;
  if (fill) {
    const std::int64_t fill_ctas = std::min<std::int64_t>((rows + kPrepareThreads / 32 - 1) / (kPrepareThreads / 32), 2 * device.num_multiprocessors);
    FG_RETURN_IF_ERROR(launch("forward prepare", fwd_prepare_kernel<T, kConfig.block_m()>, {1 + fill_ctas, kPrepareThreads}, args.stream, p, schedule, schedule_size, next_work,
                              problem.max_seqlen_kv, rows));
  } else if (Variant::kPersistent) {
    FG_RETURN_IF_ERROR(check(cudaMemsetAsync(next_work, 0, sizeof(std::uint32_t), static_cast<cudaStream_t>(args.stream)), "forward work counter"));
  }
  p.q = q.data;
  p.q_batch_stride = q.batch_stride;
  p.q_row_stride = q.row_stride;
  p.q_head_stride = q.head_stride;
  p.k = k.data;
  p.k_batch_stride = k.batch_stride;
  p.k_row_stride = k.row_stride;
  p.k_head_stride = k.head_stride;
  p.v = v.data;
  p.v_batch_stride = v.batch_stride;
  p.v_row_stride = v.row_stride;
  p.v_head_stride = v.head_stride;
  p.schedule = schedule;
  p.schedule_size = schedule_size;
  const std::int64_t tiles = static_cast<std::int64_t>(p.num_m_blocks) * p.num_heads;
  LaunchShape shape{tiles, kConfig.threads(), kConfig.shared_bytes()};
  if (Variant::kPersistent) {
    p.next_work = next_work;
    shape.num_ctas = std::min<std::int64_t>(tiles, device.num_multiprocessors);
  }
  return launch("forward", fwd_kernel<Variant>, shape, args.stream, map_q, map_k, map_v, p);
}

}  // namespace flashgrad::cuda
