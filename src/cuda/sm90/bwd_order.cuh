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

// `sums`: the lane's accumulators in fragment order.
template <int kColumns, class T>
__device__ __forceinline__ void load_rows(PackedRows<kColumns>& x, const float* sums, float scale) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float4 sum = ptx::load_sum(sums + j * 128);
    x[0][j / 4][j % 4] = ptx::pack<T>(sum.x * scale, sum.y * scale);
    x[1][j / 4][j % 4] = ptx::pack<T>(sum.z * scale, sum.w * scale);
  }
}

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

// Finishes the blocks that this tile added to last. `warp` is of the dq warpgroup; with a cluster,
// CTA `rank` has one piece of the columns.
template <BwdConfig C, class T>
__device__ __forceinline__ void finish_dq(const BwdParams& p, const KeyTile& tile, int rank,
                                          int warp, int lane) {
  constexpr int kColumns = C.dq_columns();
  constexpr int kPieces = C.cluster == 2 ? 1 : C.dq_pieces();
  const int first_piece = C.cluster == 2 ? rank : 0;
  const bool wide = p.dq.dtype != DType::kF32 && has_aligned_rows(p.dq) &&
                    kColumns * (first_piece + kPieces) <= p.head_dim;
  const int group = static_cast<int>(p.group);
#pragma unroll 1
  for (int head = tile.head_kv * group; head < (tile.head_kv + 1) * group; ++head) {
#pragma unroll 1
    for (int range = 0; range < 2; ++range) {
      const int begin = tile.finish_begin[range] * kPieces;
      const int end = tile.finish_end[range] * kPieces;
      const int first_slot = head * static_cast<int>(p.rows.num_blocks) + tile.q_block;
      // Item i: a piece of block i / kPieces.
      const auto sums = [&](int i) {
        return p.dq_accumulator + std::int64_t{first_slot + i / kPieces} * (kBlockM * C.head_dim) +
               tile::fragment_order<C.head_dim>(warp * 32 + lane, 0) +
               (first_piece + i % kPieces) * (16 * kColumns);
      };
      const auto row = [&](int i) { return i / kPieces * kBlockM + warp * 16; };
      if (wide) {
        // The loads of an item are under way while the one before is stored.
        PackedRows<kColumns> x;
        if (begin < end) {
          load_rows<kColumns, T>(x, sums(begin), p.scale);
        }
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          PackedRows<kColumns> next;
          load_rows<kColumns, T>(next, sums(min(i + 1, end - 1)), p.scale);
          store_packed<kColumns>(x, p.dq, tile.batch_index, tile.q_row + row(i),
                                 tile.q_rows - row(i), head, kColumns * (first_piece + i % kPieces),
                                 lane);
#pragma unroll
          for (int k = 0; k < kColumns / 4; ++k) {
            x[k % 2][k / 8][k / 2 % 4] = next[k % 2][k / 8][k / 2 % 4];
          }
        }
      } else {
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          finish_elements<kColumns, T>(p, sums(i), tile.batch_index, tile.q_row + row(i),
                                       tile.q_rows - row(i), head,
                                       kColumns * (first_piece + i % kPieces), lane);
        }
      }
    }
  }
}

}  // namespace flashgrad::sm90
