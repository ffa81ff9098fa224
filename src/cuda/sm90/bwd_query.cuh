// SPDX-License-Identifier: Apache-2.0
// Backward, dq by itself: query blocks outside, key blocks inside, S and dP computed again. It runs
// where nothing else is wanted, and above head dim 128 where the workspace has no room for dS.
// Nothing is added through global memory, so the bits depend on the row's own sequence alone. Per
// 128 queries of a head and block of 64 keys
//   (1) S  = Q K^T      (2) P  = exp2(scale_log2 * S - lse_log2), 0 where masked
//   (3) dP = dO V^T     (4) dS = P * (dP - delta + dlse)     (7) dQ += dS K
// and dq = scale * dQ at the end. P stays in f32.
//
// Warpgroup roles (384 threads): 0, 1 "consumers", 64 queries each; 2: the first warp issues the
// loads.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per):
//   q_full, do_full  2; loader, for each half of the rows -> consumers; once
//   k_full, v_full   1; loader -> consumers; step, stage = step mod kKStages, kVStages
//   k_empty          8; consumer warps, after (7) -> loader; step
//   v_empty          8; consumer warps, after (3) -> loader; step
//   landing          1; loader -> loader, for tiles with rows to clear
// Named barriers: 3, 4 each consumer's epilogue.
#pragma once

#include "cuda/sm90/bwd_load.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/tile/gemm.cuh"

namespace flashgrad::sm90 {

inline constexpr int kQueryRows = 128;
inline constexpr int kQueryKeys = 64;
inline constexpr int kQueryThreads = 384;
inline constexpr int kQueryRegisters = 232;
inline constexpr int kQueryLoaderRegisters = 40;

// The work of one CTA, in shared memory.
struct QueryTile {
  int n_begin;  // blocks of 64 keys, walked upwards
  int n_end;
  int head;
  int head_kv;
  int batch_index;
  int q_row;          // row of q where the tile begins
  int q_block;        // its first block of 64 rows in the row statistics
  int kv_row;         // row of k and v where the sequence begins
  int rows_to_write;  // of dq
  int rows_to_read;   // rows of the tile in use
  int live_begin;     // keys of the sequence that some query sees; the others are not to be read
  int live_end;
  int keys_existing;  // keys from kv_row to the end of the tensor
  // Query i of the tile sees key j of the sequence iff i + lo <= j <= i + hi and j < keys_end.
  int lo;
  int hi;
  int keys_end;
  int full_begin[2];  // key blocks without a mask for each consumer
  int full_end[2];
  int landing_parity[1];
};

FG_HOST_DEVICE inline QueryTile query_tile(const BwdQueryParams& p, std::int64_t index) {
  const std::int64_t per_section = p.section * p.num_q_tiles;
  const std::int64_t section = index / per_section;
  const std::int64_t in_section = index % per_section;
  const std::int64_t units =
      p.num_units - section * p.section < p.section ? p.num_units - section * p.section : p.section;
  const std::int64_t unit = section * p.section + in_section % units;
  const Sequences& s = p.sequences;
  // Descending: with a causal mask the longest come first.
  std::int64_t block = p.num_q_tiles - 1 - in_section / units;
  std::int64_t span = unit / p.heads_q;
  if (s.packed()) {
    span = span_of_block(s.cu_seqlens_q, s.batch, s.rows_q, block, kQueryRows);
    block -= first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kQueryRows);
  }
  const SequenceSpan sequence = sequence_span(s, span);
  const Band& band = sequence.band;
  const std::int64_t begin = block * kQueryRows;
  QueryTile tile{};
  const Range keys = band.kv_range(begin, begin + kQueryRows);
  if (!keys.empty()) {
    tile.n_begin = static_cast<int>(keys.begin / kQueryKeys);
    tile.n_end = static_cast<int>((keys.end + kQueryKeys - 1) / kQueryKeys);
  }
  tile.head = static_cast<int>(unit % p.heads_q);
  tile.head_kv = tile.head / static_cast<int>(p.group);
  tile.batch_index = static_cast<int>(sequence.batch_index);
  tile.q_row = static_cast<int>(sequence.q.begin + begin);
  tile.q_block = static_cast<int>(first_block(s.cu_seqlens_q, s.batch, s.rows_q, span, kBlockM) +
                                  begin / kBlockM);
  tile.kv_row = static_cast<int>(sequence.kv.begin);
  tile.rows_to_write =
      static_cast<int>(clamp_to(sequence.q.end - sequence.q.begin - begin, 0, kQueryRows));
  tile.rows_to_read = static_cast<int>(clamp_to(band.seqlen_q - begin, 0, kQueryRows));
  const Range live = band.kv_range(0, band.seqlen_q);
  tile.live_begin = static_cast<int>(live.begin);
  tile.live_end = static_cast<int>(live.end);
  tile.keys_existing = static_cast<int>(s.rows_kv - tile.kv_row);
  constexpr std::int64_t kFar = std::int64_t{1} << 30;
  tile.lo = static_cast<int>(clamp_to(band.lo + begin, -kFar, kFar));
  tile.hi = static_cast<int>(clamp_to(band.hi + begin, -kFar, kFar));
  tile.keys_end = static_cast<int>(band.seqlen_kv);
  for (int i = 0; i < 2; ++i) {
    const Range full = band.kv_range_full(begin + 64 * i, begin + 64 * i + 64);
    tile.full_begin[i] = static_cast<int>((full.begin + kQueryKeys - 1) / kQueryKeys);
    tile.full_end[i] = static_cast<int>(full.end / kQueryKeys);
  }
  return tile;
}

