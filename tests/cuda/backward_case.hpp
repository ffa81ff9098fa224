// SPDX-License-Identifier: Apache-2.0
// The cases of sm90_backward.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/problem.hpp"

namespace flashgrad {

struct Case {
  const char* name;
  Problem p;
  std::vector<int> lens_q, lens_kv;  // packed if not empty
  std::int64_t max_seqlen = 0;       // of a packed batch; 0: the total
  std::vector<int> seqused_q, seqused_kv;
  std::vector<std::int64_t> q_offset;
  int head_pad = 0;  // elements between heads; odd: the copy engine can't be used
  int row_pad = 0;   // elements between rows
  // Tensors begin so many elements behind a multiple of 16 bytes: q, and k, v, out and dout 1, 2
  // and 3 more. 0: none does.
  int first = 0;
  bool plus_inf = false;  // lse of empty rows is +inf
  bool stride0 = false;   // dout is one element, expanded
  double logit_scale = 1;
  std::vector<int> rooms;  // percent of the preferred workspace to compare as well
  // The workspace is as it was allocated, so that initcheck sees what is read before it is written.
  bool unwritten_workspace = false;
  int num_repeats = 20;  // of deterministic calls, to compare their bits
};

inline const BandMask kFull{};
inline const BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};

Problem problem(DType dtype, std::int64_t batch, std::int64_t sq, std::int64_t skv, std::int64_t hq,
                std::int64_t hkv, std::int64_t d, std::int64_t dv);

// Cases under construction: what add() returns is completed by who calls it.
class CaseTable {
 public:
  Case& add(const char* name, const Problem& p, const BandMask& mask) {
    Case c{};
    c.name = name;
    c.p = p;
    c.p.mask = mask;
    list_.push_back(std::move(c));
    return list_.back();
  }
  std::vector<Case> take() { return std::move(list_); }

 private:
  std::vector<Case> list_;
};

std::vector<Case> cases();
std::vector<Case> short_cases();
std::vector<Case> short_sequence_cases();

}  // namespace flashgrad
