// SPDX-License-Identifier: Apache-2.0
// Hands a head's tensors to the check that every backend passes.
#include "plan/judge.hpp"

namespace flashgrad::plan {

std::vector<check::OutputResult> judge_gradients(HeadData& data) {
  Problem problem;
  problem.dtype = DType::kBF16;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seqlen_q = problem.max_seqlen_q = data.queries;
  problem.seqlen_kv = problem.max_seqlen_kv = data.keys;
  problem.head_dim = data.head_dim;
  problem.head_dim_v = data.head_dim_v;
  problem.has_dout = problem.wants_dq = problem.wants_dk = problem.wants_dv = true;
  problem.mask.right = data.causal ? 0 : kUnbounded;
  problem.scale = static_cast<double>(data.scale);
  problem.num_threads = 1;
  const auto tensor = [&](auto& values, DType dtype, std::int64_t row_stride) {
    return Tensor{values.data(), dtype, 0, row_stride, row_stride, 1};
  };
  Args args;
  args.q = tensor(data.q, DType::kBF16, data.head_dim);
  args.k = tensor(data.k, DType::kBF16, data.head_dim);
  args.v = tensor(data.v, DType::kBF16, data.head_dim_v);
  args.out = tensor(data.out, DType::kBF16, data.head_dim_v);
  args.dout = tensor(data.dout, DType::kBF16, data.head_dim_v);
  args.lse = tensor(data.lse, DType::kF32, 1);
  args.dq = tensor(data.dq, DType::kF32, data.head_dim);
  args.dk = tensor(data.dk, DType::kF32, data.head_dim);
  args.dv = tensor(data.dv, DType::kF32, data.head_dim_v);
  check::ExpectedOptions options;
  options.given_out_lse = true;
  options.num_threads = 1;
  return check::Expected(problem, args, options).compare(args, false, true);
}

}  // namespace flashgrad::plan
