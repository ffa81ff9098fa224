// SPDX-License-Identifier: Apache-2.0
// Backward, pass 2 of 3, head dims up to 128. Key blocks outside, query blocks inside: one CTA
// holds block_n keys, and for every query head of the group and every query block m that sees them
//   (1) S^T  = K Q^T                     (2) P^T  = exp2(scale_log2 * S^T - lse_log2), 0 where
//   masked (3) dP^T = V dO^T                    (4) dS^T = P^T * (dP^T - delta + dlse) (5) dV  +=
//   P^T dO                    (6) dK  += dS^T Q (7) dQ   = dS K, added to f32 accumulators in
//   global memory
// With softcap, S is capped before (2) and dS^T takes the factor 1 - (s / softcap)^2.
//
// Warpgroup roles (384 threads):
//   0     "dq": its first warp issues the loads; all four make (7)
//   1, 2  "consumers": (1) to (6) for 64 keys each (d64: two blocks of 64 keys in turn); P and dS
//         go from registers into (5) and (6), dS also through shared memory to warpgroup 0
// A consumer issues [dP, dV] and [dK, S of the next step] as two batches. With ping_pong a token
// lets one consumer issue a batch only after the other has, so that one's softmax runs under the
// other's products.
//
// Barriers (count of arrivals; who arrives -> who waits; completes once per):
//   k, v         1; loader -> all, consumers; once
//   q_full       1; loader -> consumers; step, stage = step mod q_stages
//   q_empty      8; consumer warps, after (6) -> loader; step
//   do_full      1; loader -> consumers; step
//   do_empty     8; consumer warps, after (5) -> loader; step
//   ds_full      8; consumer warps -> dq; (step, key block), stage mod ds_stages
//   ds_empty     4; dq warps, after (7) -> consumers; (step, key block)
//   landing      1; loader -> loader, for tiles with rows to clear; each such tile
//   done         4; dq warps, after the last (7) -> consumers, which then reuse K's memory; once
// Named barriers: 1, 2 the token of each consumer; 3, 4 each consumer's epilogue.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/config.hpp"
#include "cuda/sm90/key_tile.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/tile/fragment.hpp"
#include "cuda/tile/gemm.cuh"

namespace flashgrad::sm90 {

struct BwdMaps {
  CUtensorMap q, k, v, dout;
};

// Shared memory of one CTA: addresses from the offsets in BwdConfig.
template <BwdConfig C>
struct BwdShared {
  std::uint32_t base;

  __device__ std::uint32_t k() const { return base + C.k_offset(); }
  __device__ std::uint32_t v() const { return base + C.v_offset(); }
  __device__ std::uint32_t q(int stage) const { return base + C.q_offset() + stage * C.q_bytes(); }
  __device__ std::uint32_t dout(int stage) const {
    return base + C.do_offset() + stage * C.q_bytes();
  }
  __device__ std::uint32_t ds(int stage) const {
    return base + C.ds_offset() + stage * C.ds_bytes();
  }
  __device__ std::uint32_t lse(int stage) const {
    return base + C.lse_offset() + stage * kBlockM * 4;
  }
  __device__ std::uint32_t delta(int stage) const {
    return base + C.delta_offset() + stage * kBlockM * 4;
  }
  __device__ std::uint32_t barrier(int i) const { return base + C.barrier_offset() + 8 * i; }
  __device__ std::uint32_t k_full() const { return barrier(0); }
  __device__ std::uint32_t v_full() const { return barrier(1); }
  __device__ std::uint32_t landing() const { return barrier(2); }
  __device__ std::uint32_t done() const { return barrier(3); }
  __device__ std::uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ std::uint32_t q_empty(int stage) const { return barrier(4 + C.q_stages + stage); }
  __device__ std::uint32_t do_full(int stage) const { return barrier(4 + 2 * C.q_stages + stage); }
  __device__ std::uint32_t do_empty(int stage) const { return barrier(4 + 3 * C.q_stages + stage); }
  __device__ std::uint32_t ds_full(int stage) const { return barrier(4 + 4 * C.q_stages + stage); }
  __device__ std::uint32_t ds_empty(int stage) const {
    return barrier(4 + 4 * C.q_stages + C.ds_stages + stage);
  }

