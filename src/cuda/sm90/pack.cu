// SPDX-License-Identifier: Apache-2.0
// Implements pack.hpp.
#include <algorithm>
#include <array>
#include <utility>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/bwd_launch.hpp"
#include "cuda/sm90/fwd_launch.hpp"
#include "cuda/sm90/pack.hpp"
#include "cuda/sm90/pieces.cuh"

namespace flashgrad::sm90 {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kThreads = 256;
// Pieces that a thread has under way at a time: a multiprocessor needs some 30 KB for the memory's
// speed. And how often it does that at most, since its begin takes as long as a few pieces.
constexpr int kPiecesAtATime = 4;
constexpr std::int64_t kMaxRounds = 4;

// The way from a vector of a tensor to the one that is some numbers behind it, in elements: heads
// are adjacent numbers, then rows, then batch entries.
struct Step {
  unsigned heads;  // to add to the head, and to the row if that passes the last head
  unsigned rows;
  std::int64_t offset;
  std::int64_t after_heads;  // besides, if the head passes the last one
  std::int64_t after_rows;   // and if the row does
};

// One tensor of 16-bit elements between the caller's memory and a compact copy.
struct Copy {
  std::uint16_t* compact;  // vectors of `padded` elements, one behind the other
  Tensor strided;
  // The bytes of the caller's tensor, and whether pieces that it touches may lie partly outside:
  // nothing is read there.
  std::uintptr_t begin;
  std::uintptr_t end;
  bool is_cut;
  unsigned heads;
  unsigned rows;
  std::int64_t num_vectors;
  int columns;
  int padded;
  unsigned pieces;           // that a vector touches at most where it is written
  unsigned vectors_at_once;  // by a CTA
  int rounds;
  Step step;  // by vectors_at_once
  std::int64_t num_ctas;
};

constexpr int kMaxCopies = 5;
struct Copies {
  Copy copies[kMaxCopies];
  int count;
};

// The 16 bytes at `at`, a multiple of 16; those outside of the caller's tensor are 0.
__device__ __forceinline__ uint4 load_piece(const Copy& copy, std::uintptr_t at) {
  if (!copy.is_cut || (at >= copy.begin && at + 16 <= copy.end)) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  }
  std::uint64_t first = 0;
  std::uint64_t last = 0;
#pragma unroll 1
  for (std::uintptr_t element = at; element < at + 16; element += 2) {
    first = first >> 16 | last << 48;
    last >>= 16;
    if (element >= copy.begin && element < copy.end) {
      last |= std::uint64_t{*reinterpret_cast<const std::uint16_t*>(element)} << 48;
    }
  }
  return make_uint4(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(first >> 32),
                    static_cast<std::uint32_t>(last), static_cast<std::uint32_t>(last >> 32));
}

// Which bits of element pair `pair` of a piece belong to its first `count` elements.
__device__ __forceinline__ std::uint32_t kept_bits(int pair, int count) {
  return 2 * pair + 1 < count ? ~0U : 2 * pair < count ? 0xffffU : 0U;
}

// A piece that a thread has under way.
struct Piece {
  uint4 low, high;             // the aligned 16 bytes in which its elements begin, and the next
  unsigned skipped;            // bytes of `low` before its first element
  std::uint16_t* destination;  // of its vector
};

// A vector of the caller's tensor, and its place in the copy.
struct Place {
  std::uint16_t* strided;
  std::uint16_t* compact;
  unsigned head;
  unsigned row;

  __device__ __forceinline__ void advance(const Copy& copy) {
    const Step& step = copy.step;
    compact += static_cast<std::int64_t>(copy.vectors_at_once) * copy.padded;
    strided += step.offset;
    head += step.heads;
    row += step.rows;
    if (head >= copy.heads) {
      head -= copy.heads;
      ++row;
      strided += step.after_heads;
    }
    if (row >= copy.rows) {
      row -= copy.rows;
      strided += step.after_rows;
    }
  }
};

