// SPDX-License-Identifier: Apache-2.0
// Backward, step 2: one key block against all query blocks that see it. Per query head of the group
// and query block:
//
//     P^T, dS^T   tile by tile, (1) to (4) of backward_tile.hpp: p is computed once
//     (5) dV += P^T dO
//     (6) dK += dS^T Q
//     (7) dQ += dS K      (times scale at the end, as dK)
//
// dV and dK of the block stay in the thread's buffers; dQ is shared by the key blocks of the head.
// They add to each of its query blocks in ascending order, by turns (HeadPack::next_kv_block): the
// sums have one order, whatever the number of threads. A key block computes its own dS first and
// waits before (7) only for lower key blocks, which started earlier, so there is no deadlock. Query
// blocks go downwards: under a causal mask all key blocks then start at the same one and follow
// each other through the rows.
//
// Zero times NaN. (5) to (7) also multiply pairs that the mask hides, with p = ds = 0. Rows of dO,
// Q and K that hold an infinity or NaN are zeros in the packs that these products read, and their
// visible pairs are added one by one (add_not_finite_queries and _keys).
#pragma once

#include "cpu/backward_prefetch.hpp"
#include "cpu/backward_tile.hpp"
#include "cpu/spin.hpp"

namespace flashgrad::cpu {

template <class Isa>
class KeyBlockTask {
 public:
  using Unit = typename Isa::Unit;

  KeyBlockTask(const BackwardPlan<Isa>& plan, const Args& args, const Job<Isa>& job,
               const KeyBlockBuffers<Isa>& buffers, std::int64_t kv_block)
      : plan_(plan),
        p_(plan.p),
        args_(args),
        job_(job),
        band_(job.sequence.band),
        b_(buffers),
        kv_block_(kv_block),
        k0_(kv_block * job.blocks.block_kv),
        valid_(band_.seqlen_kv - k0_ < job.blocks.block_kv ? band_.seqlen_kv - k0_
                                                           : job.blocks.block_kv),
        rows_(round_up(valid_, kRowMultiple<Isa>)),
        dk_(job.dk != nullptr ? job.dk + k0_ * plan.columns_qk : buffers.dk),
        dv_(job.dv != nullptr ? job.dv + k0_ * plan.columns_v : buffers.dv),
        scale_(finite_float(p_.softcap > 0 ? p_.scale / p_.softcap : p_.scale)),
        softcap_(finite_float(p_.softcap)) {}

  // Computes dk and dv of the block and its part of dq.
  void run() {
    const Range queries = band_.q_range(k0_, k0_ + valid_);
    if (queries.empty() || !plan_.needs_p) {
      write_zeros();
      return;
    }
    pack();
    const std::int64_t group = p_.group();
    const std::int64_t first_block = queries.begin / job_.blocks.block_q;
    const std::int64_t last_block = (queries.end - 1) / job_.blocks.block_q;
    bool add = job_.group_begin > 0;
    for (std::int64_t g = job_.group_begin; g < job_.group_end; ++g) {
      for (std::int64_t q_block = last_block; q_block >= first_block; --q_block) {
        if (q_block > first_block) {
          prefetch(g, q_block - 1);
        } else if (g + 1 < job_.group_end) {
          prefetch(g + 1, last_block);
        } else {
          next_packs_ = {};
        }
        query_block(job_.heads[g - job_.group_begin], job_.kv_head * group + g, q_block, add);
        add = true;
      }
    }
    if (job_.group_end < group) {
      return;
    }
    write();
    if (p_.wants_dv && !plan_.needs_dv) {
      const std::int64_t row = job_.sequence.kv_begin + k0_;
      zero_rows(args_.dv, job_.sequence.batch_index, row, row + valid_, job_.kv_head,
                p_.head_dim_v);
    }
  }

