// SPDX-License-Identifier: Apache-2.0
// Implements pack.hpp.
#include <algorithm>
#include <array>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/fwd_launch.hpp"
#include "cuda/sm90/pack.hpp"
#include "cuda/sm90/pieces.cuh"

namespace flashgrad::sm90 {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kThreads = 256;
// Pieces of 16 bytes that a thread has under way at a time. A multiprocessor needs some 30 KB for
// the memory's speed.
constexpr int kPiecesPerThread = 4;
constexpr int kPiecesPerCta = kThreads * kPiecesPerThread;

// One tensor, (batch, rows, heads) of vectors of columns, all counted in elements of 16 bits; an
// f32 column is two of them. The side in the workspace has aligned vectors.
struct Copy {
  Tensor source;
  Tensor destination;
  // The bytes of the source, outside of which nothing is read.
  std::uintptr_t source_begin;
  std::uintptr_t source_end;
  std::int64_t rows;
  std::int64_t num_vectors;
  unsigned heads;
  int read;     // elements of a vector in the source
  int written;  // and in the destination: those beyond are 0
  // 16-byte pieces of the destination that a vector touches at most, and vectors of a CTA.
  unsigned pieces;
  unsigned vectors_per_cta;
  std::int64_t num_ctas;
};

constexpr int kMaxCopies = 5;
struct Copies {
  Copy copies[kMaxCopies];
  int count;
};

// Zeroes the elements of a piece from `count` on.
__device__ __forceinline__ void clear_tail(uint4& piece, int count) {
  const auto clear = [count](std::uint32_t& pair, int first) {
    pair = first + 1 < count ? pair : first < count ? pair & 0xffffU : 0U;
  };
  clear(piece.x, 0);
  clear(piece.y, 2);
  clear(piece.z, 4);
  clear(piece.w, 6);
}

// The 16 bytes at `at`, a multiple of 16, those outside of the source 0.
__device__ __forceinline__ uint4 load_aligned(const Copy& copy, std::uintptr_t at) {
  if (at >= copy.source_begin && at + 16 <= copy.source_end) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  }
  std::uint32_t x[4] = {};
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    const std::uintptr_t element = at + 2 * static_cast<unsigned>(i);
    if (element >= copy.source_begin && element < copy.source_end) {
      x[i / 2] |= std::uint32_t{*reinterpret_cast<const std::uint16_t*>(element)} << (i % 2 * 16);
    }
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// A piece of a vector that a thread has under way.
struct Piece {
  uint4 low, high;    // the aligned 16 bytes in which its elements begin, and the next
  unsigned shift;     // bytes of `low` before its first element
  int column;         // of its first element; negative where the vector begins later
  std::uint16_t* to;  // null: there is no such piece
};

__device__ __forceinline__ Piece load_piece(const Copy& copy, std::int64_t row, std::int64_t batch,
                                            unsigned head, unsigned number) {
  Piece piece{};
  auto* const to = static_cast<std::uint16_t*>(copy.destination.data) +
                   copy.destination.offset(batch, row, head);
  piece.column = static_cast<int>(number) * kPieceElements - elements_before(to);
  if (piece.column >= copy.written) {
    return piece;
  }
  piece.to = to + piece.column;
  const auto* const from =
      static_cast<const std::uint16_t*>(copy.source.data) + copy.source.offset(batch, row, head);
  if (copy.source.dim_stride == 0) {
    const std::uint32_t pair = std::uint32_t{*from} * 0x10001U;
    piece.low = make_uint4(pair, pair, pair, pair);
    return piece;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(from);
  const std::uintptr_t end = begin + 2 * static_cast<unsigned>(copy.read);
  const std::uintptr_t at = begin + static_cast<std::uintptr_t>(std::int64_t{2} * piece.column);
  const std::uintptr_t aligned = at / 16 * 16;
  piece.shift = static_cast<unsigned>(at % 16);
  if (aligned + 16 > begin && aligned < end) {
    piece.low = load_aligned(copy, aligned);
  }
  if (piece.shift != 0 && aligned + 16 < end) {
    piece.high = load_aligned(copy, aligned + 16);
  }
  return piece;
}

__device__ __forceinline__ void finish_piece(const Copy& copy, const Piece& piece) {
  if (piece.to == nullptr) {
    return;
  }
  uint4 x = shift_pieces(piece.low, piece.high, piece.shift);
  const int left = copy.read - piece.column;
  if (left < kPieceElements) {
    clear_tail(x, left);
  }
  store_piece(piece.to, x, piece.column, copy.written);
}

// A CTA copies some vectors of one tensor: reads and writes are of 16 bytes at multiples of 16, and
// what lies between is shifted.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Copies p) {
  std::int64_t cta = blockIdx.x;
  int number = 0;
  while (number + 1 < p.count && cta >= p.copies[number].num_ctas) {
    cta -= p.copies[number].num_ctas;
    ++number;
  }
  const Copy& copy = p.copies[number];
  const std::int64_t first = cta * copy.vectors_per_cta;
  const auto first_head = static_cast<unsigned>(first % copy.heads);
  const auto first_row = static_cast<unsigned>(first / copy.heads % copy.rows);
  const std::int64_t first_batch = first / copy.heads / copy.rows;
  const auto rows = static_cast<unsigned>(copy.rows);
  const auto vectors = static_cast<unsigned>(
      min(static_cast<std::int64_t>(copy.vectors_per_cta), copy.num_vectors - first));
  Piece pieces[kPiecesPerThread];
#pragma unroll
  for (int i = 0; i < kPiecesPerThread; ++i) {
    const unsigned index = threadIdx.x + static_cast<unsigned>(i * kThreads);
    const unsigned vector = index / copy.pieces;
    pieces[i].to = nullptr;
    if (vector < vectors) {
      const unsigned head = first_head + vector;
      const unsigned row = first_row + head / copy.heads;
      pieces[i] = load_piece(copy, row % rows, first_batch + row / rows, head % copy.heads,
                             index % copy.pieces);
    }
  }
#pragma unroll
  for (int i = 0; i < kPiecesPerThread; ++i) {
    finish_piece(copy, pieces[i]);
  }
}

std::int64_t padded(std::int64_t columns) {
  return (columns + kPieceElements - 1) / kPieceElements * kPieceElements;
}

// A tensor of the pass that needs a copy, or might.
struct Candidate {
  Tensor Args::*tensor;
  bool needs_copy;
  DType dtype;
  cuda::Extents extents;

