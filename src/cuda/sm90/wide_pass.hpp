// SPDX-License-Identifier: Apache-2.0
// What the kernels for head dims above 128 share: the part of the work that they do in one launch,
// and where dS waits between them.
#pragma once

#include <cstdint>

namespace flashgrad::sm90 {

inline constexpr int kWideKeys = 64;
// dS of 64 keys and 64 queries as it lies in shared memory (tile::SwizzledTile<64>, keys in rows).
inline constexpr int kDsImageBytes = kWideKeys * 64 * 2;

// A pass makes dk and dv of the keys of some units (key heads of a batch entry, or of the packed
// batch) that lie in blocks [key_begin, key_begin + key_count) of their sequence, and adds what
// these keys give to dq. Passes run one after the other, and those of a unit by ascending keys: so
// every dq is summed by ascending keys, whatever the passes are.
struct WidePass {
  std::int64_t first_unit;
  std::int64_t num_units;
  std::int64_t section;        // units whose tiles are launched together, longest tiles first
  std::int64_t key_begin;      // blocks of 64 keys; even
  std::int64_t key_count;      // even
  std::int64_t num_key_tiles;  // clusters of CTAs per unit
  // Query blocks of a head: of a batch entry, or all of the packed batch.
  std::int64_t blocks_per_head;
  // (num_units * group, blocks_per_head, key_count) images of dS; null: dq is not wanted here.
  // Image (h, m, n) exists if query block m sees key block n.
  std::uint8_t* ds;
  // (num_units * group, blocks_per_head, 64 * padded head_dim) f32, the sums of dq that go from one
  // pass to the next, in the order in which the threads hold them; null if there is one pass.
  float* partial;
};

}  // namespace flashgrad::sm90
