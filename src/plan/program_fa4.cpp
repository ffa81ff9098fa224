// SPDX-License-Identifier: Apache-2.0
// FlashAttention-4's backward on Blackwell as a program of the simulator. Per CTA 128 keys, per
// step 128 queries:
//   (1) S^T  = K Q^T    (2) P^T = exp2(scale_log2 S^T - lse_log2)    (3) dP^T = V dO^T
//   (4) dS^T = P^T (dP^T - delta)    (5) dV += P^T dO    (6) dK += dS^T Q    (7) dQ = dS K
// P^T and dS^T are operand A of (5) and (6) where they lie, in tensor memory.
//
// Columns of tensor memory:   0       64      128     192     256       256 + d
//   one CTA                   S, later P      dP, later dS, later dQ   dV        dK
//   a pair                    S, later P | -  dP, later dS | dQ        dV        dK
//
// A pair works as one on products with 256 rows: B is cut in halves, by query rows for (1) and (3),
// by columns for (5) to (7). dQ needs all keys of the pair, so each CTA sends the other the half of
// its dS that belongs to the other's 64 query rows, and makes 64 rows of dQ over 256 keys.
//
// Roles of a CTA: loads; softmax (two warpgroups in the kernel, (2) and (4)); dq (takes dQ out);
// with a pair also send (copies the half of dS) and relay (tells the leader that a half has
// landed). The products are issued by CTA 0 alone, in the order
//   one CTA   S(i) dK(i-1) dQ(i-1) dP(i) dV(i)     dQ takes dP's columns, so it goes first
//   a pair    S(i) dK(i-1) dP(i) dQ(i-1) dV(i)     dP does not wait for the exchange of dS(i-1)
#include <fmt/format.h>

#include "plan/program_builder.hpp"

namespace flashgrad::plan {
namespace {

constexpr int kTile = 128;
constexpr int kOperands = static_cast<int>(Use::kOperands);
constexpr int kWritten = static_cast<int>(Use::kWritten);
constexpr int kExchanged = static_cast<int>(Use::kExchanged);
constexpr int kStaged = static_cast<int>(Use::kStaged);
constexpr int kLanding = static_cast<int>(Use::kLanding);
constexpr int kDqChunk = 32;  // columns of dQ on their way out at a time
constexpr int kDqStages = 2;

class Fa4 {
 public:
  Fa4(const HeadData& data, int first_key, int ctas)
      : data_(data),
        first_key_(first_key),
        ctas_(ctas),
        d_(data.head_dim),
        rows_(kTile / ctas),
        blocks_(query_blocks(data, kTile, first_key, kTile * ctas)),
        steps_(static_cast<int>(blocks_.size())),
        build_(ctas == 2 ? "FlashAttention-4, pair" : "FlashAttention-4", ctas) {}

  Program make() {
    build_.tensor("S and P", 0, kTile);
    build_.tensor("dP, dS and dQ", kTile, kTile);
    build_.tensor("dV", 2 * kTile, d_);
    build_.tensor("dK", 2 * kTile + d_, d_);
    const int pipe = build_.add_pipe();
    for (int cta = 0; cta < ctas_; ++cta) {
      write_loads(cta);
      write_softmax(cta);
      write_dq(cta);
      if (pair()) {
        write_send(cta);
        write_relay(cta);
      }
    }
    write_products(pipe);
    return build_.take(steps_);
  }

 private:
  [[nodiscard]] bool pair() const { return ctas_ == 2; }
  [[nodiscard]] int query(int step) const {
    return blocks_[static_cast<std::size_t>(step)] * kTile;
  }
  [[nodiscard]] int key(int cta) const { return first_key_ + kTile * cta; }

  View shared(const std::string& name, int cta, int offset, int rows, int columns,
              Element element = Element::kBf16) const {
    return {name, Store::kShared, cta, offset, columns * size_of(element), rows, columns, element};
  }
  static View tensor(const std::string& name, int cta, int column, int rows, int columns,
                     Element element, int fold = 0) {
    return {name, Store::kTensor, cta, column * 4, kTensorRowBytes, rows, columns, element, fold};
  }

