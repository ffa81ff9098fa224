// SPDX-License-Identifier: Apache-2.0
// Implements pack.hpp.
#include <algorithm>
#include <array>

#include "cuda/common/launch.hpp"
#include "cuda/common/tensor_map.hpp"
#include "cuda/sm90/pack.hpp"

namespace flashgrad::sm90 {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kThreads = 256;
constexpr std::int64_t kWarps = kThreads / 32;

struct PackParams {
  Tensor source;               // (batch, rows, heads, columns), any strides
  std::uint16_t* destination;  // the same, compact but for columns padded to a multiple of 8
  std::int64_t rows;
  std::int64_t heads;
  std::int64_t columns;
  std::int64_t num_vectors;  // of columns
};

__host__ __device__ constexpr std::int64_t padded(std::int64_t columns) {
  return (columns + 7) / 8 * 8;
}

// A warp a vector of columns.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  const std::int64_t lane = threadIdx.x % 32;
  for (std::int64_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < p.num_vectors;
       i += gridDim.x * kWarps) {
    const auto* const source =
        static_cast<const std::uint16_t*>(p.source.data) +
        p.source.offset(i / p.heads / p.rows, i / p.heads % p.rows, i % p.heads);
    for (std::int64_t c = lane; c < p.columns; c += 32) {
      p.destination[i * padded(p.columns) + c] = source[c * p.source.dim_stride];
    }
  }
}

// An input of the pass.
struct Input {
  Tensor Args::*tensor;
  bool unaligned;  // by its strides
  cuda::Extents extents;
};

std::array<Input, 4> inputs(const Problem& p, Pass pass) {
  return {{{&Args::q, p.unaligned_q, cuda::q_extents(p)},
           {&Args::k, p.unaligned_k, cuda::k_extents(p)},
           {&Args::v, p.unaligned_v, cuda::v_extents(p)},
           {&Args::dout, pass == Pass::kBackward && p.unaligned_dout, cuda::out_extents(p)}}};
}

std::int64_t num_vectors(const cuda::Extents& e) { return e.batch * e.rows * e.heads; }

std::size_t copy_bytes(const cuda::Extents& e) {
  const auto bytes = static_cast<std::size_t>(num_vectors(e) * padded(e.columns) * 2);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::size_t pack_bytes(const Problem& problem, Pass pass) {
  std::size_t bytes = 0;
  for (const Input& input : inputs(problem, pass)) {
    bytes += input.unaligned ? copy_bytes(input.extents) : 0;
  }
  return bytes > 0 ? bytes + kAlignment : 0;
}

Status pack_inputs(const Problem& problem, Pass pass, std::size_t used_bytes, Args* args) {
  const std::size_t bytes = pack_bytes(problem, pass);
  if (bytes == 0 || args->workspace_bytes < used_bytes + bytes) {
    return {};
  }
  args->workspace_bytes -= bytes;
  auto room = reinterpret_cast<std::uintptr_t>(args->workspace) + args->workspace_bytes;
  room = (room + kAlignment - 1) / kAlignment * kAlignment;
  for (const Input& input : inputs(problem, pass)) {
    if (!input.unaligned) {
      continue;
    }
    Tensor& tensor = args->*input.tensor;
    const cuda::Extents& e = input.extents;
    const PackParams params{.source = tensor,
                            .destination = reinterpret_cast<std::uint16_t*>(room),
                            .rows = e.rows,
                            .heads = e.heads,
                            .columns = e.columns,
                            .num_vectors = num_vectors(e)};
    constexpr std::int64_t kMaxCtas = 4096;
    FG_RETURN_IF_ERROR(
        cuda::launch("sm90 pack", pack_kernel,
                     {.num_ctas = std::min((params.num_vectors + kWarps - 1) / kWarps, kMaxCtas),
                      .num_threads = kThreads},
                     args->stream, params));
    tensor.data = params.destination;
    tensor.dim_stride = 1;
    tensor.head_stride = padded(e.columns);
    tensor.row_stride = tensor.head_stride * e.heads;
    tensor.batch_stride = problem.packed ? 0 : tensor.row_stride * e.rows;
    room += copy_bytes(e);
  }
  return {};
}

}  // namespace flashgrad::sm90
