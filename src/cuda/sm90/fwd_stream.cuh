// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper where all keys of a sequence fit shared memory: they stay there, and
// the query rows of all heads that share them stream past.
//
// A CTA takes chunks: some query rows of a sequence, of the query heads of one key head. A tile is
// 64 rows of a head and one consumer's; the consumers take the tiles of a CTA in turn, each at its
// own pace, so that the softmax and the end of one run under the products of others, and loads are
// ahead of all. The arithmetic is that of fwd.cuh, equations (1) to (5), and so are the bits.
//
// | warps               | role                     |
// | warpgroup 0, warp 0 | producer: loads Q, K, V  |
// | warpgroups 1, 2, 3  | consumers                |
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_softmax.cuh"
#include "cuda/sm90/fwd_store.cuh"
#include "cuda/sm90/fwd_stream_config.hpp"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// The tiles of a chunk, and the key blocks that any row of it sees.
struct FwdChunk {
  std::int32_t batch, head_kv;
  std::int32_t first_tile, num_tiles;  // of those of the group: tile / group is the row block
};

__device__ __forceinline__ FwdChunk find_chunk(const FwdStreamParams& params, std::uint32_t index) {
  const std::uint32_t batch = params.of_sequence.quotient(index);
  const std::uint32_t in_sequence = index - batch * params.of_sequence.divisor;
  const std::uint32_t piece = params.heads_kv.quotient(in_sequence);
  const std::uint32_t first = piece * params.tiles_per_chunk;
  return {static_cast<std::int32_t>(batch),
          static_cast<std::int32_t>(in_sequence - piece * params.heads_kv.divisor),
          static_cast<std::int32_t>(first),
          static_cast<std::int32_t>(min(params.tiles_per_chunk, params.num_tiles - first))};
}

// The i-th tile of a chunk: rows of a query head, counted in its sequence.
struct FwdStreamTile {
  std::int32_t head, m_begin;
};

__device__ __forceinline__ FwdStreamTile find_stream_tile(const FwdStreamParams& params,
                                                          const FwdChunk& chunk, int i) {
  const FwdParams& p = params.base;
  const auto number = static_cast<std::uint32_t>(chunk.first_tile + i);
  const std::uint32_t rank = params.group.quotient(number);
  const std::uint32_t m_block = p.last_block_first ? p.num_m_blocks - 1 - rank : rank;
  return {static_cast<std::int32_t>(chunk.head_kv * p.group + (number - rank * p.group)),
          static_cast<std::int32_t>(64 * m_block)};
}

// Shared memory: tiles of (64, head_dim) of Q, pairs of (block_n, head_dim) of K and V, the first
// key that each row of a consumer's tile sees and the one behind the last, and barriers. Uses of
// places are counted from the CTA's first; the n-th of a place completes phase n of its barriers.
//
// | barrier        | arrives                              | waits     | count |
// | k_full, v_full | producer and the copy engine         | consumers | 1     |
// | empty          | a lane of each consumer warp         | producer  | 12    |
// | q_full         | producer and the copy engine         | consumers | 1     |
// | q_empty        | a lane of each warp of the consumer  | producer, | 4     |
// |                |                                      | consumer  |       |
//
// A pair is empty when each consumer is done with its last tile of the chunk.
template <FwdStreamVariant kVariant>
struct FwdStreamShared {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  std::uint32_t address;

