// SPDX-License-Identifier: Apache-2.0
// The sm90 backward above head dim 128 (src/cuda/sm90/bwd_wide.cuh) as a program of the simulator:
// the tiles, stages and layout of wide_tile.cuh and wide_config.hpp, operation by operation as
// bwd_wide_load.cuh and the two roles issue them. A warpgroup is one agent here, so counts of
// arrivals are of warpgroups, and copies arrive instead of their bytes. The issue of S behind the
// last step and the clearing of rows that must not be read are left out.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan/program_sm90_wide_places.hpp"

namespace flashgrad::plan {
namespace {

using sm90::WideConfig;

constexpr int kM = WidePlaces::kM;
constexpr int kKeys = WidePlaces::kKeys;
constexpr int kCluster = 2;
constexpr int kRoles = 2;    // that make products
constexpr int kPiece = 128;  // columns that arrive together
constexpr int kChunk = WidePlaces::kChunk;
constexpr int kChunks = WidePlaces::kChunks;
constexpr int kWarpKeys = WidePlaces::kWarpKeys;
constexpr int kWarps = kKeys / kWarpKeys;
constexpr int kOperands = static_cast<int>(Use::kOperands);
constexpr int kWritten = static_cast<int>(Use::kWritten);
constexpr int kStaged = static_cast<int>(Use::kStaged);
constexpr int kLanding = static_cast<int>(Use::kLanding);

// What the tile of a CTA says, by the kernels' own code, of one unit with all its keys in a pass.
sm90::WideTile tile_of(const HeadData& data, int first_key, int rank) {
  sm90::BwdParams params{};
  params.sequences.batch = 1;
  params.sequences.rows_q = data.queries;
  params.sequences.rows_kv = data.keys;
  params.sequences.mask.right = data.causal ? 0 : kUnbounded;
  params.heads_kv = params.group = 1;
  sm90::WidePass pass{};
  pass.num_units = pass.section = 1;
  pass.key_count = data.keys / kKeys;
  pass.num_key_tiles = data.keys / (kKeys * kCluster);
  pass.blocks_per_head = data.queries / kM;
  return sm90::wide_tile<kCluster>(params, pass, first_key / kKeys + rank);
}

class Wide {
 public:
  Wide(const HeadData& data, int first_key)
      : data_(data),
        first_key_(first_key),
        c_{data.head_dim, data.head_dim_v, kCluster, false},
        places_{c_},
        tiles_{tile_of(data, first_key, 0), tile_of(data, first_key, 1)},
        steps_(tiles_[0].keys.num_steps),
        build_("sm90 backward, wide", kCluster) {
    if (!c_.valid() || data.queries % kM != 0 || data.keys % (kKeys * kCluster) != 0) {
      throw std::invalid_argument("the wide program takes whole tiles of its own head dims");
    }
  }

  Program make() {
    build_.program().shared_regions.push_back({"as WideConfig lays it out", 0, c_.shared_bytes()});
    for (int cta = 0; cta < kCluster; ++cta) {
      make_barriers(cta);
    }
    for (int cta = 0; cta < kCluster; ++cta) {
      write_loader(cta);
      write_p_role(cta);
      write_ds_role(cta);
    }
    return build_.take(steps_);
  }

 private:
  // Of one CTA, by stage or slot; those of stages that fill also by piece.
  struct Barriers {
    int done;
    std::vector<std::vector<int>> q_full, do_full;
    std::vector<int> q_empty, do_empty, p_full, p_empty;
  };

  void make_barriers(int cta) {
    const auto ring = [&](const char* name, int stages, int count) {
      std::vector<int> list;
      for (int stage = 0; stage < stages; ++stage) {
        list.push_back(build_.barrier(name, cta, count));
      }
      return list;
    };
    // Half of the rows from each CTA; the statistic comes with the first piece.
    const auto full = [&](const char* name, int stages, int pieces) {
      std::vector<std::vector<int>> list(static_cast<std::size_t>(stages));
      for (std::vector<int>& stage : list) {
        for (int piece = 0; piece < pieces; ++piece) {
          stage.push_back(build_.barrier(name, cta, piece == 0 ? 3 : 2));
        }
      }
      return list;
    };
    Barriers b;
    b.done = build_.barrier("done", cta, kRoles);
    b.q_full = full("q_full", c_.q_stages(), c_.q_pieces());
    b.q_empty = ring("q_empty", c_.q_stages(), kRoles * kCluster);
    b.do_full = full("do_full", c_.do_stages(), c_.do_pieces());
    b.do_empty = ring("do_empty", c_.do_stages(), kRoles * kCluster);
    b.p_full = ring("p_full", c_.slots(), 1);
    b.p_empty = ring("p_empty", c_.slots(), 1);
    barriers_.push_back(b);
  }