template <int kD>
struct QueryShared {
  static constexpr int kTileBytes = 64 * kD * 2;
  static constexpr int kKStages = kD > 128 ? 2 : 3;
  static constexpr int kVStages = kD > 128 ? 1 : 2;
  static constexpr int kDoOffset = 2 * kTileBytes;
  static constexpr int kKOffset = 4 * kTileBytes;
  static constexpr int kVOffset = kKOffset + kKStages * kTileBytes;
  static constexpr int kBarrierOffset = kVOffset + kVStages * kTileBytes;
  static constexpr int kNumBarriers = 3 + 2 * kKStages + 2 * kVStages;
  static constexpr int kInfoOffset = kBarrierOffset + 8 * kNumBarriers;
  static constexpr int kBytes = kInfoOffset + 128 + tile::kTileAlignment;
  static_assert(sizeof(QueryTile) <= 128, "QueryTile outgrew its place");
  static_assert(kBytes <= 227 * 1024, "tiles must fit an SM");

  std::uint32_t base;

  __device__ std::uint32_t q(int consumer) const { return base + consumer * kTileBytes; }
  __device__ std::uint32_t dout(int consumer) const {
    return base + kDoOffset + consumer * kTileBytes;
  }
  __device__ std::uint32_t k(int stage) const { return base + kKOffset + stage * kTileBytes; }
  __device__ std::uint32_t v(int stage) const { return base + kVOffset + stage * kTileBytes; }
  __device__ std::uint32_t barrier(int i) const { return base + kBarrierOffset + 8 * i; }
  __device__ std::uint32_t q_full() const { return barrier(0); }
  __device__ std::uint32_t do_full() const { return barrier(1); }
  __device__ std::uint32_t landing() const { return barrier(2); }
  __device__ std::uint32_t k_full(int stage) const { return barrier(3 + stage); }
  __device__ std::uint32_t k_empty(int stage) const { return barrier(3 + kKStages + stage); }
  __device__ std::uint32_t v_full(int stage) const { return barrier(3 + 2 * kKStages + stage); }
  __device__ std::uint32_t v_empty(int stage) const {
    return barrier(3 + 2 * kKStages + kVStages + stage);
  }

  __device__ void init_barriers() const {
    ptx::mbarrier_init(q_full(), 2);
    ptx::mbarrier_init(do_full(), 2);
    ptx::mbarrier_init(landing(), 1);
    for (int i = 0; i < kKStages; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), 8);
    }
    for (int i = 0; i < kVStages; ++i) {
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), 8);
    }
    ptx::fence_mbarrier_init();
  }
};

template <int kD>
__device__ __forceinline__ void query_loader_role(const BwdQueryParams& p, const BwdMaps& maps,
                                                  QueryTile& shared_tile,
                                                  const QueryShared<kD>& shared, int lane) {
  using Shared = QueryShared<kD>;
  const QueryTile tile = shared_tile;
  int& parity = shared_tile.landing_parity[0];
  // Rows of q and dout that are not in use only spoil rows of dq that are not kept: no clearing.
  const auto load_queries = [&](const CUtensorMap* map, bool mapped, const Tensor& tensor,
                                std::int64_t columns, bool is_q) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      load_operand<64, kD / 64>(
          map, mapped, tensor, tile.batch_index, tile.q_row + 64 * half, tile.head,
          static_cast<int>(columns), is_q ? shared.q(half) : shared.dout(half),
          is_q ? shared.q_full() : shared.do_full(), shared.landing(), parity, !mapped, lane,
          [&](int r) { return 64 * half + r < tile.rows_to_read; });
    }
  };
  load_queries(&maps.q, (p.mapped & kMapQ) != 0, p.q, p.head_dim, true);