  // Barriers of the leader have an arrival from each CTA, the others are one in each CTA.
  struct OnBoth {
    int at[2];
  };
  OnBoth on_both(const std::string& name) {
    OnBoth barrier{};
    for (int cta = 0; cta < ctas_; ++cta) {
      barrier.at[cta] = build_.barrier(name, cta, 1);
    }
    return barrier;
  }
  [[nodiscard]] std::vector<int> all(const OnBoth& barrier) const {
    return {barrier.at, barrier.at + ctas_};
  }
  int on_leader(const std::string& name) { return build_.barrier(name, 0, ctas_); }

  // Operands.
  Access k(int cta) const { return {shared("K", cta, k_, kTile, d_), "K", 0, kOperands}; }
  Access v(int cta) const { return {shared("V", cta, v_, kTile, d_), "V", 0, kOperands}; }
  Access kt(int cta) const {
    return pair() ? Access{shared("K of both", cta, kt_, 2 * kTile, d_ / 2), "K", 0, kOperands}
                  : k(cta);
  }
  // B of (1); B of (6). One CTA keeps two whole stages instead.
  Access q_rows(int cta, int step) const {
    const int at = !pair() && step % 2 == 1 ? q_other_ : q_rows_;
    return {shared("Q", cta, at, rows_, d_), "Q", step, kOperands};
  }
  Access q_columns(int cta, int step) const {
    return pair() ? Access{shared("Q columns", cta, q_other_, kTile, d_ / 2), "Q", step, kOperands}
                  : q_rows(cta, step);
  }
  Access do_rows(int cta, int step) const {
    return {shared("dO", cta, do_rows_, rows_, d_), "dO", step, kOperands};
  }
  Access do_columns(int cta, int step) const {
    return pair() ? Access{shared("dO columns", cta, do_columns_, kTile, d_ / 2), "dO", step,
                           kOperands}
                  : do_rows(cta, step);
  }
  // dS^T of all keys of the pair for this CTA's query rows: A of (7), transposed. Part of CTA
  // `from`.
  View ds_place(int cta) const { return shared("dS", cta, ds_, kTile * ctas_, rows_); }
  Access ds_part(int cta, int from, int step, int use) const {
    return {ds_place(cta).part(kTile * from, kTile, 0, rows_), "dS", step, use};
  }
  Access ds_operand(int cta, int step) const { return {ds_place(cta), "dS", step, kOperands}; }
  Access to_send(int cta, int step, int use) const {
    return {shared("dS for the peer", cta, send_, kTile, rows_), "dS", step, use};
  }
  Access statistic(const char* name, int cta, int offset, int step) const {
    return {shared(name, cta, offset, 1, kTile, Element::kF32), name, step};
  }

  // Tensor memory.
  static Access s(int cta, int step) {
    return {tensor("columns 0..127", cta, 0, kTile, kTile, Element::kF32), "S", step};
  }
  static Access p(int cta, int step) {
    return {tensor("columns 0..63", cta, 0, kTile, kTile, Element::kBf16), "P", step};
  }
  static Access dp(int cta, int step) {
    return {tensor("columns 128..255", cta, kTile, kTile, kTile, Element::kF32), "dP", step};
  }
  static Access ds(int cta, int step) {
    return {tensor("columns 128..191", cta, kTile, kTile, kTile, Element::kBf16), "dS", step};
  }
  Access dq(int cta, int step) const {
    return {pair() ? tensor("columns 192..255", cta, kTile + kTile / 2, rows_, d_, Element::kF32,
                            d_ / 2)
                   : tensor("columns 128..255", cta, kTile, rows_, d_, Element::kF32),
            "dQ", step};
  }
  Access dv(int cta, int step) const {
    return {tensor("dV's columns", cta, 2 * kTile, kTile, d_, Element::kF32), "dV", step};
  }
  Access dk(int cta, int step) const {
    return {tensor("dK's columns", cta, 2 * kTile + d_, kTile, d_, Element::kF32), "dK", step};
  }

  template <class Place>
  [[nodiscard]] std::vector<Access> each(Place&& place) const {
    std::vector<Access> list;
    for (int cta = 0; cta < ctas_; ++cta) {
      list.push_back(place(cta));
    }
    return list;
  }
  static Access counted(Access access, int use) {
    access.use = use;
    return access;
  }

