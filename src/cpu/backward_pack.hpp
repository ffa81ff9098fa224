// SPDX-License-Identifier: Apache-2.0
// Backward, step 1: packs a block of rows of one query head (backward_plan.hpp: HeadPack).
#pragma once

#include <cmath>
#include <limits>
#include <new>

#include "cpu/backward_plan.hpp"
#include "cpu/rows.hpp"
#include "cpu/vector_math.hpp"

namespace flashgrad::cpu {

FG_INLINE float load_f32(const Tensor& t, std::int64_t offset) {
  return static_cast<const float*>(t.data)[offset];
}

// kLanes rows of `t` from row i on into `staging`; rows that are not `live` become zeros. Marks
// rows that are not finite.
template <class Isa>
static bool stage_rows(const Tensor& t, const Sequence& seq, std::int64_t i, std::int64_t head,
                       std::int64_t n, const bool (&live)[Isa::kLanes], typename Isa::Unit* staging,
                       std::int64_t units, std::uint8_t* not_finite) {
  bool all_finite = true;
  for (int r = 0; r < Isa::kLanes; ++r) {
    bool finite = true;
    if (live[r]) {
      finite = stage_row<Isa>(t, t.offset(seq.batch_index, seq.q_begin + i + r, head), n,
                              staging + r * units, units);
    } else {
      std::memset(staging + r * units, 0,
                  static_cast<std::size_t>(units) * sizeof(typename Isa::Unit));
    }
    not_finite[r] = finite ? 0 : 1;
    all_finite &= finite;
  }
  return all_finite;
}

template <class Isa>
FG_INLINE void zero_marked_rows(typename Isa::Unit* staging, std::int64_t units,
                                const std::uint8_t* not_finite) {
  for (int r = 0; r < Isa::kLanes; ++r) {
    if (not_finite[r] != 0) {
      std::memset(staging + r * units, 0,
                  static_cast<std::size_t>(units) * sizeof(typename Isa::Unit));
    }
  }
}

// -lse and dlse - delta of the kLanes rows from `begin` on, and which of them are live: they see
// keys and have a finite lse.
template <class Isa>
FG_INLINE void pack_statistics(const BackwardPlan<Isa>& plan, const Args& args, const Sequence& seq,
                               HeadPack<Isa>& pack, std::int64_t head, std::int64_t begin,
                               bool* live) {
  const Problem& p = plan.p;
  for (int r = 0; r < Isa::kLanes; ++r) {
    const std::int64_t row = begin + r;
    float neg_lse = -std::numeric_limits<float>::infinity();
    float neg_delta = 0;
    live[r] = false;
    if (row < seq.band.seqlen_q) {
      const float lse =
          load_f32(args.lse, args.lse.offset(seq.batch_index, seq.q_begin + row, head));
      const bool sees = !seq.band.kv_range(row, row + 1).empty();
      live[r] = sees && !std::isinf(lse);
      if (sees && !live[r]) {
        pack.panel_has_void[row / kWidth<Isa>] = 1;
      }
      if (p.has_dlse) {
        neg_delta = load_f32(args.dlse, args.dlse.offset(seq.batch_index, seq.q_begin + row, head));
      }
      if (live[r]) {
        neg_lse = -lse;
        if (p.has_dout) {
          neg_delta -= dot_rows<Isa>(
              args.out, args.out.offset(seq.batch_index, seq.q_begin + row, head), args.dout,
              args.dout.offset(seq.batch_index, seq.q_begin + row, head), p.head_dim_v);
        }
      }
    }
    pack.neg_lse[row] = neg_lse;
    pack.neg_delta[row] = neg_delta;
  }
}

// Rows [q_block * block_q, ...) of query head `head`. dq rows that see nothing at all are written
// here: no key block will.
template <class Isa>
[[gnu::noinline]] static void pack_query_block(const BackwardPlan<Isa>& plan, const Args& args,
                                               const Job<Isa>& job, HeadPack<Isa>& pack,
                                               std::int64_t head, std::int64_t q_block,
                                               typename Isa::Unit* staging) {
  const Problem& p = plan.p;
  const Sequence& seq = job.sequence;
  const Band& band = seq.band;
  const std::int64_t q0 = q_block * job.blocks.block_q;
  const std::int64_t rows =
      job.blocks.padded_q - q0 < job.blocks.block_q ? job.blocks.padded_q - q0 : job.blocks.block_q;
  const std::int64_t end = q0 + rows < band.seqlen_q ? q0 + rows : band.seqlen_q;
  bool all_finite = true;
  std::memset(pack.panel_has_void + q0 / kWidth<Isa>, 0,
              static_cast<std::size_t>(rows / kWidth<Isa>));

  for (std::int64_t i = q0; i < q0 + rows; i += Isa::kLanes) {
    bool live[Isa::kLanes];
    for (std::int64_t row = i + Isa::kLanes; row < i + 2 * Isa::kLanes && row < end; ++row) {
      prefetch_row(args.q, args.q.offset(seq.batch_index, seq.q_begin + row, head), p.head_dim);
      if (p.has_dout && args.dout.dim_stride == 1) {
        prefetch_row(args.out, args.out.offset(seq.batch_index, seq.q_begin + row, head),
                     p.head_dim_v);
        prefetch_row(args.dout, args.dout.offset(seq.batch_index, seq.q_begin + row, head),
                     p.head_dim_v);
      }
    }
    pack_statistics<Isa>(plan, args, seq, pack, head, i, live);
    const std::int64_t panel = i / kWidth<Isa> * kWidth<Isa>;
    const std::int64_t k_begin = (i - q0) / Isa::kPair;
    if (plan.needs_p) {
      all_finite &= stage_rows<Isa>(args.q, seq, i, head, p.head_dim, live, staging, plan.units_qk,
                                    pack.q_not_finite + i);
      pack_columns<Isa>(staging, plan.units_qk, plan.units_qk,
                        pack.q_columns + panel * plan.units_qk + (i - panel));
    }
    if (p.wants_dk) {
      zero_marked_rows<Isa>(staging, plan.units_qk, pack.q_not_finite + i);
      pack_depth<Isa>(staging, plan.units_qk, Isa::kLanes, plan.columns_qk,
                      pack.q_depth + q0 / Isa::kPair * plan.columns_qk, rows / Isa::kPair, k_begin);
    }
    if (p.has_dout && (plan.needs_ds || plan.needs_dv)) {
      all_finite &= stage_rows<Isa>(args.dout, seq, i, head, p.head_dim_v, live, staging,
                                    plan.units_v, pack.dout_not_finite + i);
    }
    if (p.has_dout && plan.needs_ds) {
      pack_columns<Isa>(staging, plan.units_v, plan.units_v,
                        pack.dout_columns + panel * plan.units_v + (i - panel));
    }
    if (plan.needs_dv) {
      zero_marked_rows<Isa>(staging, plan.units_v, pack.dout_not_finite + i);
      pack_depth<Isa>(staging, plan.units_v, Isa::kLanes, plan.columns_v,
                      pack.dout_depth + q0 / Isa::kPair * plan.columns_v, rows / Isa::kPair,
                      k_begin);
    }
  }

  pack.block_not_finite[q_block] = all_finite ? 0 : 1;
  const Range keys = band.kv_range(q0, end);
  new (&pack.next_kv_block[q_block]) std::atomic<std::int32_t>(
      keys.empty() ? 0 : static_cast<std::int32_t>(keys.begin / job.blocks.block_kv));
  if (p.wants_dq && keys.empty()) {
    zero_rows(args.dq, seq.batch_index, seq.q_begin + q0, seq.q_begin + end, head, p.head_dim);
  }
}

// sum_i exp(sink - lse_i) * (dlse_i - delta_i) over the rows of one query head, in double and in
// order: no thread count changes it. `neg_delta` holds the second factor; null: it is dlse_i, as of
// rows that see nothing.
FG_INLINE double sink_gradient(const Problem& p, const Args& args, const Sequence& seq,
                               std::int64_t head, const float* neg_delta) {
  const float sink = static_cast<const float*>(args.sinks)[head];
  if (sink == -std::numeric_limits<float>::infinity()) {
    return 0;
  }
  double sum = 0;
  for (std::int64_t i = 0; i < seq.band.seqlen_q; ++i) {
    const float lse = load_f32(args.lse, args.lse.offset(seq.batch_index, seq.q_begin + i, head));
    if (std::isinf(lse)) {
      continue;
    }
    double factor = 0;
    if (neg_delta != nullptr) {
      factor = neg_delta[i];
    } else if (p.has_dlse) {
      factor = load_f32(args.dlse, args.dlse.offset(seq.batch_index, seq.q_begin + i, head));
    }
    sum += std::exp(static_cast<double>(sink) - static_cast<double>(lse)) * factor;
  }
  return sum;
}

}  // namespace flashgrad::cpu
