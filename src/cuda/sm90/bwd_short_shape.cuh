// SPDX-License-Identifier: Apache-2.0
// What bwd_short.cuh is told, the sizes of its tiles, and what it keeps in shared memory.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.hpp"
#include "cuda/sm90/short_tile.cuh"

namespace flashgrad::sm90 {

// The tensors by number; of each, a bit of BwdShortParams::wide.
enum ShortTensor : int { kK, kV, kQ, kDout, kOut, kDk, kDv, kDq, kLse, kDlse, kNumTensors };

struct BwdShortParams {
  Sequences sequences;
  std::int64_t heads_kv;
  int group;  // query heads per key head
  int head_dim;
  int head_dim_v;
  // Of any strides. Null: dout and dlse are 0, gradients are not wanted. lse and dlse are f32
  // (batch, heads_q, seqlen_q).
  Tensor tensors[kNumTensors];
  std::uint32_t wide;    // rows can be read, or of a gradient written, 16 bytes at a time
  const float* sinks;    // (heads_q), or null
  float* dsink_partial;  // (heads_q, batch), or null: not wanted
  Scales scales;
  bool softcap;
  // Sequences with more rows or keys in use are left to others, who have been there.
  int most_rows;
  int most_keys;
};

// CTAs that write the zeros of a packed batch's rows outside of all sequences.
inline constexpr int kOutsideCtas = 64;

// Tiles and layout for sequences of at most kKeysOf keys.
template <int kHeadDimOf, int kKeysOf>
struct BwdShortShape {
  static constexpr int kHeadDim = kHeadDimOf;
  static constexpr int kKeys = kKeysOf;
  static constexpr int kQueries = kHeadDim == 128 && kKeys >= 64 ? 64 : 32;  // of a block
  static constexpr int kSplit = kHeadDim == 64 ? 1 : 2;                      // warps for 16 keys
  static constexpr int kWarps = kKeys / 16 * kSplit;
  static constexpr int kThreads = 32 * kWarps;
  // P^T goes through shared memory, since a warp does not have all rows of its keys.
  static constexpr bool keeps_p() { return kSplit > 1; }
  // 16 x 8 tiles of a warp's part of S^T, of dK and dV, of dQ.
  static constexpr int kSTiles = kQueries / 8 / kSplit;
  static constexpr int kDkTiles = kHeadDim / 8 / kSplit;
  static constexpr int kRowTiles = kQueries / 16;
  static constexpr int kDqWarps =
      kWarps / kRowTiles < kHeadDim / 16 ? kWarps / kRowTiles : kHeadDim / 16;
  static constexpr int kDqTiles = kHeadDim / 8 / kDqWarps < 4 ? kHeadDim / 8 / kDqWarps : 4;
  static constexpr int kDqParts = kHeadDim / 8 / kDqWarps / kDqTiles;  // one after the other
  // CTAs of an SM.
  static constexpr int kResident = kHeadDim == 64 ? 256 / kKeys
                                                  : (kKeys == 32   ? 4
                                                     : kKeys == 64 ? 2
                                                                   : 1);

  using Tile = ShortTile<kHeadDim>;
  using Square = ShortTile<kQueries>;  // P^T, dS^T
  static constexpr int kKvBytes = kKeys * Tile::kRowBytes;
  static constexpr int kQBytes = kQueries * Tile::kRowBytes;
  static constexpr int kSquareBytes = kKeys * Square::kRowBytes;
  // Offsets in shared memory, of K from 0 on.
  static constexpr int kVAt = kKvBytes;
  static constexpr int kQAt = 2 * kKvBytes;
  static constexpr int kDoutAt = kQAt + kQBytes;
  static constexpr int kOutAt = kDoutAt + kQBytes;
  static constexpr int kDsAt = kOutAt;
  static constexpr int kPAt = kDsAt + kSquareBytes;
  static constexpr int kDqAt = keeps_p() ? kPAt + kSquareBytes : kPAt;
  static constexpr int kRowsAt =
      kDqAt + (!keeps_p() && kSquareBytes > kQBytes ? kSquareBytes : kQBytes);
  static constexpr int kSequenceAt = kRowsAt + kQueries * 12;
  static constexpr int kSharedBytes = kSequenceAt + 8 * kNumTensors + 48;
  static_assert(kWarps >= 2 && kWarps >= kRowTiles && kDqTiles % 2 == 0 && kSequenceAt % 8 == 0 &&
                kSharedBytes <= 227 * 1024);
};

// What the rows of a block are to the keys, in shared memory.
template <int kQueries>
struct ShortRowStatistics {
  float neg_lse_log2[kQueries];  // -lse * log2(e)
  float neg_delta[kQueries];     // dlse - delta
  std::uint32_t keys[kQueries];  // the first key that the row sees, and how many << 16; 0: not read
};

// The sequence of a CTA, in shared memory; numbers of its rows and keys count from its first.
struct ShortSequence {
  char* first[kNumTensors];  // of each tensor the first row, of the group's first head
  int rows;                  // in use
  int keys;                  // likewise, at most kKeys
  int all_rows;              // with those not in use
  int all_keys;
  int live_begin, live_end;  // the rows that see a key
  int keys_begin, keys_end;  // the keys that a row sees
  int lo, hi;                // row i sees key j iff i + lo <= j <= i + hi, if both are in use
  bool served;
};
static_assert(sizeof(ShortSequence) <= 8 * kNumTensors + 48);

}  // namespace flashgrad::sm90
