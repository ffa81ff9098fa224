// SPDX-License-Identifier: Apache-2.0
// Implements pack.hpp.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/bwd_plan.hpp"
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

// The way from a vector of the caller's tensor to the one that is some numbers behind it.
struct Step {
  unsigned inner;
  unsigned middle;
  std::int64_t offset;        // in elements
  std::int64_t after_inner;   // besides, if the innermost dimension has ended
  std::int64_t after_middle;  // and if the middle one has
};

// One tensor between the caller's memory and a compact copy, all counted in elements of 16 bits; an
// f32 column is two of them.
struct Copy {
  std::uint16_t* compact;  // vectors of `padded` elements, one behind the other
  std::uint16_t* strided;
  bool is_one_element;  // all of a vector's are the same one
  // Vectors are numbered as the caller's lie in memory: heads or rows are innermost, then the
  // others, then batch entries.
  unsigned inner;
  unsigned middle;
  std::int64_t inner_stride;
  std::int64_t middle_stride;
  std::int64_t outer_stride;
  // The bytes of the caller's tensor, and whether pieces that it touches may lie partly outside:
  // nothing is read there.
  std::uintptr_t begin;
  std::uintptr_t end;
  bool is_cut;
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
  unsigned inner;
  unsigned middle;

  __device__ __forceinline__ void advance(const Copy& copy) {
    const Step& step = copy.step;
    compact += static_cast<std::int64_t>(copy.vectors_at_once) * copy.padded;
    strided += step.offset;
    inner += step.inner;
    middle += step.middle;
    if (inner >= copy.inner) {
      inner -= copy.inner;
      ++middle;
      strided += step.after_inner;
    }
    if (middle >= copy.middle) {
      middle -= copy.middle;
      strided += step.after_middle;
    }
  }
};

// Piece `number` of a vector of the caller's, to a copy, whose pieces are all whole.
__device__ __forceinline__ Piece piece_to_pack(const Copy& copy, const Place& place, int number) {
  Piece piece;
  piece.destination = place.compact;
  piece.skipped = 0;
  if (copy.is_one_element) {
    const std::uint32_t pair = std::uint32_t{*place.strided} * 0x10001U;
    piece.low = piece.high = make_uint4(pair, pair, pair, pair);
    return piece;
  }
  const auto at = reinterpret_cast<std::uintptr_t>(place.strided + number * kPieceElements);
  piece.skipped = static_cast<unsigned>(at % 16);
  piece.low = piece.high = make_uint4(0, 0, 0, 0);
  const int beyond = 2 * ((number + 1) * kPieceElements - copy.columns);  // bytes of padding
  if (beyond < 16) {
    piece.low = load_piece(copy, at - piece.skipped);
  }
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
  const std::int64_t line = vector / copy.inner;
  Place place;
  place.inner = static_cast<unsigned>(vector % copy.inner);
  place.middle = static_cast<unsigned>(line % copy.middle);
  place.strided = copy.strided + place.inner * copy.inner_stride +
                  place.middle * copy.middle_stride + line / copy.middle * copy.outer_stride;
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
    const auto exact =
        static_cast<std::size_t>(num_vectors() * width * std::int64_t{size_bytes(dtype)});
    return (exact + kAlignment - 1) / kAlignment * kAlignment;
  }
  // A copy of `tensor` at `data`, with rows or heads innermost as there.
  [[nodiscard]] Tensor compact(const Tensor& tensor, std::uintptr_t data) const {
    Tensor result;
    result.data = reinterpret_cast<void*>(data);
    result.dtype = dtype;
    const bool rows_inside = has_rows_inside(tensor);
    result.row_stride = rows_inside ? width : width * extents.heads;
    result.head_stride = rows_inside ? width * extents.rows : width;
    result.batch_stride = extents.batch > 1 ? width * extents.rows * extents.heads : 0;
    return result;
  }
  [[nodiscard]] bool has_rows_inside(const Tensor& t) const {
    return extents.rows > 1 && extents.heads > 1 &&
           std::abs(t.row_stride) < std::abs(t.head_stride);
  }
};

