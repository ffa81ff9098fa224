// SPDX-License-Identifier: Apache-2.0
// The kernels of the forward pass. An item's query rows stand along the vector lanes, in panels;
// for each panel and key block
//
//   (1)  S^T = K Q^T                                     Q has the sign of the scale already
//        S^T = softcap * tanh(|scale| S^T / softcap)     if there is a softcap
//        S^T = -inf where not visible
//   (2)  m' = max(m, max_j S_j),  r = exp(|scale| (m - m')),  l = r l
//   (3)  P^T = exp(|scale| (S^T - m')),  l = l + sum_j P_j
//   (4)  O = r O + P V
//
// and in the end out = O / l, lse = |scale| m + log(l), with the sink as one more term of l. This
// is the online softmax of FlashAttention (Dao et al. 2022, algorithm 1) with S transposed: the
// maximum over keys needs no shuffle, and P^T comes out in the order that (4) reads. S - m' is
// taken before the scale, so that the largest exponent is 0 however large the logits are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/problem.hpp"
#include "cpu/forward_schedule.hpp"
#include "cpu/forward_tiles.hpp"
#include "cpu/isa/common.hpp"
#include "cpu/pack.hpp"
#include "cpu/rows.hpp"

namespace flashgrad::cpu {

// The longest staged row, in units.
inline constexpr std::int64_t kMaxStagedUnits = 256;

// A packed key block.
template <class Isa>
struct ForwardBlock {
  std::int64_t begin;  // its first key in the sequence
  std::int64_t keys;
  const typename Isa::Unit* k;
  const typename Isa::Unit* v;
  bool has_nonfinite_v;  // 0 * value must then not be added to a row that does not see it
};

template <class Isa>
static void pack_block(const ForwardCall& call, const Sequence& sequence, std::int64_t head_kv,
                       std::int64_t block_begin, void* block) {
  using Unit = typename Isa::Unit;
  const Problem& p = call.problem;
  const ForwardSizes& sizes = call.sizes;
  const std::int64_t keys = std::min(kForwardKeyBlock, sequence.band.seqlen_kv - block_begin);
  const std::int64_t first_row = sequence.kv_begin + block_begin;

  Unit* k = static_cast<Unit*>(block) + ForwardSizes::kHeaderWords;
  for (std::int64_t j = 0; j < keys; ++j, k += sizes.padded_head_words) {
    stage_row<Isa>(call.args.k, call.args.k.offset(sequence.batch_index, first_row + j, head_kv),
                   p.head_dim, k, sizes.padded_head_words);
  }
  // Tiles of S^T take whole groups of keys; what lies beyond the last one is masked, but must
  // exist.
  const std::int64_t padding = round_up(keys, kRowMultiple<Isa>) - keys;
  std::memset(k, 0, static_cast<std::size_t>(padding * sizes.padded_head_words) * sizeof(Unit));

  Unit* v = static_cast<Unit*>(block) + sizes.v_begin;
  alignas(64) Unit staged[Isa::kPair * kMaxStagedUnits];
  const std::int64_t ld = staged_units<Isa>(p.head_dim_v);
  bool finite = true;
  for (std::int64_t j = 0; j < keys; j += Isa::kPair) {
    for (std::int64_t i = 0; i < Isa::kPair; ++i) {
      if (j + i < keys) {
        finite &= stage_row<Isa>(
            call.args.v, call.args.v.offset(sequence.batch_index, first_row + j + i, head_kv),
            p.head_dim_v, staged + i * ld, ld);
      } else {
        std::memset(staged + i * ld, 0, static_cast<std::size_t>(ld) * sizeof(Unit));
      }
    }
    pack_depth<Isa>(staged, ld, Isa::kPair, sizes.columns, v, sizes.keys / Isa::kPair,
                    j / Isa::kPair);
  }
  *static_cast<std::int32_t*>(block) = finite ? 0 : 1;
}

// Which keys of a block the rows of a panel or tile see: `any` what at least one of them sees (the
// hull), `all` what all see.
struct KeyRanges {
  Range any;
  Range all;
};

// One item at work.
template <class Isa>
class ForwardItemRun {
  using Unit = typename Isa::Unit;

 public:
  ForwardItemRun(const ForwardCall& call, const Sequence& sequence, const ForwardItem& item,
                 ForwardScratch& scratch)
      : call_(call),
        sequence_(sequence),
        item_(item),
        scratch_(scratch),
        num_rows_(item.num_rows()) {
    const Problem& p = call.problem;
    // A scale of 0 becomes zeros in Q.
    const double scale = p.scale == 0 ? 1 : std::abs(p.scale);
    logits_.softcap = finite_float(p.softcap);
    logits_.cap_input = p.softcap > 0 ? finite_float(scale / p.softcap) : 0;
    to_natural_ = p.softcap > 0 ? 1 : scale;
    // Not below the normal range, where -inf times it would not stay -inf.
    logits_.to_log2 =
        std::max(finite_float(to_natural_ * kLog2E), std::numeric_limits<float>::min());
  }

