// SPDX-License-Identifier: Apache-2.0
// The tiles of the forward of a few rows that see many keys (fwd_split.cuh), its shared memory, and
// the warp that describes the tiles and loads for them.
//
// | barrier          | arrives                       | waits    | count |
// | tile_full[2]     | producer, all lanes           | consumer | 32    |
// | tile_empty[2]    | all lanes of the consumer     | producer | 128   |
// | q_full           | producer and the copy engine  | consumer | 1     |
// | q_empty          | a lane of each consumer warp  | producer | 4     |
// | k_full, v_full   | producer and the copy engine  | consumer | 1     |
// | k_empty, v_empty | a lane of each consumer warp  | producer | 4     |
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/fwd_params.hpp"
#include "cuda/sm90/fwd_shared.cuh"
#include "cuda/sm90/fwd_split.hpp"
#include "cuda/sm90/fwd_tile.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// The parts of rows in the workspace.
struct FwdParts {
  SplitSlots slots;
  std::int32_t columns;  // head_dim_v, rounded up to a multiple of 8
  float* o;              // (slots, heads_q, slots.rows, columns)
  float2* statistics;    // (slots, heads_q, slots.rows): m, not times c, and l

  // The number of a row's part of a chunk; that of the next chunk is heads_q * slots.rows further.
  __device__ __forceinline__ std::int64_t at(const Sequences& s, std::int64_t span,
                                             const SequenceSpan& sequence, std::int64_t heads_q,
                                             int head, int row, int chunk) const {
    const std::int64_t slot = slots.first(s.packed(), span, sequence.kv.begin) + chunk;
    return (slot * heads_q + head) * slots.rows + row;
  }
};

struct FwdSplitParams {
  FwdParams base;
  FwdParts parts;
  // Chunks are numbered: in a batch entry, or packed, as blocks of slots.keys keys in
  // sequences.cuh.
  std::uint32_t chunks_of_entry;
  std::uint32_t tiles_of_chunk;
  std::uint32_t tiles_of_group;  // of the query heads of a key head
  std::uint32_t num_tiles;       // those of chunks that do not exist included
  const std::uint32_t* any_cut;  // 0: no sequence is cut, and fwd.cuh computes all; or null
};

// What the producer tells the consumer through shared memory.
struct FwdSplitTile {
  FwdTile of_head;    // the first one
  std::int64_t part;  // number of that head's first row; -1: the sequence is not cut
  std::int32_t num_heads;
  int2 row_keys[kSplitRows];  // as of list_row_keys()
};

// By a warp: describes tile `index`. Returns false if there is none, or if it is another kernel's.
template <int kBlockN>
__device__ __forceinline__ bool make_split_tile(const FwdSplitParams& params, std::uint32_t index,
                                                FwdSplitTile* tile) {
  constexpr int kHeads = FwdSplitConfig::kBlockM / kSplitRows;
  const FwdParams& p = params.base;
  const Sequences& s = p.sequences;
  const std::int64_t keys = params.parts.slots.keys;
  const std::uint32_t in_order = index / params.tiles_of_chunk;
  const std::uint32_t in_chunk = index % params.tiles_of_chunk;
  std::int64_t span = 0;
  std::int32_t chunk = 0;
  if (s.packed()) {
    span = span_of_block(s.cu_seqlens_kv, s.batch, s.rows_kv, in_order, keys);
    chunk = static_cast<std::int32_t>(in_order -
                                      first_block(s.cu_seqlens_kv, s.batch, s.rows_kv, span, keys));
  } else {
    span = in_order / params.chunks_of_entry;
    chunk = static_cast<std::int32_t>(in_order % params.chunks_of_entry);
  }
  const SequenceSpan sequence = sequence_span(s, span);
  const auto rows = static_cast<std::int32_t>(sequence.band.seqlen_q);
  const KeyChunks chunks = key_chunks(sequence.band, kBlockN);
  if (rows == 0 || rows > params.parts.slots.rows || chunk >= chunks.count ||
      (params.any_cut != nullptr && chunks.count == 1)) {
    return false;
  }
  const auto group = static_cast<std::int32_t>(p.group);
  const std::int32_t in_group =
      static_cast<std::int32_t>(in_chunk % params.tiles_of_group) * kHeads;
  const std::int32_t head =
      static_cast<std::int32_t>(in_chunk / params.tiles_of_group) * group + in_group;
  place_tile(p, sequence, {0, rows}, head, &tile->of_head);
  const FwdBlocks all = key_blocks<kBlockN>(sequence.band, 0, rows);
  const std::int32_t begin = chunks.first(chunk);
  const std::int32_t end = chunks.first(chunk + 1);
  tile->of_head.blocks = {begin, min(max(all.full_begin, begin), end),
                          min(max(all.full_end, begin), end), end};
  tile->part =
      chunks.count == 1 ? -1 : params.parts.at(s, span, sequence, p.heads_q, head, 0, chunk);
  tile->num_heads = min(kHeads, group - in_group);
  return true;
}