  // Uses of a ring: K, or V, is number 0, the query block of step i number i + 1.
  static int use_of(int step) { return step + 1; }
  template <class Ring>
  static auto& stage_of(Ring& ring, int use) {
    return ring[static_cast<std::size_t>(use) % ring.size()];
  }
  template <class Ring>
  static int phase_of(const Ring& ring, int use) {
    return use / static_cast<int>(ring.size());
  }

  [[nodiscard]] Barriers& at(int cta) { return barriers_[static_cast<std::size_t>(cta)]; }
  void wait_piece(RoleWriter& role, const std::vector<std::vector<int>>& full, int use, int piece) {
    role.wait(stage_of(full, use)[static_cast<std::size_t>(piece)], phase_of(full, use));
  }
  void wait_all(RoleWriter& role, const std::vector<std::vector<int>>& full, int use) {
    for (int piece = 0; piece < static_cast<int>(full[0].size()); ++piece) {
      wait_piece(role, full, use, piece);
    }
  }
  static void wait_empty(RoleWriter& role, const std::vector<int>& empty, int use) {
    role.wait(stage_of(empty, use), phase_of(empty, use) - 1);
  }
  // To both CTAs.
  void release(RoleWriter& role, std::vector<int> Barriers::*empty, int use) {
    role.arrive({stage_of(barriers_[0].*empty, use), stage_of(barriers_[1].*empty, use)});
  }

  [[nodiscard]] int query(int step) const { return (tiles_[0].keys.m_end - 1 - step) * kM; }
  [[nodiscard]] int key(int cta) const { return first_key_ + kKeys * cta; }

  // Registers of a step's P or dS, by the 16 queries of a product.
  static std::vector<View> chunks(RoleWriter& role) {
    std::vector<View> list;
    for (int i = 0; i < kChunks; ++i) {
      list.push_back(role.registers("registers", kKeys, kChunk, Element::kBf16));
    }
    return list;
  }

  // K, or V: the resident columns through the first stage, the others to their own place; all of
  // them count as the first piece.
  void load_keys(RoleWriter& role, int cta, bool is_k) {
    Barriers& b = at(cta);
    std::vector<int>& full = stage_of(is_k ? b.q_full : b.do_full, 0);
    wait_empty(role, is_k ? b.q_empty : b.do_empty, 0);
    const char* value = is_k ? "K" : "V";
    const GlobalTensor tensor = is_k ? kGlobalK : kGlobalV;
    const int columns = is_k ? c_.head_dim : c_.head_dim_v;
    const int resident = is_k ? c_.resident_k() : c_.resident_v();
    const View stage = is_k ? places_.q(cta, 0) : places_.dout(cta, 0);
    role.copy(value, global_input(data_, tensor, key(cta), kKeys, 0, resident),
              {{stage.part(0, kKeys, 0, resident), value, 0}}, {full[0]});
    if (columns > resident) {
      role.copy(value, global_input(data_, tensor, key(cta), kKeys, resident, columns - resident),
                {{is_k ? places_.k(cta) : places_.v(cta), value, 0}}, {full[0]});
    } else {
      role.arrive({full[0]});
    }
    role.arrive({full[0]});
    for (std::size_t piece = 1; piece < full.size(); ++piece) {
      role.arrive({full[piece], full[piece]});
    }
  }