  void write_loads(int cta) {
    RoleWriter role(build_, "loads", cta);
    role.copy("K", global_input(data_, kGlobalK, key(cta), kTile, 0, d_), {counted(k(cta), -1)},
              {k_full_});
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      const int m = query(step);
      // Q in whole rows of this CTA, or the next of two stages.
      const int stage = pair() ? 0 : step % 2;
      role.wait(q_empty_[stage].at[cta], (pair() ? step : step / 2) - 1);
      role.copy("Q", global_input(data_, kGlobalQ, m + rows_ * cta, rows_, 0, d_),
                {counted(q_rows(cta, step), kLanding)}, {q_full_[stage]});
      role.wait(lse_empty_.at[cta], step - 1);
      role.copy("lse", global_input(data_, kGlobalLse, m, kTile, 0, 1),
                {statistic("lse", cta, lse_, step)}, {lse_full_.at[cta]});
      if (step == 0) {
        role.copy("V", global_input(data_, kGlobalV, key(cta), kTile, 0, d_), {counted(v(cta), -1)},
                  {v_full_});
      }
      role.wait(do_empty_[0].at[cta], step - 1);
      role.copy("dO", global_input(data_, kGlobalDout, m + rows_ * cta, rows_, 0, d_),
                {counted(do_rows(cta, step), kLanding)}, {do_full_[0]});
      role.wait(delta_empty_.at[cta], step - 1);
      role.copy("delta", global_input(data_, kGlobalDelta, m, kTile, 0, 1),
                {statistic("delta", cta, delta_, step)}, {delta_full_.at[cta]});
      if (pair()) {
        const int half = d_ / 2 * cta;
        role.wait(do_empty_[1].at[cta], step - 1);
        role.copy("dO columns", global_input(data_, kGlobalDout, m, kTile, half, d_ / 2),
                  {counted(do_columns(cta, step), kLanding)}, {do_full_[1]});
        if (step == 0) {
          role.copy("K of both", global_input(data_, kGlobalK, first_key_, 2 * kTile, half, d_ / 2),
                    {counted(kt(cta), -1)}, {kt_full_});
        }
        role.wait(q_empty_[1].at[cta], step - 1);
        role.copy("Q columns", global_input(data_, kGlobalQ, m, kTile, half, d_ / 2),
                  {counted(q_columns(cta, step), kLanding)}, {q_full_[1]});
      }
    }
  }

  void write_softmax(int cta) {
    RoleWriter role(build_, "softmax", cta);
    const View p_registers = role.registers("registers", kTile, kTile, Element::kF32);
    const View dp_registers = role.registers("registers", kTile, kTile, Element::kF32);
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      const Access own_p{p_registers, "P", step};
      const Access own_dp{dp_registers, "dP", step};
      role.wait(s_full_.at[cta], step);
      role.wait(lse_full_.at[cta], step);
      role.compute("P", {s(cta, step), statistic("lse", cta, lse_, step)}, {p(cta, step), own_p},
                   softmax_of(data_, key(cta), query(step)));
      role.arrive({p_full_});
      role.arrive({lse_empty_.at[cta]});
      role.wait(dp_full_.at[cta], step);
      role.compute("dP to registers", {dp(cta, step)}, {own_dp});
      if (pair()) {
        role.arrive({dp_read_});
      }
      role.wait(delta_full_.at[cta], step);
      if (pair()) {
        role.wait(ds_empty_.at[cta], step - 1);  // alone, dQ came before dP
      }
      std::vector<Access> writes = {ds(cta, step), ds_part(cta, cta, step, kWritten)};
      if (pair()) {
        writes.push_back(to_send(cta, step, kWritten));
      }
      role.compute(
          "dS", {own_p, own_dp, statistic("delta", cta, delta_, step)}, writes,
          [cta, rows = rows_](const std::vector<Matrix>& in) {
            const Matrix whole = ds_of(in);
            const auto half = [&](int of) {
              Matrix part(whole.rows, rows);
              for (int r = 0; r < part.rows; ++r) {
                for (int c = 0; c < rows; ++c) {
                  part.at(r, c) = whole.at(r, rows * of + c);
                }
              }
              return part;
            };
            return std::vector<Matrix>{whole, half(cta), rows < kTile ? half(1 - cta) : Matrix()};
          });
      role.arrive({ds_full_});
      role.arrive({delta_empty_.at[cta]});
      if (pair()) {
        role.arrive({send_full_.at[cta]});
      }
    }
    role.wait(done_.at[cta], 0);
    const auto result = [&](GlobalTensor tensor) {
      View whole{"global memory", Store::kGlobal, tensor, 0, d_ * 4, 0, 0, Element::kF32};
      return Access{whole.part(key(cta), kTile, 0, d_), "result", 0};
    };
    role.compute("dV", {dv(cta, steps_ - 1)}, {result(kGlobalDv)});
    role.compute("dK", {dk(cta, steps_ - 1)}, {result(kGlobalDk)},
                 [scale = data_.scale](const std::vector<Matrix>& in) {
                   Matrix scaled = in[0];
                   for (float& x : scaled.values) {
                     x *= scale;
                   }
                   return std::vector<Matrix>{scaled};
                 });
  }

