// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper, bf16 and f16.
//
// A tile is 64 query rows per consumer warpgroup of one head; its key blocks stream past from the last to the first:
//
//   (1) S = Q K^T                                    wgmma, f32
//   (2) m' = max(m, rowmax S), P = exp2(c S - c m')  c = scale * log2(e); the mask only in blocks at the edge of the band
//   (3) O = exp2(c m - c m') O, l likewise           skipped while no row's maximum has grown by more than 2^8 in p
//   (4) O += P V, l += rowsum P                      P from registers, in the input dtype
//   (5) out = O / l, lse = ln(2) (c m + log2 l)
//
// Product (1) of a block is issued right before product (4) of the block ahead of it, so (2) runs under (4); and with ping-pong one
// consumer's (2) runs under the other's products.
//
// | warps                    | role                                                                    |
// | warp 0                   | producer: loads Q, K, V by TMA                                          |
// | warp 1                   | scheduler: takes tiles from the work list and describes them            |
// | warpgroups 1, 2 (, 3)    | consumers                                                               |
//
// | barrier         | arrives                                | waits     | count              |
// | tile_full[2]    | scheduler                              | all others| 1                  |
// | tile_empty[2]   | a lane of each of the others' warps    | scheduler | 4 * consumers + 1  |
// | tile_wanted     | producer, when few loads are left      | scheduler | 1                  |
// | q_full          | producer and TMA                       | consumers | 1                  |
// | q_empty         | a lane of each consumer warp           | producer  | 4 * num_consumers  |
// | k_full, v_full  | producer and TMA                       | consumers | 1                  |
// | k_empty, v_empty| a lane of each consumer warp           | producer  | 4 * num_consumers  |
// A full barrier's n-th use completes phase n; an empty one is waited for with the phase before, so the first wait passes at once.
// Named barriers 1 to num_consumers hold the ping-pong's token; as many behind them each join the warps of one consumer.
#pragma once

#include <math_constants.h>

#include "cuda/sm90/fwd_config.hpp"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_ptx.cuh"
#include "cuda/sm90/fwd_tile.cuh"
#include "cuda/sm90/fwd_wgmma.cuh"

namespace flashgrad::cuda {

// exp2 of at most this is the most by which P may exceed 1 before O is rescaled.
inline constexpr float kRescaleThreshold = 8.0F;

// The value of lane 0. Opaque to nvcc, which would drop the shuffle of a value that it knows to be uniform and then lose that fact.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// Where the n-th use of a ring of stages lies, and the parity of the phase that it completes.
template <int kStages>
struct RingPosition {
  static_assert((kStages & (kStages - 1)) == 0);
  std::uint32_t uses = 0;
  __device__ __forceinline__ int stage() const { return static_cast<int>(uses % kStages); }
  __device__ __forceinline__ std::uint32_t phase() const { return uses / kStages % 2; }
  __device__ __forceinline__ void advance() { ++uses; }
  __device__ __forceinline__ RingPosition previous() const { return {uses - 1}; }
};

template <FwdConfig C>
struct FwdShared {
  std::uint32_t base;  // a 1024-byte boundary
  __device__ std::uint32_t q(int stage) const { return base + C.q_offset() + stage * C.q_bytes(); }  // (block_m, head_dim), 128B swizzle, 64 columns a box
  __device__ std::uint32_t k(int stage) const { return base + C.k_offset() + stage * C.k_bytes(); }  // (block_n, head_dim), likewise
  __device__ std::uint32_t v(int stage) const { return base + C.v_offset() + stage * C.v_bytes(); }  // (block_n, head_dim_v), likewise
  __device__ std::uint32_t barrier(int i) const { return base + C.control_offset() + 8 * i; }
  __device__ std::uint32_t tile_full(int slot) const { return barrier(slot); }
  __device__ std::uint32_t tile_empty(int slot) const { return barrier(2 + slot); }
  __device__ std::uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ std::uint32_t q_empty(int stage) const { return barrier(6 + stage); }
  __device__ std::uint32_t k_full(int stage) const { return barrier(8 + stage); }
  __device__ std::uint32_t k_empty(int stage) const { return barrier(8 + C.stages + stage); }
  __device__ std::uint32_t v_full(int stage) const { return barrier(8 + 2 * C.stages + stage); }
  __device__ std::uint32_t v_empty(int stage) const { return barrier(8 + 3 * C.stages + stage); }
  __device__ std::uint32_t tile_wanted() const { return barrier(8 + 4 * C.stages); }
  static_assert(8 * (9 + 4 * C.stages) <= C.kBarrierBytes);
  static_assert(sizeof(FwdTile) <= C.kTileBytes);
};

// One warp: takes tiles from the work list and describes them, one ahead of the loads.
template <FwdConfig C>
__device__ __forceinline__ void fwd_scheduler(const FwdShared<C>& shared, FwdTile* tiles, int2* row_keys, const FwdParams& p) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  RingPosition<2> slot;
  RingPosition<1> wanted;
  std::uint32_t work = blockIdx.x;
  while (true) {
    mbarrier_wait(shared.tile_empty(slot.stage()), slot.phase() ^ 1);
    const bool more = make_tile<C.block_m(), C.block_n>(p, work, tiles + slot.stage(), row_keys + slot.stage() * C.block_m(), lane);
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(shared.tile_full(slot.stage()));
    }
    if (!more) {
      return;
    }
    slot.advance();
    mbarrier_wait(shared.tile_wanted(), wanted.phase());
    wanted.advance();
    work = 0xffffffffU;
    if (p.next_work != nullptr && lane == 0) {
      work = gridDim.x + atomicAdd(p.next_work, 1U);
    }
    work = __shfl_sync(0xffffffffU, work, 0);
  }
}