// Piece `number` of a vector of the caller's, to a copy, whose pieces are all whole.
__device__ __forceinline__ Piece piece_to_pack(const Copy& copy, const Place& place, int number) {
  Piece piece;
  piece.destination = place.compact;
  piece.skipped = 0;
  if (copy.strided.dim_stride == 0) {
    const std::uint32_t pair = std::uint32_t{*place.strided} * 0x10001U;
    piece.low = piece.high = make_uint4(pair, pair, pair, pair);
    return piece;
  }
  const auto at = reinterpret_cast<std::uintptr_t>(place.strided + number * kPieceElements);
  piece.skipped = static_cast<unsigned>(at % 16);
  piece.low = load_piece(copy, at - piece.skipped);
  piece.high = make_uint4(0, 0, 0, 0);
  const int beyond = 2 * ((number + 1) * kPieceElements - copy.columns);  // bytes of padding
  if (static_cast<int>(piece.skipped) > max(beyond, 0)) {
    piece.high = load_piece(copy, at - piece.skipped + 16);
  }
  return piece;
}

// Piece `number` of a vector of a copy, counted where it is written.
__device__ __forceinline__ Piece piece_to_unpack(const Copy& copy, const Place& place, int number) {
  Piece piece;
  piece.destination = place.strided;
  const int before = elements_before(place.strided);
  piece.skipped = static_cast<unsigned>(-2 * before) % 16;
  const auto* const source = reinterpret_cast<const uint4*>(place.compact);
  piece.low = piece.high = make_uint4(0, 0, 0, 0);
  const int first = before == 0 ? number : number - 1;
  if (first >= 0 && first * kPieceElements < copy.padded) {
    piece.low = __ldg(source + first);
  }
  if (before != 0 && number * kPieceElements < copy.padded) {
    piece.high = __ldg(source + number);
  }
  return piece;
}

// A thread copies the same piece of several vectors; what is loaded and stored are whole pieces of
// 16 bytes, but for the ends of a vector, and between the two they are shifted.
template <bool kPacks>
__global__ void __launch_bounds__(kThreads, 3) copy_kernel(const __grid_constant__ Copies p) {
  std::int64_t cta = blockIdx.x;
  int index = 0;
  while (index + 1 < p.count && cta >= p.copies[index].num_ctas) {
    cta -= p.copies[index].num_ctas;
    ++index;
  }
  const Copy& copy = p.copies[index];
  const unsigned thread_vector = threadIdx.x / copy.pieces;
  const auto number = static_cast<int>(threadIdx.x % copy.pieces);
  if (thread_vector >= copy.vectors_at_once) {
    return;
  }
  const std::int64_t per_cta = std::int64_t{copy.vectors_at_once} * (kPiecesAtATime * copy.rounds);
  const std::int64_t vector = cta * per_cta + thread_vector;
  auto left = static_cast<int>(min(copy.num_vectors - cta * per_cta, per_cta)) -
              static_cast<int>(thread_vector);
  const auto step = static_cast<int>(copy.vectors_at_once);
  const std::int64_t line = vector / copy.heads;
  Place place;
  place.head = static_cast<unsigned>(vector % copy.heads);
  place.row = static_cast<unsigned>(line % copy.rows);
  place.strided = static_cast<std::uint16_t*>(copy.strided.data) +
                  copy.strided.offset(line / copy.rows, place.row, place.head);
  place.compact = copy.compact + vector * copy.padded;
  const int kept = copy.columns - number * kPieceElements;
  const uint4 mask =
      make_uint4(kept_bits(0, kept), kept_bits(1, kept), kept_bits(2, kept), kept_bits(3, kept));
#pragma unroll 1
  for (; left > 0; left -= kPiecesAtATime * step) {
    Piece pieces[kPiecesAtATime];
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) {
      if (left > i * step) {
        pieces[i] =
            kPacks ? piece_to_pack(copy, place, number) : piece_to_unpack(copy, place, number);
      }
      place.advance(copy);
    }
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) {
      if (left > i * step) {
        const Piece& piece = pieces[i];
        uint4 x = shift_pieces(piece.low, piece.high, piece.skipped);
        if constexpr (kPacks) {
          x = make_uint4(x.x & mask.x, x.y & mask.y, x.z & mask.z, x.w & mask.w);
          reinterpret_cast<uint4*>(piece.destination)[number] = x;
        } else {
          const int column = number * kPieceElements - elements_before(piece.destination);
          if (column < copy.columns) {
            store_piece(piece.destination + column, x, column, copy.columns);
          }
        }
      }
    }
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
  std::int64_t width;  // columns of the copy

  [[nodiscard]] std::int64_t num_vectors() const {
    return extents.batch * extents.rows * extents.heads;
  }
  // The copy's bytes, rounded up.
  [[nodiscard]] std::size_t bytes() const {
    const auto exact = static_cast<std::size_t>(num_vectors() * width * 2);
    return (exact + kAlignment - 1) / kAlignment * kAlignment;
  }
  // A copy of the tensor at `data`.
  [[nodiscard]] Tensor compact(std::uintptr_t data) const {
    Tensor result;
    result.data = reinterpret_cast<void*>(data);
    result.dtype = dtype;
    result.head_stride = width;
    result.row_stride = result.head_stride * extents.heads;
    result.batch_stride = extents.batch > 1 ? result.row_stride * extents.rows : 0;
    return result;
  }
};