  __device__ std::uint32_t q(std::uint32_t use) const {
    return address + use % C.q_slots * C.q_bytes();
  }
  __device__ std::uint32_t k(std::uint32_t use) const {
    return address + C.k_offset() + use % C.pairs * 2 * C.kv_bytes();
  }
  __device__ std::uint32_t v(std::uint32_t use) const { return k(use) + C.kv_bytes(); }
  __device__ static std::uint32_t phase(std::uint32_t use) { return use / C.pairs % 2; }
  __device__ static std::uint32_t q_phase(std::uint32_t use) { return use / C.q_slots % 2; }
  __device__ std::uint32_t barrier(std::uint32_t i) const {
    return address + C.barrier_offset() + 8 * i;
  }
  __device__ std::uint32_t k_full(std::uint32_t use) const { return barrier(use % C.pairs); }
  __device__ std::uint32_t v_full(std::uint32_t use) const {
    return barrier(C.pairs + use % C.pairs);
  }
  __device__ std::uint32_t empty(std::uint32_t use) const {
    return barrier(2 * C.pairs + use % C.pairs);
  }
  __device__ std::uint32_t q_full(std::uint32_t use) const {
    return barrier(3 * C.pairs + use % C.q_slots);
  }
  __device__ std::uint32_t q_empty(std::uint32_t use) const {
    return barrier(3 * C.pairs + C.q_slots + use % C.q_slots);
  }
};

// By one thread. Tiles and blocks are loaded in turn: a consumer needs a tile and a block to begin.
template <FwdStreamVariant kVariant>
__device__ __forceinline__ void stream_producer(const FwdStreamShared<kVariant>& shared,
                                                const FwdMaps& maps,
                                                const FwdStreamParams& params) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  constexpr int kBoxes = FwdConfig::boxes(W.head_dim);
  const auto load = [&]<int kRows>(std::uint32_t destination, std::uint32_t barrier,
                                   const CUtensorMap& map, int row, int head, int batch) {
    ptx::mbarrier_arrive_expect(barrier, FwdConfig::bytes(kRows, W.head_dim));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tensor_load(destination + box * kRows * tile::kBoxRowBytes, &map, barrier,
                       box * tile::kBoxColumns, row, head, batch);
    }
  };
  std::uint32_t pair = 0;
  std::uint32_t q_use = 0;
#pragma unroll 1
  for (std::uint32_t index = blockIdx.x; index < params.num_chunks; index += gridDim.x) {
    const FwdChunk chunk = find_chunk(params, index);
    const int num_blocks = params.blocks.end - params.blocks.begin;
#pragma unroll 1
    for (int i = 0; i < max(num_blocks, chunk.num_tiles); ++i) {
      if (i < num_blocks) {
        const int row = (params.blocks.end - 1 - i) * C.block_n();
        ptx::mbarrier_wait(shared.empty(pair), shared.phase(pair) ^ 1);
        load.template operator()<C.block_n()>(shared.k(pair), shared.k_full(pair), maps.k, row,
                                              chunk.head_kv, chunk.batch);
        load.template operator()<C.block_n()>(shared.v(pair), shared.v_full(pair), maps.v, row,
                                              chunk.head_kv, chunk.batch);
        ++pair;
      }
      if (i < chunk.num_tiles) {
        const FwdStreamTile tile = find_stream_tile(params, chunk, i);
        ptx::mbarrier_wait(shared.q_empty(q_use), shared.q_phase(q_use) ^ 1);
        load.template operator()<64>(shared.q(q_use), shared.q_full(q_use), maps.q, tile.m_begin,
                                     tile.head, chunk.batch);
        ++q_use;
      }
    }
  }
}

// For finish_rows(): through the tile's place of Q.
struct CopyThroughTile {
  static constexpr bool kCopies = true;
  std::uint32_t q_tile;
  const FwdMaps& maps;

  template <int kColumns>
  __device__ __forceinline__ void copy(const std::uint32_t (&pairs)[kColumns / 4],
                                       const FwdTile& tile, int warp) const {
    copy_out<kColumns, 64>(pairs, q_tile, 16 * warp, maps.out, tile.q_row + 16 * warp, tile.head,
                           tile.batch);
  }
};

template <FwdStreamVariant kVariant, bool kScoreFunction, class T>
__device__ __forceinline__ void stream_consumer(const FwdStreamShared<kVariant>& shared,
                                                const FwdMaps& maps, const FwdStreamParams& params,
                                                std::uint32_t consumer, int2* all_row_keys) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  using QTile = tile::SwizzledTile<64>;
  using KvTile = tile::SwizzledTile<C.block_n()>;
  const FwdParams& p = params.base;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  int2* const own_keys = all_row_keys + 64 * consumer + 16 * warp;
  const int2* const row_keys = own_keys + lane / 4;
  const auto num_keys = static_cast<int>(params.band.seqlen_kv);
  const auto num_rows_all = static_cast<int>(params.band.seqlen_q);
  const int num_blocks = params.blocks.end - params.blocks.begin;
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  std::uint32_t first_pair = 0;  // of the chunk
  std::uint32_t first_q = 0;     // likewise