// One warp, of which one lane issues. Order of loads: K(last), then K(n), V(n + 1) for each n below, then V(first): the order in which they
// are consumed.
template <FwdConfig C>
__device__ __forceinline__ void fwd_producer(const FwdShared<C>& shared, const FwdTile* tiles, const CUtensorMap* map_q, const CUtensorMap* map_k, const CUtensorMap* map_v) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  RingPosition<C.stages> k_ring;
  RingPosition<C.stages> v_ring;
  RingPosition<C.q_stages> q_ring;
  RingPosition<2> slot;
  while (true) {
    mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdTile& at = tiles[slot.stage()];
    if (at.num_rows < 0) {
      return;
    }
    const auto load = [&](std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier, int boxes, int rows, int row, int head) {
      if (lane == 0) {
        mbarrier_expect(barrier, boxes * rows * 128);
        for (int box = 0; box < boxes; ++box) {
          tma_load(destination + box * rows * 128, map, barrier, 64 * box, row, head, at.batch);
        }
      }
    };
    const auto load_k = [&](int n) {
      mbarrier_wait(shared.k_empty(k_ring.stage()), k_ring.phase() ^ 1);
      load(shared.k(k_ring.stage()), map_k, shared.k_full(k_ring.stage()), C.boxes(), C.block_n, at.kv_row + n * C.block_n, at.head_kv);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      mbarrier_wait(shared.v_empty(v_ring.stage()), v_ring.phase() ^ 1);
      load(shared.v(v_ring.stage()), map_v, shared.v_full(v_ring.stage()), C.boxes_v(), C.block_n, at.kv_row + n * C.block_n, at.head_kv);
      v_ring.advance();
    };
    // The next tile is taken while this one's last loads are under way: earlier would tie a short tile to a CTA that is still busy.
    const auto want_next = [&] {
      if (lane == 0) {
        mbarrier_arrive(shared.tile_wanted());
      }
    };
    const FwdBlocks blocks = at.blocks;
    constexpr int kBlocksAhead = 4;
    if (blocks.end - blocks.begin <= kBlocksAhead) {
      want_next();
    }
    if (blocks.begin < blocks.end) {
      mbarrier_wait(shared.q_empty(q_ring.stage()), q_ring.phase() ^ 1);
      load(shared.q(q_ring.stage()), map_q, shared.q_full(q_ring.stage()), C.boxes(), C.block_m(), at.q_row, at.head);
      q_ring.advance();
      load_k(blocks.end - 1);
#pragma unroll 1
      for (int n = blocks.end - 2; n >= blocks.begin; --n) {
        if (n + 1 == blocks.begin + kBlocksAhead) {
          want_next();
        }
        load_k(n);
        load_v(n + 1);
      }
      load_v(blocks.begin);
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(shared.tile_empty(slot.stage()));
    }
    slot.advance();
  }
}

// The running maximum (of raw scores) and sum of a thread's two rows, g and g + 8 of its warp's 16.
struct RowStatistics {
  float maximum[2];
  float sum[2];
};