#pragma unroll 1
  for (int n = tile.n_begin; n < tile.n_end; ++n) {
    const int step = n - tile.n_begin;
    const bool dead_keys = n * kQueryKeys < tile.live_begin ||
                           min((n + 1) * kQueryKeys, tile.keys_existing) > tile.live_end;
    const auto live = [&](int r) {
      return n * kQueryKeys + r >= tile.live_begin && n * kQueryKeys + r < tile.live_end;
    };
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const bool is_k = which == 0;
      const int stages = is_k ? Shared::kKStages : Shared::kVStages;
      const int stage = step % stages;
      const bool mapped = (p.mapped & (is_k ? kMapK : kMapV)) != 0;
      ptx::mbarrier_wait(is_k ? shared.k_empty(stage) : shared.v_empty(stage),
                         (static_cast<std::uint32_t>(step / stages) & 1U) ^ 1U);
      load_operand<64, kD / 64>(is_k ? &maps.k : &maps.v, mapped, is_k ? p.k : p.v,
                                tile.batch_index, tile.kv_row + n * kQueryKeys, tile.head_kv,
                                static_cast<int>(is_k ? p.head_dim : p.head_dim_v),
                                is_k ? shared.k(stage) : shared.v(stage),
                                is_k ? shared.k_full(stage) : shared.v_full(stage),
                                shared.landing(), parity, dead_keys || !mapped, lane, live);
      if (is_k && step == 0) {
        load_queries(&maps.dout, (p.mapped & kMapDout) != 0, p.dout, p.head_dim_v, false);
      }
    }
  }
}

template <int kD, bool kSoftcap, class T>
__device__ __forceinline__ void query_consumer_role(const BwdQueryParams& p, const QueryTile& tile,
                                                    const QueryShared<kD>& shared, int consumer,
                                                    int thread) {
  using Shared = QueryShared<kD>;
  using Tile = tile::SwizzledTile<64>;
  constexpr std::uint64_t kStage = Shared::kTileBytes / 16;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const auto arrive = [&](std::uint32_t barrier) {
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  // The thread's two rows.
  float neg_lse[2];
  float neg_delta[2];
  const std::int64_t slot =
      (tile.head * p.num_blocks + tile.q_block + consumer) * kBlockM + warp * 16 + lane / 4;
  const bool block_exists = 64 * consumer < tile.rows_to_read;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    neg_lse[half] = block_exists ? p.neg_lse_log2[slot + 8 * half] : -INFINITY;
    neg_delta[half] = block_exists ? p.neg_delta[slot + 8 * half] : 0.0F;
  }
  float dq[kD / 2];
#pragma unroll
  for (float& x : dq) {
    x = 0;
  }
  const std::uint64_t desc_q = Tile::k_major_descriptor(shared.q(consumer));
  const std::uint64_t desc_do = Tile::k_major_descriptor(shared.dout(consumer));
  const std::uint64_t desc_k = Tile::k_major_descriptor(shared.k(0));
  const std::uint64_t desc_k_mn = Tile::mn_major_descriptor(shared.k(0));
  const std::uint64_t desc_v = Tile::k_major_descriptor(shared.v(0));
  const int full_begin = tile.full_begin[consumer];
  const int full_count = max(tile.full_end[consumer] - full_begin, 0);
  const int n_end = tile.n_end;
  int n = tile.n_begin;
  Ring<Shared::kKStages> k_ring;
  Ring<Shared::kVStages> v_ring;
  ptx::mbarrier_wait(shared.q_full(), 0);
  bool first = true;
  int previous_stage = 0;
#pragma unroll 1
  do {
    const std::uint64_t k_stage = static_cast<std::uint64_t>(k_ring.stage()) * kStage;
    const std::uint64_t v_stage = static_cast<std::uint64_t>(v_ring.stage()) * kStage;
    float s[32];
    float dp[32];
    ptx::mbarrier_wait(shared.k_full(k_ring.stage()), k_ring.parity());
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kD, T, tile::Start::kZero, Tile, Tile>(s, desc_q, desc_k + k_stage);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (first) {
      ptx::mbarrier_wait(shared.do_full(), 0);
    } else {
      arrive(shared.k_empty(previous_stage));  // (7) of the step before
    }
    first = false;
    ptx::mbarrier_wait(shared.v_full(v_ring.stage()), v_ring.parity());
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kD, T, tile::Start::kZero, Tile, Tile>(dp, desc_do, desc_v + v_stage);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::pin(s);
#pragma unroll 1
    for (int r = static_cast<unsigned>(n - full_begin) >= static_cast<unsigned>(full_count); r > 0;
         --r) {
      const float hidden = hidden_logit<kSoftcap>(p.scale_log2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 64 * consumer + warp * 16 + lane / 4 + 8 * half;
        const int column = n * kQueryKeys + lane % 4 * 2;
        const int begin = row + tile.lo - column;
        const int end = min(row + tile.hi + 1, tile.keys_end) - column;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (8 * j + c < begin || 8 * j + c >= end) {
              s[4 * j + 2 * half + c] = hidden;
            }
          }
        }
      }
    }
    std::uint32_t factors[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float factor0;
      float factor1;
      const float lse = neg_lse[i % 2];
      s[2 * i] = fminf(
          exponentiate<kSoftcap>(s[2 * i], lse, p.scale_log2, p.scale_softcap, &factor0), 1.0F);
      s[2 * i + 1] = fminf(
          exponentiate<kSoftcap>(s[2 * i + 1], lse, p.scale_log2, p.scale_softcap, &factor1), 1.0F);
      if constexpr (kSoftcap) {
        factors[i] = ptx::pack<T>(factor0, factor1);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    arrive(shared.v_empty(v_ring.stage()));
    std::uint32_t rds[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float ds0 = s[2 * i] * (dp[2 * i] + neg_delta[i % 2]);
      float ds1 = s[2 * i + 1] * (dp[2 * i + 1] + neg_delta[i % 2]);
      if constexpr (kSoftcap) {
        const float2 f = ptx::unpack<T>(factors[i]);
        ds0 *= f.x;
        ds1 *= f.y;
      }
      rds[i] = ptx::pack<T>(ds0, ds1);
    }
    ptx::wgmma_fence();
    tile::gemm_registers<kD, kQueryKeys, T, Tile>(dq, rds, desc_k_mn + k_stage);
    ptx::wgmma_commit();
    previous_stage = k_ring.stage();
    k_ring.advance();
    v_ring.advance();
  } while (++n < n_end);
  ptx::wgmma_wait<0>();
  ptx::pin(dq);
  // A row that sees nothing is 0, whatever stands in q and dout.
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) {
    dq[i] = neg_lse[i / 2 % 2] == -INFINITY ? 0.0F : dq[i];
  }
  store_rows<kD, 64, T>(dq, p.scale,
                        {p.dq, tile.batch_index, tile.q_row + 64 * consumer, tile.head,
                         tile.rows_to_write - 64 * consumer, static_cast<int>(p.head_dim)},
                        shared.q(consumer), 0, 3 + consumer, thread);
}

