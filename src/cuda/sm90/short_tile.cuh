// SPDX-License-Identifier: Apache-2.0
// Tiles of short sequences, whose kernels multiply with mma.sync: rows of 16-bit elements in shared
// memory, 16 bytes longer than their columns, so that the 8 rows of a matrix that ldmatrix reads
// lie in different banks. Loads, products, and the way back to the caller's tensors, by all threads
// of a CTA or by one warp each. Where tiles are small the instructions around the products bind, so
// what few calls need (tensors whose rows can't be read 16 bytes at a time) is a loop, apart.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/sync.cuh"

namespace flashgrad::sm90 {

// How a tile of kColumns columns lies; its rows start at multiples of 16 bytes.
template <int kColumns>
struct ShortTile {
  static_assert(kColumns % 16 == 0);
  static constexpr int kRowBytes = 2 * kColumns + 16;
  static constexpr std::uint32_t offset(int row, int column) {
    return static_cast<std::uint32_t>(row * kRowBytes + 2 * column);
  }
};

// The thread's index, read where it is used (ptx::thread_index), and known not to be negative: then
// a division by a power of two is one instruction.
__device__ __forceinline__ int short_thread() {
  const int thread = ptx::thread_index();
  __builtin_assume(thread >= 0 && thread < 1024);
  return thread;
}

// Rows of one head of a tensor of 16-bit elements.
struct ShortRows {
  std::uint16_t* first;  // null: there is no tensor
  std::int64_t row_stride;
  std::int64_t dim_stride;
  int columns;
};

// Fills rows [0, rows), rows <= kRows, of a tile from rows `row` on of a tensor that can be read 16
// bytes at a time: those of [begin, end), the others with zeros, as are columns up to a multiple
// of 16. Ends with copies under way. By all threads.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_short_tile(std::uint32_t tile, const ShortRows& from, int row,
                                                int rows, int begin, int end) {
  constexpr int kChunks = kColumns / 8;  // of 16 bytes in a row
  constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0);
  const int thread = short_thread();
  const int column = thread % kChunks * 8;
  const int first = thread / kChunks;
  const int left = from.columns - column;
  if (left <= -8 || (left <= 0 && column % 16 == 0)) {
    return;
  }
  const auto bytes = static_cast<std::uint32_t>(left >= 8 ? 16 : left > 0 ? 2 * left : 0);
  const std::uint32_t destination = tile + ShortTile<kColumns>::offset(first, column);
  // Of what is not read the address is only formed.
  const std::uint16_t* source = from.first + (row + first) * from.row_stride + column;
#pragma unroll
  for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i) {
    const int r = first + i * kStep;
    if (r < rows) {
      ptx::async_copy_16(destination + ShortTile<kColumns>::offset(i * kStep, 0), source,
                         r >= begin && r < end ? bytes : 0);
    }
    source += kStep * from.row_stride;
  }
}

// The same of any tensor, element by element.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void gather_short_tile(std::uint32_t tile, const ShortRows& from,
                                                  int row, int rows, int begin, int end) {
  constexpr int kChunks = kColumns / 8;
  const int thread = short_thread();
  const int column = thread % kChunks * 8;
  const int left = from.columns - column;
#pragma unroll 1
  for (int r = thread / kChunks; r < rows; r += kThreads / kChunks) {
    const bool read = from.first != nullptr && r >= begin && r < end;
    const std::uint16_t* const source =
        from.first + (row + r) * from.row_stride + column * from.dim_stride;
    std::uint32_t pairs[4] = {};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (read && c < left) {
        pairs[c / 2] |= std::uint32_t{source[c * from.dim_stride]} << (c % 2 * 16);
      }
    }
    ptx::store_shared(tile + ShortTile<kColumns>::offset(r, column), pairs[0], pairs[1], pairs[2],
                      pairs[3]);
  }
}

// Where a lane reads an operand of 16 x 16 elements with ldmatrix, as an offset from its first
// element: the left operand as it lies or, kTransposed, from a tile that holds its transpose; the
// right one (two of 16 x 8 side by side) from a tile that holds its transpose or, kTransposed, as
// it lies.
template <int kColumns, bool kTransposed>
__device__ __forceinline__ std::uint32_t left_operand(int lane) {
  return kTransposed ? ShortTile<kColumns>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8)
                     : ShortTile<kColumns>::offset(lane % 16, lane / 16 * 8);
}
template <int kColumns, bool kTransposed>
__device__ __forceinline__ std::uint32_t right_operand(int lane) {
  return left_operand<kColumns, !kTransposed>(lane);
}

template <bool kTransposed>
__device__ __forceinline__ void load_operand(std::uint32_t address, std::uint32_t (&x)[4]) {
  if constexpr (kTransposed) {
    ptx::load_matrix_transposed(address, x[0], x[1], x[2], x[3]);
  } else {
    ptx::load_matrix(address, x[0], x[1], x[2], x[3]);
  }
}

// An operand in shared memory as a lane reads it: element (0, 0) of its part of step 0, and bytes
// from one step of 16 in the summed dimension to the next.
struct ShortOperand {
  std::uint32_t address;
  std::uint32_t step;
};

// Steps [first, last) of 16.
struct ShortSteps {
  int first;
  int last;
};