template <FwdVariant kVariant>
struct FwdSplitShared {
  static constexpr FwdConfig W = fwd_config(kVariant);
  static constexpr FwdSplitConfig C{W};
  static constexpr int kStages = FwdSplitConfig::kStages;
  static constexpr int kTiles = FwdSplitConfig::kTiles;
  static_assert(C.valid(), "shared memory");
  static_assert(sizeof(FwdSplitTile) <= FwdSplitConfig::kTileBytes);
  std::uint8_t* base;
  std::uint32_t address;

  __device__ explicit FwdSplitShared(std::uint8_t* memory)
      : base(memory), address(ptx::shared_address(memory)) {}

  // Swizzled tiles: (64, head_dim), (block_n, head_dim), (block_n, head_dim_v).
  __device__ std::uint32_t q() const { return address; }
  __device__ std::uint32_t k(int stage) const {
    return address + C.k_offset() + stage * W.k_bytes();
  }
  __device__ std::uint32_t v(int stage) const {
    return address + C.v_offset() + stage * W.v_bytes();
  }
  __device__ FwdSplitTile* tile(int slot) const {
    return reinterpret_cast<FwdSplitTile*>(base + C.tiles_offset() + slot * C.kTileBytes);
  }
  __device__ std::uint32_t barrier(int i) const { return address + C.barrier_offset() + 8 * i; }
  __device__ std::uint32_t tile_full(int slot) const { return barrier(slot); }
  __device__ std::uint32_t tile_empty(int slot) const { return barrier(kTiles + slot); }
  __device__ std::uint32_t q_full() const { return barrier(2 * kTiles); }
  __device__ std::uint32_t q_empty() const { return barrier(2 * kTiles + 1); }
  __device__ std::uint32_t k_full(int stage) const { return barrier(2 * kTiles + 2 + stage); }
  __device__ std::uint32_t k_empty(int stage) const { return k_full(kStages + stage); }
  __device__ std::uint32_t v_full(int stage) const { return k_full(2 * kStages + stage); }
  __device__ std::uint32_t v_empty(int stage) const { return k_full(3 * kStages + stage); }

  // One thread.
  __device__ void init_barriers() const {
    for (int i = 0; i < kTiles; ++i) {
      ptx::mbarrier_init(tile_full(i), 32);
      ptx::mbarrier_init(tile_empty(i), 128);
    }
    ptx::mbarrier_init(q_full(), 1);
    ptx::mbarrier_init(q_empty(), 4);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), 4);
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), 4);
    }
    ptx::fence_mbarrier_init();
  }
};

// By a warp: the rows of a tile's heads, each from a multiple of 16 on, and zeros behind them; any
// strides.
template <int kColumns>
__device__ __forceinline__ void read_rows_of_heads(std::uint32_t destination, const Tensor& tensor,
                                                   const FwdSplitTile& tile, int columns,
                                                   int lane) {
  using Tile = tile::SwizzledTile<FwdSplitConfig::kBlockM>;
  constexpr int kVectors = FwdConfig::boxes(kColumns) * tile::kBoxColumns / 8;
#pragma unroll 1
  for (int i = lane; i < FwdSplitConfig::kBlockM * kVectors; i += 32) {
    const int r = i / kVectors;
    const int column = i % kVectors * 8;
    const int head = r / kSplitRows;
    const int row = r % kSplitRows;
    std::uint32_t values[4] = {0, 0, 0, 0};
    if (head < tile.num_heads && row < tile.of_head.num_rows) {
      const auto* const source =
          static_cast<const std::uint16_t*>(tensor.data) +
          tensor.offset(tile.of_head.batch, tile.of_head.q_row + row, tile.of_head.head + head);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (column + c < columns) {
          values[c / 2] |= static_cast<std::uint32_t>(source[(column + c) * tensor.dim_stride])
                           << (c % 2 * 16);
        }
      }
    }
    ptx::store_shared(destination + static_cast<std::uint32_t>(Tile::offset(r, column)), values[0],
                      values[1], values[2], values[3]);
  }
}