// `unaligned`: by its strides. Gradients in f32 are written element by element anyway.
Candidate candidate(Tensor Args::*tensor, bool given, bool unaligned, DType dtype,
                    const cuda::Extents& extents) {
  const bool needs_copy = unaligned || extents.columns % kPieceElements != 0;
  return {tensor, given && needs_copy && dtype != DType::kF32, dtype, extents,
          padded(extents.columns)};
}

std::array<Candidate, kMaxCopies> inputs(const Problem& p, Pass pass) {
  const bool gives_dout = pass == Pass::kBackward && p.has_dout;
  const cuda::Extents out = cuda::out_extents(p);
  return {candidate(&Args::q, true, p.unaligned_q, p.dtype, cuda::q_extents(p)),
          candidate(&Args::k, true, p.unaligned_k, p.dtype, cuda::k_extents(p)),
          candidate(&Args::v, true, p.unaligned_v, p.dtype, cuda::v_extents(p)),
          candidate(&Args::out, gives_dout, p.unaligned_out, p.dtype, out),
          candidate(&Args::dout, gives_dout, p.unaligned_dout, p.dtype, out)};
}

std::array<Candidate, 4> outputs(const Problem& p, Pass pass) {
  const bool backward = pass == Pass::kBackward;
  const GradientStores stores = backward ? gradient_stores(p) : GradientStores{};
  const bool copies_out = !backward && !forward_writes_anywhere(p);
  const bool copies_dk_dv = backward && !stores.dk_dv_anywhere;
  Candidate dq = candidate(&Args::dq, backward && p.wants_dq && !stores.dq_anywhere, p.unaligned_dq,
                           p.dq_dtype, cuda::q_extents(p));
  dq.width = stores.dq_columns;
  return {candidate(&Args::out, copies_out, p.unaligned_out, p.dtype, cuda::out_extents(p)), dq,
          candidate(&Args::dk, copies_dk_dv && p.wants_dk, p.unaligned_dk, p.dk_dtype,
                    cuda::k_extents(p)),
          candidate(&Args::dv, copies_dk_dv && p.wants_dv, p.unaligned_dv, p.dv_dtype,
                    cuda::v_extents(p))};
}

