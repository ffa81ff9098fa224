// SPDX-License-Identifier: Apache-2.0
// Backward of sequences whose keys all fit one CTA. A CTA takes a key head of a sequence and walks
// its rows, in blocks, of each query head of the group. Per block, i a row, j a key:
//   (1) delta_i = <dout_i, out_i>
//   (2) S^T = K Q^T, P^T_ji = 2^(log2(e) (scale S^T_ji - lse_i)), 0 where row i does not see key j
//   (3) dP^T = V dO^T, dS^T_ji = P^T_ji (dP^T_ji - delta_i + dlse_i), likewise
//   (4) dV += P^T dO, dK += dS^T Q, in registers
//   (5) dQ = dS K, complete, since all keys are here
//   (6) dsink_h += exp(sink_h - lse_i) (dlse_i - delta_i)
// So nothing is added through memory: no workspace (but a sum of (6) per sequence and head), one
// order of additions. Several CTAs share an SM, so that the loads of one run under the products of
// another. Every product reads both operands from shared memory; warps share out its result:
//
// | result    | warps                                                 |
// |-----------|-------------------------------------------------------|
// | S^T, dP^T | kSplit for 16 keys, each its part of the block's rows |
// | dV, dK    | kSplit for 16 keys, each its part of the columns      |
// | dQ        | kDqWarps for 16 rows, each its part of the columns    |
//
// Where a warp has all rows of its keys, P^T and dS^T are left operands of (4) as they come; else
// they, and for (5) dS^T, go through shared memory. There are K, V (kKeys rows), Q, dO (kQueries),
// then dS^T and, if kept, P^T (kKeys rows of kQueries), and dQ on its way out, all of them over the
// block's out; the rows' statistics; where the sequence lies. Between barriers: delta, S, dP | P,
// dS, (4) | (5) | dQ out. Last dK and dV go out through K and V.
//
// A product of tiles multiplies what the band hides by 0, and 0 * NaN is NaN. Any NaN or infinity
// in K, Q or dO makes a NaN or an infinity of S or dP, whether it is visible or not: then the
// block's (4) and (5) are summed element by element, over the visible pairs alone. So they are
// where a row sees keys but has an infinite lse, and must not be read.
//
// Where sequences are shortest the instructions of a CTA bind, not the memory. So what all its
// threads would compute alike is computed once, by the first two warps; it is looked up in
// shared memory.
#pragma once

#include "cuda/sm90/bwd_rows.cuh"
#include "cuda/sm90/bwd_short_cta.cuh"
#include "cuda/sm90/bwd_store.cuh"

namespace flashgrad::sm90 {

__device__ __forceinline__ bool sees_key(std::uint32_t keys, int key) {
  return static_cast<std::uint32_t>(key) - (keys & 0xffffU) < keys >> 16;
}

// A number that is not finite turns *sum into NaN.
__device__ __forceinline__ void look_for_nan(float* sum, float x) { *sum = fmaf(x, 0.0F, *sum); }

// c += a b over the pairs that `sees(half, i)` names: a_at(half, i) is the left operand of the
// lane's row `half` of two, b_at(n, i) a pair of the right one's.
template <int kTiles, class Sees, class Left, class Right>
__device__ __forceinline__ void multiply_visible(float (&c)[kTiles][4], int first, int last,
                                                 Sees&& sees, Left&& a_at, Right&& b_at) {
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    const bool seen[2] = {sees(0, i), sees(1, i)};
    const float a[2] = {a_at(0, i), a_at(1, i)};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 b = b_at(n, i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (seen[half]) {
          c[n][2 * half] = fmaf(a[half], b.x, c[n][2 * half]);
          c[n][2 * half + 1] = fmaf(a[half], b.y, c[n][2 * half + 1]);
        }
      }
    }
  }
}

template <class T, class Shape>
struct BwdShort : ShortCta<Shape> {
  using Base = ShortCta<Shape>;
  using Base::columns_of;
  using Base::first_head;
  using Base::k_steps;
  using Base::p;
  using Base::part;
  using Base::q_steps;
  using Base::rows;
  using Base::sequence;
  using Base::shared;
  using Base::square_at;
  using Base::tile_at;
  using Tile = typename Shape::Tile;
  using Square = typename Shape::Square;
  static constexpr int kRightKv = 32;                      // 16 columns to the right
  static constexpr int kRightRows = 16 * Tile::kRowBytes;  // 16 rows down

  float dk[Shape::kDkTiles][4];
  float dv[Shape::kDkTiles][4];

