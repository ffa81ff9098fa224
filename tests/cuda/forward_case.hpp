// SPDX-License-Identifier: Apache-2.0
// The cases of sm90_forward.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/mask.hpp"

namespace flashgrad {

// Elements behind each vector of columns in cases with odd strides.
inline constexpr int kOddGap = 3;

enum class Poison {
  kNone,
  kUnread,  // NaN and Inf in every query, key and value that no sequence uses or no row sees
  kQuery,   // one NaN in a query
  kValue,   // one NaN in a value that some rows of its tile see and others do not
};

struct Case {
  const char* name;
  int batch = 1;
  int seqlen_q = 128;  // of all sequences together if packed
  int seqlen_kv = 128;
  int max_seqlen = 0;  // of both if packed; 0: the total
  int heads_q = 2;
  int heads_kv = 2;
  int narrower = 0;  // than the kernel's native widths
  BandMask mask{};
  double scale = std::numeric_limits<double>::quiet_NaN();
  double softcap = 0;
  bool sinks = false;
  bool lse = true;
  bool heads_outside = false;  // (batch, heads, rows, dim) in memory
  bool odd_strides = false;    // nothing is a multiple of 16 bytes, unless narrower by kOddGap
  bool odd_addresses = false;  // no tensor begins at a multiple of 16 bytes
  bool least_workspace = false;
  // The workspace is as it was allocated, so that initcheck sees what is read before it is written.
  bool unwritten_workspace = false;
  float amplitude = 1;
  Poison poison = Poison::kNone;
  std::vector<std::int32_t> cu_seqlens_q{};  // not empty: packed
  std::vector<std::int32_t> cu_seqlens_kv{};
  std::vector<std::int32_t> seqused_q{};
  std::vector<std::int32_t> seqused_kv{};
  std::vector<std::int64_t> q_offset{};
};

std::vector<Case> cases();
// Those whose keys are cut (fwd_split.hpp).
std::vector<Case> split_cases();
// The smallest that reach every kernel with more blocks than stages, for compute-sanitizer
// (sanitize.sh), under which a tile takes a thousand times as long.
std::vector<Case> short_cases();

}  // namespace flashgrad
