// SPDX-License-Identifier: Apache-2.0
// The checks that read the offsets and lengths of host tensors.
#pragma once

#include <cstdint>

#include "core/status.hpp"

namespace flashgrad {

// One side (queries or keys) of a batch.
struct Lengths {
  const char* side;   // "q" or "kv"
  std::int64_t rows;  // of each batch entry, or in all if packed
  std::int64_t batch;
  const std::int32_t* cu_seqlens;  // (batch + 1), null: fixed length
  const std::int32_t* seqused;     // (batch), null: all rows
  std::int64_t max_seqlen;         // as the caller gave it, 0: no bound
};

Status check_lengths(const Lengths& lengths);

}  // namespace flashgrad