  void run() {
    find_visible_keys();
    pack_queries();
    std::fill_n(scratch_.row_max, call_.sizes.rows, -kInfinity);
    std::fill_n(scratch_.row_sum, call_.sizes.rows, 0.F);
    const std::int64_t last_block = ceil_div(seen_.end, kForwardKeyBlock);
    for (std::int64_t b = seen_.begin / kForwardKeyBlock; b < last_block; ++b) {
      const ForwardBlock<Isa> block = key_block(b);
      for (std::int64_t r = 0; r < num_rows_; r += kWidth<Isa>) {
        with_vecs<Isa>(panel_vecs(r), [&]<int kN>() { panel<kN>(block, r); });
      }
    }
    write();
  }

 private:
  [[nodiscard]] std::int64_t head_of(std::int64_t r) const {
    return item_.first_head + r / item_.rows.size();
  }
  [[nodiscard]] std::int64_t row_of(std::int64_t r) const {
    return item_.rows.begin + r % item_.rows.size();
  }

  void find_visible_keys() {
    seen_ = {0, 0};
    for (std::int64_t r = 0; r < num_rows_; ++r) {
      const Range keys = sequence_.band.kv_range(row_of(r), row_of(r) + 1);
      scratch_.keys_begin[r] = keys.begin;
      scratch_.keys_end[r] = keys.end;
      if (!keys.empty()) {
        seen_ = seen_.empty()
                    ? keys
                    : Range{std::min(seen_.begin, keys.begin), std::max(seen_.end, keys.end)};
      }
    }
  }

  // The keys of the block that row r sees, counted from the block's first.
  [[nodiscard]] Range row_keys(const ForwardBlock<Isa>& block, std::int64_t r) const {
    return {std::clamp<std::int64_t>(scratch_.keys_begin[r] - block.begin, 0, block.keys),
            std::clamp<std::int64_t>(scratch_.keys_end[r] - block.begin, 0, block.keys)};
  }

  // Those that rows [begin, end) see, as far as they exist.
  [[nodiscard]] KeyRanges key_ranges(const ForwardBlock<Isa>& block, std::int64_t begin,
                                     std::int64_t end) const {
    KeyRanges ranges{{block.keys, 0}, {0, block.keys}};
    for (std::int64_t r = begin; r < std::min(end, num_rows_); ++r) {
      const Range row = row_keys(block, r);
      if (!row.empty()) {
        ranges.any = {std::min(ranges.any.begin, row.begin), std::max(ranges.any.end, row.end)};
      }
      ranges.all = {std::max(ranges.all.begin, row.begin), std::min(ranges.all.end, row.end)};
    }
    return ranges;
  }

  // The sign of the scale goes into Q, and a scale of 0 too (0 * NaN stays NaN).
  void apply_sign(Unit* staged) const {
    const double scale = call_.problem.scale;
    if (scale > 0) {
      return;
    }
    for (std::int64_t u = 0; u < call_.sizes.head_words; ++u) {
      if constexpr (Isa::kPair == 1) {
        staged[u] *= scale < 0 ? -1.F : 0.F;
      } else if (scale < 0) {
        staged[u] ^= 0x80008000U;
      } else {
        const auto times_zero = [](Unit half) {
          return (half & 0x7f80U) == 0x7f80U ? Unit{0x7fc0U} : Unit{0};
        };
        staged[u] = times_zero(staged[u] & 0xffffU) | times_zero(staged[u] >> 16) << 16;
      }
    }
  }

  // Vectors in the panel that starts at row r.
  [[nodiscard]] std::int64_t panel_vecs(std::int64_t r) const {
    constexpr std::int64_t kStep = std::max<std::int64_t>(Isa::kLanes, kRowMultiple<Isa>);
    return std::min<std::int64_t>(round_up(num_rows_ - r, kStep) / Isa::kLanes, Isa::kVecs);
  }

  void pack_queries() {
    const std::int64_t words = call_.sizes.padded_head_words;
    auto* const staged = static_cast<Unit*>(scratch_.staging);
    for (std::int64_t r = 0; r < num_rows_; r += kWidth<Isa>) {
      const std::int64_t width = panel_vecs(r) * Isa::kLanes;
      Unit* panel = queries(r);
      for (std::int64_t c = 0; c < width; c += Isa::kLanes) {
        for (std::int64_t i = 0; i < Isa::kLanes; ++i) {
          const std::int64_t row = r + c + i;
          if (row < num_rows_) {
            const Tensor& q = call_.args.q;
            stage_row<Isa>(
                q, q.offset(sequence_.batch_index, sequence_.q_begin + row_of(row), head_of(row)),
                call_.problem.head_dim, staged + i * words, words);
            apply_sign(staged + i * words);
          } else {
            std::memset(staged + i * words, 0, static_cast<std::size_t>(words) * sizeof(Unit));
          }
        }
        for (std::int64_t u = 0; u < words; u += Isa::kLanes) {
          Isa::transpose(staged + u, words, panel + u * width + c, width);
        }
      }
    }
  }

