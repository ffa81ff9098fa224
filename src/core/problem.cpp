// SPDX-License-Identifier: Apache-2.0
// The line of FLASHGRAD_VERBOSE.
#include "core/problem.hpp"

namespace flashgrad {
namespace {

std::string side(std::int64_t x) { return x >= kUnboundedFrom ? "inf" : std::to_string(x); }

}  // namespace

std::string to_string(const Problem& p) {
  std::string s = std::string(name(p.dtype)) + " b=" + std::to_string(p.batch) +
                  " hq=" + std::to_string(p.heads_q) + " hkv=" + std::to_string(p.heads_kv) +
                  (p.packed ? " total_q=" : " sq=") + std::to_string(p.seqlen_q) +
                  (p.packed ? " total_kv=" : " sk=") + std::to_string(p.seqlen_kv) +
                  " d=" + std::to_string(p.head_dim) + " dv=" + std::to_string(p.head_dim_v);
  if (p.mask.left < kUnboundedFrom || p.mask.right < kUnboundedFrom) {
    s += " window=" + side(p.mask.left) + "," + side(p.mask.right);
    s += p.mask.alignment == Alignment::kTopLeft ? " top-left" : " bottom-right";
  }
  s += " scale=" + std::to_string(p.scale);
  if (p.softcap > 0) {
    s += " softcap=" + std::to_string(p.softcap);
  }
  s += p.has_sinks ? " sinks" : "";
  s += p.deterministic ? " deterministic" : "";
  return s;
}

}  // namespace flashgrad