  __device__ void init_barriers() const {
    constexpr int kConsumerWarps = 4 * BwdConfig::kConsumers;
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(landing(), 1);
    ptx::mbarrier_init(done(), 4);
    for (int i = 0; i < C.q_stages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), kConsumerWarps);
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(do_empty(i), kConsumerWarps);
    }
    for (int i = 0; i < C.ds_stages; ++i) {
      ptx::mbarrier_init(ds_full(i), kConsumerWarps);
      ptx::mbarrier_init(ds_empty(i), 4);
    }
    ptx::fence_mbarrier_init();
  }
};

// A position in a ring of stages and the parity of its current round.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Walks the steps of a tile: query heads of the group, and in each the query blocks downwards.
struct StepWalk {
  int m_begin;
  int m_last;
  int m;
  int head;

  __device__ StepWalk(const KeyTile& tile, int group)
      : m_begin(tile.m_begin), m_last(tile.m_end - 1), m(m_last), head(tile.head_kv * group) {}
  __device__ void advance() {
    if (--m < m_begin) {
      m = m_last;
      ++head;
    }
  }
};

// The loads of a CTA, all issued by one warp. What it must remember between steps is little,
// because the dq warpgroup, to which the warp belongs, has few registers.
template <BwdConfig C>
struct Loader {
  static constexpr int kBoxes = C.head_dim / 64;

  const BwdParams& p;
  const BwdMaps& maps;
  const KeyTile& tile;
  int& landing_parity;
  BwdShared<C> shared;
  int lane;
  StepWalk walk;
  // Whether the walk's block, the next, ... have rows that are not to be read: loaded 32 at a time,
  // since a load that is waited for in every step costs the dq warpgroup its slack.
  std::uint32_t unreadable = 0;

  __device__ Loader(const BwdParams& params, const BwdMaps& tensor_maps, const KeyTile& key_tile,
                    int& parity_of_landing, BwdShared<C> memory, int lane_index)
      : p(params),
        maps(tensor_maps),
        tile(key_tile),
        landing_parity(parity_of_landing),
        shared(memory),
        lane(lane_index),
        walk(key_tile, static_cast<int>(params.group)) {}

  __device__ std::int64_t slot() const {
    return walk.head * p.rows.num_blocks + tile.q_block + walk.m;
  }

