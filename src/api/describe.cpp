// SPDX-License-Identifier: Apache-2.0
// Words for dtypes, devices and shapes.
#include "api/describe.hpp"

namespace flashgrad {

std::string device_name(DLDevice device) {
  const std::string id = ":" + std::to_string(device.device_id);
  switch (device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDAHost:
      return "pinned cpu";
    case kDLCUDA:
      return "cuda" + id;
    default:
      return "DLPack device type " + std::to_string(device.device_type) + id;
  }
}

std::string dtype_name(DLDataType t) {
  const std::string bits =
      std::to_string(t.bits) + (t.lanes == 1 ? "" : "x" + std::to_string(t.lanes));
  switch (t.code) {
    case kDLFloat:
      return "f" + bits;
    case kDLBfloat:
      return "bf" + bits;
    case kDLInt:
      return "i" + bits;
    case kDLUInt:
      return "u" + bits;
    case kDLComplex:
      return "c" + bits;
    default:
      return "DLPack type code " + std::to_string(t.code) + " of " + bits + " bits";
  }
}

std::optional<DType> float_dtype(DLDataType t) {
  if (t.lanes != 1) {
    return std::nullopt;
  }
  if (t.code == kDLFloat && t.bits == 64) return DType::kF64;
  if (t.code == kDLFloat && t.bits == 32) return DType::kF32;
  if (t.code == kDLFloat && t.bits == 16) return DType::kF16;
  if (t.code == kDLBfloat && t.bits == 16) return DType::kBF16;
  return std::nullopt;
}

std::string shape_text(const std::int64_t* shape, int ndim) {
  std::string s = "(";
  for (int k = 0; k < ndim; ++k) {
    s += (k > 0 ? ", " : "") + std::to_string(shape[k]);
  }
  return s + ")";
}

}  // namespace flashgrad