template <FwdVariant kVariant>
__device__ __forceinline__ void split_producer(const FwdSplitShared<kVariant>& shared,
                                               const FwdMaps& maps, const FwdSplitParams& params) {
  static constexpr FwdConfig W = fwd_config(kVariant);
  const FwdParams& p = params.base;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<FwdSplitConfig::kStages> k_ring;
  RingPosition<FwdSplitConfig::kStages> v_ring;
  RingPosition<1> q_ring;
  RingPosition<FwdSplitConfig::kTiles> slot;
  // What the lanes have written is there for the consumer, and counts as the barrier's use.
  const auto written = [&](std::uint32_t barrier) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  };
  const auto load = [&]<int kColumns>(std::uint32_t destination, std::uint32_t full,
                                      std::uint32_t map_bit, const CUtensorMap& map,
                                      const Tensor& tensor, int columns, const FwdTile& tile,
                                      int n) {
    const int row = tile.kv_row + n * W.block_n;
    if ((p.mapped & map_bit) != 0) {
      if (lane == 0) {
        ptx::mbarrier_arrive_expect(full, FwdConfig::bytes(W.block_n, kColumns));
#pragma unroll 1
        for (int box = 0; box < FwdConfig::boxes(kColumns); ++box) {
          ptx::tensor_load(destination + box * W.block_n * tile::kBoxRowBytes, &map, full,
                           box * tile::kBoxColumns, row, tile.head_kv, tile.batch);
        }
      }
    } else {
      const int rows_that_exist = static_cast<int>(tile.band.seqlen_kv) - n * W.block_n;
      load_tile<W.block_n, FwdConfig::boxes(kColumns) * tile::kBoxColumns>(
          destination, tensor, tile.batch, row, tile.head_kv, 0, columns, lane,
          [&](int r) { return r < rows_that_exist; });
      written(full);
    }
  };
  const auto load_q = [&](const FwdSplitTile& tile) {
    ptx::mbarrier_wait(shared.q_empty(), q_ring.phase() ^ 1);
    q_ring.advance();
    if ((p.mapped & kFwdMapQ) == 0) {
      read_rows_of_heads<W.head_dim>(shared.q(), p.q, tile, p.head_dim, lane);
      written(shared.q_full());
    } else if (lane == 0) {
      constexpr int kBoxes = FwdConfig::boxes(W.head_dim);
      ptx::mbarrier_arrive_expect(shared.q_full(), static_cast<std::uint32_t>(tile.num_heads) *
                                                       (kBoxes * kSplitRows * tile::kBoxRowBytes));
#pragma unroll 1
      for (int i = 0; i < tile.num_heads * kBoxes; ++i) {
        const int head = i / kBoxes;
        const int box = i % kBoxes;
        ptx::tensor_load(
            shared.q() + (box * FwdSplitConfig::kBlockM + head * kSplitRows) * tile::kBoxRowBytes,
            &maps.q, shared.q_full(), box * tile::kBoxColumns, tile.of_head.q_row,
            tile.of_head.head + head, tile.of_head.batch);
      }
    }
  };
#pragma unroll 1
  for (std::uint32_t index = blockIdx.x; index < params.num_tiles; index += gridDim.x) {
    ptx::mbarrier_wait(shared.tile_empty(slot.stage()), slot.phase() ^ 1);
    FwdSplitTile* const tile = shared.tile(slot.stage());
    if (!make_split_tile<W.block_n>(params, index, tile)) {
      continue;
    }
    __syncwarp();  // after what other lanes have written of the tile
    list_row_keys<kSplitRows>(tile->of_head, 0, tile->row_keys, lane);
    ptx::mbarrier_arrive(shared.tile_full(slot.stage()));
    const FwdTile& of_head = tile->of_head;
    const FwdBlocks blocks = of_head.blocks;
    const auto load_k = [&](int n) {
      const int stage = k_ring.stage();
      ptx::mbarrier_wait(shared.k_empty(stage), k_ring.phase() ^ 1);
      load.template operator()<W.head_dim>(shared.k(stage), shared.k_full(stage), kFwdMapK, maps.k,
                                           p.k, p.head_dim, of_head, n);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      const int stage = v_ring.stage();
      ptx::mbarrier_wait(shared.v_empty(stage), v_ring.phase() ^ 1);
      load.template operator()<W.head_dim_v>(shared.v(stage), shared.v_full(stage), kFwdMapV,
                                             maps.v, p.v, p.head_dim_v, of_head, n);
      v_ring.advance();
    };
    if (blocks.begin < blocks.end) {
      load_k(blocks.end - 1);
      // K first: Q waits for the last scores of the tile before.
      load_q(*tile);
#pragma unroll 1
      for (int n = blocks.end - 2; n >= blocks.begin; --n) {
        load_k(n);
        load_v(n + 1);
      }
      load_v(blocks.begin);
    }
    slot.advance();
  }
  ptx::mbarrier_wait(shared.tile_empty(slot.stage()), slot.phase() ^ 1);
  shared.tile(slot.stage())->of_head.num_rows = -1;
  ptx::mbarrier_arrive(shared.tile_full(slot.stage()));
}

}  // namespace flashgrad::sm90