  // Rows `row` on of one head into a tile of kRows x head_dim, and `statistic`, if any, beside it;
  // then one arrival on `full`. Rows that keep() refuses become 0 if `clear`.
  template <int kRows, class Keep>
  __device__ void load(const CUtensorMap* map, bool mapped, const Tensor& tensor, int columns,
                       int row, int head, std::uint32_t destination, std::uint32_t full, bool clear,
                       Keep&& keep, const float* statistic, std::uint32_t statistic_destination) {
    constexpr std::uint32_t kBytes = kRows * C.head_dim * 2;
    constexpr std::uint32_t kStatisticBytes = kBlockM * 4;
    const std::uint32_t barrier = clear ? shared.landing() : full;
    if (ptx::elect_one()) {
      const std::uint32_t bytes =
          (mapped ? kBytes : 0U) + (statistic != nullptr ? kStatisticBytes : 0U);
      if (mapped || clear) {
        ptx::mbarrier_arrive_expect(barrier, bytes);
        if (statistic != nullptr) {
          ptx::bulk_load(statistic_destination, statistic, kStatisticBytes, barrier);
        }
      }
      if (mapped) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          ptx::tensor_load(destination + box * kRows * tile::kBoxRowBytes, map, barrier, 64 * box,
                           row, head, tile.batch_index);
        }
      }
    }
    __syncwarp();
    if (!clear) {
      return;
    }
    ptx::mbarrier_wait(barrier, static_cast<std::uint32_t>(landing_parity));
    __syncwarp();
    if (mapped) {
      clear_rows<kRows, C.head_dim>(destination, lane, keep);
    } else {
      load_tile<kRows, C.head_dim>(destination, tensor, tile.batch_index, row, head, columns, lane,
                                   keep);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect_one()) {
      landing_parity ^= 1;
      ptx::mbarrier_arrive(full);
    }
    __syncwarp();
  }

  __device__ void load_kv(const CUtensorMap* map, bool mapped, const Tensor& tensor,
                          std::int64_t columns, std::uint32_t destination, std::uint32_t full) {
    load<C.block_n()>(
        map, mapped, tensor, static_cast<int>(columns), tile.kv_row, tile.head_kv, destination,
        full, tile.has_dead_keys != 0 || !mapped,
        [this](int r) { return r >= tile.live_begin && r < tile.live_end; }, nullptr, 0);
  }

  // Step `step`: a query block of q with lse, and of dout with delta. V comes between the first
  // two.
  __device__ void load_step(int step) {
    const int stage = step % C.q_stages;
    const std::uint32_t parity = (static_cast<std::uint32_t>(step / C.q_stages) & 1U) ^ 1U;
    if (step == tile.num_steps) {
      // The consumers prefetch S of a step past the last: let them, on whatever the stage holds.
      ptx::mbarrier_wait(shared.q_empty(stage), parity);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive(shared.q_full(stage));
      }
      __syncwarp();
      return;
    }
    if ((tile.m_end - 1 - walk.m) % 32 == 0) {
      const bool exists = walk.m - lane >= tile.m_begin;
      unreadable = __ballot_sync(0xffffffffU, exists && p.rows.unreadable[slot() - lane] != 0);
    }
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const bool is_q = which == 0;
      ptx::mbarrier_wait(is_q ? shared.q_empty(stage) : shared.do_empty(stage), parity);
      const float* lse = p.rows.neg_lse_log2 + slot() * kBlockM;
      const bool mapped = (p.mapped & (is_q ? kMapQ : kMapDout)) != 0;
      load<kBlockM>(
          is_q ? &maps.q : &maps.dout, mapped, is_q ? p.q : p.dout,
          static_cast<int>(is_q ? p.head_dim : p.head_dim_v), tile.q_row + walk.m * kBlockM,
          walk.head, is_q ? shared.q(stage) : shared.dout(stage),
          is_q ? shared.q_full(stage) : shared.do_full(stage), (unreadable & 1U) != 0 || !mapped,
          [lse](int r) { return lse[r] != -INFINITY; },
          is_q ? lse : p.rows.neg_delta + slot() * kBlockM,
          is_q ? shared.lse(stage) : shared.delta(stage));
      if (is_q && step == 0) {
        load_kv(&maps.v, (p.mapped & kMapV) != 0, p.v, p.head_dim_v, shared.v(), shared.v_full());
      }
    }
    walk.advance();
    unreadable >>= 1;
  }
};