// Between `tensor` and `compact`, whichever way.
Copy make_copy(const Candidate& candidate, const Tensor& tensor, const Tensor& compact,
               bool packs) {
  const cuda::Extents& e = candidate.extents;
  const Tensor& t = tensor;
  Copy copy{};
  copy.compact = static_cast<std::uint16_t*>(compact.data);
  copy.strided = tensor;
  copy.columns = static_cast<int>(e.columns);
  copy.padded = static_cast<int>(candidate.width);
  copy.heads = static_cast<unsigned>(e.heads);
  copy.rows = static_cast<unsigned>(e.rows);
  copy.num_vectors = candidate.num_vectors();
  if (copy.num_vectors == 0) {
    return copy;
  }
  copy.begin = reinterpret_cast<std::uintptr_t>(t.data);
  copy.end = copy.begin + static_cast<std::uintptr_t>(t.dim_stride == 0 ? 2 : 2 * copy.columns);
  for (const auto& [extent, stride] :
       {std::pair{e.batch, t.batch_stride}, {e.rows, t.row_stride}, {e.heads, t.head_stride}}) {
    const std::int64_t bytes = 2 * (extent - 1) * stride;
    (bytes < 0 ? copy.begin : copy.end) += static_cast<std::uintptr_t>(bytes);
  }
  copy.is_cut = copy.begin % 16 != 0 || copy.end % 16 != 0;
  // A vector that begins anywhere touches one piece more.
  const int longest = packs ? copy.padded : copy.columns + kPieceElements - 1;
  copy.pieces = static_cast<unsigned>((longest + kPieceElements - 1) / kPieceElements);
  copy.vectors_at_once = kThreads / copy.pieces;
  const std::int64_t at_once = copy.vectors_at_once;
  const std::int64_t heads = at_once % e.heads;
  const std::int64_t rows = at_once / e.heads % e.rows;
  const std::int64_t entries = at_once / e.heads / e.rows;
  copy.step = {.heads = static_cast<unsigned>(heads),
               .rows = static_cast<unsigned>(rows),
               .offset = t.offset(entries, rows, heads),
               .after_heads = t.row_stride - e.heads * t.head_stride,
               .after_rows = t.batch_stride - e.rows * t.row_stride};
  // Enough CTAs for any device, if there are so many vectors.
  constexpr std::int64_t kManyCtas = 1024;
  const std::int64_t at_a_time = at_once * kPiecesAtATime;
  copy.rounds = static_cast<int>(
      std::clamp<std::int64_t>(copy.num_vectors / (at_a_time * kManyCtas), 1, kMaxRounds));
  copy.num_ctas = (copy.num_vectors + at_a_time * copy.rounds - 1) / (at_a_time * copy.rounds);
  return copy;
}

template <bool kPacks>
Status launch_copies(const Copies& copies, void* stream) {
  std::int64_t num_ctas = 0;
  for (int i = 0; i < copies.count; ++i) {
    num_ctas += copies.copies[i].num_ctas;
  }
  return cuda::launch(kPacks ? "sm90 pack" : "sm90 unpack", copy_kernel<kPacks>,
                      {.num_ctas = num_ctas, .num_threads = kThreads}, stream, copies);
}

}  // namespace

Problem packed_problem(const Problem& problem, Pass pass) {
  Problem p = problem;
  p.head_dim = padded(p.head_dim);
  // The forward writes as many columns as the problem has.
  if (pass == Pass::kBackward || !forward_writes_anywhere(p)) {
    p.head_dim_v = padded(p.head_dim_v);
  }
  p.unaligned_q = p.unaligned_k = p.unaligned_v = p.unaligned_out = p.unaligned_dout = false;
  p.unaligned_dq = p.unaligned_dk = p.unaligned_dv = false;
  return p;
}

GradientColumns packed_columns(const Problem& p) {
  const auto [out, dq, dk, dv] = outputs(p, Pass::kBackward);
  return {.dq = dq.needs_copy ? dq.width : p.head_dim,
          .dk = dk.needs_copy ? dk.width : p.head_dim,
          .dv = dv.needs_copy ? dv.width : p.head_dim_v};
}

std::size_t pack_bytes(const Problem& problem, Pass pass) {
  std::size_t bytes = 0;
  for (const Candidate& input : inputs(problem, pass)) {
    bytes += input.needs_copy ? input.bytes() : 0;
  }
  for (const Candidate& output : outputs(problem, pass)) {
    bytes += output.needs_copy ? output.bytes() : 0;
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
  return launch_copies<true>(copies, args->stream);
}

Status unpack_outputs(const Problem& problem, Pass pass, const Args& packed, const Args& args) {
  Copies copies{};
  for (const Candidate& output : outputs(problem, pass)) {
    if (output.needs_copy) {
      copies.copies[copies.count++] =
          make_copy(output, args.*output.tensor, packed.*output.tensor, false);
    }
  }
  return launch_copies<false>(copies, args.stream);
}

}  // namespace flashgrad::sm90