 private:
  void pack() {
    bool all_finite = true;
    for (std::int64_t j = 0; j < rows_; ++j) {
      bool finite = true;
      if (j < valid_) {
        const std::int64_t row = job_.sequence.kv_begin + k0_ + j;
        if (j + kPrefetchRows < valid_) {
          prefetch_row(args_.k,
                       args_.k.offset(job_.sequence.batch_index, row + kPrefetchRows, job_.kv_head),
                       p_.head_dim);
          prefetch_row(args_.v,
                       args_.v.offset(job_.sequence.batch_index, row + kPrefetchRows, job_.kv_head),
                       p_.head_dim_v);
        }
        finite =
            stage_row<Isa>(args_.k, args_.k.offset(job_.sequence.batch_index, row, job_.kv_head),
                           p_.head_dim, b_.k_rows + j * plan_.units_qk, plan_.units_qk);
        if (plan_.needs_ds && p_.has_dout) {
          stage_row<Isa>(args_.v, args_.v.offset(job_.sequence.batch_index, row, job_.kv_head),
                         p_.head_dim_v, b_.v_rows + j * plan_.units_v, plan_.units_v);
        }
      } else {
        std::memset(b_.k_rows + j * plan_.units_qk, 0,
                    static_cast<std::size_t>(plan_.units_qk) * sizeof(Unit));
        std::memset(b_.v_rows + j * plan_.units_v, 0,
                    static_cast<std::size_t>(plan_.units_v) * sizeof(Unit));
      }
      b_.k_not_finite[j] = finite ? 0 : 1;
      all_finite &= finite;
    }
    k_all_finite_ = all_finite;
    if (!p_.wants_dq) {
      return;
    }
    if (!all_finite) {
      for (std::int64_t j = 0; j < rows_; ++j) {
        if (b_.k_not_finite[j] != 0) {
          std::memset(b_.k_rows + j * plan_.units_qk, 0,
                      static_cast<std::size_t>(plan_.units_qk) * sizeof(Unit));
        }
      }
    }
    pack_depth<Isa>(b_.k_rows, plan_.units_qk, rows_, plan_.columns_qk, b_.k_depth,
                    rows_ / Isa::kPair, 0);
    if (!all_finite) {
      for (std::int64_t j = 0; j < valid_; ++j) {
        if (b_.k_not_finite[j] != 0) {
          stage_row<Isa>(args_.k,
                         args_.k.offset(job_.sequence.batch_index, job_.sequence.kv_begin + k0_ + j,
                                        job_.kv_head),
                         p_.head_dim, b_.k_rows + j * plan_.units_qk, plan_.units_qk);
        }
      }
    }
  }

  // Rows of a query block, the last one's padding included.
  [[nodiscard]] std::int64_t rows_of(std::int64_t q_block) const {
    const std::int64_t left = job_.blocks.padded_q - q_block * job_.blocks.block_q;
    return left < job_.blocks.block_q ? left : job_.blocks.block_q;
  }

  // The query block that comes next, whose packs the tiles of this one ask for.
  void prefetch(std::int64_t g, std::int64_t q_block) {
    const std::int64_t tiles = job_.blocks.block_q / kWidth<Isa> * (rows_ / Isa::kRows);
    next_packs_ = PackPrefetch<Isa>(plan_, job_.heads[g - job_.group_begin],
                                    q_block * job_.blocks.block_q, rows_of(q_block), tiles);
  }

  void query_block(HeadPack<Isa>& head, std::int64_t head_index, std::int64_t q_block, bool add) {
    const std::int64_t q0 = q_block * job_.blocks.block_q;
    const std::int64_t rows_q = rows_of(q_block);
    for (std::int64_t panel = 0; panel < rows_q; panel += kWidth<Isa>) {
      panel_tiles(head, q0, panel);
    }
    // The queries that a group of keys sees, in units from the block's first.
    const auto queries_of = [&](std::int64_t m_begin, std::int64_t m_end) {
      return units(band_.q_range(k0_ + m_begin, k0_ + (m_end < valid_ ? m_end : valid_)), q0,
                   q0 + rows_q);
    };
    const bool not_finite = head.block_not_finite[q_block] != 0;
    if (plan_.needs_dv) {
      multiply_panels<Isa, false>(rows_, plan_.columns_v, b_.p_rows, kLdP<Isa>,
                                  head.dout_depth + q0 / Isa::kPair * plan_.columns_v,
                                  rows_q / Isa::kPair, dv_, plan_.columns_v, add,
                                  queries_of);  // (5)
      if (not_finite) {
        add_not_finite_queries(args_.dout, head.dout_not_finite, head_index, p_.head_dim_v,
                               b_.p_rows, dv_, plan_.columns_v, q0, rows_q);
      }
    }
    if (p_.wants_dk) {
      multiply_panels<Isa, false>(rows_, plan_.columns_qk, b_.ds_rows, kLdP<Isa>,
                                  head.q_depth + q0 / Isa::kPair * plan_.columns_qk,
                                  rows_q / Isa::kPair, dk_, plan_.columns_qk, add,
                                  queries_of);  // (6)
      if (not_finite) {
        add_not_finite_queries(args_.q, head.q_not_finite, head_index, p_.head_dim, b_.ds_rows, dk_,
                               plan_.columns_qk, q0, rows_q);
      }
    }
    if (p_.wants_dq) {
      add_to_dq(head, head_index, q_block, q0, rows_q);
    }
  }

