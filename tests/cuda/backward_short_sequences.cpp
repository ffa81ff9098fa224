// SPDX-License-Identifier: Apache-2.0
// Cases of short sequences, whose backward is one kernel (bwd_short.cuh): every size of its tiles,
// from one row to its longest, and whatever a call may ask of it.
#include <utility>

#include "backward_case.hpp"

namespace flashgrad {
namespace {

// What may differ beside lengths and widths.
void add_features(CaseTable& table, std::int64_t d, std::int64_t dv, std::int64_t n) {
  const BandMask causal_top{kUnbounded, 0, Alignment::kTopLeft};
  const BandMask window{10, 3, Alignment::kBottomRight};
  constexpr DType kB = DType::kBF16;
  const std::int64_t m = n - n / 3;
  const Problem longer = problem(kB, 3, n, m, 4, 2, d, dv);
  const Problem shorter = problem(kB, 3, m, n, 4, 2, d, dv);
  table.add("short top-left", longer, causal_top);
  table.add("short top-left, hidden keys", shorter, causal_top);
  table.add("short empty rows", longer, kCausal).plus_inf = true;
  table.add("short window", shorter, window);
  table.add("short band off the diagonal", shorter, BandMask{-2, n / 2, Alignment::kTopLeft});
  table.add("short empty band", shorter, BandMask{-1, -1, Alignment::kBottomRight});
  table.add("short negative scale", longer, kCausal).p.scale = -0.1;
  table.add("short softcap", shorter, kCausal).p.softcap = 15;
  table.add("short f16", problem(DType::kF16, 2, n, n, 3, 1, d, dv), kCausal);
  table.add("short stride-0 dout", shorter, kCausal).stride0 = true;
  table.add("short odd strides", shorter, kCausal).head_pad = 3;
  {
    Case& c = table.add("short strides", shorter, kCausal);
    c.head_pad = 8;
    c.row_pad = 64;
  }
  {
    Case& c = table.add("short f32 gradients", shorter, kCausal);
    c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32;
    c.head_pad = 1;
  }
  {
    Case& c = table.add("short sinks dlse", longer, kCausal);
    c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true;
  }
  {
    Case& c = table.add("short dlse without dout", longer, kCausal);
    c.p.has_dlse = true;
    c.p.has_dout = c.p.wants_dv = false;
  }
  table.add("short no dq", longer, kCausal).p.wants_dq = false;
  {
    Case& c = table.add("short only dq", longer, kCausal);
    c.p.wants_dk = c.p.wants_dv = false;
  }
  table.add("short only dv", longer, kCausal).p.wants_dq = false;
  {
    Case& c = table.add("short seqused, q_offset", problem(kB, 4, n, m, 2, 2, d, dv), kCausal);
    c.seqused_q = {static_cast<int>(n), static_cast<int>(n / 2), 0, 1};
    c.seqused_kv = {static_cast<int>(m), 1, static_cast<int>(m), 0};
    c.q_offset = {1, 0, 3, 2};
  }
  {
    Case& c = table.add("short packed, many", problem(kB, 0, 0, 0, 4, 2, d, dv), kCausal);
    c.max_seqlen = n;
    for (std::int64_t i = 0; i < 7000 / n; ++i) {
      c.lens_q.push_back(static_cast<int>(i * 7 % (n + 1)));
      c.lens_kv.push_back(static_cast<int>(i * 5 % (n + 1)));
    }
    c.p.has_sinks = c.p.wants_dsinks = true;
  }
  {
    Case& c = table.add("short packed seqused", problem(kB, 0, 0, 0, 2, 1, d, dv), window);
    c.max_seqlen = n;
    const auto whole = static_cast<int>(n);
    c.lens_q = {whole, 0, 3, whole / 2};
    c.lens_kv = {whole / 2, 2, whole, whole};
    c.seqused_q = {whole - 1, 0, 0, whole / 2};
    c.seqused_kv = {whole / 2, 1, whole, whole / 3};
  }
}

}  // namespace

std::vector<Case> short_sequence_cases() {
  constexpr DType kB = DType::kBF16;
  CaseTable table;
  for (const auto& [d, dv] : {std::pair{64, 64}, std::pair{128, 128}}) {
    for (const std::int64_t n : {1, 8, 16, 17, 32, 33, 49, 64, 65, 100, 128}) {
      const Problem p = problem(kB, 3, n, n, 4, 2, d, dv);
      table.add("short full", p, kFull);
      table.add("short causal", p, kCausal);
    }
    table.add("short rows 200x20", problem(kB, 2, 200, 20, 4, 2, d, dv), kFull);
    table.add("short rows 256x77", problem(kB, 2, 256, 77, 2, 2, d, dv), kCausal);
    table.add("short rows 3x128", problem(kB, 2, 3, 128, 6, 1, d, dv), kCausal);
    for (const std::int64_t n : {30, 61, 120}) {
      add_features(table, d, dv, n);
    }
  }
  for (const auto& [d, dv] :
       {std::pair{1, 128}, std::pair{128, 1}, std::pair{8, 8}, std::pair{33, 40}, std::pair{72, 72},
        std::pair{80, 80}, std::pair{96, 24}, std::pair{127, 65}}) {
    for (const std::int64_t n : {31, 63, 127}) {
      table.add("short width", problem(kB, 2, n, n, 4, 2, d, dv), kCausal);
      Case& c = table.add("short width f32", problem(DType::kF16, 2, n, n, 2, 2, d, dv), kFull);
      c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32;
      // Behind out's columns are NaN, which nothing may read.
      Case& alone = table.add("short width, no dout", problem(kB, 2, n, n, 4, 2, d, dv), kCausal);
      alone.p.has_dlse = true;
      alone.p.has_dout = alone.p.wants_dv = false;
      alone.head_pad = 3;
    }
  }
  table.add("short, many entries", problem(kB, 70000, 1, 2, 1, 1, 8, 8), kFull);
  return table.take();
}

}  // namespace flashgrad
