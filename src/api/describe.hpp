// SPDX-License-Identifier: Apache-2.0
// DLPack's dtypes, devices and shapes in words, for messages.
#pragma once

#include <optional>
#include <string>

#include "core/dtype.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad {

std::string device_name(DLDevice device);                     // cuda:0
std::string dtype_name(DLDataType t);                         // bf16
std::optional<DType> float_dtype(DLDataType t);               // f64, f32, bf16, f16
std::string shape_text(const std::int64_t* shape, int ndim);  // (2, 512, 8, 64)

}  // namespace flashgrad