  enum class Visibility { kNone, kSome, kAll };

  // What the tile of keys [m, m + kRows) and the panel of queries from `query` on shows; fills
  // tile.visible if it must be masked.
  Visibility look(std::int64_t query, std::int64_t m, bool has_void, Tile<Isa>& tile) const {
    const std::int64_t key = k0_ + m;
    if (band_.is_empty(query, query + kWidth<Isa>, key, key + Isa::kRows)) {
      return Visibility::kNone;
    }
    if (!has_void && band_.is_full(query, query + kWidth<Isa>, key, key + Isa::kRows)) {
      return Visibility::kAll;
    }
    for (int r = 0; r < Isa::kRows; ++r) {
      const Range seen_by = band_.q_range(key + r, key + r + 1);
      tile.visible[r] = {seen_by.begin - query, seen_by.end - query};
    }
    return Visibility::kSome;
  }

  // P^T and dS^T of the key block and one panel of queries: S^T of a group of tiles, then their
  // dP^T, since the panels of Q^T and dO^T may be too large for the first cache together. dS needs
  // the weights of the whole group: f32 has them in P^T; where they are apart, a group is one tile.
  void panel_tiles(const HeadPack<Isa>& head, std::int64_t q0, std::int64_t panel) {
    const std::int64_t query = q0 + panel;
    const Unit* q_columns = head.q_columns + query * plan_.units_qk;
    const Unit* dout_columns =
        head.dout_columns != nullptr ? head.dout_columns + query * plan_.units_v : nullptr;
    const bool has_void = head.panel_has_void[query / kWidth<Isa>] != 0;
    alignas(64) float weight_buffer[Isa::kRows * kWidth<Isa>];
    const bool p_is_weight = Isa::kPair == 1 && !(p_.softcap > 0);
    const std::ptrdiff_t ld_weight = p_is_weight ? kLdP<Isa> : kWidth<Isa>;
    const std::int64_t group = p_is_weight ? kGroupTiles * Isa::kRows : Isa::kRows;
    const auto p_at = [&](std::int64_t m) {
      return b_.p_rows + m * kLdP<Isa> + panel / Isa::kPair;
    };
    const auto weight_at = [&](std::int64_t m) {
      if constexpr (Isa::kPair == 1) {
        return p_is_weight ? p_at(m) : weight_buffer;
      } else {
        return weight_buffer;
      }
    };
    Tile<Isa> tile;
    tile.neg_lse = head.neg_lse + query;
    tile.neg_delta = head.neg_delta + query;
    for (std::int64_t begin = 0; begin < rows_; begin += group) {
      const std::int64_t end = begin + group < rows_ ? begin + group : rows_;
      for (std::int64_t m = begin; m < end; m += Isa::kRows) {
        next_packs_.step();
        if (look(query, m, has_void, tile) == Visibility::kNone) {
          zero_tile<Isa>(p_at(m));
        } else {
          score_tile<Isa>(b_.k_rows + m * plan_.units_qk, plan_.units_qk, q_columns,
                          plan_.depth_qk(), scale_, weight_at(m), ld_weight);
        }
      }
      for (std::int64_t m = begin; m < end; m += Isa::kRows) {
        const Visibility visibility = look(query, m, has_void, tile);
        gradient(dout_columns, visibility, tile, m, weight_at(m), ld_weight, p_at(m),
                 b_.ds_rows + m * kLdP<Isa> + panel / Isa::kPair,
                 Isa::kPair == 2 ? b_.ds_pairs + m / 2 * kLdPairs<Isa> + panel : nullptr);
      }
    }
  }

  void gradient(const Unit* dout_columns, Visibility visibility, const Tile<Isa>& tile,
                std::int64_t m, float* weight, std::ptrdiff_t ld_weight, Unit* p_rows,
                Unit* ds_rows, Unit* ds_pairs) const {
    if (visibility == Visibility::kNone) {
      zero_tile<Isa>(ds_rows);
      if constexpr (Isa::kPair == 2) {
        zero_pairs<Isa>(ds_pairs);
      }
      return;
    }
    const auto run = [&]<bool kMasked, bool kSoftcap>() {
      // Without a use for ds, only p: dO^T is not packed.
      gradient_tile<Isa, kMasked, kSoftcap>(b_.v_rows + m * plan_.units_v, plan_.units_v,
                                            dout_columns, plan_.needs_ds ? plan_.depth_v() : 0,
                                            softcap_, tile, weight, ld_weight, p_rows, ds_rows,
                                            ds_pairs);
    };
    const bool masked = visibility == Visibility::kSome;
    if (p_.softcap > 0) {
      masked ? run.template operator()<true, true>() : run.template operator()<false, true>();
    } else {
      masked ? run.template operator()<true, false>() : run.template operator()<false, false>();
    }
  }