// c += a b, where the lane's part of a is in registers and `right` is where it reads b; of 16 x 8
// kTiles elements those of tiles from `tiles` on are not wanted. kRightStride: bytes from 16
// columns of b to the next 16. In c tile n is as ptx::multiply_16x8 has it.
template <class T, bool kRightTransposed, int kRightStride, int kTiles>
__device__ __forceinline__ void multiply_step(float (&c)[kTiles][4], const std::uint32_t (&a)[4],
                                              std::uint32_t right, int tiles) {
  static_assert(kTiles % 2 == 0);
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    if (n < tiles) {
      std::uint32_t b[4];
      load_operand<kRightTransposed>(right + static_cast<std::uint32_t>(n / 2 * kRightStride), b);
      ptx::multiply_16x8<T>(c[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      ptx::multiply_16x8<T>(c[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// The same over `steps`, with a in shared memory. Where all kSteps and all tiles are wanted,
// mostly, without branches: then ptxas loads ahead.
template <class T, bool kLeftTransposed, bool kRightTransposed, int kRightStride, int kSteps,
          int kTiles>
__device__ __forceinline__ void multiply_short(float (&c)[kTiles][4], const ShortOperand& left,
                                               const ShortOperand& right, const ShortSteps& steps,
                                               int tiles) {
  const auto step = [&](int k, int wanted) {
    std::uint32_t a[4];
    load_operand<kLeftTransposed>(left.address + static_cast<std::uint32_t>(k) * left.step, a);
    multiply_step<T, kRightTransposed, kRightStride>(
        c, a, right.address + static_cast<std::uint32_t>(k) * right.step, wanted);
  };
  if (steps.first == 0 && steps.last == kSteps && tiles >= kTiles) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      step(k, kTiles);
    }
  } else {
#pragma unroll 1
    for (int k = steps.first; k < steps.last; ++k) {
      step(k, tiles);
    }
  }
}

// A warp's 16 x 8 kTiles product times `factor`, rounded, to a tile; `address` is that of its first
// element.
template <class T, int kColumns, int kTiles>
__device__ __forceinline__ void stage_short(std::uint32_t address, const float (&c)[kTiles][4],
                                            float factor, int lane) {
  address += ShortTile<kColumns>::offset(lane / 4, lane % 4 * 2);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared_uint(address + ShortTile<kColumns>::offset(8 * half, 8 * n),
                             ptx::pack<T>(c[n][2 * half] * factor, c[n][2 * half + 1] * factor));
    }
  }
}

// Rows [0, rows), rows <= kRows, of a tile to rows `row` on of a tensor whose columns can be
// written, and are, 16 bytes at a time. By all threads.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void store_short_tile(std::uint32_t tile, const ShortRows& to, int row,
                                                 int rows) {
  constexpr int kChunks = kColumns / 8;
  constexpr int kStep = kThreads / kChunks;
  const int thread = short_thread();
  const int column = thread % kChunks * 8;
  const int first = thread / kChunks;
  if (column >= to.columns) {
    return;
  }
  const std::uint32_t source = tile + ShortTile<kColumns>::offset(first, column);
  std::uint16_t* destination = to.first + (row + first) * to.row_stride + column;
#pragma unroll
  for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i) {
    if (first + i * kStep < rows) {
      __stcs(reinterpret_cast<uint4*>(destination),
             ptx::load_shared_uint4(source + ShortTile<kColumns>::offset(i * kStep, 0)));
    }
    destination += kStep * to.row_stride;
  }
}

// The same to any tensor, element by element.
template <int kColumns, int kThreads>
__device__ __forceinline__ void scatter_short_tile(std::uint32_t tile, const ShortRows& to, int row,
                                                   int rows) {
  constexpr int kPairs = kColumns / 2;  // of a row
  const int thread = short_thread();
  const int column = thread % kPairs * 2;
#pragma unroll 1
  for (int r = thread / kPairs; r < rows; r += kThreads / kPairs) {
    const std::uint32_t pair = ptx::load_shared_uint(tile + ShortTile<kColumns>::offset(r, column));
    std::uint16_t* const destination = to.first + (row + r) * to.row_stride + column;
    if (column < to.columns) {
      destination[0] = static_cast<std::uint16_t>(pair);
    }
    if (column + 1 < to.columns) {
      destination[1] = static_cast<std::uint16_t>(pair >> 16);
    }
  }
}

// A warp's product times `factor` to rows of f32, of which it begins at (row, column), and rows
// from `rows` on do not exist.
template <int kTiles>
__device__ __forceinline__ void store_short_f32(float* first, std::int64_t row_stride, int columns,
                                                const float (&c)[kTiles][4], float factor, int row,
                                                int column, int rows, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + lane / 4 + 8 * half;
    const int left = r < rows ? columns - column - lane % 4 * 2 : 0;
    float* const destination = first + r * row_stride + column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e < left) {
          destination[8 * n + e] = c[n][2 * half + e] * factor;
        }
      }
    }
  }
}

// Zeros in rows [begin, end) of heads [first_head, last_head); a warp a row of a head, `warp` of
// `num_warps`.
__device__ __forceinline__ void clear_short_rows(const Tensor& t, std::int64_t batch_index,
                                                 std::int64_t begin, std::int64_t end,
                                                 std::int64_t first_head, std::int64_t last_head,
                                                 std::int64_t columns, std::int64_t warp,
                                                 std::int64_t num_warps) {
  if (!t || begin >= end) {
    return;
  }
  const std::int64_t heads = last_head - first_head;
#pragma unroll 1
  for (std::int64_t i = warp; i < (end - begin) * heads; i += num_warps) {
    const std::int64_t at = t.offset(batch_index, begin + i / heads, first_head + i % heads);
#pragma unroll 1
    for (std::int64_t c = threadIdx.x % 32; c < columns; c += 32) {
      if (t.dtype == DType::kF32) {
        static_cast<float*>(t.data)[at + c] = 0;
      } else {
        static_cast<std::uint16_t*>(t.data)[at + c] = 0;
      }
    }
  }
}

}  // namespace flashgrad::sm90