template <int kD, bool kSoftcap, class T>
__global__ __launch_bounds__(kQueryThreads,
                             1) void bwd_query(const __grid_constant__ BwdMaps maps,
                                               const __grid_constant__ BwdQueryParams p) {
  using Shared = QueryShared<kD>;
  extern __shared__ std::uint8_t dynamic_shared[];
  const std::uint32_t start = ptx::shared_address(dynamic_shared);
  const std::uint32_t base =
      (start + tile::kTileAlignment - 1) / tile::kTileAlignment * tile::kTileAlignment;
  const Shared shared{base};
  QueryTile& tile =
      *reinterpret_cast<QueryTile*>(dynamic_shared + (base - start) + Shared::kInfoOffset);
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  } else if (threadIdx.x == 128) {
    tile = query_tile(p, blockIdx.x);
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  if (tile.n_begin == tile.n_end) {
    const std::int64_t total = tile.rows_to_write * p.head_dim;
    for (std::int64_t i = threadIdx.x; i < total; i += kQueryThreads) {
      const std::int64_t at =
          p.dq.offset(tile.batch_index, tile.q_row + i / p.head_dim, tile.head) + i % p.head_dim;
      if (p.dq.dtype == DType::kF32) {
        static_cast<float*>(p.dq.data)[at] = 0;
      } else {
        static_cast<std::uint16_t*>(p.dq.data)[at] = 0;
      }
    }
    return;
  }
  if (warpgroup == 2) {
    ptx::registers_decrease<kQueryLoaderRegisters>();
    if (__shfl_sync(0xffffffffU, ptx::thread_index() / 32, 0) == 8) {
      query_loader_role<kD>(p, maps, tile, shared, ptx::thread_index() % 32);
    }
  } else {
    ptx::registers_increase<kQueryRegisters>();
    const int consumer = __shfl_sync(0xffffffffU, ptx::thread_index() / 128, 0);
    query_consumer_role<kD, kSoftcap, T>(p, tile, shared, consumer, ptx::thread_index() % 128);
  }
}

}  // namespace flashgrad::sm90