  [[nodiscard]] std::int64_t num_vectors() const {
    return extents.batch * extents.rows * extents.heads;
  }
  // The copy's bytes, rounded up.
  [[nodiscard]] std::size_t bytes() const {
    const auto exact = static_cast<std::size_t>(num_vectors() * padded(extents.columns) *
                                                std::int64_t{size_bytes(dtype)});
    return (exact + kAlignment - 1) / kAlignment * kAlignment;
  }
  // A copy of the tensor at `data`.
  [[nodiscard]] Tensor compact(std::uintptr_t data) const {
    Tensor result;
    result.data = reinterpret_cast<void*>(data);
    result.dtype = dtype;
    result.head_stride = padded(extents.columns);
    result.row_stride = result.head_stride * extents.heads;
    result.batch_stride = extents.batch > 1 ? result.row_stride * extents.rows : 0;
    return result;
  }
};

// `unaligned`: by its strides. Gradients in f32 are written element by element, so only their width
// counts.
Candidate candidate(Tensor Args::*tensor, bool given, bool unaligned, DType dtype,
                    const cuda::Extents& extents) {
  const bool needs_copy =
      extents.columns % kPieceElements != 0 || (unaligned && dtype != DType::kF32);
  return {tensor, given && needs_copy, dtype, extents};
}

using Candidates = std::array<Candidate, 5>;

Candidates inputs(const Problem& p, Pass pass) {
  const bool backward = pass == Pass::kBackward;
  const cuda::Extents out = cuda::out_extents(p);
  return {candidate(&Args::q, true, p.unaligned_q, p.dtype, cuda::q_extents(p)),
          candidate(&Args::k, true, p.unaligned_k, p.dtype, cuda::k_extents(p)),
          candidate(&Args::v, true, p.unaligned_v, p.dtype, cuda::v_extents(p)),
          candidate(&Args::out, backward && p.has_dout, p.unaligned_out, p.dtype, out),
          candidate(&Args::dout, backward && p.has_dout, p.unaligned_dout, p.dtype, out)};
}

Candidates outputs(const Problem& p, Pass pass) {
  const bool backward = pass == Pass::kBackward;
  return {
      candidate(&Args::out, !backward && !forward_writes_anywhere(p), p.unaligned_out, p.dtype,
                cuda::out_extents(p)),
      candidate(&Args::dq, backward && p.wants_dq, p.unaligned_dq, p.dq_dtype, cuda::q_extents(p)),
      candidate(&Args::dk, backward && p.wants_dk, p.unaligned_dk, p.dk_dtype, cuda::k_extents(p)),
      candidate(&Args::dv, backward && p.wants_dv, p.unaligned_dv, p.dv_dtype, cuda::v_extents(p)),
      Candidate{}};
}

// The same tensor in elements of 16 bits.
Tensor halved(const Tensor& tensor) {
  Tensor result = tensor;
  if (tensor.dtype == DType::kF32) {
    for (std::int64_t* stride : {&result.batch_stride, &result.row_stride, &result.head_stride}) {
      *stride *= 2;
    }
  }
  return result;
}

// `padded_out`: the destination is the copy in the workspace.
Copy make_copy(const Candidate& candidate, const Tensor& source, const Tensor& destination,
               bool padded_out) {
  const cuda::Extents& e = candidate.extents;
  const auto halves = static_cast<int>(size_bytes(candidate.dtype) / 2);
  Copy copy{};
  copy.source = halved(source);
  copy.destination = halved(destination);
  copy.rows = e.rows;
  copy.num_vectors = candidate.num_vectors();
  copy.heads = static_cast<unsigned>(e.heads);
  copy.read = static_cast<int>(e.columns) * halves;
  copy.written = padded_out ? static_cast<int>(padded(e.columns)) * halves : copy.read;
  // A vector that begins anywhere touches one piece more.
  const int longest = padded_out ? copy.written : copy.written + kPieceElements - 1;
  copy.pieces = static_cast<unsigned>((longest + kPieceElements - 1) / kPieceElements);
  copy.vectors_per_cta = kPiecesPerCta / copy.pieces;
  copy.num_ctas = (copy.num_vectors + copy.vectors_per_cta - 1) / copy.vectors_per_cta;
  copy.source_begin = reinterpret_cast<std::uintptr_t>(source.data);
  copy.source_end = copy.source_begin + 2 * static_cast<unsigned>(copy.read);
  const auto reach = [&copy](std::int64_t extent, std::int64_t stride) {
    const std::int64_t bytes = 2 * (extent - 1) * stride;
    (bytes < 0 ? copy.source_begin : copy.source_end) += static_cast<std::uintptr_t>(bytes);
  };
  reach(e.batch, copy.source.batch_stride);
  reach(e.rows, copy.source.row_stride);
  reach(e.heads, copy.source.head_stride);
  return copy;
}

Status launch_copies(const char* name, const Copies& copies, void* stream) {
  std::int64_t num_ctas = 0;
  for (int i = 0; i < copies.count; ++i) {
    num_ctas += copies.copies[i].num_ctas;
  }
  return cuda::launch(name, copy_kernel, {.num_ctas = num_ctas, .num_threads = kThreads}, stream,
                      copies);
}

}  // namespace

