// SPDX-License-Identifier: Apache-2.0
// A build without oneDNN has no baseline to compare with.
#include "standard_attention.hpp"

namespace flashgrad::tool {

std::unique_ptr<StandardAttention> make_standard_attention(const AttentionCall& /*call*/,
                                                           const fg_options& /*options*/,
                                                           std::string& reason) {
  reason = "not built (cmake -DFLASHGRAD_ONEDNN=ON, with oneDNN)";
  return nullptr;
}

}  // namespace flashgrad::tool