  void write_dq(int cta) {
    RoleWriter role(build_, "dq", cta);
    const View registers = role.registers("registers", rows_, d_, Element::kF32);
    int copies = 0;
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      role.wait(dq_full_.at[cta], step);
      role.compute("dQ to registers", {dq(cta, step)}, {{registers, "dQ", step}});
      role.arrive({dq_read_});
      for (int column = 0; column < d_; column += kDqChunk, ++copies) {
        if (copies >= kDqStages) {
          role.wait_copies(kDqStages - 1);
        }
        const View stage = shared(fmt::format("dQ stage {}", copies % kDqStages), cta,
                                  dq_stage_ + copies % kDqStages * rows_ * kDqChunk * 4, rows_,
                                  kDqChunk, Element::kF32);
        const Access staged{stage, fmt::format("dQ from column {}", column), step, kStaged};
        role.compute("dQ", {{registers.part(0, rows_, column, kDqChunk), "dQ", step}}, {staged});
        const View sums{"global memory", Store::kGlobal, kGlobalDq, 0, d_ * 4, 0, 0, Element::kF32};
        role.copy("dQ", staged,
                  {{sums.part(query(step) + rows_ * cta, rows_, column, kDqChunk), "sum", step, -1,
                    true}},
                  {});
      }
    }
    role.wait_copies(0);
  }

  void write_send(int cta) {
    RoleWriter role(build_, "send", cta);
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      role.wait(send_full_.at[cta], step);
      role.copy("dS", to_send(cta, step, kExchanged), {ds_part(1 - cta, cta, step, kExchanged)},
                {landed_.at[1 - cta]});
    }
  }

  void write_relay(int cta) {
    RoleWriter role(build_, "relay", cta);
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      role.wait(landed_.at[cta], step);
      role.arrive({exchanged_});
    }
  }

  void write_products(int pipe) {
    RoleWriter role(build_, "products", 0, pipe);
    const auto issue_s = [&](int i) {
      const int stage = pair() ? 0 : i % 2;
      role.wait(k_full_, 0);
      role.wait(q_full_[stage], pair() ? i : i / 2);
      role.product("S", each([&](int c) { return s(c, i); }), {}, each([&](int c) { return k(c); }),
                   each([&](int c) { return q_rows(c, i); }), {.transpose_b = true});
      role.commit(all(s_full_));
      if (pair()) {
        role.commit(all(q_empty_[0]));
      }
    };
    const auto issue_dp = [&](int i) {
      role.wait(v_full_, 0);
      role.wait(do_full_[0], i);
      role.wait(dq_read_, pair() ? i - 2 : i - 1);
      role.product("dP", each([&](int c) { return dp(c, i); }), {},
                   each([&](int c) { return v(c); }), each([&](int c) { return do_rows(c, i); }),
                   {.transpose_b = true});
      role.commit(all(dp_full_));
      if (pair()) {
        role.commit(all(do_empty_[0]));
      }
    };
    const auto issue_dv = [&](int i) {
      role.wait(p_full_, i);
      if (pair()) {
        role.wait(do_full_[1], i);
      }
      role.product("dV", each([&](int c) { return dv(c, i); }),
                   i == 0 ? std::vector<Access>{} : each([&](int c) { return dv(c, i - 1); }),
                   each([&](int c) { return p(c, i); }),
                   each([&](int c) { return do_columns(c, i); }), {.halves = Halves::kColumns});
      role.commit(all(do_empty_[pair() ? 1 : 0]));
    };
    const auto issue_dk = [&](int i) {
      role.wait(ds_full_, i);
      if (pair()) {
        role.wait(q_full_[1], i);
      }
      role.product("dK", each([&](int c) { return dk(c, i); }),
                   i == 0 ? std::vector<Access>{} : each([&](int c) { return dk(c, i - 1); }),
                   each([&](int c) { return ds(c, i); }),
                   each([&](int c) { return q_columns(c, i); }), {.halves = Halves::kColumns});
      role.commit(all(q_empty_[pair() ? 1 : i % 2]));
    };
    const auto issue_dq = [&](int i, int newest_dp) {
      if (pair()) {
        role.wait(dp_read_, newest_dp);
        role.wait(exchanged_, i);
        role.wait(kt_full_, 0);
        if (newest_dp == i) {
          role.wait(dq_read_, i - 1);  // else dP waited for it
        }
      }
      role.product("dQ", each([&](int c) { return dq(c, i); }), {},
                   each([&](int c) { return ds_operand(c, i); }),
                   each([&](int c) { return kt(c); }),
                   {.transpose_a = true, .halves = Halves::kColumns});
      role.commit(all(dq_full_));
      if (pair()) {
        role.commit(all(ds_empty_));
      }
    };
    for (int i = 0; i < steps_; ++i) {
      role.set_step(i);
      issue_s(i);
      if (i > 0) {
        issue_dk(i - 1);
      }
      if (pair()) {
        issue_dp(i);
        if (i > 0) {
          issue_dq(i - 1, i);
        }
      } else {
        if (i > 0) {
          issue_dq(i - 1, i - 1);
        }
        issue_dp(i);
      }
      issue_dv(i);
    }
    issue_dk(steps_ - 1);
    issue_dq(steps_ - 1, steps_ - 1);
    role.commit(all(done_));
  }

  const HeadData& data_;
  int first_key_;
  int ctas_;
  int d_;
  int rows_;  // of queries that this CTA makes dQ of
  std::vector<int> blocks_;
  int steps_;
  ProgramBuilder build_;

  // Where everything lies. With a pair Q and dO lie twice: half the rows and half the columns.
  int k_ = build_.shared("K", kTile* d_ * 2);
  int v_ = build_.shared("V", kTile* d_ * 2);
  int kt_ = pair() ? build_.shared("K of both, half the columns", 2 * kTile * d_ / 2 * 2) : k_;
  int q_rows_ = build_.shared("Q", rows_* d_ * 2);
  int q_other_ = build_.shared(pair() ? "Q, half the columns" : "Q", kTile* d_ / ctas_ * 2);
  int do_rows_ = build_.shared("dO", rows_* d_ * 2);
  int do_columns_ = pair() ? build_.shared("dO, half the columns", kTile* d_ / 2 * 2) : do_rows_;
  int ds_ = build_.shared("dS", kTile* kTile * 2);
  int send_ = pair() ? build_.shared("dS for the peer", kTile* kTile / 2 * 2) : 0;
  int dq_stage_ = build_.shared("dQ", kDqStages* rows_* kDqChunk * 4);
  int lse_ = build_.shared("lse", kTile * 4);
  int delta_ = build_.shared("delta", kTile * 4);

  int k_full_ = on_leader("K full");
  int v_full_ = on_leader("V full");
  int kt_full_ = on_leader("K of both full");
  int q_full_[2] = {on_leader("Q full"), on_leader(pair() ? "Q columns full" : "Q full, stage 1")};
  int do_full_[2] = {on_leader("dO full"), on_leader("dO columns full")};
  int p_full_ = on_leader("P full");
  int dp_read_ = on_leader("dP read");
  int ds_full_ = on_leader("dS full");
  int exchanged_ = on_leader("dS exchanged");
  int dq_read_ = on_leader("dQ read");
  OnBoth q_empty_[2] = {on_both("Q empty"),
                        on_both(pair() ? "Q columns empty" : "Q empty, stage 1")};
  OnBoth do_empty_[2] = {on_both("dO empty"), on_both("dO columns empty")};
  OnBoth s_full_ = on_both("S full");
  OnBoth dp_full_ = on_both("dP full");
  OnBoth dq_full_ = on_both("dQ full");
  OnBoth ds_empty_ = on_both("dS empty");
  OnBoth done_ = on_both("done");
  OnBoth lse_full_ = on_both("lse full");
  OnBoth lse_empty_ = on_both("lse empty");
  OnBoth delta_full_ = on_both("delta full");
  OnBoth delta_empty_ = on_both("delta empty");
  OnBoth send_full_ = on_both("dS to send");
  OnBoth landed_ = on_both("dS landed");
};

}  // namespace

Program fa4_program(const HeadData& data, int first_key, int ctas) {
  return Fa4(data, first_key, ctas).make();
}

}  // namespace flashgrad::plan
