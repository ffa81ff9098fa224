// SPDX-License-Identifier: Apache-2.0
// The forward's first warpgroup: a warp that takes tiles from the work list, a warp that loads.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/fwd_shared.cuh"
#include "cuda/sm90/load.cuh"

namespace flashgrad::sm90 {

// Describes tiles one ahead of the loads.
template <FwdVariant kVariant>
__device__ __forceinline__ void fwd_scheduler(const FwdShared<kVariant>& shared,
                                              const FwdParams& p) {
  static constexpr FwdConfig C = fwd_config(kVariant);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<C.tiles()> slot;
  RingPosition<1> wanted;
  std::uint32_t work = blockIdx.x;
  ptx::grid_dependency_wait();  // for prepare, if there is one; nobody else reads what it writes
  while (true) {
    ptx::mbarrier_wait(shared.tile_empty(slot.stage()), slot.phase() ^ 1);
    FwdTile* const tile = shared.tile(slot.stage());
    const bool more = make_tile<C.block_m(), C.block_n>(p, work, tile, lane);
    ptx::mbarrier_arrive(shared.tile_full(slot.stage()));
    if (!more) {
      return;
    }
    // The loads don't wait for this.
    __syncwarp();  // after what other lanes have written of the tile
    list_row_keys<C.block_m()>(*tile, 0, shared.row_keys(slot.stage()), lane);
    ptx::mbarrier_arrive(shared.keys_full(slot.stage()));
    slot.advance();
    ptx::mbarrier_wait(shared.tile_wanted(), wanted.phase());
    wanted.advance();
    if (lane == 0) {
      work = gridDim.x + atomicAdd(p.next_work, 1U);
    }
    work = __shfl_sync(0xffffffffU, work, 0);
  }
}

// Order of loads: K(last), then K(n), V(n + 1) for each n below, then V(first): the order in which
// they are consumed.
template <FwdVariant kVariant>
__device__ __forceinline__ void fwd_producer(const FwdShared<kVariant>& shared, const FwdMaps& maps,
                                             const FwdParams& p) {
  static constexpr FwdConfig C = fwd_config(kVariant);
  // So many loads before a tile's end, the next tile is taken. Earlier would tie a tile to a CTA
  // that is still busy.
  constexpr int kBlocksAhead = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<C.kStages> k_ring;
  RingPosition<C.kStages> v_ring;
  RingPosition<1> q_ring;
  RingPosition<C.tiles()> slot;
  while (true) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdTile& tile = *shared.tile(slot.stage());
    if (tile.num_rows < 0) {
      return;
    }
    const auto load = [&]<int kRows, int kColumns>(std::uint32_t destination, std::uint32_t barrier,
                                                   std::uint32_t map_bit, const CUtensorMap& map,
                                                   const Tensor& tensor, int columns, int row,
                                                   int head, int rows_that_exist) {
      if ((p.mapped & map_bit) != 0) {
        if (lane == 0) {
          ptx::mbarrier_arrive_expect(barrier, C.bytes(kRows, kColumns));
#pragma unroll 1
          for (int box = 0; box < C.boxes(kColumns); ++box) {
            ptx::tensor_load(destination + box * kRows * tile::kBoxRowBytes, &map, barrier,
                             box * tile::kBoxColumns, row, head, tile.batch);
          }
        }
      } else {
        load_tile<kRows, C.boxes(kColumns) * tile::kBoxColumns>(
            destination, tensor, tile.batch, row, head, 0, columns, lane,
            [&](int r) { return r < rows_that_exist; });
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(barrier);
        }
      }
    };
    const auto load_k = [&](int n) {
      ptx::mbarrier_wait(shared.k_empty(k_ring.stage()), k_ring.phase() ^ 1);
      load.template operator()<C.block_n, C.head_dim>(
          shared.k(k_ring.stage()), shared.k_full(k_ring.stage()), kFwdMapK, maps.k, p.k,
          p.head_dim, tile.kv_row + n * C.block_n, tile.head_kv,
          static_cast<int>(tile.band.seqlen_kv) - n * C.block_n);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      ptx::mbarrier_wait(shared.v_empty(v_ring.stage()), v_ring.phase() ^ 1);
      load.template operator()<C.block_n, C.head_dim_v>(
          shared.v(v_ring.stage()), shared.v_full(v_ring.stage()), kFwdMapV, maps.v, p.v,
          p.head_dim_v, tile.kv_row + n * C.block_n, tile.head_kv,
          static_cast<int>(tile.band.seqlen_kv) - n * C.block_n);
      v_ring.advance();
    };
    const auto want_next = [&] {
      if (lane == 0) {
        ptx::mbarrier_arrive(shared.tile_wanted());
      }
    };
    const FwdBlocks blocks = tile.blocks;
    if (blocks.end - blocks.begin <= kBlocksAhead) {
      want_next();
    }
    if (blocks.begin < blocks.end) {
      ptx::mbarrier_wait(shared.q_empty(), q_ring.phase() ^ 1);
      load.template operator()<C.block_m(), C.head_dim>(shared.q(), shared.q_full(), kFwdMapQ,
                                                        maps.q, p.q, p.head_dim, tile.q_row,
                                                        tile.head, tile.num_rows);
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
    ptx::mbarrier_arrive(shared.tile_empty(slot.stage()));
    slot.advance();
  }
}

}  // namespace flashgrad::sm90
