// SPDX-License-Identifier: Apache-2.0
// The sm90 backward's main kernel (src/cuda/sm90/bwd.cuh) as a program of the simulator, in the
// configuration and the shared-memory layout of config.hpp, operation by operation as bwd_dq.cuh,
// bwd_load.cuh and bwd_consumer.cuh issue them. A warpgroup is one agent here, so counts of
// arrivals are of warpgroups; the ping-pong token, which orders products but no data, is left out,
// and so are the prefetch of S behind the last step, the clearing of rows that must not be read,
// and the turns of an ordered variant, which are between clusters.
#include <stdexcept>

#include "cuda/sm90/config.hpp"
#include "plan/program_builder.hpp"

namespace flashgrad::plan {
namespace {

using sm90::BwdConfig;

constexpr int kM = sm90::kBlockM;
constexpr int kConsumers = BwdConfig::kConsumers;
constexpr int kOperands = static_cast<int>(Use::kOperands);
constexpr int kWritten = static_cast<int>(Use::kWritten);
constexpr int kExchanged = static_cast<int>(Use::kExchanged);
constexpr int kLanding = static_cast<int>(Use::kLanding);

class Sm90 {
 public:
  Sm90(const HeadData& data, int first_key, const BwdConfig& config)
      : data_(data),
        first_key_(first_key),
        c_(config),
        d_(config.head_dim),
        blocks_(query_blocks(data, kM, first_key, config.block_n() * config.cluster)),
        steps_(static_cast<int>(blocks_.size())),
        build_("sm90 backward", config.cluster) {
    if (data.head_dim != d_) {
      throw std::invalid_argument("the sm90 program has its own head_dim");
    }
  }

  Program make() {
    build_.program().shared_regions.push_back({"as BwdConfig lays it out", 0, c_.shared_bytes()});
    for (int cta = 0; cta < c_.cluster; ++cta) {
      make_barriers(cta);
    }
    for (int cta = 0; cta < c_.cluster; ++cta) {
      write_dq(cta);
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        write_consumer(cta, consumer);
      }
    }
    return build_.take(steps_);
  }

 private:
  // Of one CTA; a vector has one for each stage.
  struct Barriers {
    int k_full, v_full, done;
    std::vector<int> q_full, q_empty, do_full, do_empty, ds_full, ds_empty, peer_ds_full,
        peer_ds_empty;
  };

  void make_barriers(int cta) {
    const bool pair = c_.cluster == 2;
    const auto ring = [&](const char* name, int stages, int count) {
      std::vector<int> list;
      for (int stage = 0; stage < stages; ++stage) {
        list.push_back(build_.barrier(name, cta, count));
      }
      return list;
    };
    const int parts =
        pair ? 3 : 2;  // of a tile with its statistic: each CTA loads half of the tile
    Barriers b;
    b.k_full = build_.barrier("k_full", cta, c_.cluster);
    b.v_full = build_.barrier("v_full", cta, 1);
    b.done = build_.barrier("done", cta, 1);
    b.q_full = ring("q_full", c_.q_stages, parts);
    b.q_empty = ring("q_empty", c_.q_stages, kConsumers * c_.cluster);
    b.do_full = ring("do_full", c_.do_stages, parts);
    b.do_empty = ring("do_empty", c_.do_stages, kConsumers * c_.cluster);
    b.ds_full = ring("ds_full", c_.ds_stages, kConsumers);
    b.ds_empty = ring("ds_empty", c_.ds_stages, c_.cluster);
    if (pair) {
      b.peer_ds_full = ring("peer_ds_full", c_.ds_stages, c_.consumers_send() ? kConsumers : 1);
      b.peer_ds_empty = ring("peer_ds_empty", c_.ds_stages, 1);
    }
    barriers_.push_back(b);
  }

  [[nodiscard]] Barriers& at(int cta) { return barriers_[static_cast<std::size_t>(cta)]; }
  static int stage_of(const std::vector<int>& ring, int count) {
    return ring[static_cast<std::size_t>(count) % ring.size()];
  }
  // The phase of its stage that use number `count` completes.
  static int phase_of(const std::vector<int>& ring, int count) {
    return count / static_cast<int>(ring.size());
  }
  static void wait_full(RoleWriter& role, const std::vector<int>& ring, int count) {
    role.wait(stage_of(ring, count), phase_of(ring, count));
  }
  static void wait_empty(RoleWriter& role, const std::vector<int>& ring, int count) {
    role.wait(stage_of(ring, count), phase_of(ring, count) - 1);
  }
  // A barrier of this number in every CTA of the cluster.
  std::vector<int> on_all(std::vector<int> Barriers::*ring, int count) {
    std::vector<int> list;
    for (Barriers& b : barriers_) {
      list.push_back(stage_of(b.*ring, count));
    }
    return list;
  }