// A raw score as an exponent of 2, softcap included.
__device__ __forceinline__ float transform_score(float x, const FwdParams& p) {
  const bool softcap = p.cap_log2 != 0.0F;
  x *= softcap ? p.tanh_scale : p.scale_log2;
  // tanh x = 1 - 2 / (1 + e^2x): within 2e-7, where tanh.approx is within 5e-4, too much for lse.
  const float tanh_x = 1.0F - __fdividef(2.0F, 1.0F + exp2_approx(x * 2.885390081777927F));
  return softcap ? tanh_x * p.cap_log2 : x;
}

// A thread holds columns 0, 1, 8, 9, 16, 17, ... of a block, counted from its own first one. Returns a bit for each of the num_columns / 4
// of them, set if the column is under `end`.
template <int kNumColumns>
__device__ __forceinline__ std::uint32_t columns_below(int end) {
  const int count = min(max(2 * (end >> 3) + min(end & 7, 2), 0), kNumColumns / 4);
  return ~__funnelshift_lc(0U, 0xffffffffU, static_cast<unsigned>(count));
}

// S (64 x block_n) of a block becomes P, unnormalised, in place. `row_keys` says which keys the thread's two rows see, begin and end each;
// `first_key` is the key of its first column. Returns whether O of this warp must be multiplied by `rescale` (3).
template <FwdConfig C, bool kMasked>
__device__ __forceinline__ bool softmax_block(float (&s)[C.block_n / 2], RowStatistics* rows, float (&rescale)[2], const int2* row_keys, int first_key,
                                              const FwdParams& p) {
  const float scale = C.score_function ? 1.0F : p.scale_log2;
  if constexpr (C.score_function) {
#pragma unroll
    for (float& x : s) {
      x = transform_score(x, p);
    }
  }
  if constexpr (kMasked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 keys = row_keys[8 * r];
      const std::uint32_t visible = columns_below<C.block_n>(keys.y - first_key) & ~columns_below<C.block_n>(keys.x - first_key);
#pragma unroll
      for (int j = 0; j < C.block_n / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = (visible & (1U << (2 * j + e))) != 0 ? x : -CUDART_INF_F;
        }
      }
    }
  }
  float maximum[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = rows->maximum[r];
#pragma unroll
    for (int j = 0; j < C.block_n / 8; ++j) {
      x = fmaxf(x, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    }
    x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
    maximum[r] = x;
    grown |= (x - rows->maximum[r]) * scale > kRescaleThreshold;
  }
  grown = __any_sync(0xffffffffU, grown);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = rows->maximum[r];
    const float now = grown ? maximum[r] : before;
    // Where nothing was visible yet both may be -inf; rows that do not exist hold +inf throughout.
    rescale[r] = now == before ? 1.0F : exp2_approx((before - now) * scale);
    rows->maximum[r] = now;
    const float shift = now == -CUDART_INF_F ? 0.0F : now * scale;
    float sum = rows->sum[r] * rescale[r];
#pragma unroll
    for (int j = 0; j < C.block_n / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = exp2_approx(fmaf(x, scale, -shift));
        sum += x;
      }
    }
    rows->sum[r] = sum;
  }
  return grown;
}

// Writes 64 rows of O, in the input dtype. Each quad first exchanges its columns, so that a thread holds 8 neighbours.
template <FwdConfig C, class T>
__device__ __forceinline__ void store_out(const float (&o)[C.head_dim_v / 2], const float (&factor)[2], const FwdParams& p, T* out, int row, int num_rows) {
  const int lane_of_quad = static_cast<int>(threadIdx.x) & 3;
  const auto pick = [](const std::uint32_t(&x)[4], int i) {
    const std::uint32_t low = (i & 1) != 0 ? x[1] : x[0];
    const std::uint32_t high = (i & 1) != 0 ? x[3] : x[2];
    return (i & 2) != 0 ? high : low;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    T* const row_out = out + (row + 8 * r) * p.out_row_stride;
#pragma unroll
    for (int c = 0; c < C.head_dim_v / 32; ++c) {
      std::uint32_t mine[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * c + j) + 2 * r;
        // A row that sees nothing is 0, whatever a masked V holds.
        mine[j] = factor[r] == 0.0F ? 0U : pack_pair<T>(o[i] * factor[r], o[i + 1] * factor[r]);
      }
      std::uint32_t received[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        received[j] = __shfl_xor_sync(0xffffffffU, pick(mine, lane_of_quad ^ j), j);
      }
      union {
        uint4 vector;
        std::uint32_t pair[4];
        T element[8];
      } columns;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        columns.pair[j] = pick(received, lane_of_quad ^ j);
      }
      const int first = 32 * c + 8 * lane_of_quad;
      if (row + 8 * r < num_rows) {
        if (p.out_vectors) {
          if (first < p.head_dim_v) {
            *reinterpret_cast<uint4*>(row_out + first) = columns.vector;
          }
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (first + e < p.head_dim_v) {
              row_out[first + e] = columns.element[e];
            }
          }
        }
      }
    }
  }
}

