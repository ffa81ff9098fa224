// SPDX-License-Identifier: Apache-2.0
// What a backward pass holds in memory: attention that stores P against attention that makes it
// again, on one GPU or with the sequence cut over several.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashgrad::plan {

struct MemoryShape {
  double batch = 1;
  double heads_q = 1;
  double heads_kv = 1;
  double seqlen_q = 0;
  double seqlen_kv = 0;
  double head_dim = 128;
  double head_dim_v = 128;
  double element_bytes = 2;  // of the tensors
  double gpus = 1;           // each holds seqlen / gpus rows of q and of k, in a ring
};

struct MemoryLine {
  std::string buffer;
  std::string why;
  double bytes;  // of one GPU
};

struct MemoryPlan {
  std::vector<MemoryLine> lines;
  [[nodiscard]] double total() const;
};

// q, k, v, out, dout and the gradients, which both hold, and what is theirs.
MemoryPlan standard_backward_memory(const MemoryShape& shape);
MemoryPlan recomputing_backward_memory(const MemoryShape& shape);

}  // namespace flashgrad::plan