  // (7), in turn, a part of the keys at a time. The first key block that a query block sees stores,
  // the last one writes dq while it is hot.
  void add_to_dq(HeadPack<Isa>& head, std::int64_t head_index, std::int64_t q_block,
                 std::int64_t q0, std::int64_t rows_q) {
    const Range keys = band_.kv_range(q0, q0 + rows_q);
    const std::int64_t first = keys.begin / job_.blocks.block_kv;
    const std::int64_t last = (keys.end - 1) / job_.blocks.block_kv;
    const auto keys_of = [&](std::int64_t m_begin, std::int64_t m_end) {
      return units(band_.kv_range(q0 + m_begin, q0 + m_end), k0_, k0_ + valid_);
    };
    std::atomic<std::int32_t>& turn = head.next_kv_block[q_block];
    const auto mine = static_cast<std::int32_t>(kv_block_);
    spin_until([&] { return turn.load(std::memory_order_acquire) == mine; });
    float* dq = head.dq + q0 * plan_.columns_qk;
    const Unit* ds = Isa::kPair == 2 ? b_.ds_pairs : b_.ds_rows;
    const std::ptrdiff_t ld_ds = Isa::kPair == 2 ? kLdPairs<Isa> : kLdP<Isa>;
    for (std::int64_t part = 0; part < rows_ / Isa::kPair; part += kDqDepth<Isa>) {
      const auto keys_of_part = [&](std::int64_t m_begin, std::int64_t m_end) {
        DepthRange range = keys_of(m_begin, m_end);
        range.begin = range.begin < part ? part : range.begin;
        range.end = range.end > part + kDqDepth<Isa> ? part + kDqDepth<Isa> : range.end;
        return range;
      };
      multiply_panels<Isa, true>(rows_q, plan_.columns_qk, ds, ld_ds, b_.k_depth,
                                 rows_ / Isa::kPair, dq, plan_.columns_qk,
                                 kv_block_ > first || part > 0, keys_of_part);
    }
    if (!k_all_finite_) {
      add_not_finite_keys(head, q0, rows_q);
    }
    if (kv_block_ == last) {
      const std::int64_t end = q0 + rows_q < band_.seqlen_q ? rows_q : band_.seqlen_q - q0;
      for (std::int64_t i = 0; i < end; ++i) {
        if (i + kPrefetchRows < end) {
          prefetch_row<true>(
              args_.dq,
              args_.dq.offset(job_.sequence.batch_index,
                              job_.sequence.q_begin + q0 + i + kPrefetchRows, head_index),
              p_.head_dim);
        }
        write_row<Isa>(
            dq + i * plan_.columns_qk, static_cast<float>(p_.scale), args_.dq,
            args_.dq.offset(job_.sequence.batch_index, job_.sequence.q_begin + q0 + i, head_index),
            p_.head_dim);
      }
    }
    turn.store(mine + 1, std::memory_order_release);
  }

  // The part of `range` inside [begin, end), counted from begin in whole units.
  static DepthRange units(Range range, std::int64_t begin, std::int64_t end) {
    range.begin = range.begin < begin ? begin : range.begin;
    range.end = range.end > end ? end : range.end;
    if (range.empty()) {
      return {};
    }
    return {static_cast<std::ptrdiff_t>((range.begin - begin) / Isa::kPair),
            static_cast<std::ptrdiff_t>(ceil_div(range.end - begin, Isa::kPair))};
  }

  // Element `column` of a row of P^T or dS^T.
  static float element(const Unit* row, std::int64_t column) {
    if constexpr (Isa::kPair == 1) {
      return row[column];
    } else {
      const std::uint32_t pair = row[column / 2];
      return std::bit_cast<float>(column % 2 == 0 ? pair << 16 : pair & 0xffff0000U);
    }
  }

  // acc (padded to whole vectors) += coefficient * row of `t`.
  static void add_row(float coefficient, const Tensor& t, std::int64_t offset, std::int64_t n,
                      float* acc) {
    const char* row = row_at(t, offset);
    with_dtype(t.dtype, [&]<DType kType>() {
      for (std::int64_t c = 0; c < n; c += Isa::kLanes) {
        Isa::store(acc + c,
                   Isa::fma(Isa::set1(coefficient), load_chunk<Isa, kType>(row, t.dim_stride, c, n),
                            Isa::load(acc + c)));
      }
    });
  }