  [[nodiscard]] int query(int step) const {
    return blocks_[static_cast<std::size_t>(steps_ - 1 - step)] * kM;  // downwards
  }
  [[nodiscard]] int key(int cta) const { return first_key_ + c_.block_n() * cta; }

  static View shared(const char* name, int cta, int offset, int rows, int columns,
                     Element element = Element::kBf16) {
    return {name, Store::kShared, cta, offset, columns * size_of(element), rows, columns, element};
  }
  [[nodiscard]] View k(int cta) const { return shared("K", cta, c_.k_offset(), c_.block_n(), d_); }
  [[nodiscard]] View v(int cta) const { return shared("V", cta, c_.v_offset(), c_.block_n(), d_); }
  [[nodiscard]] View peer_k(int cta) const {
    return shared("peer's K", cta, c_.peer_k_offset(), c_.block_n(), d_ / 2);
  }
  [[nodiscard]] View q(int cta, int step) const {
    return shared("Q", cta, c_.q_offset() + step % c_.q_stages * c_.q_bytes(), kM, d_);
  }
  [[nodiscard]] View dout(int cta, int step) const {
    return shared("dO", cta, c_.do_offset() + step % c_.do_stages * c_.q_bytes(), kM, d_);
  }
  [[nodiscard]] View lse(int cta, int step) const {
    return shared("lse", cta, c_.lse_offset() + step % c_.q_stages * kM * 4, 1, kM, Element::kF32);
  }
  [[nodiscard]] View delta(int cta, int step) const {
    return shared("delta", cta, c_.delta_offset() + step % c_.do_stages * kM * 4, 1, kM,
                  Element::kF32);
  }
  // dS^T of 128 keys.
  [[nodiscard]] View ds(int cta, int count) const {
    return shared("dS", cta, c_.ds_offset() + count % c_.ds_stages * c_.ds_bytes(),
                  BwdConfig::kKeysPerDs, kM);
  }
  [[nodiscard]] View peer_ds(int cta, int count) const {
    return shared("peer's dS", cta, c_.peer_ds_offset() + count % c_.ds_stages * c_.ds_bytes(),
                  BwdConfig::kKeysPerDs, kM);
  }

  void load_half_step(RoleWriter& role, int cta, int step, bool is_q) {
    if (step >= steps_) {
      return;
    }
    Barriers& b = at(cta);
    const std::vector<int>& full = is_q ? b.q_full : b.do_full;
    wait_empty(role, is_q ? b.q_empty : b.do_empty, step);
    const char* value = is_q ? "Q" : "dO";
    const GlobalTensor tensor = is_q ? kGlobalQ : kGlobalDout;
    const int columns = d_ / c_.cluster;
    const int first = columns * cta;
    std::vector<Access> to;
    for (int other = 0; other < c_.cluster; ++other) {
      const View place = is_q ? q(other, step) : dout(other, step);
      to.push_back({place.part(0, kM, first, columns), value, step, kLanding});
    }
    role.copy(value, global_input(data_, tensor, query(step), kM, first, columns), to,
              on_all(is_q ? &Barriers::q_full : &Barriers::do_full, step));
    role.copy(is_q ? "lse" : "delta",
              global_input(data_, is_q ? kGlobalLse : kGlobalDelta, query(step), kM, 0, 1),
              {{is_q ? lse(cta, step) : delta(cta, step), is_q ? "lse" : "delta", step}},
              {stage_of(full, step)});
    if (is_q && step == 0) {
      role.copy("V", global_input(data_, kGlobalV, key(cta), c_.block_n(), 0, d_),
                {{v(cta), "V", 0}}, {b.v_full});
    }
  }

  void write_dq(int cta) {
    RoleWriter role(build_, "dq and loads", cta, build_.add_pipe());
    Barriers& b = at(cta);
    role.copy("K", global_input(data_, kGlobalK, key(cta), c_.block_n(), 0, d_), {{k(cta), "K", 0}},
              {b.k_full});
    if (c_.cluster == 2) {
      role.copy("peer's K",
                global_input(data_, kGlobalK, key(1 - cta), c_.block_n(), d_ / 2 * cta, d_ / 2),
                {{peer_k(cta), "K", 0}}, {b.k_full});
    }
    for (int step = 0; step < ahead(); ++step) {
      role.set_step(step);
      load_half_step(role, cta, step, true);
      load_half_step(role, cta, step, false);
    }
    role.wait(b.k_full, 0);
    const View sum = role.registers("registers", kM, c_.dq_columns(), Element::kF32);
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      if (c_.cluster == 2) {
        write_dq_of_cluster(role, cta, step, sum);
      } else {
        write_dq_alone(role, cta, step, sum);
      }
    }
    role.arrive({b.done});
  }