template <BwdConfig C, class T>
__device__ __forceinline__ void bwd_dq_role(const BwdParams& p, const BwdMaps& maps,
                                            KeyTile& shared_tile, const BwdShared<C>& shared,
                                            int warp, int lane) {
  using KTile = tile::SwizzledTile<C.block_n()>;
  using DsTile = tile::SwizzledTile<64 * BwdConfig::kConsumers>;
  constexpr int kAhead = C.q_stages - 1;
  static_assert((C.ds_stages & (C.ds_stages - 1)) == 0, "stages are counted by masks");
  const bool loads = warp == 0;
  // A copy in registers: loads from shared memory wait long behind the operands of wgmma.
  const KeyTile tile = shared_tile;
  Loader<C> loader(p, maps, tile, shared_tile.landing_parity, shared, lane);
  if (loads) {
    loader.load_kv(&maps.k, (p.mapped & kMapK) != 0, p.k, p.head_dim, shared.k(), shared.k_full());
  }
  const std::uint64_t desc_k = KTile::mn_major_descriptor(shared.k());
  const std::uint64_t desc_ds = DsTile::mn_major_descriptor(shared.ds(0));
  StepWalk walk(tile, static_cast<int>(p.group));
  if (loads) {
#pragma unroll 1
    for (int step = 0; step < kAhead && step <= tile.num_steps; ++step) {
      loader.load_step(step);
    }
  }
  __syncwarp();
  ptx::mbarrier_wait(shared.k_full(), 0);
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step) {
    float* const accumulator =
        p.dq_accumulator +
        (walk.head * p.rows.num_blocks + tile.q_block + walk.m) * (kBlockM * C.head_dim) +
        tile::fragment_order<C.head_dim>(warp * 32 + lane, 0);
    // (7), 64 columns of d at a time.
#pragma unroll
    for (int box = 0; box < C.head_dim / 64; ++box) {
      float dq[32];
#pragma unroll
      for (int x = 0; x < C.key_blocks; ++x) {
        const int count = step * C.key_blocks + x;
        const int stage = count % C.ds_stages;
        if (box == 0) {
          ptx::mbarrier_wait(shared.ds_full(stage),
                             static_cast<std::uint32_t>(count / C.ds_stages) & 1U);
        }
        const std::uint64_t a = desc_ds + static_cast<std::uint64_t>(stage * (C.ds_bytes() / 16));
        const std::uint64_t b =
            desc_k + static_cast<std::uint64_t>(box * (KTile::kBoxBytes / 16) + x * 1024);
        constexpr int kKeys = 64 * BwdConfig::kConsumers;
        ptx::wgmma_fence();
        if (x == 0) {
          tile::gemm_mn_major<64, kKeys, T, tile::Start::kZero, DsTile, KTile>(dq, a, b);
        } else {
          tile::gemm_mn_major<64, kKeys, T, tile::Start::kAccumulate, DsTile, KTile>(dq, a, b);
        }
        ptx::wgmma_commit();
        if (box == 0 && x == 0) {  // under the first product
          if (loads && step + kAhead <= tile.num_steps) {
            loader.load_step(step + kAhead);
          }
          __syncwarp();
        }
        ptx::wgmma_wait<0>();
        ptx::pin(dq);
        if (box == C.head_dim / 64 - 1 && lane == 0) {
          ptx::mbarrier_arrive(shared.ds_empty(stage));
        }
      }
      if (p.dq_accumulator != nullptr) {
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          ptx::reduce_add(accumulator + box * 1024 + i / 4 * 128, dq[i], dq[i + 1], dq[i + 2],
                          dq[i + 3]);
        }
      }
    }
    walk.advance();
  }
  if (lane == 0) {
    ptx::mbarrier_arrive(shared.done());
  }
}

// Puts `hidden`, for which (2) gives 0, where the band hides an element of S^T. `key` is the
// tile-relative key of the lane's first row, `query` the query of its first column.
__device__ __forceinline__ void mask_s(float (&s)[32], const KeyTile& tile, int key, int query,
                                       float hidden) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int distance = key + 8 * half - query;
    const int last = key + 8 * half < tile.keys_end ? distance - tile.lo : -1;
    const int first = distance - tile.hi;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c < first || 8 * j + c > last) {
          s[4 * j + 2 * half + c] = hidden;
        }
      }
    }
  }
}