// Whether a tensor of 16-bit elements is unaligned.
bool has_unaligned(const Problem& p) {
  const auto is_slow = [&p](bool unaligned, DType dtype) { return unaligned && dtype == p.dtype; };
  return p.unaligned_q || p.unaligned_k || p.unaligned_v || p.unaligned_out || p.unaligned_dout ||
         is_slow(p.unaligned_dq, p.dq_dtype) || is_slow(p.unaligned_dk, p.dk_dtype) ||
         is_slow(p.unaligned_dv, p.dv_dtype);
}

// Head dims that are padded to a multiple of 8, of all tensors that have them. The forward reads
// aligned rows of any width, but writes only whole pieces fast; so does the backward, but where no
// tensor is unaligned that does not pay for copies of all.
struct Padding {
  bool head_dim;
  bool head_dim_v;
};
Padding padding(const Problem& p, Pass pass) {
  return pass == Pass::kForward
             ? Padding{false, p.unaligned_out || p.head_dim_v % kPieceElements != 0}
             : Padding{has_unaligned(p), has_unaligned(p)};
}

std::array<Candidate, kMaxCopies> inputs(const Problem& p, Pass pass) {
  const Padding pads = padding(p, pass);
  const Problem to = packed_problem(p, pass);
  const bool gives_dout = pass == Pass::kBackward && p.has_dout;
  const auto candidate = [&](Tensor Args::*tensor, bool unaligned, const cuda::Extents& extents,
                             bool is_padded, std::int64_t columns) {
    const bool needs_copy = unaligned || (is_padded && extents.columns % kPieceElements != 0);
    return Candidate{tensor, needs_copy, p.dtype, extents, padded(columns)};
  };
  const cuda::Extents out = cuda::out_extents(p);
  return {candidate(&Args::q, p.unaligned_q, cuda::q_extents(p), pads.head_dim, to.head_dim),
          candidate(&Args::k, p.unaligned_k, cuda::k_extents(p), pads.head_dim, to.head_dim),
          candidate(&Args::v, p.unaligned_v, cuda::v_extents(p), pads.head_dim_v, to.head_dim_v),
          candidate(&Args::out, gives_dout && p.unaligned_out, out, gives_dout && pads.head_dim_v,
                    to.head_dim_v),
          candidate(&Args::dout, gives_dout && p.unaligned_dout, out, gives_dout && pads.head_dim_v,
                    to.head_dim_v)};
}

std::array<Candidate, 4> outputs(const Problem& p, Pass pass) {
  const Padding pads = padding(p, pass);
  const Problem to = packed_problem(p, pass);
  const bool backward = pass == Pass::kBackward;
  // Gradients in f32 are written element by element anyway.
  const auto candidate = [&](Tensor Args::*tensor, bool wanted, bool unaligned, DType dtype,
                             const cuda::Extents& extents, bool is_padded, std::int64_t columns) {
    const bool needs_copy =
        (unaligned && dtype == p.dtype) || (is_padded && extents.columns % kPieceElements != 0);
    return Candidate{tensor, wanted && needs_copy, dtype, extents, padded(columns)};
  };
  return {candidate(&Args::out, !backward, p.unaligned_out, p.dtype, cuda::out_extents(p),
                    pads.head_dim_v, to.head_dim_v),
          candidate(&Args::dq, backward && p.wants_dq, p.unaligned_dq, p.dq_dtype,
                    cuda::q_extents(p), pads.head_dim, to.head_dim),
          candidate(&Args::dk, backward && p.wants_dk, p.unaligned_dk, p.dk_dtype,
                    cuda::k_extents(p), pads.head_dim, to.head_dim),
          candidate(&Args::dv, backward && p.wants_dv, p.unaligned_dv, p.dv_dtype,
                    cuda::v_extents(p), pads.head_dim_v, to.head_dim_v)};
}

