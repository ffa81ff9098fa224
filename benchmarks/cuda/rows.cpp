// SPDX-License-Identifier: Apache-2.0
// The table of rows, and the lengths of the packed batch.
#include "rows.hpp"

#include <algorithm>
#include <numeric>

namespace flashgrad::bench {
namespace {

constexpr std::int64_t kTokens = 16384;
constexpr std::int64_t kHidden = 2048;

// Drawn once with P(n) ~ n^-1.1 (Zipf) until they filled the tokens, the last one cut:
// zipf_lengths of benchmarks/peers_cuda.py, Python's random.Random(1).
const std::vector<std::int32_t> kZipfLengths = {1, 1459, 479,  3,  26,  17, 128, 659,
                                                1, 1,    1240, 15, 470, 1,  16,  285,
                                                3, 6425, 3218, 1,  1,   41, 1894};

Row plain(std::int64_t head_dim, std::int64_t seqlen, bool causal) {
  Row row;
  row.head_dim = row.head_dim_v = head_dim;
  row.seqlen = seqlen;
  row.batch = kTokens / seqlen;
  row.heads_q = row.heads_kv = kHidden / head_dim;
  row.window_right = causal ? 0 : FG_UNBOUNDED;
  return row;
}

// Pairs of a row and a key that it sees in one sequence.
double pairs_of(double seqlen, const Row& row) {
  if (row.window_right == FG_UNBOUNDED) {
    return seqlen * seqlen;
  }
  if (row.window_left == FG_UNBOUNDED) {
    return seqlen * seqlen / 2;
  }
  const double reach = std::min(static_cast<double>(row.window_left) + 1, seqlen);
  return reach * seqlen - reach * (reach - 1) / 2;
}

}  // namespace

std::int64_t Row::tokens() const {
  return lengths.empty() ? batch * seqlen
                         : std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

std::string Row::name() const {
  std::string text = f16 ? "f16 d" : "bf16 d";
  text += std::to_string(head_dim);
  if (head_dim_v != head_dim) {
    text += "/" + std::to_string(head_dim_v);
  }
  constexpr const char* kLayouts[] = {
      "", " heads first", " between others", " key head shared", " offset", " dout shared"};
  text += kLayouts[static_cast<int>(layout)];
  text += window_right == FG_UNBOUNDED  ? " full "
          : window_left == FG_UNBOUNDED ? " causal "
                                        : " window " + std::to_string(window_left) + ",0 ";
  text += lengths.empty() ? std::to_string(seqlen / 1024) + "k"
                          : "packed " + std::to_string(lengths.size());
  if (heads_q != heads_kv) {
    text += " GQA " + std::to_string(heads_q) + "/" + std::to_string(heads_kv);
  }
  return text + (deterministic ? " deterministic" : "");
}

double Row::pairs() const {
  if (lengths.empty()) {
    return static_cast<double>(batch) * pairs_of(static_cast<double>(seqlen), *this);
  }
  double pairs = 0;
  for (const std::int32_t length : lengths) {
    pairs += pairs_of(length, *this);
  }
  return pairs;
}

double Row::flops(fg_pass pass) const {
  const auto columns = static_cast<double>(pass == FG_FORWARD ? head_dim + head_dim_v
                                                              : 3 * head_dim + 2 * head_dim_v);
  return 2 * static_cast<double>(heads_q) * pairs() * columns;
}

double Row::standard_bytes() const {
  double pairs = static_cast<double>(batch * seqlen) * static_cast<double>(seqlen);
  for (const std::int32_t length : lengths) {
    pairs += static_cast<double>(length) * length;
  }
  return 2 * 2 * pairs * static_cast<double>(heads_q);
}

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (const bool causal : {false, true}) {
    for (const std::int64_t head_dim : {128, 64, 256}) {
      for (const std::int64_t seqlen : {16384, 4096, 1024}) {
        rows.push_back(plain(head_dim, seqlen, causal));
        rows.push_back(rows.back());
        rows.back().deterministic = true;
      }
    }
  }
  for (const std::int64_t seqlen : {16384, 4096}) {
    Row row = plain(128, seqlen, true);
    row.head_dim = 192;
    rows.push_back(row);
    row = plain(128, seqlen, true);
    row.heads_kv = 4;
    rows.push_back(row);
    row.deterministic = true;
    rows.push_back(row);
    for (const std::int64_t head_dim : {128, 64, 256}) {
      row = plain(head_dim, seqlen, true);
      row.f16 = true;
      rows.push_back(row);
    }
  }
  Row window = plain(128, kTokens, true);
  window.window_left = 1024;
  rows.push_back(window);
  Row packed = plain(128, kTokens, true);
  packed.batch = 0;
  packed.seqlen = 0;
  packed.lengths = kZipfLengths;
  rows.push_back(packed);
  return rows;
}

std::vector<Row> odd_rows() {
  std::vector<Row> rows;
  for (const std::int64_t head_dim :
       {128, 127, 124, 100, 104, 96, 95, 65, 64, 63, 59, 36, 7, 1, 256, 255, 192, 191, 129}) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t seqlen : {16384, 4096, 1024}) {
        // As many heads as the width without its odd part has.
        Row row = plain(head_dim, seqlen, causal);
        row.heads_q = row.heads_kv = head_dim > 128 ? 8 : head_dim > 64 ? 16 : 32;
        rows.push_back(row);
      }
    }
  }
  for (const Layout layout : {Layout::kHeadsFirst, Layout::kBetweenOthers, Layout::kKeyHeadShared,
                              Layout::kOffset, Layout::kDoutShared}) {
    for (const std::int64_t head_dim : {128, 127}) {
      Row row = plain(head_dim, 4096, true);
      row.heads_q = row.heads_kv = 16;
      row.layout = layout;
      rows.push_back(row);
    }
  }
  for (const std::int64_t head_dim : {128, 127}) {
    for (const std::int64_t seqlen : {16384, 4096}) {
      Row row = plain(head_dim, seqlen, true);
      row.heads_q = 16;
      row.heads_kv = 4;
      rows.push_back(row);
      row.heads_kv = 16;
      row.deterministic = true;
      rows.push_back(row);
    }
    Row packed = plain(head_dim, kTokens, true);
    packed.batch = 0;
    packed.seqlen = 0;
    packed.heads_q = packed.heads_kv = 16;
    packed.lengths = kZipfLengths;
    rows.push_back(packed);
  }
  return rows;
}

Row long_row() {
  Row row = plain(128, kTokens, true);
  row.seqlen = std::int64_t{512} * 1024;
  row.heads_q = row.heads_kv = 8;
  return row;
}

}  // namespace flashgrad::bench