// Writes 64 rows of a gradient: staged as 16-bit in the consumer's own rows of shared memory, or
// directly from registers if f32.
template <BwdConfig C, class T>
__device__ __forceinline__ void store_gradient(float (&d)[C.head_dim / 2], float factor,
                                               const Tensor& out, const KeyTile& tile, int key,
                                               int columns, std::uint32_t staging, int consumer,
                                               int thread) {
  using Tile = tile::SwizzledTile<C.block_n()>;
  const int lane = thread % 32;
  const int warp = thread / 32;
  if (out.dtype == DType::kF32) {
    auto* base = static_cast<float*>(out.data);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = key + warp * 16 + lane / 4 + 8 * half;
      if (row < tile.rows_to_write) {
        float* destination = base + out.offset(tile.batch_index, tile.kv_row + row, tile.head_kv);
#pragma unroll
        for (int j = 0; j < C.head_dim / 8; ++j) {
          const int column = 8 * j + lane % 4 * 2;
          if (column < columns) {
            destination[column] = d[4 * j + 2 * half] * factor;
          }
          if (column + 1 < columns) {
            destination[column + 1] = d[4 * j + 2 * half + 1] * factor;
          }
        }
      }
    }
    return;
  }
  const int row = key + warp * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < C.head_dim / 16; ++k) {
    const auto at = static_cast<std::uint32_t>(Tile::offset(row, 16 * k + lane / 16 * 8));
    ptx::store_matrix(staging + at, ptx::pack<T>(d[8 * k] * factor, d[8 * k + 1] * factor),
                      ptx::pack<T>(d[8 * k + 2] * factor, d[8 * k + 3] * factor),
                      ptx::pack<T>(d[8 * k + 4] * factor, d[8 * k + 5] * factor),
                      ptx::pack<T>(d[8 * k + 6] * factor, d[8 * k + 7] * factor));
  }
  ptx::named_barrier_sync<128>(3 + consumer);
  const bool wide = reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0 &&
                    out.row_stride % 8 == 0 && out.head_stride % 8 == 0 &&
                    out.batch_stride % 8 == 0;
  auto* base = static_cast<std::uint16_t*>(out.data);
#pragma unroll 4
  for (int i = thread; i < 64 * (C.head_dim / 8); i += 128) {
    const int r = key + i / (C.head_dim / 8);
    const int column = i % (C.head_dim / 8) * 8;
    if (r < tile.rows_to_write && column < columns) {
      std::uint32_t values[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                   : "r"(staging + static_cast<std::uint32_t>(Tile::offset(r, column))));
      std::uint16_t* destination =
          base + out.offset(tile.batch_index, tile.kv_row + r, tile.head_kv) + column;
      if (wide && column + 8 <= columns) {
        *reinterpret_cast<uint4*>(destination) =
            make_uint4(values[0], values[1], values[2], values[3]);
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          if (column + c < columns) {
            destination[c] = static_cast<std::uint16_t>(values[c / 2] >> (c % 2 * 16));
          }
        }
      }
    }
  }
}