// Rows [begin, end) of a V tile become 0. By all threads of a warpgroup, for that warpgroup's products.
template <FwdConfig C>
__device__ __forceinline__ void clear_value_rows(std::uint32_t tile, int begin, int end, int consumer) {
  for (int i = static_cast<int>(threadIdx.x) % 128; i < (end - begin) * 8; i += 128) {
#pragma unroll
    for (int box = 0; box < C.boxes_v(); ++box) {
      store_shared_zeros(tile + box * C.block_n * 128 + begin * 128 + i * 16);
    }
  }
  fence_proxy_async();
  named_barrier_sync<128>(1 + C.num_consumers + consumer);
}

// One warp computes one row of out anew, key by key, of nothing but the keys that the row sees. The products of whole tiles multiply V
// of the other keys by 0, and 0 * NaN is NaN; so this runs where out is NaN though the row's sum is not.
template <FwdConfig C, class T>
__device__ __forceinline__ void recompute_row(const FwdParams& p, const FwdTile& tile, int row_in_tile, float lse_log2) {
  constexpr int kColumns = (C.head_dim_v + 31) / 32;  // of a lane
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const Range keys = tile.band.kv_range(tile.m_begin + row_in_tile, tile.m_begin + row_in_tile + 1);
  const T* const q = static_cast<const T*>(p.q) + tile.q_offset + row_in_tile * p.q_row_stride;
  float o[kColumns] = {};
#pragma unroll 1
  for (std::int64_t first = keys.begin; first < keys.end; first += 32) {
    float probability = 0.0F;
    if (first + lane < keys.end) {
      const T* const k = static_cast<const T*>(p.k) + tile.k_offset + (first + lane) * p.k_row_stride;
      float score = 0.0F;
#pragma unroll 1
      for (int c = 0; c < p.head_dim; ++c) {
        score = fmaf(static_cast<float>(q[c]), static_cast<float>(k[c]), score);
      }
      probability = exp2_approx((C.score_function ? transform_score(score, p) : score * p.scale_log2) - lse_log2);
    }
    const int count = static_cast<int>(min(keys.end - first, std::int64_t{32}));
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const T* const v = static_cast<const T*>(p.v) + tile.v_offset + (first + j) * p.v_row_stride;
      const float weight = __shfl_sync(0xffffffffU, probability, j);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        o[c] = lane + 32 * c < p.head_dim_v ? fmaf(weight, static_cast<float>(v[lane + 32 * c]), o[c]) : 0.0F;
      }
    }
  }
  T* const out = static_cast<T*>(p.out) + tile.out_offset + row_in_tile * p.out_row_stride;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (lane + 32 * c < p.head_dim_v) {
      out[lane + 32 * c] = static_cast<T>(o[c]);
    }
  }
}

__device__ __forceinline__ FwdBlocks uniform(const FwdBlocks& x) {
  constexpr unsigned kAll = 0xffffffffU;
  return {__shfl_sync(kAll, x.begin, 0), __shfl_sync(kAll, x.full_begin, 0), __shfl_sync(kAll, x.full_end, 0), __shfl_sync(kAll, x.end, 0)};
}

