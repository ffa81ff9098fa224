// SPDX-License-Identifier: Apache-2.0
// What bench_cuda measures: attention on 16k tokens in all, hidden size 2048, unless a row says
// otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashgrad/flashgrad.h"

namespace flashgrad::bench {

// How the tensors of a row lie.
enum class Layout : std::uint8_t {
  kCompact,        // (batch, seqlen, heads, head_dim)
  kHeadsFirst,     // the same indices, but (batch, heads, seqlen, head_dim) compact
  kBetweenOthers,  // compact, with one element more behind each head
  kKeyHeadShared,  // compact, but all heads of k, and of v, are one
  kOffset,         // compact, but q, k and v begin one element past a multiple of 16 bytes
  kDoutShared,     // compact, but dout is one element: the gradient of a sum
};

struct Row {
  std::int64_t head_dim = 128;
  std::int64_t head_dim_v = 128;
  std::int64_t seqlen = 0;  // of each sequence, unless there are lengths
  std::int64_t batch = 1;
  std::int64_t heads_q = 16;
  std::int64_t heads_kv = 16;
  std::int64_t window_left = FG_UNBOUNDED;
  std::int64_t window_right = FG_UNBOUNDED;
  bool f16 = false;  // else bf16
  bool deterministic = false;
  Layout layout = Layout::kCompact;
  std::vector<std::int32_t> lengths;  // of a packed batch

  [[nodiscard]] std::int64_t tokens() const;
  // "bf16 d128 causal 16k": the words by which rows are chosen.
  [[nodiscard]] std::string name() const;
  // Visible pairs of a row and a key, over one head; of a causal mask half of all, as is the
  // custom.
  [[nodiscard]] double pairs() const;
  // Two products forward, five backward.
  [[nodiscard]] double flops(fg_pass pass) const;
  // S and P of all heads in 16 bits, which standard attention would hold.
  [[nodiscard]] double standard_bytes() const;
};

// The rows of the table in docs/performance.md.
std::vector<Row> all_rows();

// Head dims and strides that the copy engine can't address, beside those that it can.
std::vector<Row> odd_rows();

// 512K tokens, causal, 8 heads of 128.
Row long_row();

}  // namespace flashgrad::bench