template <BwdConfig C, class T>
__device__ __forceinline__ void bwd_consumer_role(const BwdParams& p, const KeyTile& tile,
                                                  const BwdShared<C>& shared, int consumer,
                                                  int thread) {
  constexpr int kD = C.head_dim;
  constexpr int kBlocks = C.key_blocks;
  // Loading delta before dP is there needs registers that f16's conversions or softcap take.
  constexpr bool kDeltaAhead = std::is_same_v<T, __nv_bfloat16> && !C.softcap;
  constexpr std::uint32_t kOnes = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80U : 0x3c003c00U;
  using QTile = tile::SwizzledTile<kBlockM>;
  using KTile = tile::SwizzledTile<C.block_n()>;
  using DsTile = tile::SwizzledTile<64 * BwdConfig::kConsumers>;
  const int lane = thread % 32;
  const int warp = thread / 32;

  // Key block x of this consumer begins at key 128 * x + 64 * consumer of the tile.
  const std::uint32_t own_rows = static_cast<std::uint32_t>(consumer * 64 * tile::kBoxRowBytes);
  const std::uint64_t desc_k = KTile::k_major_descriptor(shared.k() + own_rows);
  const std::uint64_t desc_v = KTile::k_major_descriptor(shared.v() + own_rows);
  const std::uint64_t desc_q = QTile::k_major_descriptor(shared.q(0));
  const std::uint64_t desc_do = QTile::k_major_descriptor(shared.dout(0));
  const std::uint64_t desc_q_mn = QTile::mn_major_descriptor(shared.q(0));
  const std::uint64_t desc_do_mn = QTile::mn_major_descriptor(shared.dout(0));
  constexpr std::uint64_t kStage = C.q_bytes() / 16;
  constexpr std::uint64_t kBlock = 128 * tile::kBoxRowBytes / 16;
  const std::uint32_t lse = shared.lse(0) + static_cast<std::uint32_t>(lane % 4 * 8);
  constexpr std::uint32_t kDelta = C.delta_offset() - C.lse_offset();
  const std::uint32_t ds_row =
      shared.ds(0) + static_cast<std::uint32_t>(
                         DsTile::offset(consumer * 64 + warp * 16 + lane % 16, lane / 16 * 8));

  float dk[kBlocks][kD / 2];
  float dv[kBlocks][kD / 2];
#pragma unroll
  for (int x = 0; x < kBlocks; ++x) {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) {
      dk[x][i] = 0;
      dv[x][i] = 0;
    }
  }
  const float scale_log2 = p.scale_log2;
  const float hidden = C.softcap ? -INFINITY : copysignf(INFINITY, -scale_log2);

  const auto token_wait = [&] {
    if constexpr (C.ping_pong) {
      ptx::named_barrier_sync<256>(1 + consumer);
    }
  };
  const auto token_pass = [&] {
    if constexpr (C.ping_pong) {
      ptx::named_barrier_arrive<256>(2 - consumer);
    }
  };
  const auto arrive = [&](std::uint32_t barrier) {
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  const auto load_row_statistic = [&](float2(&rows)[8], std::uint32_t address) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      rows[j] = ptx::load_shared_float2(address + j * 32);
    }
  };

  Ring<C.q_stages> ring;
  Ring<C.ds_stages> ds_ring{0, 1};
  float s[32];
  float2 rows[8];
  std::uint32_t rp[16];
  std::uint32_t rds[16];
  if (consumer == 1) {
    token_pass();
  }
  ptx::mbarrier_wait(shared.k_full(), 0);
  ptx::mbarrier_wait(shared.q_full(0), 0);
  ptx::wgmma_fence();
  tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(s, desc_k, desc_q);
  ptx::wgmma_commit();
  load_row_statistic(rows, lse);
  ptx::mbarrier_wait(shared.v_full(), 0);
  ptx::wgmma_wait<0>();
  ptx::pin(s);

  // In registers: loads from shared memory wait long behind the operands of wgmma.
  const int m_begin = tile.m_begin;
  const int m_last = tile.m_end - 1;
  int full_begin[kBlocks];
  int full_count[kBlocks];
