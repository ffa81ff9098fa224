// SPDX-License-Identifier: Apache-2.0
// dq in a fixed order, for the ordered variants of the backward's main kernel: the same bits in
// every run, and for a sequence alone or in any batch.
//
// The clusters (or single CTAs) that add to a query block take turns. A counter per query block and
// CTA of the cluster holds whose turn it is; who has added passes it on. Mostly a cluster's turn is
// its number among the key blocks of its sequence; with a mask that hides nothing, where all
// clusters would come to the same block at the same time, it rotates (KeyTile, rotation()).
//
// prepare sets each counter to the turn of the first cluster that reaches the block, with
// kNothingYet: that one stores instead of adding, so nothing is zeroed. Whoever adds to a block
// last also finishes it, after its last step: dq = scale * accumulator, rounded once. Each thread
// reads back what it added itself, so that needs no further signal.
//
// No cluster waits for ever: clusters take their numbers from a ticket in the order in which they
// start. Without rotation one waits only for smaller numbers. With rotation it waits for its round,
// neighbours by number, and the host keeps rounds within half of the device.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90/bwd_shared.cuh"
#include "cuda/sm90/bwd_store.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/tile/fragment.hpp"

namespace flashgrad::sm90 {

// Waits for turn `turn` of a block's counter, of which `seen` was read before. Returns whether
// nothing has been stored to the block. One warp.
//
// `seen` was read without acquire, ahead of the step's products, since an acquiring load there
// costs 2.5 % (H200): the additions depend on it by control, and are themselves performed at the
// L2, after those that the counter announced.
__device__ __forceinline__ bool wait_for_turn(const std::uint32_t* counter, int turn,
                                              std::uint32_t seen) {
  while ((seen & ~kNothingYet) != static_cast<std::uint32_t>(turn)) {
    seen = ptx::load_acquire(counter);
  }
  __syncwarp();
  return (seen & kNothingYet) != 0;
}

// kColumns columns of a warp's 16 rows of dq in 16 bits: of each row half, and of each 32 columns,
// two neighbours from each of four times 8 columns.
template <int kColumns>
using PackedRows = std::uint32_t[2][kColumns / 32][4];

// A warp's sums on their way, kColumns columns of 16 rows at a time, through kRoom bytes of shared
// memory: in registers there is room for one of them only, and it would be waited for each time.
// Each lane has places of its own, so nobody waits for another.
template <int kColumns, int kRoom>
class SumsRing {
 public:
  static constexpr int kItemBytes = 16 * kColumns * 4;
  static constexpr int kDepth = kRoom / kItemBytes;
  static constexpr int kBytes = kDepth * kItemBytes;

  __device__ SumsRing(std::uint32_t room, int lane)
      : own_(room + static_cast<std::uint32_t>(lane * 16)) {}

  // Loads the next; `sums` is the lane's first. kDepth of them, or fewer if there are no more and
  // `any` is false, come before the first take().
  __device__ __forceinline__ void fetch(bool any, const float* sums) {
    if (any) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        ptx::async_copy_16(own_ + at_ + j * 512, sums + j * 128, 16);
      }
    }
    ptx::commit_async_copies();
    at_ = at_ == kBytes - kItemBytes ? 0 : at_ + kItemBytes;
  }

  // Takes the oldest, whose place the next one gets.
  template <class T>
  __device__ __forceinline__ void take(PackedRows<kColumns>& x, float scale) {
    ptx::wait_async_copies<kDepth - 1>();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 sum = ptx::load_shared_float4(own_ + at_ + j * 512);
      x[0][j / 4][j % 4] = ptx::pack<T>(sum.x * scale, sum.y * scale);
      x[1][j / 4][j % 4] = ptx::pack<T>(sum.z * scale, sum.w * scale);
    }
  }

 private:
  std::uint32_t own_;
  std::uint32_t at_ = 0;  // of the next to be loaded, which is the oldest
};

// Rows `row` on, of which `count` exist, from column `column` on, 16 bytes at a time.
template <int kColumns>
__device__ __forceinline__ void store_packed(PackedRows<kColumns>& x, const Tensor& dq, int batch,
                                             int row, int count, int head, int column, int lane) {
  const int q = lane % 4;
  const int r = lane / 4;
  auto* out = reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(dq.data) +
                                       dq.offset(batch, row + r, head) + column + 8 * q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < kColumns / 32; ++k) {
      transpose_quad(x[half][k], q);
      if (r + 8 * half < count) {
        out[4 * k] = make_uint4(x[half][k][0], x[half][k][1], x[half][k][2], x[half][k][3]);
      }
    }
    out += dq.row_stride;  // 8 rows
  }
}