template <FwdConfig C, class T>
__device__ __forceinline__ void fwd_consumer(const FwdShared<C>& shared, const FwdTile* tiles, int2* row_keys, const FwdParams& p, int consumer) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp_row = 64 * consumer + 16 * ((static_cast<int>(threadIdx.x) >> 5) & 3);
  RingPosition<C.stages> ring;  // of K; the block's V has the same position in its own ring
  RingPosition<C.q_stages> q_ring;
  RingPosition<2> slot;
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(barrier);
    }
  };
  const auto take_token = [&] {
    if constexpr (C.ping_pong) {
      named_barrier_sync<256>(1 + consumer);
    }
  };
  const auto pass_token = [&] {
    if constexpr (C.ping_pong) {
      named_barrier_arrive<256>(consumer == C.num_consumers - 1 ? 1 : 2 + consumer);
    }
  };
  if (consumer == C.num_consumers - 1) {
    pass_token();
  }

  while (true) {
    mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdTile& tile = tiles[slot.stage()];
    if (static_cast<int>(uniform(static_cast<std::uint32_t>(tile.num_rows))) < 0) {
      return;
    }
    const int row_in_tile = warp_row + lane / 4;
    float o[C.head_dim_v / 2];
#pragma unroll
    for (float& x : o) {
      x = 0.0F;
    }
    RowStatistics rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows that do not exist must not decide when the warp rescales: their +inf never grows.
      rows.maximum[r] = row_in_tile + 8 * r < tile.num_rows ? -CUDART_INF_F : CUDART_INF_F;
      rows.sum[r] = 0.0F;
    }
    const FwdBlocks loaded = uniform(tile.blocks);
    if (loaded.begin < loaded.end) {
      // The 64 rows of this warpgroup see fewer blocks than the tile, and need the mask in fewer of them.
      const FwdBlocks blocks = uniform(tile.part_blocks[consumer]);
      const int2* const thread_keys = row_keys + slot.stage() * C.block_m() + row_in_tile;
      // Blocks that only other warpgroups use.
      const auto skip_k = [&](RingPosition<C.stages> at) {
        mbarrier_wait(shared.k_full(at.stage()), at.phase());
        release(shared.k_empty(at.stage()));
        take_token();
        pass_token();
      };
      const auto skip_v = [&](RingPosition<C.stages> at) {
        mbarrier_wait(shared.v_full(at.stage()), at.phase());
        release(shared.v_empty(at.stage()));
      };
      const auto skip_both = [&](int count) {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          skip_k(ring);
          skip_v(ring);
          ring.advance();
        }
      };
      mbarrier_wait(shared.q_full(q_ring.stage()), q_ring.phase());
      if (blocks.begin >= blocks.end) {
        take_token();
        pass_token();
        skip_both(loaded.end - loaded.begin);
        release(shared.q_empty(q_ring.stage()));
      } else {
      const RingPosition<C.stages> first = ring;
#pragma unroll 1
      for (int i = 0; i < loaded.end - blocks.end; ++i) {
        skip_k(ring);
        ring.advance();
      }
      float s[C.block_n / 2];
      std::uint32_t p_pairs[C.block_n / 4];
      std::uint32_t q_fragments[C.q_in_registers ? C.head_dim / 4 : 1];
      const int key_in_block = 2 * (lane & 3);
      if constexpr (C.q_in_registers) {
#pragma unroll
        for (int k = 0; k < C.head_dim / 16; ++k) {
          const int r = warp_row + (lane & 15);
          const int chunk = (2 * k + lane / 16) & 7;
          ldmatrix_x4(shared.q(q_ring.stage()) + (k / 4) * C.block_m() * 128 + r * 128 + ((chunk ^ (r & 7)) * 16), q_fragments + 4 * k);
        }
        release(shared.q_empty(q_ring.stage()));
      }
      const std::uint32_t q_address = uniform(shared.q(q_ring.stage()) + 64 * 128 * consumer);

      const auto issue_scores = [&](std::uint64_t k_descriptor) {  // (1)
        const std::uint64_t q_descriptor = k_major_descriptor(q_address);
#pragma unroll
        for (int k = 0; k < C.head_dim / 16; ++k) {
          const std::uint64_t b = k_descriptor + (k / 4) * (C.block_n * 8) + (k % 4) * 2;
          if constexpr (C.q_in_registers) {
            wgmma_rs<T, 0>(s, q_fragments + 4 * k, b, k > 0);
          } else {
            wgmma_ss<T, 0>(s, q_descriptor + (k / 4) * (C.block_m() * 8) + (k % 4) * 2, b, k > 0);
          }
        }
        wgmma_commit();
      };
      const auto issue_out = [&](std::uint64_t v_descriptor) {  // (4)
#pragma unroll
        for (int k = 0; k < C.block_n / 16; ++k) {
          wgmma_rs<T, 1>(o, p_pairs + 4 * k, v_descriptor + k * 128, 1);
        }
        wgmma_commit();
      };
      const auto pack_probabilities = [&] {
#pragma unroll
        for (int i = 0; i < C.block_n / 4; ++i) {
          p_pairs[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        }
      };
      const auto describe_k = [&] { return k_major_descriptor(C.uniform_desc ? uniform(shared.k(ring.stage())) : shared.k(ring.stage())); };
      const auto describe_v = [&] { return mn_major_descriptor(C.uniform_desc ? uniform(shared.v(ring.previous().stage())) : shared.v(ring.previous().stage()), C.block_n * 128); };
      float rescale[2];
      const auto step = [&]<bool kMasked>(int n) {
        const RingPosition<C.stages> before = ring.previous();
        const std::uint64_t k_descriptor = describe_k();
        const std::uint64_t v_descriptor = describe_v();
        mbarrier_wait(shared.k_full(ring.stage()), ring.phase());
        mbarrier_wait(shared.v_full(before.stage()), before.phase());
        take_token();
        wgmma_fence();
        issue_scores(k_descriptor);
        issue_out(v_descriptor);
        pass_token();
        wgmma_wait<1>();
        pin_registers(s);
        release(shared.k_empty(ring.stage()));
        const bool grown = softmax_block<C, kMasked>(s, &rows, rescale, thread_keys, n * C.block_n + key_in_block, p);
        pin_registers(s);
        const auto rescale_out = [&] {
#pragma unroll
          for (int i = 0; i < C.head_dim_v / 2; ++i) {
            o[i] *= rescale[(i / 2) % 2];
          }
        };
        if constexpr (C.late_wait) {
          // The branch around the waits keeps ptxas from moving them ahead of the exponentials.
          if (grown) {  // (3)
            wgmma_wait<0>();
            pin_registers(o);
            rescale_out();
          } else {
            wgmma_wait<0>();
            pin_registers(o);
          }
          release(shared.v_empty(before.stage()));
        } else {
          // ptxas moves this wait and the release up to the maxima. V is then free early, and the other consumers' products cover the rest.
          wgmma_wait<0>();
          pin_registers(o);
          release(shared.v_empty(before.stage()));
          if (grown) {  // (3)
            rescale_out();
          }
        }
        pin_registers(s);
        ring.advance();
        pack_probabilities();
      };

      int n = blocks.end - 1;
      mbarrier_wait(shared.k_full(ring.stage()), ring.phase());
      take_token();
      wgmma_fence();
      issue_scores(describe_k());
      pass_token();
      wgmma_wait<0>();
      pin_registers(s);
      release(shared.k_empty(ring.stage()));
      ring.advance();
      softmax_block<C, true>(s, &rows, rescale, thread_keys, n * C.block_n + key_in_block, p);
      pack_probabilities();
#pragma unroll 1
      for (int i = 0; i < loaded.end - blocks.end; ++i) {
        skip_v({first.uses + static_cast<std::uint32_t>(i)});
      }
      // Behind a sequence's last key lies what TMA filled with 0, or, packed or with seqused, anything.
      if (const int keys = static_cast<int>(tile.band.seqlen_kv) - n * C.block_n; keys < C.block_n && (p.cu_seqlens_kv != nullptr || p.seqused_kv != nullptr)) {
        mbarrier_wait(shared.v_full(ring.previous().stage()), ring.previous().phase());
        clear_value_rows<C>(shared.v(ring.previous().stage()), keys, C.block_n, consumer);
      }
      --n;
#pragma unroll 1
      for (; n >= blocks.full_end; --n) {
        step.template operator()<true>(n);
      }
#pragma unroll 1
      for (; n >= blocks.full_begin; --n) {
        step.template operator()<false>(n);
      }
#pragma unroll 1
      for (; n >= blocks.begin; --n) {
        step.template operator()<true>(n);
      }
      if constexpr (!C.q_in_registers) {
        release(shared.q_empty(q_ring.stage()));
      }
      mbarrier_wait(shared.v_full(ring.previous().stage()), ring.previous().phase());
      take_token();
      wgmma_fence();
      issue_out(describe_v());
      pass_token();
      wgmma_wait<0>();
      pin_registers(o);
      release(shared.v_empty(ring.previous().stage()));
      skip_both(blocks.begin - loaded.begin);
      }
      q_ring.advance();
    }

    // (5)
    float factor[2];
    float lse_log2[2];
    bool suspicious[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = rows.sum[r];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      float exponent = rows.maximum[r] == -CUDART_INF_F ? -CUDART_INF_F : rows.maximum[r] * (C.score_function ? 1.0F : p.scale_log2);
      factor[r] = sum == 0.0F ? 0.0F : 1.0F / sum;
      if (p.sinks != nullptr) {
        const float sink = p.sinks[tile.head] * 1.4426950408889634F;
        const float top = fmaxf(exponent, sink);
        if (top != -CUDART_INF_F) {
          const float weight = exp2_approx(exponent - top);
          sum = sum * weight + exp2_approx(sink - top);
          factor[r] = factor[r] == 0.0F ? 0.0F : weight / sum;
          exponent = top;
        }
      }
      lse_log2[r] = sum == 0.0F ? -CUDART_INF_F : exponent + log2_approx(sum);
      const bool exists = row_in_tile + 8 * r < tile.num_rows;
      if (p.lse != nullptr && lane % 4 == 0 && exists) {
        p.lse[tile.lse_offset + (row_in_tile + 8 * r) * p.lse_row_stride] = lse_log2[r] * 0.6931471805599453F;
      }
      float zero = 0.0F;
#pragma unroll
      for (int i = 2 * r; i < C.head_dim_v / 2; i += 4) {
        zero = fmaf(o[i], 0.0F, fmaf(o[i + 1], 0.0F, zero));
      }
      suspicious[r] = exists && factor[r] != 0.0F && sum == sum && zero != 0.0F;
    }
    store_out<C, T>(o, factor, p, static_cast<T*>(p.out) + tile.out_offset, row_in_tile, tile.num_rows);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t lanes = __ballot_sync(0xffffffffU, suspicious[r]);
      while (lanes != 0) {
        const int quad = (__ffs(static_cast<int>(lanes)) - 1) / 4;
        lanes &= ~(0xfU << (4 * quad));
        recompute_row<C, T>(p, tile, warp_row + 8 * r + quad, __shfl_sync(0xffffffffU, lse_log2[r], 4 * quad));
      }
    }
    release(shared.tile_empty(slot.stage()));
    slot.advance();
  }
}

