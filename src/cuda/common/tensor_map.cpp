// SPDX-License-Identifier: Apache-2.0
// Implements cuda/common/tensor_map.hpp. The driver's encoder is fetched through the runtime, so
// that nothing links against libcuda.
#include "cuda/common/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "cuda/common/device.hpp"

namespace flashgrad::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(function);
}

// The stride of a dimension of extent 1 is never used, so any legal one will do.
std::int64_t stride_bytes(std::int64_t extent, std::int64_t stride, std::int64_t fallback) {
  return extent > 1 ? 2 * stride : fallback;
}

// kRaggedRows times as much is 2^64, which is as good as 0.
constexpr std::int64_t kFarBytes = std::int64_t{1} << 34;

Status encode(const Tensor& tensor, cuuint32_t rank, const cuuint64_t* dims,
              const cuuint64_t* strides, int box_rows, CUtensorMap* map) {
  static const EncodeTiled encode_tiled = find_encoder();
  if (encode_tiled == nullptr) {
    return {FG_DEVICE_ERROR, "tensor maps: the driver has no cuTensorMapEncodeTiled (want 12.0)"};
  }
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode_tiled(map,
                   tensor.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                   rank, tensor.data, dims, strides, box, element_strides,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {FG_DEVICE_ERROR,
            "tensor maps: cuTensorMapEncodeTiled returned " + std::to_string(result)};
  }
  return {};
}

Status encode_plain(const Tensor& tensor, const Extents& extents, int box_rows, cuuint32_t rank,
                    CUtensorMap* map) {
  const auto fallback = (2 * extents.columns + 15) / 16 * 16;
  const cuuint64_t dims[5] = {
      static_cast<cuuint64_t>(extents.columns), static_cast<cuuint64_t>(extents.rows),
      static_cast<cuuint64_t>(extents.heads), static_cast<cuuint64_t>(extents.batch), 1};
  const cuuint64_t strides[4] = {
      static_cast<cuuint64_t>(stride_bytes(extents.rows, tensor.row_stride, fallback)),
      static_cast<cuuint64_t>(stride_bytes(extents.heads, tensor.head_stride, fallback)),
      static_cast<cuuint64_t>(stride_bytes(extents.batch, tensor.batch_stride, fallback)),
      static_cast<cuuint64_t>(fallback)};
  return encode(tensor, rank, dims, strides, box_rows, map);
}

Status encode_ragged(const Tensor& tensor, const Extents& extents, int box_rows, CUtensorMap* map) {
  constexpr cuuint64_t kAnyCoordinate = 0x7fff0000;
  const auto fallback = (2 * extents.columns + 15) / 16 * 16;
  const auto row = static_cast<cuuint64_t>(stride_bytes(extents.rows, tensor.row_stride, fallback));
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(extents.columns), kRaggedRows,
                              static_cast<cuuint64_t>(extents.heads), kAnyCoordinate,
                              kAnyCoordinate};
  const cuuint64_t strides[4] = {
      row, static_cast<cuuint64_t>(stride_bytes(extents.heads, tensor.head_stride, fallback)), row,
      static_cast<cuuint64_t>(kFarBytes) - row};
  return encode(tensor, 5, dims, strides, box_rows, map);
}

}  // namespace

Extents q_extents(const Problem& p) {
  return {p.packed ? 1 : p.batch, p.seqlen_q, p.heads_q, p.head_dim};
}
Extents k_extents(const Problem& p) {
  return {p.packed ? 1 : p.batch, p.seqlen_kv, p.heads_kv, p.head_dim};
}
Extents v_extents(const Problem& p) {
  return {p.packed ? 1 : p.batch, p.seqlen_kv, p.heads_kv, p.head_dim_v};
}
Extents out_extents(const Problem& p) {
  return {p.packed ? 1 : p.batch, p.seqlen_q, p.heads_q, p.head_dim_v};
}

bool can_map(const Tensor& tensor, const Extents& extents) {
  constexpr std::int64_t kMaxExtent = std::int64_t{1} << 31;
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;
  if (tensor.data == nullptr || size_bytes(tensor.dtype) != 2 ||
      reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0 ||
      (tensor.dim_stride != 1 && extents.columns > 1)) {
    return false;
  }
  const auto legal = [](std::int64_t extent, std::int64_t stride) {
    return extent >= 1 && extent < kMaxExtent &&
           (extent == 1 || (stride >= 0 && 2 * stride < kMaxStride && stride % 8 == 0));
  };
  return legal(extents.rows, tensor.row_stride) && legal(extents.heads, tensor.head_stride) &&
         legal(extents.batch, tensor.batch_stride);
}

Status make_map(const Tensor& tensor, const Extents& extents, int box_rows, MapKind kind,
                std::uint32_t bit, CUtensorMap* map, std::uint32_t* mapped) {
  const bool ragged = kind == MapKind::kRagged;
  if (!can_map(tensor, extents) ||
      (ragged && stride_bytes(extents.rows, tensor.row_stride, 0) >= kFarBytes)) {
    return {};
  }
  *mapped |= bit;
  return ragged ? encode_ragged(tensor, extents, box_rows, map)
                : encode_plain(tensor, extents, box_rows, kind == MapKind::k4d ? 4 : 5, map);
}

}  // namespace flashgrad::cuda