#pragma unroll
  for (int x = 0; x < kBlocks; ++x) {
    full_begin[x] = tile.full_begin[2 * x + consumer];
    full_count[x] = max(tile.full_end[2 * x + consumer] - full_begin[x], 0);
  }
  int m = m_last;
  int remaining = tile.num_steps;
  const auto block = [&]<int x>() {
    const int index = 2 * x + consumer;
    // A loop of at most one round, so that ptxas keeps the mask out of the unmasked blocks.
#pragma unroll 1
    for (int r = static_cast<unsigned>(m - full_begin[x]) >= static_cast<unsigned>(full_count[x]);
         r > 0; --r) {
      mask_s(s, tile, 64 * index + warp * 16 + lane / 4, m * kBlockM + lane % 4 * 2, hidden);
    }
    // (2)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float s0 = s[4 * j + 2 * half];
        const float s1 = s[4 * j + 2 * half + 1];
        if constexpr (C.softcap) {
          // tanh(a) = 1 - 2 / (1 + exp(2 a)); the factor of (4) waits in rds.
          constexpr float kTwoLog2E = 2.8853900817779268F;
          const float a = p.scale_softcap * kTwoLog2E;
          const float t0 = 1.0F - __fdividef(2.0F, 1.0F + ptx::exp2_approx(s0 * a));
          const float t1 = 1.0F - __fdividef(2.0F, 1.0F + ptx::exp2_approx(s1 * a));
          const float p0 = ptx::exp2_approx(fmaf(t0, scale_log2, rows[j].x));
          const float p1 = ptx::exp2_approx(fmaf(t1, scale_log2, rows[j].y));
          rp[2 * j + half] = ptx::pack<T>(s0 == hidden ? 0.0F : p0, s1 == hidden ? 0.0F : p1);
          rds[2 * j + half] = ptx::pack<T>(1.0F - t0 * t0, 1.0F - t1 * t1);
        } else {
          rp[2 * j + half] = ptx::pack<T>(ptx::exp2_approx(fmaf(s0, scale_log2, rows[j].x)),
                                          ptx::exp2_approx(fmaf(s1, scale_log2, rows[j].y)));
        }
        // Rounding may lift huge logits above their lse.
        rp[2 * j + half] = ptx::min_packed<T>(rp[2 * j + half], kOnes);
      }
    }
    ptx::pin(rp);

    // (3), (5)
    float dp[32];
    if constexpr (x == 0) {
      ptx::mbarrier_wait(shared.do_full(ring.stage), ring.parity);
    }
    const std::uint64_t stage = static_cast<std::uint64_t>(ring.stage) * kStage;
    token_wait();
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(dp, desc_v + x * kBlock,
                                                                    desc_do + stage);
    ptx::wgmma_commit();
    ptx::wgmma_fence();
    tile::gemm_registers<kD, kBlockM, T, QTile>(dv[x], rp, desc_do_mn + stage);
    ptx::wgmma_commit();
    token_pass();
    const std::uint32_t delta =
        lse + static_cast<std::uint32_t>(ring.stage) * (kBlockM * 4) + kDelta;
    if constexpr (kDeltaAhead) {
      load_row_statistic(rows, delta);
    }
    ptx::wgmma_wait<1>();
    ptx::pin(dp);

    // (4)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (!kDeltaAhead) {
        rows[j] = ptx::load_shared_float2(delta + j * 32);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 p01 = ptx::unpack<T>(rp[2 * j + half]);
        float ds0 = p01.x * (dp[4 * j + 2 * half] + rows[j].x);
        float ds1 = p01.y * (dp[4 * j + 2 * half + 1] + rows[j].y);
        if constexpr (C.softcap) {
          const float2 factor = ptx::unpack<T>(rds[2 * j + half]);
          ds0 *= factor.x;
          ds1 *= factor.y;
        }
        rds[2 * j + half] = ptx::pack<T>(ds0, ds1);
      }
    }
    Ring<C.q_stages> next = ring;
    if constexpr (x == kBlocks - 1) {
      next.advance();
    }
    ptx::mbarrier_wait(shared.ds_empty(ds_ring.stage), ds_ring.parity);
    const std::uint32_t ds_address =
        ds_row + static_cast<std::uint32_t>(ds_ring.stage * C.ds_bytes());
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::store_matrix(ds_address ^ static_cast<std::uint32_t>(k * 32), rds[4 * k], rds[4 * k + 1],
                        rds[4 * k + 2], rds[4 * k + 3]);
    }
    if constexpr (x == kBlocks - 1) {
      ptx::mbarrier_wait(shared.q_full(next.stage), next.parity);
    }

    // (6), and (1) of the next block; after the last step on a stale stage, unused.
    token_wait();
    ptx::wgmma_fence();
    tile::gemm_registers<kD, kBlockM, T, QTile>(dk[x], rds, desc_q_mn + stage);
    ptx::wgmma_commit();
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(shared.ds_full(ds_ring.stage));
    ds_ring.advance();
    ptx::wgmma_wait<1>();
    ptx::pin(rp);
    ptx::pin(dv[x]);
    if constexpr (x == kBlocks - 1) {
      arrive(shared.do_empty(ring.stage));
    }
    ptx::wgmma_fence();
    tile::gemm_k_major<64, kD, T, tile::Start::kZero, KTile, QTile>(
        s, desc_k + (x + 1) % kBlocks * kBlock,
        desc_q + static_cast<std::uint64_t>(next.stage) * kStage);
    ptx::wgmma_commit();
    token_pass();
    load_row_statistic(rows, lse + static_cast<std::uint32_t>(next.stage) * (kBlockM * 4));
    ptx::wgmma_wait<1>();
    ptx::pin(rds);
    ptx::pin(dk[x]);
    if constexpr (x == kBlocks - 1) {
      arrive(shared.q_empty(ring.stage));
    }
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    ring = next;
  };