Problem packed_problem(const Problem& problem, Pass pass) {
  Problem p = problem;
  p.head_dim = padded(p.head_dim);
  // An out that is written in place has its own width.
  if (pass == Pass::kBackward || !forward_writes_anywhere(p)) {
    p.head_dim_v = padded(p.head_dim_v);
  }
  p.unaligned_q = p.unaligned_k = p.unaligned_v = p.unaligned_out = p.unaligned_dout = false;
  p.unaligned_dq = p.unaligned_dk = p.unaligned_dv = false;
  return p;
}

std::size_t pack_bytes(const Problem& problem, Pass pass) {
  std::size_t bytes = 0;
  for (const Candidates& side : {inputs(problem, pass), outputs(problem, pass)}) {
    for (const Candidate& tensor : side) {
      bytes += tensor.needs_copy ? tensor.bytes() : 0;
    }
  }
  return bytes > 0 ? bytes + kAlignment : 0;
}

Status pack_inputs(const Problem& problem, Pass pass, Args* args) {
  args->workspace_bytes -= pack_bytes(problem, pass);
  auto room = reinterpret_cast<std::uintptr_t>(args->workspace) + args->workspace_bytes;
  room = (room + kAlignment - 1) / kAlignment * kAlignment;
  Copies copies{};
  for (const Candidate& input : inputs(problem, pass)) {
    if (input.needs_copy) {
      Tensor& tensor = args->*input.tensor;
      const Tensor compact = input.compact(room);
      copies.copies[copies.count++] = make_copy(input, tensor, compact, true);
      tensor = compact;
      room += input.bytes();
    }
  }
  for (const Candidate& output : outputs(problem, pass)) {
    if (output.needs_copy) {
      args->*output.tensor = output.compact(room);
      room += output.bytes();
    }
  }
  return launch_copies("sm90 pack", copies, args->stream);
}

Status unpack_outputs(const Problem& problem, Pass pass, const Args& packed, const Args& args) {
  Copies copies{};
  for (const Candidate& output : outputs(problem, pass)) {
    if (output.needs_copy) {
      copies.copies[copies.count++] =
          make_copy(output, packed.*output.tensor, args.*output.tensor, false);
    }
  }
  return launch_copies("sm90 unpack", copies, args.stream);
}

}  // namespace flashgrad::sm90