// The same element by element, for f32, odd strides and partial widths.
template <int kColumns, class T>
__device__ __forceinline__ void finish_elements(const BwdParams& p, const float* sums, int batch,
                                                int row, int count, int head, int column,
                                                int lane) {
  const int q = lane % 4;
  const int r = lane / 4;
  const std::int64_t at = p.dq.offset(batch, row + r, head) + column;
#pragma unroll 1
  for (int j = 0; j < kColumns / 8; ++j) {
    const float4 sum = ptx::load_sum(sums + j * 128);
    const float values[4] = {sum.x * p.scale, sum.y * p.scale, sum.z * p.scale, sum.w * p.scale};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = 8 * j + 2 * q + i % 2;
      if (r + i / 2 * 8 < count && column + c < p.head_dim) {
        const std::int64_t element = at + i / 2 * 8 * p.dq.row_stride + c;
        if (p.dq.dtype == DType::kF32) {
          static_cast<float*>(p.dq.data)[element] = values[i];
        } else {
          static_cast<T*>(p.dq.data)[element] = static_cast<T>(values[i]);
        }
      }
    }
  }
}

// What finish_dq goes through: pieces of the columns of the blocks that a tile finishes, of one
// query head after the other.
template <int kPieces>
struct FinishWalk {
  int begin[2];  // pieces, from a head's first block on
  int in_first;  // of begin[0] on; the others from begin[1] on
  int of_head;
  int head;
  int item = 0;

  __device__ FinishWalk(const KeyTile& tile, int first_head) : head(first_head) {
    begin[0] = tile.finish_begin[0] * kPieces;
    begin[1] = tile.finish_begin[1] * kPieces;
    in_first = (tile.finish_end[0] - tile.finish_begin[0]) * kPieces;
    of_head = in_first + (tile.finish_end[1] - tile.finish_begin[1]) * kPieces;
  }
  __device__ int at() const {
    return item < in_first ? begin[0] + item : begin[1] + item - in_first;
  }
  __device__ void advance() {
    if (++item == of_head) {
      item = 0;
      ++head;
    }
  }
};

// Finishes the blocks that this tile added to last, of which there are some. `warp` is of the dq
// warpgroup; with a cluster, CTA `rank` has one piece of the columns.
//
// Many loads are under way at a time, in the stages of Q and dO.
template <BwdConfig C, class T>
__device__ __forceinline__ void finish_dq(const BwdParams& p, const KeyTile& tile,
                                          const BwdShared<C>& shared, int rank, int warp,
                                          int lane) {
  constexpr int kColumns = C.dq_columns();
  constexpr int kPieces = C.cluster == 2 ? 1 : C.dq_pieces();
  constexpr int kRoom = (C.q_stages + C.do_stages) * C.q_bytes();
  static_assert(C.do_offset() == C.q_offset() + C.q_stages * C.q_bytes());
  using Sums = SumsRing<kColumns, kRoom / 4>;
  const int first_piece = C.cluster == 2 ? rank : 0;
  const int head_end = (tile.head_kv + 1) * static_cast<int>(p.group);
  FinishWalk<kPieces> walk(tile, tile.head_kv * static_cast<int>(p.group));
  const auto sums = [&](const FinishWalk<kPieces>& of) {
    const int slot =
        of.head * static_cast<int>(p.rows.num_blocks) + tile.q_block + of.at() / kPieces;
    return p.dq_accumulator + std::int64_t{slot} * (kBlockM * C.head_dim) +
           tile::fragment_order<C.head_dim>(warp * 32 + lane, 0) +
           (first_piece + of.at() % kPieces) * (16 * kColumns);
  };
  const auto row = [&] { return walk.at() / kPieces * kBlockM + warp * 16; };
  const auto column = [&] { return kColumns * (first_piece + walk.at() % kPieces); };
  if (p.dq.dtype == DType::kF32 || !has_aligned_rows(p.dq) ||
      kColumns * (first_piece + kPieces) > p.head_dim) {
#pragma unroll 1
    for (; walk.head < head_end; walk.advance()) {
      finish_elements<kColumns, T>(p, sums(walk), tile.batch_index, tile.q_row + row(),
                                   tile.q_rows - row(), walk.head, column(), lane);
    }
    return;
  }
  wait_for_last(shared.q_empty(0), C.q_stages, tile.num_steps);
  wait_for_last(shared.do_empty(0), C.do_stages, tile.num_steps);
  // And behind rows that the loading warp has cleared there: racecheck follows no chain of
  // barriers.
  ptx::named_barrier_sync<128>(5);
  Sums ring(shared.q(0) + static_cast<std::uint32_t>(warp * Sums::kBytes), lane);
  FinishWalk<kPieces> ahead = walk;
  const auto fetch = [&] {
    const bool any = ahead.head < head_end;
    ring.fetch(any, sums(ahead));
    if (any) {
      ahead.advance();
    }
  };
#pragma unroll 1
  for (int i = 0; i < Sums::kDepth; ++i) {
    fetch();
  }
#pragma unroll 1
  for (; walk.head < head_end; walk.advance()) {
    PackedRows<kColumns> x;
    ring.template take<T>(x, p.scale);
    fetch();
    store_packed<kColumns>(x, p.dq, tile.batch_index, tile.q_row + row(), tile.q_rows - row(),
                           walk.head, column(), lane);
  }
}

}  // namespace flashgrad::sm90
