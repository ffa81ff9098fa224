// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper where all keys of a sequence fit shared memory: they stay there, and
// the query rows of all heads that share them stream past.
//
// A CTA takes chunks: some query rows of a sequence, of the query heads of one key head. A tile is
// 64 rows of a head and one consumer's; the consumers take the tiles of a CTA in turn, each at its
// own pace, so that the softmax and the end of one run under the products of others, and loads are
// ahead of all. The arithmetic is that of fwd.cuh, equations (1) to (5), and so are the bits.
//
// | warps               | role                  |
// | warpgroup 0, warp 0 | producer: loads K, V  |
// | warpgroup 0, warp 1 | producer: loads Q     |
// | warpgroups 1, 2, 3  | consumers             |
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

// A use of a place of a ring: the n-th use of a place completes phase n of its barriers.
struct FwdStreamRing {
  std::uint32_t place = 0;
  std::uint32_t phase = 0;

  // By `steps`, of which a ring of `places` has no fewer.
  __device__ __forceinline__ void advance(std::uint32_t steps, std::uint32_t places) {
    place += steps;
    if (place >= places) {
      place -= places;
      phase ^= 1;
    }
  }
};

// Shared memory (FwdStreamLayout): slots of (64, head_dim) of Q, pairs of (block_n, head_dim) of K
// and V, pairs of (last_keys, head_dim), and barriers.
//
// | barrier        | arrives                              | waits     | count |
// | k_full, v_full | producer and the copy engine         | consumers | 1     |
// | empty          | a lane of each consumer warp         | producer  | 12    |
// | q_full         | producer and the copy engine         | consumers | 1     |
// | q_empty        | a lane of each warp of the consumer  | producer  | 4     |
//
// A pair is empty when each consumer is done with its last tile of the chunk. Who waits for a phase
// must know that the one before is complete, and loads may complete in any order: there are as many
// q_full as make all uses of each one consumer's.
//
// The last block of a sequence has a pair of its own where it has few keys: less is loaded and
// computed, and there is room for more of the next chunk.
struct FwdStreamPair {
  std::uint32_t k, v;      // addresses
  std::uint32_t barriers;  // k_full, v_full, empty
  std::uint32_t phase;

  __device__ std::uint32_t k_full() const { return barriers; }
  __device__ std::uint32_t v_full() const { return barriers + 8; }
  __device__ std::uint32_t empty() const { return barriers + 16; }
};

template <FwdStreamVariant kVariant>
struct FwdStreamShared {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  std::uint32_t address;
  const FwdStreamLayout& layout;

  __device__ std::uint32_t q(const FwdStreamRing& at) const {
    return address + at.place * C.q_bytes();
  }
  __device__ std::uint32_t q_full(const FwdStreamRing& at) const {
    return address + C.kBarrierOffset + 8 * at.place;
  }
  __device__ std::uint32_t q_empty(const FwdStreamRing& at) const {
    return address + C.kBarrierOffset + 8 * (C.kNumArrivals + at.place);
  }
  __device__ FwdStreamPair pair(const FwdStreamRing& at) const {
    const std::uint32_t k =
        address + layout.q_slots * C.q_bytes() + at.place * (2 * C.kv_bytes(C.block_n()));
    return {k, k + C.kv_bytes(C.block_n()),
            address + C.kBarrierOffset + 8 * (C.kNumArrivals + C.kMaxQSlots) + 24 * at.place,
            at.phase};
  }
  __device__ FwdStreamPair last_pair(const FwdStreamRing& at) const {
    const std::uint32_t bytes = C.kv_bytes(1) * layout.last_keys;
    const std::uint32_t k = address + layout.q_slots * C.q_bytes() +
                            layout.pairs * (2 * C.kv_bytes(C.block_n())) + at.place * (2 * bytes);
    return {k, k + bytes,
            address + C.kBarrierOffset + 8 * (C.kNumArrivals + C.kMaxQSlots) +
                24 * (C.kMaxPairs + at.place),
            at.phase};
  }
  __device__ void init_barriers() const {
    for (std::uint32_t i = 0; i < C.kNumBarriers; ++i) {
      constexpr std::uint32_t kOfQ = C.kNumArrivals + C.kMaxQSlots;
      const bool by_warps = i >= C.kNumArrivals && i < kOfQ;
      const bool by_consumers = i >= kOfQ && (i - kOfQ) % 3 == 2;
      ptx::mbarrier_init(address + C.kBarrierOffset + 8 * i, by_warps ? 4 : by_consumers ? 12 : 1);
    }
    ptx::fence_mbarrier_init();
  }
};