  [[nodiscard]] Unit* queries(std::int64_t r) const {
    return static_cast<Unit*>(scratch_.q) + r * call_.sizes.padded_head_words;
  }

  // Key block b: shared, or packed here unless it is the one packed last.
  ForwardBlock<Isa> key_block(std::int64_t b) {
    const ForwardSizes& sizes = call_.sizes;
    const std::int64_t begin = b * kForwardKeyBlock;
    const void* packed = scratch_.block;
    if (item_.blocks != nullptr) {
      packed = item_.blocks + (b - item_.first_block) * sizes.block_bytes();
    } else if (scratch_.block_batch != item_.batch || scratch_.block_head != item_.head_kv ||
               scratch_.block_begin != begin) {
      pack_block<Isa>(call_, sequence_, item_.head_kv, begin, scratch_.block);
      scratch_.block_batch = item_.batch;
      scratch_.block_head = item_.head_kv;
      scratch_.block_begin = begin;
    }
    const auto* const words = static_cast<const Unit*>(packed);
    return {begin, std::min(kForwardKeyBlock, sequence_.band.seqlen_kv - begin),
            words + ForwardSizes::kHeaderWords, words + sizes.v_begin,
            *static_cast<const std::int32_t*>(packed) != 0};
  }

  // Equations (1) to (4) for the panel of kN vectors that starts at row r.
  template <int kN>
  void panel(const ForwardBlock<Isa>& block, std::int64_t r) {
    constexpr int kM = kTileRows<Isa, kN>;
    constexpr std::int64_t kPanel = kN * Isa::kLanes;
    const ForwardSizes& sizes = call_.sizes;
    const KeyRanges seen = key_ranges(block, r, r + kPanel);
    if (seen.any.empty()) {
      return;
    }
    alignas(64) float maxima[kPanel];
    std::fill_n(maxima, kPanel, -kInfinity);

    // (1) Whole tiles; those that all rows see need no mask.
    const std::int64_t first = seen.any.begin / kM * kM;
    const std::int64_t last = round_up(seen.any.end, kM);
    const bool capped = logits_.cap_input != 0;
    const std::int64_t plain_begin =
        capped ? last : std::clamp(round_up(seen.all.begin, kM), first, last);
    const std::int64_t plain_end =
        capped ? last : std::clamp(seen.all.end / kM * kM, plain_begin, last);
    for (std::int64_t j = first; j < last; j += kM) {
      auto* const tile = j >= plain_begin && j < plain_end ? logits_tile<Isa, kM, kN, true>
                                                           : logits_tile<Isa, kM, kN, false>;
      tile(block.k + j * sizes.padded_head_words, sizes.padded_head_words, queries(r),
           sizes.head_words, scratch_.s + j * kPanel, maxima);
    }
    if (first < plain_begin || plain_end < last) {
      alignas(64) float begin[kPanel];
      alignas(64) float end[kPanel];
      for (std::int64_t i = 0; i < kPanel; ++i) {
        const Range row = r + i < num_rows_ ? row_keys(block, r + i) : Range{0, 0};
        begin[i] = static_cast<float>(row.begin);
        end[i] = static_cast<float>(row.end);
      }
      cap_and_mask<Isa, kN>(scratch_.s, first, plain_begin, logits_, begin, end, maxima);
      cap_and_mask<Isa, kN>(scratch_.s, plain_end, last, logits_, begin, end, maxima);
    }

    // (2), (3)
    auto* const p = static_cast<Unit*>(scratch_.p);
    probabilities<Isa, kN>(scratch_.s, first, last, logits_, maxima, scratch_.row_max + r,
                           scratch_.row_sum + r, scratch_.row_rescale + r, p);

    // (4)
    for (std::int64_t c = 0; c < sizes.columns; c += kWidth<Isa>) {
      with_vecs<Isa>((sizes.columns - c) / Isa::kLanes,
                     [&]<int kColumnVecs>() { values<kColumnVecs>(block, r, kPanel, c, seen); });
    }
  }

