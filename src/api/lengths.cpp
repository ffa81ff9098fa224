// SPDX-License-Identifier: Apache-2.0
// One pass over the offsets and lengths of a side of the batch.
#include "api/lengths.hpp"

#include <string>

namespace flashgrad {

Status check_lengths(const Lengths& lengths) {
  const auto& [side, rows, batch, cu_seqlens, seqused, max_seqlen] = lengths;
  const std::string cu_name = std::string("cu_seqlens_") + side;
  if (cu_seqlens != nullptr) {
    if (cu_seqlens[0] < 0) {
      return invalid(cu_name + ": first offset " + std::to_string(cu_seqlens[0]) +
                     ", want 0 or more");
    }
    for (std::int64_t b = 0; b < batch; ++b) {
      if (cu_seqlens[b + 1] < cu_seqlens[b]) {
        return invalid(cu_name + ": offset " + std::to_string(b + 1) + " is " +
                       std::to_string(cu_seqlens[b + 1]) + ", want " +
                       std::to_string(cu_seqlens[b]) + " or more (offsets must not decrease)");
      }
    }
    if (cu_seqlens[batch] > rows) {
      return invalid(cu_name + ": last offset " + std::to_string(cu_seqlens[batch]) +
                     ", want at most " + std::to_string(rows) + " (the total)");
    }
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t length = cu_seqlens != nullptr ? cu_seqlens[b + 1] - cu_seqlens[b] : rows;
    if (seqused != nullptr) {
      if (seqused[b] < 0 || seqused[b] > length) {
        return invalid(std::string("seqused_") + side + ": entry " + std::to_string(b) + " is " +
                       std::to_string(seqused[b]) + ", want 0 to " + std::to_string(length) +
                       " (the sequence's length)");
      }
      length = seqused[b];
    }
    if (max_seqlen > 0 && length > max_seqlen) {
      return invalid(std::string("max_seqlen_") + side + ": " + std::to_string(max_seqlen) +
                     ", but sequence " + std::to_string(b) + " has length " +
                     std::to_string(length));
    }
    if (cu_seqlens == nullptr && seqused == nullptr) {
      break;  // all alike
    }
  }
  return {};
}

}  // namespace flashgrad