// By one thread.
template <FwdStreamVariant kVariant>
__device__ __forceinline__ void stream_key_producer(const FwdStreamShared<kVariant>& shared,
                                                    const FwdStreamMaps& maps,
                                                    const FwdStreamParams& params) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  const FwdStreamLayout& layout = params.layout;
  const auto load = [&](const FwdStreamPair& pair, const CUtensorMap& k, const CUtensorMap& v,
                        int block, int keys, const FwdChunk& chunk) {
    const std::uint32_t box_bytes = keys * tile::kBoxRowBytes;
    const auto load_tile = [&](std::uint32_t destination, std::uint32_t barrier,
                               const CUtensorMap& map) {
      ptx::mbarrier_arrive_expect(barrier, C.kv_bytes(1) * keys);
#pragma unroll
      for (int box = 0; box < FwdConfig::boxes(C.widths().head_dim); ++box) {
        ptx::tensor_load(destination + box * box_bytes, &map, barrier, box * tile::kBoxColumns,
                         block * C.block_n(), chunk.head_kv, chunk.batch);
      }
    };
    ptx::mbarrier_wait(pair.empty(), pair.phase ^ 1);
    load_tile(pair.k, pair.k_full(), k);
    load_tile(pair.v, pair.v_full(), v);
  };
  FwdStreamRing whole;
  FwdStreamRing last;
#pragma unroll 1
  for (std::uint32_t index = blockIdx.x; index < params.num_chunks; index += gridDim.x) {
    const FwdChunk chunk = find_chunk(params, index);
    int block = params.blocks.end;
    if (layout.last_pairs > 0) {
      --block;
      load(shared.last_pair(last), maps.last_k, maps.last_v, block, layout.last_keys, chunk);
      last.advance(1, layout.last_pairs);
    }
#pragma unroll 1
    for (--block; block >= params.blocks.begin; --block) {
      load(shared.pair(whole), maps.whole.k, maps.whole.v, block, C.block_n(), chunk);
      whole.advance(1, layout.pairs);
    }
  }
}

// By one thread.
template <FwdStreamVariant kVariant>
__device__ __forceinline__ void stream_query_producer(const FwdStreamShared<kVariant>& shared,
                                                      const FwdStreamMaps& maps,
                                                      const FwdStreamParams& params) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  FwdStreamRing slot;
  FwdStreamRing arrival;
#pragma unroll 1
  for (std::uint32_t index = blockIdx.x; index < params.num_chunks; index += gridDim.x) {
    const FwdChunk chunk = find_chunk(params, index);
#pragma unroll 1
    for (int i = 0; i < chunk.num_tiles; ++i) {
      const FwdStreamTile tile = find_stream_tile(params, chunk, i);
      ptx::mbarrier_wait(shared.q_empty(slot), slot.phase ^ 1);
      ptx::mbarrier_arrive_expect(shared.q_full(arrival), C.q_bytes());
#pragma unroll
      for (int box = 0; box < FwdConfig::boxes(C.widths().head_dim); ++box) {
        ptx::tensor_load(shared.q(slot) + box * 64 * tile::kBoxRowBytes, &maps.whole.q,
                         shared.q_full(arrival), box * tile::kBoxColumns, tile.m_begin, tile.head,
                         chunk.batch);
      }
      slot.advance(1, params.layout.q_slots);
      arrival.advance(1, C.kNumArrivals);
    }
  }
}