  void load_rows(RoleWriter& role, int cta, int step, bool is_q) {
    Barriers& b = at(cta);
    const int use = use_of(step);
    wait_empty(role, is_q ? b.q_empty : b.do_empty, use);
    const char* value = is_q ? "Q" : "dO";
    const char* statistic = is_q ? "lse" : "delta";
    const int columns = is_q ? c_.head_dim : c_.head_dim_v;
    const int half = kM / kCluster;
    role.copy(statistic,
              global_input(data_, is_q ? kGlobalLse : kGlobalDelta, query(step), kM, 0, 1),
              {{is_q ? places_.lse(cta, step) : places_.delta(cta, step), statistic, step}},
              {stage_of(is_q ? b.q_full : b.do_full, use)[0]});
    for (int piece = 0; piece * kPiece < columns; ++piece) {
      const int first = piece * kPiece;
      const int width = std::min(kPiece, columns - first);
      std::vector<Access> to;
      std::vector<int> full;
      for (int other = 0; other < kCluster; ++other) {
        const View stage = is_q ? places_.q(other, use) : places_.dout(other, use);
        to.push_back({stage.part(half * cta, half, first, width), value, step, kLanding});
        full.push_back(stage_of(is_q ? at(other).q_full : at(other).do_full,
                                use)[static_cast<std::size_t>(piece)]);
      }
      role.copy(value,
                global_input(data_, is_q ? kGlobalQ : kGlobalDout, query(step) + half * cta, half,
                             first, width),
                to, full);
    }
  }

  void write_loader(int cta) {
    RoleWriter role(build_, "loads", cta);
    load_keys(role, cta, true);
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      load_rows(role, cta, step, true);
      if (step == 0) {
        load_keys(role, cta, false);
      }
      load_rows(role, cta, step, false);
    }
  }

  // sum (64 keys x 64 queries) = A B^T piece by piece, A's resident columns from registers.
  void product_of_rows(RoleWriter& role, const char* name, const View& sum, int step,
                       const View& resident, const View& rest, const View& rows,
                       const std::vector<std::vector<int>>& full) {
    const bool is_k = std::string(name) == "S";
    const char* const key_value = is_k ? "K" : "V";
    const char* const row_value = is_k ? "Q" : "dO";
    std::string before;
    for (int column = 0; column < rows.columns;) {
      if (column % kPiece == 0) {
        wait_piece(role, full, use_of(step), column / kPiece);
      }
      const bool in_registers = column < resident.columns;
      const int end =
          std::min((column / kPiece + 1) * kPiece, in_registers ? resident.columns : rows.columns);
      const int width = end - column;
      const Access a = in_registers ? Access{resident.part(0, kKeys, column, width), key_value, 0}
                                    : Access{rest.part(0, kKeys, column - resident.columns, width),
                                             key_value, 0, kOperands};
      // What a sum holds before it is complete has a name of its own.
      const Access so_far{sum, before, step};
      before = end == rows.columns ? name : name + (" of " + std::to_string(end) + " columns");
      role.product(name, {{sum, before, step}},
                   column == 0 ? std::vector<Access>{} : std::vector<Access>{so_far}, {a},
                   {{rows.part(0, kM, column, width), row_value, step, kOperands}},
                   {.transpose_b = true});
      column = end;
    }
    role.commit();
  }

  // A sum that grows by a product in every chunk of every step.
  static void add_chunk(RoleWriter& role, const char* name, const View& sum, int step, int chunk,
                        const Access& a, const View& rows, const char* row_value) {
    const auto after = [name](int chunks) {
      return chunks == kChunks ? std::string(name)
                               : name + (" of " + std::to_string(kChunk * chunks) + " queries");
    };
    const Access so_far{sum, after(chunk > 0 ? chunk : kChunks), chunk > 0 ? step : step - 1};
    role.product(name, {{sum, after(chunk + 1), step}},
                 step == 0 && chunk == 0 ? std::vector<Access>{} : std::vector<Access>{so_far}, {a},
                 {{rows.part(kChunk * chunk, kChunk, 0, rows.columns), row_value, step, kOperands}},
                 {});
  }