  // Equation (4) for the rows [r, r + panel) and the panel of kN vectors of columns that starts at
  // column c.
  template <int kN>
  void values(const ForwardBlock<Isa>& block, std::int64_t r, std::int64_t panel, std::int64_t c,
              const KeyRanges& panel_seen) {
    constexpr int kM = kTileRows<Isa, kN>;
    const ForwardSizes& sizes = call_.sizes;
    const Unit* const v = block.v + c * (sizes.keys / Isa::kPair);
    const auto* const p = static_cast<const Unit*>(scratch_.p);
    const bool full = panel_seen.all.begin == 0 && panel_seen.all.end == block.keys;
    for (std::int64_t m = 0; m < panel && r + m < num_rows_; m += kM) {
      const KeyRanges seen = full ? panel_seen : key_ranges(block, r + m, r + m + kM);
      if (seen.any.empty()) {
        continue;
      }
      float* const out = scratch_.out + (r + m) * sizes.columns + c;
      const float* const rescale = scratch_.row_rescale + r + m;
      const bool is_first = first_key(r + m, r + m + kM) >= block.begin;
      const std::int64_t first = seen.any.begin / Isa::kPair;
      const std::int64_t last = ceil_div(seen.any.end, Isa::kPair);
      // A unit may reach one key further than what is seen; past the last key lies a zero.
      const bool exact = seen.all.begin <= first * Isa::kPair &&
                         seen.all.end >= std::min(last * Isa::kPair, block.keys);
      if (block.has_nonfinite_v && !exact) {
        for (std::int64_t i = 0; i < kM && r + m + i < num_rows_; ++i) {
          const Range row = row_keys(block, r + m + i);
          values_row<Isa>(p + m + i, panel, v, kN * Isa::kLanes, row.begin, row.end, rescale[i],
                          is_first, out + i * sizes.columns);
        }
        continue;
      }
      values_tile<Isa, kM, kN>(p + first * panel + m, panel, v + first * (kN * Isa::kLanes),
                               last - first, rescale, is_first, out, sizes.columns);
    }
  }

  // The first key that one of rows [begin, end) sees.
  [[nodiscard]] std::int64_t first_key(std::int64_t begin, std::int64_t end) const {
    std::int64_t first = sequence_.band.seqlen_kv;
    for (std::int64_t r = begin; r < std::min(end, num_rows_); ++r) {
      if (scratch_.keys_begin[r] < scratch_.keys_end[r]) {
        first = std::min(first, scratch_.keys_begin[r]);
      }
    }
    return first;
  }

  void write() const {
    const Problem& p = call_.problem;
    const Args& args = call_.args;
    for (std::int64_t r = 0; r < num_rows_; ++r) {
      const std::int64_t head = head_of(r);
      const std::int64_t i = sequence_.q_begin + row_of(r);
      // Without a logit above -inf the maximum is -inf, the sum 0.
      // In f32, as the backward computes its logits: see probability() in backward_tile.hpp.
      double maximum = scratch_.row_max[r] * finite_float(to_natural_);
      double sum = scratch_.row_sum[r];
      double weight = 1;
      const float sink =
          args.sinks != nullptr ? static_cast<const float*>(args.sinks)[head] : -kInfinity;
      if (sink != -kInfinity) {
        const double highest = std::max<double>(maximum, sink);
        weight = std::exp(maximum - highest);
        sum = weight * sum + std::exp(sink - highest);
        maximum = highest;
      }
      const auto lse = static_cast<float>(maximum + std::log(sum));
      // +inf would call the row empty.
      const bool beyond_f32 = lse == kInfinity;
      if (beyond_f32) {
        weight = kNaN;
      }
      if (scratch_.row_sum[r] == 0) {
        zero_rows(args.out, sequence_.batch_index, i, i + 1, head, p.head_dim_v);
      } else {
        write_row<Isa>(scratch_.out + r * call_.sizes.columns, static_cast<float>(weight / sum),
                       args.out, args.out.offset(sequence_.batch_index, i, head), p.head_dim_v);
      }
      if (args.lse) {
        static_cast<float*>(args.lse.data)[args.lse.offset(sequence_.batch_index, i, head)] =
            beyond_f32 ? kNaN : lse;
      }
    }
  }

  const ForwardCall& call_;
  const Sequence& sequence_;
  const ForwardItem& item_;
  ForwardScratch& scratch_;
  const std::int64_t num_rows_;
  Range seen_;  // keys that at least one row sees
  Logits logits_;
  double to_natural_ = 1;  // what a (capped) entry of S^T is multiplied with to be a logit
};

template <class Isa>
static void run_item(const ForwardCall& call, const Sequence& sequence, const ForwardItem& item,
                     ForwardScratch& scratch) {
  ForwardItemRun<Isa>(call, sequence, item, scratch).run();
}

template <class Isa>
inline constexpr ForwardKernels kForwardKernels = {Isa::kPair, Isa::kLanes, kWidth<Isa>,
                                                   pack_block<Isa>, run_item<Isa>};

}  // namespace flashgrad::cpu
