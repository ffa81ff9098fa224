// SPDX-License-Identifier: Apache-2.0
// How a unit is cut out of a call.
#include "check/unit.hpp"

#include <algorithm>

#include "reference/reference.hpp"

namespace flashgrad::check {
namespace {

using reference::kBlock;

Tensor advanced(Tensor t, std::int64_t offset) {
  if (t) {
    t.data = static_cast<std::byte*>(t.data) + offset * size_bytes(t.dtype);
  }
  return t;
}

}  // namespace

Extent extent(const Unit& u, Output output) {
  const Problem& p = u.problem;
  switch (output) {
    case kOut:
      return {p.heads_q, &u.rows, p.head_dim_v};
    case kLse:
      return {p.heads_q, &u.rows, 1};
    case kDq:
      return {p.heads_q, &u.rows, p.head_dim};
    case kDk:
      return {1, &u.keys, p.head_dim};
    default:
      return {1, &u.keys, p.head_dim_v};
  }
}

std::size_t slot(const Unit& u, Output output, std::int64_t head, std::int64_t t) {
  const Extent e = extent(u, output);
  if (output == kOut || output == kLse) {
    const std::int64_t i = (*e.index)[static_cast<std::size_t>(t)];
    return static_cast<std::size_t>((head * u.seqlen_q() + i) * e.dim);
  }
  return static_cast<std::size_t>((head * static_cast<std::int64_t>(e.index->size()) + t) * e.dim);
}

std::size_t size_of(const Unit& u, Output output) {
  const Extent e = extent(u, output);
  const std::int64_t count =
      output == kOut || output == kLse ? u.seqlen_q() : static_cast<std::int64_t>(e.index->size());
  return static_cast<std::size_t>(e.heads * count * e.dim);
}

Unit make_unit(const Problem& p, const Args& a, std::int64_t b, std::int64_t head_kv) {
  Unit u;
  u.b = b;
  u.head_kv = head_kv;
  u.at = sequence(p, a, b);
  u.problem = p;
  u.problem.batch = 1;
  u.problem.heads_kv = 1;
  u.problem.heads_q = p.group();
  u.problem.packed = false;
  u.problem.seqlen_q = u.at.band.seqlen_q;
  u.problem.seqlen_kv = u.at.band.seqlen_kv;
  const std::int64_t head_q = head_kv * p.group();
  const auto q_like = [&](const Tensor& t) {
    return advanced(t, t.offset(u.at.batch_index, u.at.q_begin, head_q));
  };
  const auto kv_like = [&](const Tensor& t) {
    return advanced(t, t.offset(u.at.batch_index, u.at.kv_begin, head_kv));
  };
  u.args.q = q_like(a.q);
  u.args.k = kv_like(a.k);
  u.args.v = kv_like(a.v);
  u.args.out = q_like(a.out);
  u.args.lse = q_like(a.lse);
  u.args.dout = q_like(a.dout);
  u.args.dlse = q_like(a.dlse);
  if (a.sinks != nullptr) {
    const int width = p.dtype == DType::kF64 ? 8 : 4;
    u.args.sinks = static_cast<const std::byte*>(a.sinks) + head_q * width;
  }
  return u;
}

double cost_of(const Unit& u) {
  double pairs = 0;
  for (std::int64_t i = 0; i < u.seqlen_q(); ++i) {
    pairs += static_cast<double>(u.at.band.kv_range(i, i + 1).size());
  }
  const Problem& p = u.problem;
  const auto elements = static_cast<double>((p.heads_q * u.seqlen_q() + u.at.band.seqlen_kv) *
                                            (p.head_dim + p.head_dim_v));
  const auto flops_per_pair = static_cast<double>(8 * p.head_dim + 6 * p.head_dim_v);
  return pairs * static_cast<double>(p.heads_q) * flops_per_pair + 1000 * elements;
}

std::vector<std::int64_t> sample(std::int64_t size, double count, std::mt19937_64& random) {
  std::vector<std::int64_t> chosen;
  const std::int64_t num_blocks = (size + kBlock - 1) / kBlock;
  if (num_blocks == 0) {
    return chosen;
  }
  std::vector<std::int64_t> blocks = {0, num_blocks - 1};
  while (static_cast<double>(blocks.size()) * kBlock < std::min(count, static_cast<double>(size))) {
    blocks.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(num_blocks)));
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  for (const std::int64_t block : blocks) {
    for (std::int64_t x = block * kBlock; x < std::min(size, (block + 1) * kBlock); ++x) {
      chosen.push_back(x);
    }
  }
  return chosen;
}

std::vector<std::int64_t> all_below(std::int64_t size) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
  for (std::size_t x = 0; x < indices.size(); ++x) {
    indices[x] = static_cast<std::int64_t>(x);
  }
  return indices;
}

}  // namespace flashgrad::check