// The value of lane 0, which ptxas then knows to be the same in all lanes: what follows from it
// goes to uniform registers.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) {
  return __shfl_sync(0xffffffffU, x, 0);
}

// The keys that a thread's rows see: for softmax_block().
struct FwdStreamRowKeys {
  std::int32_t row;
  std::int32_t lo, hi, num_keys;  // row i sees keys [i + lo, i + hi], and no others than exist

  __device__ __forceinline__ int2 operator[](int further) const {
    const int i = row + further;
    return make_int2(i + lo, min(i + hi + 1, num_keys));
  }
};

template <FwdStreamVariant kVariant, bool kScoreFunction, class T>
__device__ __forceinline__ void stream_consumer(const FwdStreamShared<kVariant>& shared,
                                                const FwdStreamMaps& maps,
                                                const FwdStreamParams& params,
                                                std::uint32_t consumer) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  using QTile = tile::SwizzledTile<64>;
  const FwdParams& p = params.base;
  const FwdStreamLayout& layout = params.layout;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const auto num_rows_all = static_cast<int>(params.band.seqlen_q);
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  const int num_whole = params.blocks.end - params.blocks.begin - (layout.last_pairs > 0 ? 1 : 0);
  FwdStreamRing whole;  // of the chunk
  FwdStreamRing last;   // likewise
  FwdStreamRing slot;   // of the consumer's next tile
  slot.advance(consumer, layout.q_slots);
  FwdStreamRing arrival;  // likewise
  arrival.advance(consumer, C.kNumArrivals);
  int i = static_cast<int>(consumer);  // the consumer's next tile, counted from the chunk's first