  void add_dq(RoleWriter& role, const View& sum, int step, int version, int column) {
    const View all{"global memory", Store::kGlobal, kGlobalDq, 0, d_ * 4, 0, 0, Element::kF32};
    role.compute("dQ", {{sum, "dQ", version}},
                 {{all.part(query(step), kM, column, c_.dq_columns()), "sum", step, -1, true}});
  }

  void write_dq_of_cluster(RoleWriter& role, int cta, int step, const View& sum) {
    Barriers& b = at(cta);
    Barriers& other = at(1 - cta);
    load_half_step(role, cta, step + ahead(), true);
    wait_full(role, b.ds_full, step);
    if (!c_.consumers_send()) {
      wait_empty(role, b.peer_ds_empty, step);
      role.copy("dS", {ds(cta, step), "dS", step, kExchanged},
                {{peer_ds(1 - cta, step), "dS", step, kExchanged}},
                {stage_of(other.peer_ds_full, step)});
    }
    role.product("dQ", {{sum, "dQ", 2 * step}}, {}, {{ds(cta, step), "dS", step, kOperands}},
                 {{k(cta).part(0, c_.block_n(), 64 * cta, 64), "K", 0, kOperands}},
                 {.transpose_a = true});
    role.commit();
    load_half_step(role, cta, step + ahead(), false);
    wait_full(role, b.peer_ds_full, step);
    role.arrive({stage_of(other.ds_empty, step)});  // its copy has left
    role.product("dQ", {{sum, "dQ", 2 * step + 1}}, {{sum, "dQ", 2 * step}},
                 {{peer_ds(cta, step), "dS", step, kOperands}}, {{peer_k(cta), "K", 0, kOperands}},
                 {.transpose_a = true});
    role.commit();
    role.wait_products(0);
    role.arrive({stage_of(b.ds_empty, step)});
    role.arrive({stage_of(other.peer_ds_empty, step)});
    add_dq(role, sum, step, 2 * step + 1, 64 * cta);
  }

  // All keys of the CTA.
  void write_dq_alone(RoleWriter& role, int cta, int step, const View& sum) {
    Barriers& b = at(cta);
    for (int column = 0; column < d_; column += c_.dq_columns()) {
      const int first_version = (step * d_ + column) * c_.key_blocks;
      for (int x = 0; x < c_.key_blocks; ++x) {
        const int count = step * c_.key_blocks + x;
        const int version = first_version + x;
        if (column == 0) {
          wait_full(role, b.ds_full, count);
        }
        role.product("dQ", {{sum, "dQ", version}},
                     x == 0 ? std::vector<Access>{} : std::vector<Access>{{sum, "dQ", version - 1}},
                     {{ds(cta, count), "dS", count, kOperands}},
                     {{k(cta).part(128 * x, 128, column, c_.dq_columns()), "K", 0, kOperands}},
                     {.transpose_a = true});
        role.commit();
        if (column == 0 && x == 0) {
          load_half_step(role, cta, step + ahead(), true);
          load_half_step(role, cta, step + ahead(), false);
        }
        role.wait_products(0);
        if (column == d_ - c_.dq_columns()) {
          role.arrive({stage_of(b.ds_empty, count)});
        }
      }
      add_dq(role, sum, step, first_version + c_.key_blocks - 1, column);
    }
  }