  // acc (keys, columns) += coefficient(key, query) * row(query) for the visible pairs of marked
  // queries.
  [[gnu::noinline]] void add_not_finite_queries(const Tensor& t, const std::uint8_t* not_finite,
                                                std::int64_t head_index, std::int64_t n,
                                                const Unit* coefficients, float* acc,
                                                std::int64_t columns, std::int64_t q0,
                                                std::int64_t rows_q) {
    for (std::int64_t i = q0; i < q0 + rows_q; ++i) {
      if (not_finite[i] == 0) {
        continue;
      }
      const Range keys = clip(band_.kv_range(i, i + 1), k0_, k0_ + valid_);
      for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        add_row(element(coefficients + (j - k0_) * kLdP<Isa>, i - q0), t,
                t.offset(job_.sequence.batch_index, job_.sequence.q_begin + i, head_index), n,
                acc + (j - k0_) * columns);
      }
    }
  }

  // dq (queries, columns_qk) += ds(key, query) * k(key) for the visible pairs of marked keys.
  [[gnu::noinline]] void add_not_finite_keys(const HeadPack<Isa>& head, std::int64_t q0,
                                             std::int64_t rows_q) {
    for (std::int64_t j = 0; j < valid_; ++j) {
      if (b_.k_not_finite[j] == 0) {
        continue;
      }
      const Range queries = clip(band_.q_range(k0_ + j, k0_ + j + 1), q0, q0 + rows_q);
      for (std::int64_t i = queries.begin; i < queries.end; ++i) {
        if (head.neg_lse[i] == -std::numeric_limits<float>::infinity()) {
          continue;
        }
        add_row(element(b_.ds_rows + j * kLdP<Isa>, i - q0), args_.k,
                args_.k.offset(job_.sequence.batch_index, job_.sequence.kv_begin + k0_ + j,
                               job_.kv_head),
                p_.head_dim, head.dq + i * plan_.columns_qk);
      }
    }
  }

  static Range clip(Range range, std::int64_t begin, std::int64_t end) {
    return {range.begin < begin ? begin : range.begin, range.end > end ? end : range.end};
  }

  void write() {
    for (std::int64_t j = 0; j < valid_; ++j) {
      const std::int64_t row = job_.sequence.kv_begin + k0_ + j;
      if (j + kPrefetchRows < valid_) {
        if (p_.wants_dk) {
          prefetch_row<true>(
              args_.dk,
              args_.dk.offset(job_.sequence.batch_index, row + kPrefetchRows, job_.kv_head),
              p_.head_dim);
        }
        if (p_.wants_dv) {
          prefetch_row<true>(
              args_.dv,
              args_.dv.offset(job_.sequence.batch_index, row + kPrefetchRows, job_.kv_head),
              p_.head_dim_v);
        }
      }
      if (p_.wants_dk) {
        write_row<Isa>(dk_ + j * plan_.columns_qk, static_cast<float>(p_.scale), args_.dk,
                       args_.dk.offset(job_.sequence.batch_index, row, job_.kv_head), p_.head_dim);
      }
      if (plan_.needs_dv) {
        write_row<Isa>(dv_ + j * plan_.columns_v, 1.F, args_.dv,
                       args_.dv.offset(job_.sequence.batch_index, row, job_.kv_head),
                       p_.head_dim_v);
      }
    }
  }

  // No query sees the block, or nothing that depends on p is wanted.
  void write_zeros() {
    const std::int64_t row = job_.sequence.kv_begin + k0_;
    if (p_.wants_dk) {
      zero_rows(args_.dk, job_.sequence.batch_index, row, row + valid_, job_.kv_head, p_.head_dim);
    }
    if (p_.wants_dv) {
      zero_rows(args_.dv, job_.sequence.batch_index, row, row + valid_, job_.kv_head,
                p_.head_dim_v);
    }
  }

  const BackwardPlan<Isa>& plan_;
  const Problem& p_;
  const Args& args_;
  const Job<Isa>& job_;
  const Band band_;
  const KeyBlockBuffers<Isa> b_;
  const std::int64_t kv_block_;
  const std::int64_t k0_;     // its first key
  const std::int64_t valid_;  // its keys
  const std::int64_t rows_;   // its keys, padded
  float* const dk_;           // (rows, columns_qk)
  float* const dv_;           // (rows, columns_v)
  const float scale_;         // of the logits; with softcap: scale / softcap
  const float softcap_;
  PackPrefetch<Isa> next_packs_;
  bool k_all_finite_ = true;
};

}  // namespace flashgrad::cpu
