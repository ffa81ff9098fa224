// SPDX-License-Identifier: Apache-2.0
// From command line texts to a Case.
#include "shape_case.hpp"

#include <stdexcept>

#include "memory.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

// Throws if the tensors, and the float64 copies that the oracle makes of the outputs, do not fit.
void require_memory_for(const check::Case& c) {
  const auto elements = [](std::int64_t batch, std::int64_t rows, std::int64_t heads,
                           std::int64_t dim) {
    return static_cast<double>(batch) * static_cast<double>(rows) * static_cast<double>(heads) *
           static_cast<double>(dim);
  };
  const std::int64_t batch = c.packed() ? 1 : c.batch;
  const double q = elements(batch, c.seqlen_q, c.heads_q, c.head_dim);
  const double out = elements(batch, c.seqlen_q, c.heads_q, c.head_dim_v);
  const double k = elements(batch, c.seqlen_kv, c.heads_kv, c.head_dim);
  const double v = elements(batch, c.seqlen_kv, c.heads_kv, c.head_dim_v);
  const double lse = elements(batch, c.seqlen_q, c.heads_q, 1);
  require_memory(size_bytes(c.dtype) * 2 * (q + k + v + out) + 8 * (q + k + v + out + 3 * lse));
}

}  // namespace

check::Case shape_case(const std::string& shape, const std::string& dtype, std::uint64_t seed,
                       const CallOptions& call_options) {
  const fg_options& options = call_options.options;
  check::Case c;
  try {
    c = check::parse_shape(shape);
    c.dtype = check::parse_dtype(dtype);
  } catch (const std::invalid_argument& error) {
    throw Error(printable(error.what(), 400));
  }
  c.grad_f32 = call_options.grad_f32;
  c.mask = {options.window_left, options.window_right,
            options.alignment == FG_TOP_LEFT ? Alignment::kTopLeft : Alignment::kBottomRight};
  c.scale = options.scale;
  c.softcap = options.softcap;
  c.deterministic = options.deterministic != 0;
  c.seed = seed;
  if (options.max_seqlen_q > 0) {
    c.max_seqlen_q = options.max_seqlen_q;
  }
  if (options.max_seqlen_kv > 0) {
    c.max_seqlen_kv = options.max_seqlen_kv;
  }
  require_memory_for(c);
  return c;
}

}  // namespace flashgrad::tool
