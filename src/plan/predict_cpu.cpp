// SPDX-License-Identifier: Apache-2.0
// The CPU backend's time from counted vector instructions, and what all predictions share.
#include <algorithm>

#include "plan/predict.hpp"

namespace flashgrad::plan {
namespace {

// AVX-512: vectors of 16 floats; a bf16 dot product takes two numbers of each lane.
constexpr double kLanes = 16;

// f16 tensors are computed in f32.
bool computes_in_pairs(const Call& call) { return call.dtype == DType::kBF16; }

// Vector instructions for a vector of 16 logits besides the products, counted in
// src/cpu/forward_tiles.hpp and backward_tile.hpp; rounding, fraction and scalef of exp2 count
// twice, since Zen 5 starts one of them a cycle and two multiply-adds.
double elementwise_instructions(bool backward, bool pairs) {
  // exp2: round, fraction, scalef; multiply-adds by its degree.
  const double exp2 = 6 + (pairs ? (backward ? 3 : 4) : 6);
  if (backward) {
    // p: multiply-add, minimum; ds: add, multiply. Pairs: store of the weight, two narrowings and
    // an interleaving, each of two vectors; else: log2(e).
    return exp2 + 4 + (pairs ? 3 : 1);
  }
  // Maximum, subtract, multiply, sum; pairs: narrow and interleave.
  return exp2 + 4 + (pairs ? 1.5 : 1);
}

// Fitted on the rows of 2026-11-29-zen5-bench.json and -bench-quiet.json (two cores of a Zen 5):
// the products take longer than their multiply-adds (panels stream from the second cache), and
// tensors are packed and unpacked at this rate.
constexpr double kProductCost = 1.12;
constexpr double kPackBytesPerSecond = 20e9;
// Keys that a row pays for beyond those it sees at each edge of the band: a tile of 64 queries
// meets what any of them sees.
constexpr double kEdgeKeys = 32;

// Bytes that packing reads or writes; a unit is 4 bytes, of one or two numbers.
double packed_bytes(const Call& call, double numbers_per_unit) {
  const auto tokens = static_cast<double>(call.tokens());
  const double q = 4 * tokens * static_cast<double>(call.heads_q * call.head_dim);
  const double k = 4 * tokens * static_cast<double>(call.heads_kv * call.head_dim);
  // Forward: q, k, v; out twice. Backward: q and dout twice, dq and out; k and v, dk and dv.
  return call.backward ? q * (4 / numbers_per_unit + 2) + k * (2 / numbers_per_unit + 2)
                       : q * (1 / numbers_per_unit + 2) + k * 2 / numbers_per_unit;
}

// Keys that a row meets, on average.
double keys_of_a_row(const Call& call) {
  const auto seqlen = static_cast<double>(call.seqlen);
  const bool left = call.mask.left < kUnboundedFrom;
  const bool right = call.mask.right < kUnboundedFrom;
  return std::min(seqlen, call.pairs() / static_cast<double>(call.tokens()) +
                              kEdgeKeys * ((left ? 1 : 0) + (right ? 1 : 0)));
}

}  // namespace

std::int64_t Call::tokens() const {
  std::int64_t sum = batch * seqlen;
  if (!lengths.empty()) {
    sum = 0;
    for (const std::int32_t length : lengths) {
      sum += length;
    }
  }
  return sum;
}

double Call::pairs() const {
  const auto of = [this](std::int64_t length) {
    const auto n = static_cast<double>(length);
    if (mask.left >= kUnboundedFrom && (mask.right >= kUnboundedFrom || mask.right == 0)) {
      return n * n / (mask.right == 0 ? 2 : 1);
    }
    const Band band = Band::of(mask, length, length);
    double visible = 0;
    for (std::int64_t row = 0; row < length; ++row) {
      visible += static_cast<double>(band.kv_range(row, row + 1).size());
    }
    return visible;
  };
  double sum = static_cast<double>(batch) * of(seqlen);
  if (!lengths.empty()) {
    sum = 0;
    for (const std::int32_t length : lengths) {
      sum += of(length);
    }
  }
  return sum;
}

double Call::flop() const {
  const auto d = static_cast<double>(head_dim);
  const auto dv = static_cast<double>(head_dim_v);
  return 2 * static_cast<double>(heads_q) * pairs() * (backward ? 3 * d + 2 * dv : d + dv);
}

double predict_cpu_seconds(const Call& call, double f32_gflops) {
  const double numbers_per_unit = computes_in_pairs(call) ? 2 : 1;
  const auto rows = static_cast<double>(call.tokens() * call.heads_q);
  const double products = call.backward ? 5 : 2;
  const double instructions =
      products * static_cast<double>(call.head_dim) / numbers_per_unit * kProductCost +
      elementwise_instructions(call.backward, computes_in_pairs(call));
  const double instructions_per_second = f32_gflops * 1e9 / (2 * kLanes);
  return rows * keys_of_a_row(call) / kLanes * instructions / instructions_per_second +
         packed_bytes(call, numbers_per_unit) / kPackBytesPerSecond;
}

}  // namespace flashgrad::plan
