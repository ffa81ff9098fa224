// SPDX-License-Identifier: Apache-2.0
// The element-wise part of standard attention, one row at a time.
#pragma once

#include <cstdint>

namespace flashgrad::tool {

// Elements are f32, or bf16 as 16-bit patterns. [begin, end) are the keys that the row sees;
// elsewhere the result is 0.

// p = exp(scale * (s - max)) / sum
void softmax_row(const float* s, float* p, std::int64_t size, std::int64_t begin, std::int64_t end,
                 float scale);
void softmax_row(const std::uint16_t* s, std::uint16_t* p, std::int64_t size, std::int64_t begin,
                 std::int64_t end, float scale);

// ds = scale * p * (dp - sum(p * dp)), in place of dp
void softmax_backward_row(const float* p, float* dp, std::int64_t size, float scale);
void softmax_backward_row(const std::uint16_t* p, std::uint16_t* dp, std::int64_t size,
                          float scale);

// sum_c = sum over `num_rows` rows of `size` elements
void sum_rows(const float* rows, std::int64_t num_rows, std::int64_t size, float* sum);
void sum_rows(const std::uint16_t* rows, std::int64_t num_rows, std::int64_t size,
              std::uint16_t* sum);

}  // namespace flashgrad::tool