// Between `tensor` and `compact`, whichever way.
Copy make_copy(const Candidate& candidate, const Tensor& tensor, const Tensor& compact,
               bool packs) {
  const cuda::Extents& e = candidate.extents;
  const std::int64_t halves = size_bytes(candidate.dtype) / 2;
  const bool rows_inside = candidate.has_rows_inside(tensor);
  const std::int64_t inner = rows_inside ? e.rows : e.heads;
  const std::int64_t middle = rows_inside ? e.heads : e.rows;
  Copy copy{};
  copy.num_vectors = candidate.num_vectors();
  if (copy.num_vectors == 0) {
    return copy;
  }
  copy.compact = static_cast<std::uint16_t*>(compact.data);
  copy.strided = static_cast<std::uint16_t*>(tensor.data);
  copy.is_one_element = tensor.dim_stride == 0;
  copy.inner = static_cast<unsigned>(inner);
  copy.middle = static_cast<unsigned>(middle);
  copy.inner_stride = halves * (rows_inside ? tensor.row_stride : tensor.head_stride);
  copy.middle_stride = halves * (rows_inside ? tensor.head_stride : tensor.row_stride);
  copy.outer_stride = halves * tensor.batch_stride;
  copy.columns = static_cast<int>(halves * e.columns);
  copy.padded = static_cast<int>(halves * candidate.width);
  copy.begin = reinterpret_cast<std::uintptr_t>(tensor.data);
  copy.end = copy.begin + static_cast<std::uintptr_t>(copy.is_one_element ? 2 : 2 * copy.columns);
  for (const auto& [extent, stride] : {std::pair{inner, copy.inner_stride},
                                       {middle, copy.middle_stride},
                                       {e.batch, copy.outer_stride}}) {
    const std::int64_t bytes = 2 * (extent - 1) * stride;
    (bytes < 0 ? copy.begin : copy.end) += static_cast<std::uintptr_t>(bytes);
  }
  copy.is_cut = copy.begin % 16 != 0 || copy.end % 16 != 0;
  // A vector that begins anywhere touches one piece more.
  const int longest = packs ? copy.padded : copy.columns + kPieceElements - 1;
  copy.pieces = static_cast<unsigned>((longest + kPieceElements - 1) / kPieceElements);
  copy.vectors_at_once = kThreads / copy.pieces;
  const std::int64_t at_once = copy.vectors_at_once;
  copy.step.inner = static_cast<unsigned>(at_once % inner);
  copy.step.middle = static_cast<unsigned>(at_once / inner % middle);
  copy.step.offset = copy.step.inner * copy.inner_stride + copy.step.middle * copy.middle_stride +
                     at_once / inner / middle * copy.outer_stride;
  copy.step.after_inner = copy.middle_stride - inner * copy.inner_stride;
  copy.step.after_middle = copy.outer_stride - middle * copy.middle_stride;
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
  const Padding pads = padding(problem, pass);
  p.head_dim = pads.head_dim ? padded(p.head_dim) : p.head_dim;
  p.head_dim_v = pads.head_dim_v ? padded(p.head_dim_v) : p.head_dim_v;
  if (pads.head_dim && problem.head_dim % kPieceElements != 0) {
    // dq is written faster in rows as wide as the kernel's (bwd_plan.hpp), if not half of them
    // would be zeros. H200, head dim 100, causal 4k, TFLOP/s: 366 with 104 columns, 385 with 128.
    const int variant = find_variant(p, p.deterministic);
    const std::int64_t width = variant < 0 ? 0 : kBwdConfigs[variant].head_dim;
    p.head_dim = 2 * p.head_dim > width ? std::max(p.head_dim, width) : p.head_dim;
  }
  p.unaligned_q = p.unaligned_k = p.unaligned_v = p.unaligned_out = p.unaligned_dout = false;
  p.unaligned_dq = p.unaligned_dk = p.unaligned_dv = false;
  return p;
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
      const Tensor compact = input.compact(tensor, room);
      copies.copies[copies.count++] = make_copy(input, tensor, compact, true);
      tensor = compact;
      room += input.bytes();
    }
  }
  for (const Candidate& output : outputs(problem, pass)) {
    if (output.needs_copy) {
      Tensor& tensor = args->*output.tensor;
      tensor = output.compact(tensor, room);
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