// A variant has a kConfig and an Element. (nvcc 13.0 cannot name a kernel whose own template argument is a FwdConfig.)
template <class Variant>
__global__ void __launch_bounds__(Variant::kConfig.threads(), 1)
    fwd_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
               const __grid_constant__ FwdParams p) {
  constexpr FwdConfig C = Variant::kConfig;
  static_assert(C.fits(), "shared memory, registers or a tile's multiples");
  extern __shared__ __align__(1024) std::uint8_t base[];
  const FwdShared<C> shared{shared_address(base)};
  auto* const tiles = reinterpret_cast<FwdTile*>(base + C.tiles_offset());
  auto* const row_keys = reinterpret_cast<int2*>(base + C.row_keys_offset());
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * C.num_consumers;
    for (int i = 0; i < C.q_stages; ++i) {
      mbarrier_init(shared.q_full(i), 1);
      mbarrier_init(shared.q_empty(i), kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(shared.tile_full(i), 1);
      mbarrier_init(shared.tile_empty(i), kConsumerWarps + 1);
    }
    mbarrier_init(shared.tile_wanted(), 1);
    for (int i = 0; i < C.stages; ++i) {
      mbarrier_init(shared.k_full(i), 1);
      mbarrier_init(shared.k_empty(i), kConsumerWarps);
      mbarrier_init(shared.v_full(i), 1);
      mbarrier_init(shared.v_empty(i), kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  // The same for all lanes of a warp, and the compiler knows it.
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    registers_decrease<C.producer_registers()>();
    if (threadIdx.x < 32) {
      fwd_producer<C>(shared, tiles, &map_q, &map_k, &map_v);
    } else if (threadIdx.x < 64) {
      fwd_scheduler<C>(shared, tiles, row_keys, p);
    }
  } else {
    registers_increase<C.consumer_registers()>();
    fwd_consumer<C, typename Variant::Element>(shared, tiles, row_keys, p, warpgroup - 1);
  }
}

}  // namespace flashgrad::cuda