#pragma unroll 1
  for (std::uint32_t index = blockIdx.x; index < params.num_chunks; index += gridDim.x) {
    const FwdChunk chunk = find_chunk(params, index);
    if (i >= chunk.num_tiles) {
      // What is released must have come, or the next use would be counted as this one.
      const auto skip = [&](const FwdStreamPair& pair) {
        ptx::mbarrier_wait(pair.k_full(), pair.phase);
        ptx::mbarrier_wait(pair.v_full(), pair.phase);
        release(pair.empty());
      };
      if (layout.last_pairs > 0) {
        skip(shared.last_pair(last));
      }
      FwdStreamRing at = whole;
#pragma unroll 1
      for (int block = 0; block < num_whole; ++block) {
        skip(shared.pair(at));
        at.advance(1, layout.pairs);
      }
    }
#pragma unroll 1
    for (; i < chunk.num_tiles; i += 3) {
      const FwdStreamTile place = find_stream_tile(params, chunk, i);
      const bool is_last = i + 3 >= chunk.num_tiles;
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
          params.num_tables == 1 ? params.tables[0]
          : params.num_tables > 0
              ? params.tables[place.m_begin / 64]
              : key_blocks<C.block_n()>(params.band, place.m_begin, place.m_begin + 64);
      const FwdStreamRowKeys row_keys{place.m_begin + 16 * warp + lane / 4, params.lo, params.hi,
                                      params.num_keys};
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
      // Block n, of which kKeys keys are in shared memory; there are no others.
      const auto compute = [&]<int kKeys>(int n, const FwdStreamPair& pair) {
        using KvTile = tile::SwizzledTile<kKeys>;
        float s[kKeys / 2];
        std::uint32_t probabilities[kKeys / 4];
        ptx::mbarrier_wait(pair.k_full(), pair.phase);
        ptx::wgmma_fence();
        const std::uint64_t q_descriptor = QTile::k_major_descriptor(uniform(shared.q(slot)));
        const std::uint64_t k_descriptor = KvTile::k_major_descriptor(uniform(pair.k));
        ptx::wgmma_ss<kKeys, T, false, 0, 0>(s, q_descriptor, k_descriptor);  // (1)
#pragma unroll
        for (int k = 1; k < W.head_dim / 16; ++k) {
          ptx::wgmma_ss<kKeys, T, true, 0, 0>(s, q_descriptor + QTile::k_major_step(k),
                                              k_descriptor + KvTile::k_major_step(k));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        if (n == blocks.begin) {
          release(shared.q_empty(slot));
        }
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
        ptx::mbarrier_wait(pair.v_full(), pair.phase);
        ptx::wgmma_fence();
        const std::uint64_t v_descriptor = KvTile::mn_major_descriptor(uniform(pair.v));
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {  // (4)
          ptx::wgmma_rs<W.head_dim_v, T, true, 1>(o, probabilities + 4 * k,
                                                  v_descriptor + KvTile::mn_major_step(k));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(o);
      };
      const auto skip_or_release = [&](int n, const FwdStreamPair& pair) {
        if (is_last) {
          if (n < blocks.begin || n >= blocks.end) {
            ptx::mbarrier_wait(pair.k_full(), pair.phase);
            ptx::mbarrier_wait(pair.v_full(), pair.phase);
          }
          release(pair.empty());
        }
      };
      ptx::mbarrier_wait(shared.q_full(arrival), arrival.phase);
      int n = params.blocks.end;
      if (layout.last_pairs > 0) {
        --n;
        const FwdStreamPair pair = shared.last_pair(last);
        if (n < blocks.end) {
          if (layout.last_keys == C.fewest_keys) {
            compute.template operator()<C.fewest_keys>(n, pair);
          } else {
            compute.template operator()<C.few_keys>(n, pair);
          }
        }
        skip_or_release(n, pair);
      }
      FwdStreamRing at = whole;
#pragma unroll 1
      for (--n; n >= params.blocks.begin; --n) {
        const FwdStreamPair pair = shared.pair(at);
        if (n >= blocks.begin && n < blocks.end) {
          compute.template operator()<C.block_n()>(n, pair);
        }
        skip_or_release(n, pair);
        at.advance(1, layout.pairs);
      }
      tile.out_offset = p.out.offset(chunk.batch, place.m_begin, place.head);
      tile.lse_offset = p.lse.offset(chunk.batch, place.m_begin, place.head);
      if (blocks.begin >= blocks.end) {
        release(shared.q_empty(slot));
      }
      if (16 * warp < tile.num_rows) {
        finish_rows<W.head_dim_v, kScoreFunction, T>(p, tile, rows, o, warp, NoCopy{});  // (5)
      }
      slot.advance(3, layout.q_slots);
      arrival.advance(3, C.kNumArrivals);
    }
    i -= chunk.num_tiles;
    whole.advance(num_whole, layout.pairs);
    if (layout.last_pairs > 0) {
      last.advance(1, layout.last_pairs);
    }
  }
}

template <FwdStreamVariant kVariant, bool kScoreFunction, class T>
__global__ void __launch_bounds__(FwdStreamConfig::kThreads, 1)
    fwd_stream(const __grid_constant__ FwdStreamMaps maps,
               const __grid_constant__ FwdStreamParams params) {
  static constexpr FwdStreamConfig C = fwd_stream_config(kVariant);
  static constexpr FwdConfig W = C.widths();
  static_assert(C.valid());
  extern __shared__ __align__(tile::kTileAlignment) std::uint8_t memory[];
  const FwdStreamShared<kVariant> shared{ptx::shared_address(memory), params.layout};
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  const std::uint32_t warp = __shfl_sync(0xffffffffU, threadIdx.x / 32, 0);
  if (warp < 4) {
    ptx::registers_decrease<W.producer_registers()>();
    if (threadIdx.x == 0) {
      stream_key_producer<kVariant>(shared, maps, params);
    } else if (threadIdx.x == 32) {
      stream_query_producer<kVariant>(shared, maps, params);
    }
  } else {
    ptx::registers_increase<W.consumer_registers()>();
    stream_consumer<kVariant, kScoreFunction, T>(shared, maps, params, warp / 4 - 1);
  }
}

}  // namespace flashgrad::sm90
