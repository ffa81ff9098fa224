// SPDX-License-Identifier: Apache-2.0
// Where a CTA of bwd_short.cuh finds things: its sequence, tensors and tiles, and how tiles come
// and go.
#pragma once

#include "cuda/sm90/bwd_short_shape.cuh"
#include "cuda/sm90/key_tile.cuh"

namespace flashgrad::sm90 {

// Where the sequence of `span` lies, by the first two warps, beside each other.
template <int kKeys>
__device__ __forceinline__ void find_sequence(const BwdShortParams& p, const SequenceSpan& span,
                                              int head_kv, ShortSequence* to) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto narrow = [](std::int64_t x) {
    constexpr std::int64_t kFar = 1 << 30;
    return static_cast<int>(clamp_to(x, -kFar, kFar));
  };
  if (thread < kNumTensors) {
    const Tensor& t = p.tensors[thread];
    constexpr std::uint32_t kOfKeys = 1U << kK | 1U << kV | 1U << kDk | 1U << kDv;
    const bool of_keys = (kOfKeys >> thread & 1U) != 0;
    const std::int64_t offset = t.offset(span.batch_index, of_keys ? span.kv.begin : span.q.begin,
                                         of_keys ? head_kv : std::int64_t{head_kv} * p.group);
    to->first[thread] =
        t ? static_cast<char*>(t.data) + offset * (t.dtype == DType::kF32 ? 4 : 2) : nullptr;
  }
  if (thread == 32) {
    const Band& band = span.band;
    const Range live = band.q_range(0, band.seqlen_kv);
    const Range keys = band.kv_range(0, band.seqlen_q);
    to->rows = narrow(band.seqlen_q);
    to->keys = min(narrow(band.seqlen_kv), kKeys);
    to->all_rows = narrow(span.q.end - span.q.begin);
    to->all_keys = narrow(span.kv.end - span.kv.begin);
    to->live_begin = narrow(live.begin);
    to->live_end = narrow(live.end);
    to->keys_begin = min(narrow(keys.begin), kKeys);
    to->keys_end = min(narrow(keys.end), kKeys);
    // No row sees anything of an empty band.
    to->lo = narrow(band.lo > band.hi ? Band::kFar : band.lo);
    to->hi = narrow(band.lo > band.hi ? -Band::kFar : band.hi);
    to->served = band.seqlen_q <= p.most_rows && band.seqlen_kv <= p.most_keys;
  }
}

template <class Shape>
struct ShortCta {
  using Tile = typename Shape::Tile;
  using Square = typename Shape::Square;

  const BwdShortParams& p;
  const ShortSequence& sequence;
  int first_head;  // of the group
  std::uint32_t shared;
  ShortRowStatistics<Shape::kQueries>* rows;

  // What the warp has of S^T, dV and dK: 16 keys, a part of the rows or columns.
  struct Part {
    int lane;
    int key;
    int part;
  };
  // Asked for anew in every phase: what would follow from it for all phases takes 30 registers.
  __device__ static __forceinline__ Part part() {
    const int thread = short_thread();
    return {thread % 32, thread / 32 / Shape::kSplit * 16, thread / 32 % Shape::kSplit};
  }

  __device__ __forceinline__ std::uint32_t tile_at(int tile, int row, int column) const {
    return shared + static_cast<std::uint32_t>(tile) + Tile::offset(row, column);
  }
  __device__ __forceinline__ std::uint32_t square_at(int square, int row, int column) const {
    return shared + static_cast<std::uint32_t>(square) + Square::offset(row, column);
  }

  // The rows of tensor number `t`, of its head number `head` in the group.
  __device__ __forceinline__ ShortRows rows_of(int t, int head) const {
    const Tensor& tensor = p.tensors[t];
    auto* const first = reinterpret_cast<std::uint16_t*>(sequence.first[t]);
    return {first != nullptr ? first + head * tensor.head_stride : nullptr, tensor.row_stride,
            tensor.dim_stride, columns_of(t)};
  }
  __device__ __forceinline__ bool is_wide(int t) const { return (p.wide >> t & 1U) != 0; }

  // Loads tensors [kFirst, kLast] into tiles of kRows rows that lie one behind the other: rows from
  // `row` on, those of [begin, end).
  template <int kFirst, int kLast, int kRows>
  __device__ __forceinline__ void load_tiles(int tiles, int head, int row, int begin,
                                             int end) const {
    constexpr int kBytes = kRows * Tile::kRowBytes;
    const int rows_in_tile = (end + 15) / 16 * 16;
    const auto tile = [&](int t) {
      return shared + static_cast<std::uint32_t>(tiles + (t - kFirst) * kBytes);
    };
#pragma unroll
    for (int t = kFirst; t <= kLast; ++t) {
      if (is_wide(t)) {
        load_short_tile<kRows, Shape::kHeadDim, Shape::kThreads>(tile(t), rows_of(t, head), row,
                                                                 rows_in_tile, begin, end);
      }
    }
    constexpr std::uint32_t kAll = (2U << kLast) - (1U << kFirst);
    if ((p.wide & kAll) != kAll) {
#pragma unroll 1
      for (int t = kFirst; t <= kLast; ++t) {
        if (!is_wide(t)) {
          gather_short_tile<kRows, Shape::kHeadDim, Shape::kThreads>(tile(t), rows_of(t, head), row,
                                                                     rows_in_tile, begin, end);
        }
      }
    }
  }

  // Stores the first `count` rows of a tile to a gradient of 16-bit elements, from `row` on.
  template <int kRows>
  __device__ __forceinline__ void store_tile(int t, int tile, int head, int row, int count) const {
    const std::uint32_t from = shared + static_cast<std::uint32_t>(tile);
    if (!p.tensors[t] || p.tensors[t].dtype == DType::kF32) {
      return;
    }
    if (is_wide(t)) {
      store_short_tile<kRows, Shape::kHeadDim, Shape::kThreads>(from, rows_of(t, head), row, count);
    } else {
      scatter_short_tile<Shape::kHeadDim, Shape::kThreads>(from, rows_of(t, head), row, count);
    }
  }

  __device__ __forceinline__ int columns_of(int t) const {
    constexpr std::uint32_t kOfV = 1U << kV | 1U << kOut | 1U << kDout | 1U << kDv;
    return (kOfV >> t & 1U) != 0 ? p.head_dim_v : p.head_dim;
  }

  // The steps of a block in which rows see keys [key, key + 16).
  __device__ __forceinline__ ShortSteps q_steps(int block, int key) const {
    const int last_key = min(key + 15, sequence.keys - 1);
    const int first = max(key - sequence.hi, block);
    const int last =
        min(min(last_key - sequence.lo, sequence.rows - 1), block + Shape::kQueries - 1);
    return key > last_key || first > last
               ? ShortSteps{0, 0}
               : ShortSteps{(first - block) / 16, (last - block) / 16 + 1};
  }
  // The steps of keys that rows [row, row + 16) see.
  __device__ __forceinline__ ShortSteps k_steps(int row) const {
    const int last_row = min(row + 15, sequence.rows - 1);
    const int first = max(row + sequence.lo, 0);
    const int last = min(last_row + sequence.hi, sequence.keys - 1);
    return row > last_row || first > last ? ShortSteps{0, 0}
                                          : ShortSteps{first / 16, last / 16 + 1};
  }
};

}  // namespace flashgrad::sm90
