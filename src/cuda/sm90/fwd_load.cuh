// SPDX-License-Identifier: Apache-2.0
// The forward's first warpgroup: a warp that takes tiles from the work list, one that loads K and
// V, one that loads Q.
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
    list_row_keys<C.block_m()>(*tile, shared.row_keys(slot.stage()), lane);
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

// A tile of kRows rows from `row` of a head on, `rows_that_exist` of them; then one arrival on
// `barrier`. One warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void fwd_load(std::uint32_t destination, std::uint32_t barrier,
                                         bool mapped, const CUtensorMap& map, const Tensor& tensor,
                                         int columns, int batch, int row, int head,
                                         int rows_that_exist, int lane) {
  constexpr int kBoxes = FwdConfig::boxes(kColumns);
  if (mapped) {
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barrier, FwdConfig::bytes(kRows, kColumns));
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box) {
        ptx::tensor_load(destination + box * kRows * tile::kBoxRowBytes, &map, barrier,
                         box * tile::kBoxColumns, row, head, batch);
      }
    }
  } else {
    load_tile<kRows, kBoxes * tile::kBoxColumns>(destination, tensor, batch, row, head, 0, columns,
                                                 lane, [&](int r) { return r < rows_that_exist; });
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  }
}

// Q: each consumer's rows as soon as it has made the last scores of the tile before. By then they
// are in the L2, since a tile is known some blocks ahead.
template <FwdVariant kVariant>
__device__ __forceinline__ void fwd_q_loader(const FwdShared<kVariant>& shared, const FwdMaps& maps,
                                             const FwdParams& p) {
  static constexpr FwdConfig C = fwd_config(kVariant);
  constexpr int kBoxes = FwdConfig::boxes(C.head_dim);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool mapped = (p.mapped & kFwdMapQ) != 0;
  RingPosition<1> ring[C.num_consumers];
  RingPosition<C.tiles()> slot;
  while (true) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdTile& tile = *shared.tile(slot.stage());
    if (tile.num_rows < 0) {
      return;
    }
    const auto is_used = [&](int consumer) {
      return tile.part_blocks[consumer].begin < tile.part_blocks[consumer].end;
    };
    if (mapped && lane < C.num_consumers * kBoxes && is_used(lane / kBoxes)) {
      ptx::tensor_prefetch_l2(&maps.q, lane % kBoxes * tile::kBoxColumns,
                              tile.q_row + 64 * (lane / kBoxes), tile.head, tile.batch);
    }
    __syncwarp();
#pragma unroll
    for (int consumer = 0; consumer < C.num_consumers; ++consumer) {
      if (is_used(consumer)) {
        ptx::mbarrier_wait(shared.q_empty(consumer), ring[consumer].phase() ^ 1);
        fwd_load<64, C.head_dim>(shared.q(consumer), shared.q_full(consumer), mapped,
                                 maps.q, p.q, p.head_dim, tile.batch, tile.q_row + 64 * consumer,
                                 tile.head, tile.num_rows - 64 * consumer, lane);
        ring[consumer].advance();
      }
    }
    ptx::mbarrier_arrive(shared.tile_empty(slot.stage()));
    slot.advance();
  }
}

// K and V: K(last), then K(n), V(n + 1) for each n below, then V(first): the order in which they
// are consumed.
template <FwdVariant kVariant>
__device__ __forceinline__ void fwd_producer(const FwdShared<kVariant>& shared, const FwdMaps& maps,
                                             const FwdParams& p) {
  static constexpr FwdConfig C = fwd_config(kVariant);
  // So many loads before a tile's end, the next tile is taken. Earlier would tie a tile to a CTA
  // that is still busy.
  constexpr int kBlocksAhead = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<C.stages> k_ring;
  RingPosition<C.stages> v_ring;
  RingPosition<C.tiles()> slot;
  while (true) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.phase());
    const FwdTile& tile = *shared.tile(slot.stage());
    if (tile.num_rows < 0) {
      return;
    }
    const auto load_k = [&](int n) {
      ptx::mbarrier_wait(shared.k_empty(k_ring.stage()), k_ring.phase() ^ 1);
      fwd_load<C.block_n, C.head_dim>(shared.k(k_ring.stage()), shared.k_full(k_ring.stage()),
                                      (p.mapped & kFwdMapK) != 0, maps.k, p.k, p.head_dim,
                                      tile.batch, tile.kv_row + n * C.block_n, tile.head_kv,
                                      static_cast<int>(tile.band.seqlen_kv) - n * C.block_n, lane);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      ptx::mbarrier_wait(shared.v_empty(v_ring.stage()), v_ring.phase() ^ 1);
      fwd_load<C.block_n, C.head_dim_v>(
          shared.v(v_ring.stage()), shared.v_full(v_ring.stage()), (p.mapped & kFwdMapV) != 0,
          maps.v, p.v, p.head_dim_v, tile.batch, tile.kv_row + n * C.block_n, tile.head_kv,
          static_cast<int>(tile.band.seqlen_kv) - n * C.block_n, lane);
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