#pragma unroll 1
  for (std::uint32_t index = blockIdx.x; index < params.num_chunks; index += gridDim.x) {
    const FwdChunk chunk = find_chunk(params, index);
    // The consumer's first tile of the chunk.
    int i = static_cast<int>((consumer + 3 - first_q % 3) % 3);
    if (i >= chunk.num_tiles) {
#pragma unroll 1
      for (int block = 0; block < num_blocks; ++block) {
        // What is released must have come, or the next use would be counted as this one.
        const std::uint32_t pair = first_pair + block;
        ptx::mbarrier_wait(shared.k_full(pair), shared.phase(pair));
        ptx::mbarrier_wait(shared.v_full(pair), shared.phase(pair));
        release(shared.empty(pair));
      }
    }
#pragma unroll 1
    for (; i < chunk.num_tiles; i += 3) {
      const FwdStreamTile place = find_stream_tile(params, chunk, i);
      const bool is_last = i + 3 >= chunk.num_tiles;
      const std::uint32_t q_use = first_q + i;
      FwdTile tile;
      tile.band = params.band;
      tile.m_begin = place.m_begin;
      tile.num_rows = min(64, num_rows_all - place.m_begin);
      tile.head = place.head;
      tile.head_kv = chunk.head_kv;
      tile.batch = chunk.batch;
      tile.q_row = place.m_begin;
      tile.kv_row = 0;
      const FwdBlocks blocks =
          params.num_tables > 0
              ? params.tables[place.m_begin / 64]
              : key_blocks<C.block_n()>(params.band, place.m_begin, place.m_begin + 64);
      if (lane < 16) {
        const int m = place.m_begin + 16 * warp + lane;
        const Range keys = params.band.kv_range(m, m + 1);
        own_keys[lane] = make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
      }
      __syncwarp();
      float o[W.head_dim_v / 2];
#pragma unroll
      for (float& x : o) {
        x = 0.0F;
      }
      SoftmaxRows rows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Rows that do not exist must not decide when the warp rescales: their +inf never grows.
        rows.maximum[r] =
            16 * warp + lane / 4 + 8 * r < tile.num_rows ? -CUDART_INF_F : CUDART_INF_F;
        rows.sum[r] = 0.0F;
      }
      // Block n with its first kKeys keys; there are no others.
      const auto compute = [&]<int kKeys>(int n, std::uint32_t pair) {
        float s[kKeys / 2];
        std::uint32_t probabilities[kKeys / 4];
        ptx::mbarrier_wait(shared.k_full(pair), shared.phase(pair));
        ptx::wgmma_fence();
        const std::uint64_t q_descriptor = QTile::k_major_descriptor(shared.q(q_use));
        const std::uint64_t k_descriptor = KvTile::k_major_descriptor(shared.k(pair));
        ptx::wgmma_ss<kKeys, T, false, 0, 0>(s, q_descriptor, k_descriptor);  // (1)
#pragma unroll
        for (int k = 1; k < W.head_dim / 16; ++k) {
          ptx::wgmma_ss<kKeys, T, true, 0, 0>(s, q_descriptor + QTile::k_major_step(k),
                                              k_descriptor + KvTile::k_major_step(k));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        float rescale[2];
        const int first_key = n * C.block_n() + 2 * (lane % 4);
        const bool grown =  // (2)
            n >= blocks.full_begin && n < blocks.full_end
                ? softmax_block<kKeys, kScoreFunction, false>(s, &rows, rescale, row_keys,
                                                              first_key, p)
                : softmax_block<kKeys, kScoreFunction, true>(s, &rows, rescale, row_keys, first_key,
                                                             p);
        if (grown) {  // (3)
#pragma unroll
          for (int x = 0; x < W.head_dim_v / 2; ++x) {
            o[x] *= rescale[x / 2 % 2];
          }
        }
#pragma unroll
        for (int x = 0; x < kKeys / 4; ++x) {
          probabilities[x] = ptx::pack<T>(s[2 * x], s[2 * x + 1]);
        }
        ptx::mbarrier_wait(shared.v_full(pair), shared.phase(pair));
        ptx::wgmma_fence();
        const std::uint64_t v_descriptor = KvTile::mn_major_descriptor(shared.v(pair));
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {  // (4)
          ptx::wgmma_rs<W.head_dim_v, T, true, 1>(o, probabilities + 4 * k,
                                                  v_descriptor + KvTile::mn_major_step(k));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(o);
      };
      // The place's use before is another consumer's, and loads may come out of order: until it is
      // over, the phase before it would be taken for this one's.
      ptx::mbarrier_wait(shared.q_empty(q_use), shared.q_phase(q_use) ^ 1);
      ptx::mbarrier_wait(shared.q_full(q_use), shared.q_phase(q_use));
      std::uint32_t pair = first_pair;
#pragma unroll 1
      for (int n = params.blocks.end - 1; n >= params.blocks.begin; --n) {
        if (n >= blocks.begin && n < blocks.end) {
          if (num_keys - n * C.block_n() <= C.few_keys) {
            compute.template operator()<C.few_keys>(n, pair);
          } else {
            compute.template operator()<C.block_n()>(n, pair);
          }
        } else if (is_last) {
          ptx::mbarrier_wait(shared.k_full(pair), shared.phase(pair));
          ptx::mbarrier_wait(shared.v_full(pair), shared.phase(pair));
        }
        if (is_last) {
          release(shared.empty(pair));
        }
        ++pair;
      }
      tile.out_offset = p.out.offset(chunk.batch, place.m_begin, place.head);
      tile.lse_offset = p.lse.offset(chunk.batch, place.m_begin, place.head);
      ptx::named_barrier_sync<128>(1 + static_cast<int>(consumer));  // no warp reads Q any more
      if (16 * warp < tile.num_rows) {
        finish_rows<W.head_dim_v, kScoreFunction, T>(
            p, tile, rows, o, warp, CopyThroughTile{shared.q(q_use), maps});  // (5)
      }
      if (lane == 0) {
        ptx::bulk_wait_read<0>();
      }
      release(shared.q_empty(q_use));
    }
    first_pair += num_blocks;
    first_q += chunk.num_tiles;
  }
}