#pragma unroll 1
  do {
    block.template operator()<0>();
    if constexpr (kBlocks == 2) {
      block.template operator()<1>();
    }
    if (--m < m_begin) {
      m = m_last;
    }
  } while (--remaining > 0);
  if (consumer == 0) {
    token_wait();  // consumer 1 passed once more than it waited
  }

  ptx::mbarrier_wait(shared.done(), 0);
#pragma unroll
  for (int x = 0; x < kBlocks; ++x) {
    const int key = 128 * x + 64 * consumer;
    if (p.dv) {
      store_gradient<C, T>(dv[x], 1.0F, p.dv, tile, key, static_cast<int>(p.head_dim_v), shared.v(),
                           consumer, thread);
    }
    if (p.dk) {
      store_gradient<C, T>(dk[x], p.scale, p.dk, tile, key, static_cast<int>(p.head_dim),
                           shared.k(), consumer, thread);
    }
  }
}

// dk = dv = 0 for keys that no query sees.
template <class T>
__device__ __forceinline__ void store_zeros(const Tensor& out, const KeyTile& tile, int columns) {
  const auto total = static_cast<std::int64_t>(tile.rows_to_write) * columns;
  for (std::int64_t i = threadIdx.x; i < total; i += blockDim.x) {
    const std::int64_t at =
        out.offset(tile.batch_index, tile.kv_row + i / columns, tile.head_kv) + i % columns;
    if (out.dtype == DType::kF32) {
      static_cast<float*>(out.data)[at] = 0;
    } else {
      static_cast<std::uint16_t*>(out.data)[at] = 0;
    }
  }
}

template <BwdVariant kVariant, class T>
__global__ __launch_bounds__(BwdConfig::kThreads,
                             1) void bwd_main(const __grid_constant__ BwdMaps maps,
                                              const __grid_constant__ BwdParams p) {
  constexpr BwdConfig C = kBwdConfigs[static_cast<int>(kVariant)];
  static_assert(C.valid(), "tiles, stages and registers must fit an SM");
  static_assert(sizeof(KeyTile) <= BwdConfig::kInfoBytes, "KeyTile outgrew its place");
  extern __shared__ std::uint8_t dynamic_shared[];
  const std::uint32_t start = ptx::shared_address(dynamic_shared);
  const std::uint32_t base =
      (start + tile::kTileAlignment - 1) / tile::kTileAlignment * tile::kTileAlignment;
  const BwdShared<C> shared{base};
  KeyTile& tile = *reinterpret_cast<KeyTile*>(dynamic_shared + (base - start) + C.info_offset());
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(0xffffffffU, thread / 32, 0);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  } else if (threadIdx.x == 128) {
    tile = key_tile<C.block_n()>(p, blockIdx.x);
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  if (tile.num_steps == 0) {
    if (p.dk) {
      store_zeros<T>(p.dk, tile, static_cast<int>(p.head_dim));
    }
    if (p.dv) {
      store_zeros<T>(p.dv, tile, static_cast<int>(p.head_dim_v));
    }
    return;
  }
  if (warpgroup == 0) {
    ptx::registers_decrease<C.dq_registers>();
    bwd_dq_role<C, T>(p, maps, tile, shared, warp, thread % 32);
  } else {
    ptx::registers_increase<C.consumer_registers>();
    const int consumer = __shfl_sync(0xffffffffU, warpgroup - 1, 0);
    bwd_consumer_role<C, T>(p, tile, shared, consumer, warp * 32 + thread % 32);
  }
}

}  // namespace flashgrad::sm90