  // Rows of a block that a lane speaks for, in the first kRowTiles warps: this one and 8 further
  // down. Those are the lanes that get the diagonals of products of 8 x 8 elements.
  __device__ static __forceinline__ int first_own_row() {
    const int thread = short_thread();
    const int lane = thread % 32;
    return thread < 32 * Shape::kRowTiles && lane % 4 == lane / 8 ? thread / 32 * 16 + lane / 4
                                                                  : -1;
  }

  // lse, or dlse, of the lane's rows; `otherwise` where there is none.
  __device__ __forceinline__ void load_statistic(int t, int head, int block, float otherwise,
                                                 float (&x)[2]) const {
    const int own = first_own_row();
    const std::int64_t stride = p.tensors[t].row_stride;
    const auto* const first = reinterpret_cast<const float*>(sequence.first[t]) +
                              head * p.tensors[t].head_stride + (block + own) * stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[i] = own >= 0 && block + own + 8 * i < sequence.rows ? first[8 * i * stride] : otherwise;
    }
  }

  // (1), by the first kRowTiles warps, and what else the block's rows are. delta is the diagonal of
  // products of 8 rows of dout and of out each: scalar products take ten times the instructions.
  // Returns whether a row of the lane is not read though it sees a key.
  __device__ __forceinline__ bool make_rows(int head, int block, const float (&lse)[2],
                                            const float (&dlse)[2], float* dsink) {
    const int thread = short_thread();
    if (thread >= 32 * Shape::kRowTiles) {
      return false;
    }
    const int lane = thread % 32;
    const std::uint32_t row_tile = Tile::offset(thread / 32 * 16, 0);
    const std::uint32_t dout =
        shared + Shape::kDoutAt + row_tile + left_operand<Shape::kHeadDim, false>(lane);
    const std::uint32_t out =
        shared + Shape::kOutAt + row_tile + right_operand<Shape::kHeadDim, false>(lane);
    float products[2][4] = {};
#pragma unroll 2
    for (int k = 0; k < (p.head_dim_v + 15) / 16; ++k) {
      std::uint32_t a[4];
      std::uint32_t b[4];
      load_operand<false>(dout + 32 * k, a);
      load_operand<false>(out + 32 * k, b);
      ptx::multiply_16x8<T>(products[0], a[0], a[1], a[2], a[3], b[0], b[1]);
      ptx::multiply_16x8<T>(products[1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
    const int own = first_own_row();
    bool unread = false;
    if (own >= 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = own + 8 * i;
        const int row = block + r;
        const float delta = lane / 4 % 2 == 0 ? products[i][2 * i] : products[i][2 * i + 1];
        const int first = max(row + sequence.lo, 0);
        const int last = min(row + sequence.hi, sequence.keys - 1);
        const bool exists = row < sequence.rows;
        const bool sees = exists && first <= last;
        const bool read = sees && !isinf(lse[i]);
        const float neg_delta = dlse[i] - (read ? delta : 0.0F);
        constexpr float kLog2E = 1.4426950408889634F;
        rows->neg_lse_log2[r] = -lse[i] * kLog2E;
        rows->neg_delta[r] = neg_delta;
        rows->keys[r] = read ? static_cast<std::uint32_t>(first | (last + 1 - first) << 16) : 0;
        unread = unread || (sees && !read);
        if (p.dsink_partial != nullptr && exists && !isinf(lse[i])) {
          const float sink = p.sinks[first_head + head];
          *dsink += sink == -INFINITY ? 0 : expf(sink - lse[i]) * neg_delta;
        }
      }
    }
    return unread;
  }

  // (2) and (3) of the lane's elements: take(n, h, p, ds) gets the pairs of tile n of S^T in row
  // lane / 4 + 8 h, rounded and packed.
  template <bool kSoftcap, class Take>
  __device__ __forceinline__ void make_p_and_ds(const float (&s)[Shape::kSTiles][4],
                                                const float (&dp)[Shape::kSTiles][4],
                                                Take&& take) const {
    const auto [lane, first_key, part_of_rows] = part();
    const int query = part_of_rows * (Shape::kQueries / Shape::kSplit) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Shape::kSTiles; ++n) {
      const int column = query + 8 * n;
      const float2 neg_lse = *reinterpret_cast<const float2*>(rows->neg_lse_log2 + column);
      const float2 neg_delta = *reinterpret_cast<const float2*>(rows->neg_delta + column);
      const uint2 seen = *reinterpret_cast<const uint2*>(rows->keys + column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = first_key + lane / 4 + 8 * h;
        float p_of_pair[2];
        float ds_of_pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float factor = 1.0F;
          float x = exponent<kSoftcap>(s[n][2 * h + e], e == 0 ? neg_lse.x : neg_lse.y,
                                       p.scales.log2, p.scales.softcap, &factor);
          x = x > 0.0F ? 0.0F : x;  // keeps NaN
          const bool visible = sees_key(e == 0 ? seen.x : seen.y, key);
          const float d = dp[n][2 * h + e] + (e == 0 ? neg_delta.x : neg_delta.y);
          p_of_pair[e] = visible ? ptx::exp2_approx(x) : 0.0F;
          ds_of_pair[e] = visible ? p_of_pair[e] * d * (kSoftcap ? factor : 1.0F) : 0.0F;
        }
        take(n, h, ptx::pack<T>(p_of_pair[0], p_of_pair[1]),
             ptx::pack<T>(ds_of_pair[0], ds_of_pair[1]));
      }
    }
  }
  // Where the lane's first pair of the warp's part of P^T or dS^T lies.
  __device__ __forceinline__ std::uint32_t own_square(int square) const {
    const auto [lane, key, part_of_rows] = part();
    return square_at(square, key + lane / 4,
                     part_of_rows * (Shape::kQueries / Shape::kSplit) + lane % 4 * 2);
  }

  __device__ __forceinline__ float2 pair(std::uint32_t address) const {
    return ptx::unpack<T>(ptx::load_shared_uint(address));
  }
  __device__ __forceinline__ float element(std::uint32_t address) const {
    const float2 x = pair(address & ~3U);
    return (address & 2U) != 0 ? x.y : x.x;
  }

  // dV or dK of (4): += P^T or dS^T, which the warp has all rows of, times `right` (dO or Q).
  __device__ __forceinline__ void add_key_gradient(float (&c)[Shape::kDkTiles][4],
                                                   const std::uint32_t (&left)[Shape::kSTiles][2],
                                                   int right, int columns, int rows_in_tile) const {
    const std::uint32_t b =
        tile_at(right, 0, 0) + right_operand<Shape::kHeadDim, true>(part().lane);
    const auto step = [&](int k, int tiles) {
      const std::uint32_t a[4] = {left[2 * k][0], left[2 * k][1], left[2 * k + 1][0],
                                  left[2 * k + 1][1]};
      multiply_step<T, true, kRightKv>(c, a, b + static_cast<std::uint32_t>(k * kRightRows), tiles);
    };
    if (rows_in_tile == Shape::kQueries && columns > Shape::kHeadDim - 8) {
#pragma unroll
      for (int k = 0; k < Shape::kRowTiles; ++k) {
        step(k, Shape::kDkTiles);
      }
    } else {
#pragma unroll
      for (int k = 0; k < Shape::kRowTiles; ++k) {
        if (16 * k < rows_in_tile) {
          step(k, (columns + 7) / 8);
        }
      }
    }
  }
  // The same from their tile.
  __device__ __forceinline__ void add_key_gradient(float (&c)[Shape::kDkTiles][4], int left,
                                                   int right, int columns, const ShortSteps& steps,
                                                   bool exactly) const {
    const auto [lane, first_key, part_of_columns] = part();
    const int column = part_of_columns * (Shape::kHeadDim / Shape::kSplit);
    if (exactly) {
      const int key = first_key + lane / 4;
      multiply_visible(
          c, 16 * steps.first, 16 * steps.last,
          [&](int h, int i) { return sees_key(rows->keys[i], key + 8 * h); },
          [&](int h, int i) { return element(square_at(left, key + 8 * h, i)); },
          [&](int n, int i) { return pair(tile_at(right, i, column + 8 * n + lane % 4 * 2)); });
    } else if constexpr (Shape::keeps_p()) {
      const ShortOperand a{
          square_at(left, first_key, 0) + left_operand<Shape::kQueries, false>(lane), 32};
      const ShortOperand b{tile_at(right, 0, column) + right_operand<Shape::kHeadDim, true>(lane),
                           kRightRows};
      multiply_short<T, false, true, kRightKv, Shape::kRowTiles>(c, a, b, steps,
                                                                 (columns - column + 7) / 8);
    }
  }

  // Rows of a block's dQ that exist.
  __device__ __forceinline__ int dq_rows(int block) const {
    return min(sequence.all_rows - block, Shape::kQueries);
  }

  // (5), to its tile or, of f32, to memory.
  __device__ __forceinline__ void make_dq(int head, int block, bool exactly) const {
    const int thread = short_thread();
    const int lane = thread % 32;
    const int first_row = thread / 32 / Shape::kDqWarps * 16;
    if (first_row >= Shape::kQueries) {
      return;
    }
    const ShortSteps steps = k_steps(block + first_row);
#pragma unroll 1
    for (int i = 0; i < Shape::kDqParts; ++i) {
      const int column =
          (thread / 32 % Shape::kDqWarps * Shape::kDqParts + i) * (8 * Shape::kDqTiles);
      float dq[Shape::kDqTiles][4] = {};
      if (exactly) {
        const int row = first_row + lane / 4;
        multiply_visible(
            dq, 16 * steps.first, 16 * steps.last,
            [&](int h, int j) { return sees_key(rows->keys[row + 8 * h], j); },
            [&](int h, int j) { return element(square_at(Shape::kDsAt, j, row + 8 * h)); },
            [&](int n, int j) { return pair(tile_at(0, j, column + 8 * n + lane % 4 * 2)); });
      } else {
        const ShortOperand a{
            square_at(Shape::kDsAt, 0, first_row) + left_operand<Shape::kQueries, true>(lane),
            16 * Square::kRowBytes};
        const ShortOperand b{tile_at(0, 0, column) + right_operand<Shape::kHeadDim, true>(lane),
                             kRightRows};
        multiply_short<T, true, true, kRightKv, Shape::kKeys / 16>(dq, a, b, steps,
                                                                   (p.head_dim - column + 7) / 8);
      }
      const Tensor& t = p.tensors[kDq];
      if (t.dtype == DType::kF32) {
        store_short_f32(reinterpret_cast<float*>(sequence.first[kDq]) + block * t.row_stride +
                            head * t.head_stride,
                        t.row_stride, p.head_dim, dq, p.scales.scale, first_row, column,
                        dq_rows(block), lane);
      } else {
        stage_short<T, Shape::kHeadDim>(tile_at(Shape::kDqAt, first_row, column), dq,
                                        p.scales.scale, lane);
      }
    }
  }

  __device__ __forceinline__ void load_block(int head, int block) const {
    const auto in_block = [block](int row) { return min(max(row - block, 0), Shape::kQueries); };
    this->template load_tiles<kQ, kOut, Shape::kQueries>(
        Shape::kQAt, head, block, in_block(sequence.live_begin), in_block(sequence.live_end));
  }

  // A block of the rows of a query head; returns the thread's part of (6).
  __device__ __forceinline__ float run_block(int head, int block) {
    load_block(head, block);
    float lse[2];
    float dlse[2] = {};
    load_statistic(kLse, head, block, INFINITY, lse);
    if (p.tensors[kDlse]) {
      load_statistic(kDlse, head, block, 0.0F, dlse);
    }
    ptx::wait_async_copies();
    __syncthreads();

    float dsink = 0;
    const bool unread = make_rows(head, block, lse, dlse, &dsink);
    const auto [lane, key, part_of_rows] = part();
    const int s_row = part_of_rows * (Shape::kQueries / Shape::kSplit);
    const ShortSteps steps = q_steps(block, key);
    const bool hidden =
        16 * steps.last <= s_row || 16 * steps.first >= s_row + Shape::kQueries / Shape::kSplit;
    float s[Shape::kSTiles][4] = {};
    float dp[Shape::kSTiles][4] = {};
    float nan = 0;
    if (!hidden) {
      const auto product = [&](float(&c)[Shape::kSTiles][4], int left, int right, int columns) {
        const ShortOperand a{tile_at(left, key, 0) + left_operand<Shape::kHeadDim, false>(lane),
                             32};
        const ShortOperand b{tile_at(right, s_row, 0) + right_operand<Shape::kHeadDim, false>(lane),
                             32};
        multiply_short<T, false, false, kRightRows, Shape::kHeadDim / 16>(
            c, a, b, {0, (columns + 15) / 16}, (16 * steps.last - s_row) / 8);
      };
      product(s, 0, Shape::kQAt, p.head_dim);
      product(dp, Shape::kVAt, Shape::kDoutAt, p.head_dim_v);
#pragma unroll
      for (int n = 0; n < Shape::kSTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          look_for_nan(&nan, s[n][e]);
          look_for_nan(&nan, dp[n][e]);
        }
      }
    }
    const bool exactly = __syncthreads_or(static_cast<int>(unread || isnan(nan))) != 0;

    if (!hidden) {
      const std::uint32_t own_p = own_square(Shape::kPAt);
      const std::uint32_t own_ds = own_square(Shape::kDsAt);
      // Where P^T is not kept.
      std::uint32_t p_pairs[Shape::kSTiles][2];
      std::uint32_t ds_pairs[Shape::kSTiles][2];
      const auto take = [&](int n, int h, std::uint32_t p_pair, std::uint32_t ds_pair) {
        const std::uint32_t offset = Square::offset(8 * h, 8 * n);
        ptx::store_shared_uint(own_ds + offset, ds_pair);
        if (Shape::keeps_p() || exactly) {
          ptx::store_shared_uint(own_p + offset, p_pair);
        }
        if constexpr (!Shape::keeps_p()) {
          p_pairs[n][h] = p_pair;
          ds_pairs[n][h] = ds_pair;
        }
      };
      if (p.softcap) {
        make_p_and_ds<true>(s, dp, take);
      } else {
        make_p_and_ds<false>(s, dp, take);
      }
      if constexpr (!Shape::keeps_p()) {
        const int rows_in_tile = 16 * steps.last;
        if (p.tensors[kDv] && !exactly) {
          add_key_gradient(dv, p_pairs, Shape::kDoutAt, p.head_dim_v, rows_in_tile);
        }
        if (p.tensors[kDk] && !exactly) {
          add_key_gradient(dk, ds_pairs, Shape::kQAt, p.head_dim, rows_in_tile);
        }
      }
    }
    __syncthreads();

    if (Shape::keeps_p() || exactly) {
      const ShortSteps of_keys = q_steps(block, part().key);  // as above, not kept in registers
      if (p.tensors[kDv]) {
        add_key_gradient(dv, Shape::kPAt, Shape::kDoutAt, p.head_dim_v, of_keys, exactly);
      }
      if (p.tensors[kDk]) {
        add_key_gradient(dk, Shape::kDsAt, Shape::kQAt, p.head_dim, of_keys, exactly);
      }
    }
    if (!Shape::keeps_p() && exactly) {
      __syncthreads();  // dQ comes where P^T is now
    }
    if (p.tensors[kDq]) {
      make_dq(head, block, exactly);
    }
    __syncthreads();
    this->template store_tile<Shape::kQueries>(kDq, Shape::kDqAt, head, block, dq_rows(block));
    return dsink;
  }

  // dK or dV, through the tile of K or V, which nobody reads any more.
  __device__ __forceinline__ void stage_key_gradient(int t, const float (&c)[Shape::kDkTiles][4],
                                                     float factor, int tile) const {
    const Tensor& tensor = p.tensors[t];
    const auto [lane, key, part_of_columns] = part();
    const int column = part_of_columns * (Shape::kHeadDim / Shape::kSplit);
    if (!tensor) {
      return;
    }
    if (tensor.dtype == DType::kF32) {
      store_short_f32(reinterpret_cast<float*>(sequence.first[t]), tensor.row_stride, columns_of(t),
                      c, factor, key, column, min(sequence.all_keys, Shape::kKeys), lane);
    } else {
      stage_short<T, Shape::kHeadDim>(tile_at(tile, key, column), c, factor, lane);
    }
  }

  // Leaves the sum of (6) over a head's rows.
  __device__ __forceinline__ void store_dsink(float dsink, std::int64_t index) const {
    auto* const partial = reinterpret_cast<float*>(rows);  // which nobody reads any more
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      dsink += __shfl_xor_sync(0xffffffffU, dsink, step);
    }
    if (threadIdx.x % 32 == 0) {
      partial[threadIdx.x / 32] = dsink;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0;
#pragma unroll 1
      for (int i = 0; i < Shape::kWarps; ++i) {
        sum += partial[i];
      }
      p.dsink_partial[index] = sum;
    }
    __syncthreads();  // the next head's sums come here
  }

  // `number`: of the sequence.
  __device__ __forceinline__ void run(std::int64_t number) {
    if (sequence.keys_end > sequence.keys_begin) {
      this->template load_tiles<kK, kV, Shape::kKeys>(0, 0, 0, sequence.keys_begin,
                                                      sequence.keys_end);
    }
#pragma unroll 1
    for (int head = 0; head < p.group; ++head) {
      float dsink = 0;
#pragma unroll 1
      for (int block = 0; block < sequence.rows; block += Shape::kQueries) {
        if (head > 0 || block > 0) {
          __syncthreads();  // dQ has gone out, where out will be
        }
        dsink += run_block(head, block);
      }
      if (p.dsink_partial != nullptr) {
        store_dsink(dsink, (first_head + head) * p.sequences.batch + number);
      }
    }
    stage_key_gradient(kDk, dk, p.scales.scale, 0);
    stage_key_gradient(kDv, dv, 1.0F, Shape::kVAt);
    __syncthreads();
    const int count = min(sequence.all_keys, Shape::kKeys);
    this->template store_tile<Shape::kKeys>(kDk, 0, 0, 0, count);
    this->template store_tile<Shape::kKeys>(kDv, Shape::kVAt, 0, 0, count);
  }
};

}  // namespace flashgrad::sm90