  void write_consumer(int cta, int consumer) {
    RoleWriter role(build_, consumer == 0 ? "consumer 0" : "consumer 1", cta, build_.add_pipe());
    Barriers& b = at(cta);
    const int blocks = c_.key_blocks;
    const int total = steps_ * blocks;
    const View s = role.registers("registers", 64, kM, Element::kF32);
    const View dp = role.registers("registers", 64, kM, Element::kF32);
    const View p = role.registers("registers", 64, kM, Element::kBf16);
    const View rds = role.registers("registers", 64, kM, Element::kBf16);
    std::vector<View> dk;
    std::vector<View> dv;
    for (int x = 0; x < blocks; ++x) {
      dk.push_back(role.registers("registers", 64, d_, Element::kF32));
      dv.push_back(role.registers("registers", 64, d_, Element::kF32));
    }
    const auto row = [consumer](int x) { return 128 * x + 64 * consumer; };
    const auto issue_s = [&](int count) {  // (1)
      const int step = count / blocks;
      role.product("S", {{s, "S", count}}, {},
                   {{k(cta).part(row(count % blocks), 64, 0, d_), "K", 0, kOperands}},
                   {{q(cta, step), "Q", step, kOperands}}, {.transpose_b = true});
      role.commit();
    };
    // What a sum holds before it is added to: nothing in the first step.
    const auto before = [](const View& sum, const char* name, int step) {
      return step == 0 ? std::vector<Access>{} : std::vector<Access>{{sum, name, step - 1}};
    };
    role.wait(b.k_full, 0);
    wait_full(role, b.q_full, 0);
    issue_s(0);
    role.wait(b.v_full, 0);
    role.wait_products(0);
    for (int count = 0; count < total; ++count) {
      const int step = count / blocks;
      const int x = count % blocks;
      const auto block = static_cast<std::size_t>(x);
      const bool last_block = x == blocks - 1;
      const bool last = count == total - 1;
      role.set_step(step);
      role.compute("P", {{s, "S", count}, {lse(cta, step), "lse", step}}, {{p, "P", count}},  // (2)
                   softmax_of(data_, key(cta) + row(x), query(step)));
      if (x == 0) {
        wait_full(role, b.do_full, step);
      }
      role.product("dP", {{dp, "dP", count}}, {},  // (3)
                   {{v(cta).part(row(x), 64, 0, d_), "V", 0, kOperands}},
                   {{dout(cta, step), "dO", step, kOperands}}, {.transpose_b = true});
      role.commit();
      role.product("dV", {{dv[block], "dV", step}}, before(dv[block], "dV", step),  // (5)
                   {{p, "P", count}}, {{dout(cta, step), "dO", step, kOperands}}, {});
      role.commit();
      if (last_block && !last) {
        wait_full(role, b.q_full, step + 1);
      }
      role.wait_products(1);
      role.compute("dS", {{p, "P", count}, {dp, "dP", count}, {delta(cta, step), "delta", step}},
                   {{rds, "dS", count}},  // (4)
                   [](const std::vector<Matrix>& in) { return std::vector<Matrix>{ds_of(in)}; });
      wait_empty(role, b.ds_empty, count);
      role.compute("dS", {{rds, "dS", count}},
                   {{ds(cta, count).part(64 * consumer, 64, 0, kM), "dS", count, kWritten}});
      role.product("dK", {{dk[block], "dK", step}}, before(dk[block], "dK", step),  // (6)
                   {{rds, "dS", count}}, {{q(cta, step), "Q", step, kOperands}}, {});
      role.commit();
      if (c_.consumers_send()) {
        wait_empty(role, b.peer_ds_empty, count);
        const auto own = [&](const View& stage) {
          return Access{stage.part(64 * consumer, 64, 0, kM), "dS", count, kExchanged};
        };
        role.copy("dS", own(ds(cta, count)), {own(peer_ds(1 - cta, count))},
                  {stage_of(at(1 - cta).peer_ds_full, count)});
      }
      role.arrive({stage_of(b.ds_full, count)});
      role.wait_products(1);
      if (last_block) {
        role.arrive(on_all(&Barriers::do_empty, step));
      }
      if (!last) {
        issue_s(count + 1);
      }
      role.wait_products(last ? 0 : 1);
      if (last_block) {
        role.arrive(on_all(&Barriers::q_empty, step));
      }
      role.wait_products(0);
    }
    role.wait(b.done, 0);
    for (int x = 0; x < blocks; ++x) {
      const auto block = static_cast<std::size_t>(x);
      store_rows(role, "dV", dv[block], v(cta).part(row(x), 64, 0, d_), kGlobalDv,
                 key(cta) + row(x), 1);
      store_rows(role, "dK", dk[block], k(cta).part(row(x), 64, 0, d_), kGlobalDk,
                 key(cta) + row(x), data_.scale);
    }
  }

  // Through the shared memory that the operand's own rows leave.
  void store_rows(RoleWriter& role, const char* name, const View& registers, const View& place,
                  GlobalTensor tensor, int first_row, float factor) {
    const View all{"global memory", Store::kGlobal, tensor, 0, d_ * 4, 0, 0, Element::kF32};
    role.store_scaled({registers, name, steps_ - 1}, place, all.part(first_row, 64, 0, d_), factor);
  }

  // Steps that are loaded before they are needed (bwd_dq.cuh).
  [[nodiscard]] int ahead() const { return c_.q_stages - 1; }

  const HeadData& data_;
  int first_key_;
  const BwdConfig& c_;
  int d_;
  std::vector<int> blocks_;
  int steps_;
  ProgramBuilder build_;
  std::vector<Barriers> barriers_;
};

}  // namespace

Program sm90_program(const HeadData& data, int first_key, int variant) {
  return Sm90(data, first_key, sm90::kBwdConfigs[variant]).make();
}

}  // namespace flashgrad::plan