template <FwdStreamVariant kVariant, bool kScoreFunction, class T>
__global__ void __launch_bounds__(FwdStreamConfig::kThreads, 1)
    fwd_stream(const __grid_constant__ FwdMaps maps,
               const __grid_constant__ FwdStreamParams params) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  static_assert(C.valid(), "shared memory");
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t memory[];
  const FwdStreamShared<kVariant> shared{ptx::shared_address(memory)};
  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < C.num_barriers(); ++i) {
      const bool by_consumers = i >= 2 * C.pairs && i < 3 * C.pairs;
      const bool by_warps = i >= 3 * C.pairs + C.q_slots;
      ptx::mbarrier_init(shared.barrier(i), by_consumers ? 12 : by_warps ? 4 : 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const std::uint32_t warp = __shfl_sync(0xffffffffU, threadIdx.x / 32, 0);
  if (warp < 4) {
    ptx::registers_decrease<W.producer_registers()>();
    if (warp == 0 && threadIdx.x == 0) {
      stream_producer<kVariant>(shared, maps, params);
    }
  } else {
    ptx::registers_increase<W.consumer_registers()>();
    stream_consumer<kVariant, kScoreFunction, T>(
        shared, maps, params, warp / 4 - 1, reinterpret_cast<int2*>(memory + C.row_keys_offset()));
  }
}

}  // namespace flashgrad::sm90