  void write_p_role(int cta) {
    RoleWriter role(build_, "P", cta, build_.add_pipe());
    Barriers& b = at(cta);
    const View s[2] = {role.registers("registers", kKeys, kM, Element::kF32),
                       role.registers("registers", kKeys, kM, Element::kF32)};
    const View rows = role.registers("registers", 1, kM, Element::kF32);
    const View resident = role.registers("registers", kKeys, c_.resident_k(), Element::kBf16);
    const std::vector<View> p = chunks(role);
    const View dv = role.registers("registers", kKeys, c_.head_dim_v, Element::kF32);
    wait_all(role, b.q_full, 0);
    role.compute("K", {{places_.q(cta, 0).part(0, kKeys, 0, c_.resident_k()), "K", 0}},
                 {{resident, "K", 0}});
    release(role, &Barriers::q_empty, 0);
    release(role, &Barriers::do_empty, 0);  // V is the other's
    const auto issue_s = [&](int step) {    // (1)
      product_of_rows(role, "S", s[c_.ahead() ? step % 2 : 0], step, resident, places_.k(cta),
                      places_.q(cta, use_of(step)), b.q_full);
    };
    if (c_.ahead()) {
      issue_s(0);
    }
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      const View& s_now = s[c_.ahead() ? step % 2 : 0];
      const int use = use_of(step);
      const auto load_lse = [&] {
        role.compute("lse", {{places_.lse(cta, step), "lse", step}}, {{rows, "lse", step}});
      };
      const auto release_dout = [&] {
        if (step > 0) {
          release(role, &Barriers::do_empty, use - 1);
        }
      };
      if (c_.ahead()) {
        load_lse();
        role.wait_products(0);
        release_dout();
        if (step + 1 < steps_) {
          issue_s(step + 1);
        }
        release(role, &Barriers::q_empty, use);
      } else {
        issue_s(step);
        role.wait_products(1);
        release_dout();
        role.wait_products(0);
        release(role, &Barriers::q_empty, use);
      }
      wait_empty(role, b.p_empty, step);
      wait_all(role, b.do_full, use);
      if (!c_.ahead()) {
        load_lse();
      }
      for (int chunk = 0; chunk < kChunks; ++chunk) {  // (2), (5)
        const auto i = static_cast<std::size_t>(chunk);
        std::vector<Access> made = {{p[i], "P", step}};
        for (int warp = 0; warp < kWarps; ++warp) {
          made.push_back({places_.handover(cta, step, chunk, warp), "P", step, kWritten});
        }
        role.compute("P",
                     {{s_now.part(0, kKeys, kChunk * chunk, kChunk), "S", step},
                      {rows.part(0, 1, kChunk * chunk, kChunk), "lse", step}},
                     made,
                     [softmax = softmax_of(data_, key(cta), query(step) + kChunk * chunk)](
                         const std::vector<Matrix>& in) {
                       std::vector<Matrix> out = {softmax(in)[0]};
                       for (int warp = 0; warp < kWarps; ++warp) {
                         out.push_back(rows_of(out[0], kWarpKeys * warp, kWarpKeys));
                       }
                       return out;
                     });
        add_chunk(role, "dV", dv, step, chunk, {p[i], "P", step}, places_.dout(cta, use), "dO");
      }
      role.arrive({stage_of(b.p_full, step)});
      role.commit();
    }
    role.wait_products(0);
    release(role, &Barriers::do_empty, use_of(steps_ - 1));
    if (!c_.ahead()) {
      role.arrive({b.done});
      role.wait(b.done, 0);
    }
    store_rows(role, "dV", dv,
               c_.ahead() ? places_.staging(cta, 0, c_.head_dim_v) : places_.dout(cta, 0),
               kGlobalDv, key(cta), 1);
  }

