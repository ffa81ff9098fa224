// SPDX-License-Identifier: Apache-2.0
// What flashgrad is compared with: attention as most programs compute it, with S and P in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "attention_call.hpp"

namespace flashgrad::tool {

class StandardAttention {
 public:
  virtual ~StandardAttention() = default;
  // out = softmax(scale q k^T) v; S and P stay for the backward.
  virtual void forward() = 0;
  // dv = P^T dout, dP = dout v^T, dS = P (dP - delta), dq = dS k, dk = dS^T q.
  virtual void backward() = 0;

  // Compact results in q's dtype, as flashgrad's.
  virtual const Buffer& out() const = 0;
  virtual const Buffer& dq() const = 0;
  virtual const Buffer& dk() const = 0;
  virtual const Buffer& dv() const = 0;
};

// Null, and `reason`, if this build or this machine has no such baseline for the call. The call
// must outlive it and have dout.
std::unique_ptr<StandardAttention> make_standard_attention(const AttentionCall& call,
                                                           const fg_options& options,
                                                           std::string& reason);

}  // namespace flashgrad::tool
