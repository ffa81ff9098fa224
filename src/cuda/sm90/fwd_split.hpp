// SPDX-License-Identifier: Apache-2.0
// Which sequences the forward computes in chunks of keys, and where the parts of their rows lie.
// Plain arithmetic, for the device and for tests on the host.
//
// A few rows that see many keys are one tile a head: too little for the machine. Their keys are cut
// into chunks, each of which gives a part of the row: O, m and l as at the end of fwd.cuh's walk,
// over its own keys (fwd_split.cuh); another kernel adds the parts, in order (fwd_merge.cuh). What
// is cut, and where, follows from the sequence's own lengths and mask, so its bits are the same in
// every call.
#pragma once

#include <cstdint>

#include "core/mask.hpp"
#include "cuda/sm90/fwd_config.hpp"

namespace flashgrad::sm90 {

// Sequences of more rows are not cut: a warp has the rows of a head.
inline constexpr std::int32_t kSplitRows = 16;
// A chunk has about so many keys or more; a row has at most so many chunks.
inline constexpr std::int32_t kChunkKeys = 640;
inline constexpr std::int32_t kMaxChunks = 128;

// Of so many keys a sequence has a chunk.
FG_HOST_DEVICE constexpr std::int32_t least_chunk_keys(std::int32_t block_n) {
  return kChunkKeys / block_n * block_n;
}

// The key blocks [begin, end) that a sequence's rows see, in `count` chunks, 1: not cut.
struct KeyChunks {
  std::int32_t begin, end;
  std::int32_t count;

  // The first block of a chunk, or behind the last. There are fewer than 2^30 keys.
  [[nodiscard]] FG_HOST_DEVICE constexpr std::int32_t first(std::int32_t chunk) const {
    return begin + chunk * (end - begin) / count;
  }
};

FG_HOST_DEVICE constexpr KeyChunks key_chunks(const Band& band, std::int32_t block_n) {
  const Range hull = band.kv_range(0, band.seqlen_q);
  if (hull.empty()) {
    return {0, 0, 1};
  }
  const std::int32_t most = static_cast<std::int32_t>(hull.size()) / least_chunk_keys(block_n);
  return {static_cast<std::int32_t>(hull.begin) / block_n,
          (static_cast<std::int32_t>(hull.end) + block_n - 1) / block_n,
          band.seqlen_q > kSplitRows || most < 2 ? 1
          : most < kMaxChunks                    ? most
                                                 : kMaxChunks};
}

// Where the parts of rows lie in the workspace. A slot has those of a chunk, of all heads; the
// slots of a sequence follow each other. They begin where its keys do, counted in least_chunk_keys,
// so that no sum over the sequences is needed: its chunks have no fewer.
struct SplitSlots {
  std::int64_t of_entry;  // of a batch entry; unused if packed
  std::int64_t all;
  std::int32_t keys;  // of a slot: least_chunk_keys
  std::int32_t rows;  // of a sequence, at most

  static constexpr SplitSlots of(bool packed, std::int64_t batch, std::int64_t rows_kv,
                                 std::int64_t max_rows, std::int32_t block_n) {
    SplitSlots slots{};
    slots.rows = static_cast<std::int32_t>(max_rows < kSplitRows ? max_rows : kSplitRows);
    slots.keys = least_chunk_keys(block_n);
    const std::int64_t chunks = rows_kv / slots.keys;
    slots.of_entry = chunks < kMaxChunks ? chunks : kMaxChunks;
    slots.all = packed ? chunks : batch * slots.of_entry;
    return slots;
  }
  // Of a sequence: number `index` of a batch, or packed, with keys from `kv_begin` on.
  [[nodiscard]] FG_HOST_DEVICE constexpr std::int64_t first(bool packed, std::int64_t index,
                                                            std::int64_t kv_begin) const {
    return packed ? kv_begin / keys : index * of_entry;
  }
};

// The shape of fwd_split.cuh's kernel for a kernel of fwd.cuh whose arithmetic it has: a tile of 64
// rows, and two CTAs on a multiprocessor where two stages of K and V leave room.
struct FwdSplitConfig {
  FwdConfig widths;

  static constexpr int kBlockM = 64;
  static constexpr int kThreads = 256;  // a warpgroup for the loads and the tiles, and a consumer
  static constexpr int kStages = 2;
  static constexpr int kTiles = 2;  // described at a time
  static constexpr int kTileBytes = 352;
  static constexpr int kNumBarriers = 2 * kTiles + 2 + 4 * kStages;
  // Of two CTAs: 64 K registers are 256 per slot of their warpgroups. One has enough for all.
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kProducerRegisters = 40;

  constexpr int ctas() const {
    constexpr int kSystemBytes = 1024;  // of each CTA's
    return 2 * (shared_bytes() + kSystemBytes) <= 228 * 1024 ? 2 : 1;
  }
  // Offsets in shared memory, which starts at a multiple of tile::kTileAlignment.
  constexpr int k_offset() const { return FwdConfig::bytes(kBlockM, widths.head_dim); }
  constexpr int v_offset() const { return k_offset() + kStages * widths.k_bytes(); }
  constexpr int tiles_offset() const { return v_offset() + kStages * widths.v_bytes(); }
  constexpr int barrier_offset() const { return tiles_offset() + kTiles * kTileBytes; }
  constexpr int shared_bytes() const { return barrier_offset() + 8 * kNumBarriers; }
  constexpr bool valid() const { return shared_bytes() <= FwdConfig::kSharedBytes; }
};

}  // namespace flashgrad::sm90
