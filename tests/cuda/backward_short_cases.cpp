// SPDX-License-Identifier: Apache-2.0
// The smallest cases that reach every backward kernel, with more steps than stages and more tiles
// than one: for compute-sanitizer (sanitize.sh), under which a tile takes a thousand times as long.
#include <utility>

#include "backward_case.hpp"

namespace flashgrad {

std::vector<Case> short_cases() {
  const BandMask window{60, 20, Alignment::kBottomRight};
  constexpr DType kB = DType::kBF16;
  CaseTable table;
  for (const auto& [d, dv] : {std::pair{64, 64}, std::pair{96, 96}, std::pair{128, 128},
                              std::pair{192, 128}, std::pair{192, 192}, std::pair{256, 256}}) {
    const Problem small = problem(kB, 1, 300, 260, 2, 1, d, dv);
    table.add("full", small, kFull);
    table.add("causal", problem(kB, 1, 200, 300, 2, 2, d, dv), kCausal);
    table.add("empty rows", problem(kB, 1, 200, 100, 2, 1, d, dv), kCausal).plus_inf = true;
    {
      Case& c = table.add("window sinks dlse f32", small, window);
      c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true;
      c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32;
    }
    for (const bool deterministic : {false, true}) {
      Case& packed = table.add(deterministic ? "deterministic packed" : "packed",
                               problem(kB, 0, 0, 0, 2, 1, d, dv), kCausal);
      packed.p.deterministic = deterministic;
      packed.lens_q = {0, 100, 1, 150};
      packed.lens_kv = {3, 130, 70, 100};
      packed.seqused_q = {0, 100, 1, 120};
      packed.seqused_kv = {3, 120, 70, 100};
      Case& softcap = table.add(deterministic ? "deterministic softcap" : "softcap",
                                problem(kB, 1, 200, 200, 1, 1, d, dv), kCausal);
      softcap.p.deterministic = deterministic;
      softcap.p.softcap = 15;
    }
    table.add("deterministic full", small, kFull).p.deterministic = true;
    table.add("deterministic causal", small, kCausal).p.deterministic = true;
    {
      Case& c = table.add("only dq", problem(kB, 1, 150, 200, 2, 1, d, dv), kCausal);
      c.p.wants_dk = c.p.wants_dv = false;
    }
    {
      Case& c = table.add("only dq softcap", problem(kB, 1, 150, 200, 2, 1, d, dv), kCausal);
      c.p.wants_dk = c.p.wants_dv = false;
      c.p.softcap = 15;
    }
    table.add("odd strides", problem(kB, 1, 150, 150, 1, 1, d, dv), kCausal).head_pad = 3;
    table.add("odd widths", problem(kB, 1, 150, 150, 2, 1, d - 1, dv - 3), kCausal);
    if (d > 128) {
      // Passes over the keys, which carry sums of dq.
      table.add("passes", problem(kB, 1, 70, 9400, 1, 1, d, dv), kCausal).rooms = {98};
      // More tiles than multiprocessors: each CTA makes several.
      table.add("many tiles", problem(kB, 70, 70, 140, 1, 1, d, dv), kFull);
      continue;
    }
    // Sequences whose keys fit a tile, or the two of a cluster.
    for (const std::int64_t keys : {120, 200}) {
      if (d == 96 && keys > 128) {
        continue;
      }
      const Problem whole = problem(kB, 1, 400, keys, 2, 1, d, dv);
      table.add("whole full", whole, kFull);
      table.add("whole causal", whole, kCausal);
      table.add("whole deterministic", whole, kFull).p.deterministic = true;
      Case& c = table.add("whole packed", problem(kB, 0, 0, 0, 2, 1, d, dv), window);
      c.max_seqlen = keys > 128 ? 256 : 128;
      c.lens_q = {100, 0, 70};
      c.lens_kv = {static_cast<int>(keys), 2, 70};
      c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true;
    }
    // Sequences that fit one CTA (bwd_short.cuh), in each of its sizes.
    for (const std::int64_t n : {30, 60, 120}) {
      if (d > 64 && n > 64) {
        continue;
      }
      table.add("one CTA", problem(kB, 1, n, n, 4, 2, d, dv), kCausal).plus_inf = true;
      Case& c = table.add("one CTA packed", problem(kB, 0, 0, 0, 2, 1, d, dv), window);
      const auto whole = static_cast<int>(n);
      c.max_seqlen = n;
      c.lens_q = {whole, 0, 3};
      c.lens_kv = {whole / 2, 2, whole};
      c.seqused_q = {whole - 1, 0, 3};
      c.seqused_kv = {whole / 2, 1, whole};
      c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true;
      c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32;
      c.head_pad = 3;
    }
    // So many units that the main kernel serves them and their slots get others after them
    // (unit_pipeline.hpp), some without a row.
    const Problem served = problem(kB, 60, 64, d == 64 ? 2048 : 1024, 1, 1, d, dv);
    table.add("served full", served, kFull);
    Case& causal = table.add("served causal", served, kCausal);
    for (int i = 0; i < 60; ++i) {
      causal.seqused_q.push_back(i % 3 * 32);
    }
  }
  // The other dtype, once a kernel of each kind.
  for (const auto& [d, dv] : {std::pair{128, 128}, std::pair{192, 128}}) {
    table.add("f16 causal", problem(DType::kF16, 1, 200, 300, 2, 1, d, dv), kCausal);
  }
  std::vector<Case> list = table.take();
  for (Case& c : list) {
    c.unwritten_workspace = true;
    c.num_repeats = 1;
  }
  return list;
}

}  // namespace flashgrad
