// SPDX-License-Identifier: Apache-2.0
// The backward of short sequences, in one kernel (bwd_short.cuh): which problems it serves, how it
// is launched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "core/problem.hpp"
#include "core/status.hpp"

namespace flashgrad::sm90 {

// The kernel's tiles: head dims up to `head_dim`, sequences of up to `keys` keys.
struct ShortSize {
  int head_dim = 0;
  int keys = 0;

  bool operator==(const ShortSize&) const = default;
};

inline constexpr ShortSize kShortSizes[] = {
#define FG_BWD_SHORT_VARIANT(...) ShortSize{__VA_ARGS__},
#include "cuda/sm90/bwd_short_variants.def"
#undef FG_BWD_SHORT_VARIANT
};

// The longest short sequence. It follows from nothing but the sequence, since bits must not depend
// on others where a call is deterministic. H200, us without this kernel / with it: 77 keys, head
// dim 64, 256 rows 212 / 160, 1024 rows in batches of 16 187 / 165, 4096 rows in batches of 4,
// which leave SMs idle, 238 / 517.
inline constexpr int kShortRows = 256;

// Its keys; 0: no sequence of such head dims is short. Likewise: head dim 64, 128 tokens 283 / 195,
// 160 causal 291 / 344; head dim 128, 64 tokens 416 / 196, 100 362 / 553.
inline int short_keys(const Problem& p) {
  const std::int64_t width = std::max(p.head_dim, p.head_dim_v);
  return width <= 64 ? 128 : width <= 128 ? 64 : 0;
}

// Whether all sequences of a call are short: then this kernel alone computes its backward.
inline bool serves_short(const Problem& p) {
  const std::int64_t rows = p.packed ? std::min(p.seqlen_q, p.max_seqlen_q) : p.seqlen_q;
  const std::int64_t keys = p.packed ? std::min(p.seqlen_kv, p.max_seqlen_kv) : p.seqlen_kv;
  return short_keys(p) > 0 && rows <= kShortRows && keys <= short_keys(p);
}

// Whether some may be short among others, and bits may not depend on these: after the kernels of
// all this one computes the short ones anew, as it would alone.
inline bool serves_short_among_others(const Problem& p) {
  return p.deterministic && short_keys(p) > 0 && !serves_short(p) &&
         (p.packed || p.has_seqused_q || p.has_seqused_kv);
}

// The narrowest tiles that hold a problem's short sequences.
inline ShortSize short_size(const Problem& p) {
  const std::int64_t longest = p.packed ? std::min(p.seqlen_kv, p.max_seqlen_kv) : p.seqlen_kv;
  const std::int64_t keys = std::min<std::int64_t>(longest, short_keys(p));
  return *std::find_if(std::begin(kShortSizes), std::end(kShortSizes), [&](const ShortSize& size) {
    return size.head_dim >= std::max(p.head_dim, p.head_dim_v) && size.keys >= keys;
  });
}

// `dsink_partial`: (heads_q, batch), written if not null.
Status launch_bwd_short(const Problem& p, const Args& args, float* dsink_partial);

}  // namespace flashgrad::sm90
