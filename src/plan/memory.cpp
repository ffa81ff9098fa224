// SPDX-License-Identifier: Apache-2.0
// Implements memory.hpp.
#include "plan/memory.hpp"

namespace flashgrad::plan {
namespace {

constexpr double kF32 = 4;

// Elements of this GPU's rows.
struct Sizes {
  explicit Sizes(const MemoryShape& s)
      : q(s.batch * s.heads_q * s.seqlen_q / s.gpus * s.head_dim),
        out(s.batch * s.heads_q * s.seqlen_q / s.gpus * s.head_dim_v),
        k(s.batch * s.heads_kv * s.seqlen_kv / s.gpus * s.head_dim),
        v(s.batch * s.heads_kv * s.seqlen_kv / s.gpus * s.head_dim_v),
        rows(s.batch * s.heads_q * s.seqlen_q / s.gpus) {}
  double q, out, k, v, rows;
};

MemoryPlan tensors(const MemoryShape& s) {
  const Sizes size(s);
  const double e = s.element_bytes;
  MemoryPlan plan;
  plan.lines = {{"q, k, v", "inputs", e * (size.q + size.k + size.v)},
                {"out, dout", "the forward's result and its gradient", e * 2 * size.out},
                {"dq, dk, dv", "results", e * (size.q + size.k + size.v)}};
  if (s.gpus > 1) {
    plan.lines.push_back({"k, v of two others", "in a ring: one block in use, the next arriving",
                          e * 2 * (size.k + size.v)});
    plan.lines.push_back({"dk, dv of two others", "f32 sums that travel with their keys",
                          kF32 * 2 * (size.k + size.v)});
  }
  return plan;
}

}  // namespace

double MemoryPlan::total() const {
  double sum = 0;
  for (const MemoryLine& line : lines) {
    sum += line.bytes;
  }
  return sum;
}

MemoryPlan standard_backward_memory(const MemoryShape& s) {
  const double scores = s.element_bytes * Sizes(s).rows * s.seqlen_kv;
  MemoryPlan plan = tensors(s);
  plan.lines.push_back({"P", "kept by the forward: rows x seqlen_kv", scores});
  plan.lines.push_back({"dP, then dS", "the same size; dS overwrites dP", scores});
  return plan;
}

MemoryPlan recomputing_backward_memory(const MemoryShape& s) {
  const Sizes size(s);
  MemoryPlan plan = tensors(s);
  plan.lines.push_back({"lse", "f32, a number a row, kept by the forward", kF32 * size.rows});
  plan.lines.push_back({"lse and delta", "f32, as the kernels read them", kF32 * 2 * size.rows});
  plan.lines.push_back({"dq sums", "f32: key tiles add to them", kF32 * size.q});
  return plan;
}

}  // namespace flashgrad::plan