  void write_ds_role(int cta) {
    RoleWriter role(build_, "dS", cta, build_.add_pipe());
    Barriers& b = at(cta);
    const View dp = role.registers("registers", kKeys, kM, Element::kF32);
    const View rows = role.registers("registers", 1, kM, Element::kF32);
    const View resident = role.registers("registers", kKeys, c_.resident_v(), Element::kBf16);
    const std::vector<View> ds = chunks(role);
    const View dk = role.registers("registers", kKeys, c_.head_dim, Element::kF32);
    release(role, &Barriers::q_empty, 0);  // K is the other's
    wait_all(role, b.do_full, 0);
    role.compute("V", {{places_.dout(cta, 0).part(0, kKeys, 0, c_.resident_v()), "V", 0}},
                 {{resident, "V", 0}});
    release(role, &Barriers::do_empty, 0);
    for (int step = 0; step < steps_; ++step) {
      role.set_step(step);
      const int use = use_of(step);
      product_of_rows(role, "dP", dp, step, resident, places_.v(cta), places_.dout(cta, use),
                      b.do_full);  // (3)
      role.compute("delta", {{places_.delta(cta, step), "delta", step}}, {{rows, "delta", step}});
      if (step > 0) {
        role.wait_copies(0);
        role.arrive({stage_of(b.p_empty, step - 1)});
      }
      role.wait_products(1);
      if (step > 0) {
        release(role, &Barriers::q_empty, use - 1);
      }
      role.wait(stage_of(b.p_full, step), phase_of(b.p_full, step));
      const View place = places_.slot(cta, step);
      const auto part = [](const View& whole, int chunk) {
        return whole.part(0, whole.rows, kChunk * chunk, kChunk);
      };
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        std::vector<Access> from;
        std::vector<Access> to;
        for (int warp = 0; warp < kWarps; ++warp) {
          from.push_back({places_.handover(cta, step, chunk, warp), "P", step, kWritten});
          to.push_back(
              {ds[static_cast<std::size_t>(chunk)].part(kWarpKeys * warp, kWarpKeys, 0, kChunk),
               "P", step});
        }
        role.compute("P", from, to, [](const std::vector<Matrix>& in) { return in; });
      }
      role.wait_products(0);
      release(role, &Barriers::do_empty, use);
      wait_all(role, b.q_full, use);
      for (int chunk = 0; chunk < kChunks; ++chunk) {  // (4), (6)
        const View& registers = ds[static_cast<std::size_t>(chunk)];
        role.compute("dS",
                     {{registers, "P", step},
                      {part(dp, chunk), "dP", step},
                      {part(rows, chunk), "delta", step}},
                     {{registers, "dS", step}, {part(place, chunk), "dS", step, kStaged}},
                     [](const std::vector<Matrix>& in) {
                       const Matrix made_ds = ds_of(in);
                       return std::vector<Matrix>{made_ds, made_ds};
                     });
        add_chunk(role, "dK", dk, step, chunk, {registers, "dS", step}, places_.q(cta, use), "Q");
      }
      role.commit();
      role.copy("dS", {place, "dS", step, kStaged}, {{image(cta, step), "dS", step}}, {});
    }
    role.wait_products(0);
    release(role, &Barriers::q_empty, use_of(steps_ - 1));
    role.wait_copies(0);
    role.arrive({stage_of(b.p_empty, steps_ - 1)});
    if (!c_.ahead()) {
      role.arrive({b.done});
      role.wait(b.done, 0);
    }
    store_rows(role, "dK", dk,
               c_.ahead() ? places_.staging(cta, c_.do_bytes(), c_.head_dim) : places_.q(cta, 0),
               kGlobalDk, key(cta), data_.scale);
  }

  // Where dS of a step goes.
  [[nodiscard]] View image(int cta, int step) const {
    const sm90::WideTile& tile = tiles_[static_cast<std::size_t>(cta)];
    return {"global memory",
            Store::kGlobal,
            kGlobalDs,
            (tile.image + step * tile.to_block_below) * sm90::kDsImageBytes,
            kM * 2,
            kKeys,
            kM,
            Element::kBf16};
  }

  // Through a place of its own, or a stage that nobody reads any more.
  void store_rows(RoleWriter& role, const char* name, const View& sum, const View& stage,
                  GlobalTensor tensor, int first_row, float factor) const {
    const View all{"global memory", Store::kGlobal, tensor, 0, sum.columns * 4, 0, 0,
                   Element::kF32};
    role.store_scaled({sum, name, steps_ - 1}, stage, all.part(first_row, kKeys, 0, sum.columns),
                      factor);
  }

  const HeadData& data_;
  int first_key_;
  WideConfig c_;
  WidePlaces places_;
  std::vector<sm90::WideTile> tiles_;
  int steps_;
  ProgramBuilder build_;
  std::vector<Barriers> barriers_;
};

}  // namespace

Program sm90_wide_program(const HeadData& data, int first_key) {
  return Wide(data, first_key).make();
}

}  // namespace flashgrad::plan
