// SPDX-License-Identifier: Apache-2.0
// dq of the sm90 backward above head dim 128 (src/cuda/sm90/bwd_wide_dq.cuh) as a program of the
// simulator: a pair of CTAs that takes tile after tile, in the configuration and layout of
// wide_config.hpp, with the tiles of wide_tile.cuh. A warpgroup is one agent here, so counts of
// arrivals are of warpgroups, and copies arrive instead of their bytes. The clearing of rows that
// must not be read and the sums that go from pass to pass are left out.
#include <stdexcept>

#include "cuda/sm90/wide_config.hpp"
#include "plan/program_builder.hpp"

namespace flashgrad::plan {
namespace {

using sm90::WideDqConfig;

constexpr int kM = sm90::kBlockM;
constexpr int kKeys = sm90::kWideKeys;
constexpr int kCluster = 2;
constexpr int kConsumers = 2;
constexpr int kOperands = static_cast<int>(Use::kOperands);
constexpr int kLanding = static_cast<int>(Use::kLanding);

// Where the images of dS lie.
std::uint8_t* room_of(const HeadData& data) {
  // Nobody writes through it.
  return reinterpret_cast<std::uint8_t*>(const_cast<std::uint16_t*>(data.ds.data()));
}

// Of CTA `rank` in a round, for head dims padded to kD.
template <int kD>
sm90::WideDqTile tile_of(const HeadData& data, int tile, int rank) {
  sm90::BwdQueryParams params{};
  params.sequences.batch = 1;
  params.sequences.rows_q = data.queries;
  params.sequences.rows_kv = data.keys;
  params.sequences.mask.right = data.causal ? 0 : kUnbounded;
  params.heads_q = params.group = 1;
  params.num_blocks = data.queries / kM;
  constexpr int kRows = sm90::kWideDqRows * kCluster;
  params.section = 1;
  params.num_q_tiles = (data.queries + kRows - 1) / kRows;
  sm90::WidePass pass{};
  pass.num_units = 1;
  pass.key_count = data.keys / kKeys;
  pass.blocks_per_head = params.num_blocks;
  pass.ds = room_of(data);
  return sm90::wide_dq_tile<kD, kCluster>(params, pass, std::int64_t{tile} * kCluster + rank);
}

class WideDq {
 public:
  explicit WideDq(const HeadData& data)
      : data_(data), c_{data.head_dim, kCluster}, build_("sm90 backward, wide dq", kCluster) {
    if ((data.head_dim != 192 && data.head_dim != 256) || data.queries % kM != 0 ||
        data.keys % kKeys != 0) {
      throw std::invalid_argument("the wide dq program takes whole tiles of its own head dims");
    }
    constexpr int kRows = sm90::kWideDqRows * kCluster;
    const int num_tiles = (data.queries + kRows - 1) / kRows;
    for (int number = 0; number < num_tiles; ++number) {  // one pair of CTAs takes them all
      for (int rank = 0; rank < kCluster; ++rank) {
        tiles_.push_back(data.head_dim == 256 ? tile_of<256>(data, number, rank)
                                              : tile_of<192>(data, number, rank));
      }
    }
  }

  Program make() {
    build_.program().shared_regions.push_back(
        {"as WideDqConfig lays it out", 0, c_.shared_bytes()});
    for (int cta = 0; cta < kCluster; ++cta) {
      make_barriers(cta);
    }
    for (int cta = 0; cta < kCluster; ++cta) {
      write_next_tile(cta);
      write_loader(cta);
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        write_consumer(cta, consumer);
      }
    }
    int steps = 0;
    for (int round = 0; round < rounds(); ++round) {
      steps += tile(round, 0).n_end - tile(round, 0).n_begin;
    }
    return build_.take(steps);
  }

 private:
  struct Barriers {
    std::vector<int> full, empty;            // by stage
    std::vector<int> tile_full, tile_empty;  // by round
  };

  void make_barriers(int cta) {
    const auto ring = [&](const char* name, int stages, int count) {
      std::vector<int> list;
      for (int stage = 0; stage < stages; ++stage) {
        list.push_back(build_.barrier(name, cta, count));
      }
      return list;
    };
    // Two images of dS, and half of K from each CTA.
    barriers_.push_back({ring("full", c_.stages(), 4),
                         ring("empty", c_.stages(), kConsumers * kCluster), ring("tile_full", 2, 1),
                         ring("tile_empty", 2, kConsumers + 1)});
  }

  [[nodiscard]] int rounds() const { return static_cast<int>(tiles_.size()) / kCluster; }
  [[nodiscard]] const sm90::WideDqTile& tile(int round, int cta) const {
    const int at = round * kCluster + cta;
    return tiles_[static_cast<std::size_t>(at)];
  }
  [[nodiscard]] Barriers& at(int cta) { return barriers_[static_cast<std::size_t>(cta)]; }
  static int stage_of(const std::vector<int>& ring, int use) {
    return ring[static_cast<std::size_t>(use) % ring.size()];
  }
  static int phase_of(const std::vector<int>& ring, int use) {
    return use / static_cast<int>(ring.size());
  }

  static View shared(const char* name, int cta, int offset, int rows, int columns,
                     Element element = Element::kBf16) {
    return {name, Store::kShared, cta, offset, columns * size_of(element), rows, columns, element};
  }
  [[nodiscard]] View ds(int cta, int use, int consumer) const {
    return shared("dS", cta, use % c_.stages() * c_.stage_bytes() + consumer * sm90::kDsImageBytes,
                  kKeys, kM);
  }
  [[nodiscard]] View k(int cta, int use) const {
    return shared("K", cta, use % c_.stages() * c_.stage_bytes() + 2 * sm90::kDsImageBytes, kKeys,
                  c_.head_dim);
  }
  // What the second warp writes and everybody reads.
  [[nodiscard]] Access description(int cta, int round) const {
    constexpr int kBytes = static_cast<int>(sizeof(sm90::WideDqTile));
    // Rounds have places of their own cells.
    return {shared("tile", cta, c_.info_offset() + round % 2 * ((kBytes + 127) / 64 * 64), 1,
                   kBytes / 4, Element::kF32),
            "tile", round};
  }

  // One role: the tile of each round, between its barriers.
  template <class Body>
  void each_round(RoleWriter& role, int cta, Body&& body) {
    Barriers& b = at(cta);
    for (int round = 0; round < rounds(); ++round) {
      role.set_step(round);
      role.wait(stage_of(b.tile_full, round), phase_of(b.tile_full, round));
      role.compute("tile", {description(cta, round)}, {});
      body(round, tile(round, cta));
      role.arrive({stage_of(b.tile_empty, round)});
    }
  }

  void write_next_tile(int cta) {
    RoleWriter role(build_, "next tile", cta);
    Barriers& b = at(cta);
    for (int round = 0; round < rounds(); ++round) {
      role.set_step(round);
      role.wait(stage_of(b.tile_empty, round), phase_of(b.tile_empty, round) - 1);
      const Access to = description(cta, round);
      role.compute("tile", {}, {to}, [columns = to.view.columns](const std::vector<Matrix>&) {
        return std::vector<Matrix>{Matrix(1, columns)};
      });
      role.arrive({stage_of(b.tile_full, round)});
    }
  }

  void write_loader(int cta) {
    RoleWriter role(build_, "loads", cta);
    Barriers& b = at(cta);
    int use = 0;
    each_round(role, cta, [&](int round, const sm90::WideDqTile& t) {
      for (int n = t.n_begin; n < t.n_end; ++n, ++use) {
        role.wait(stage_of(b.empty, use), phase_of(b.empty, use) - 1);
        for (int i = 0; i < kConsumers; ++i) {
          if (n < t.own_begin[i] || n >= t.own_end[i]) {
            role.arrive({stage_of(b.full, use)});
            continue;
          }
          const auto image = static_cast<int>(t.ds[i] - room_of(data_)) + n * sm90::kDsImageBytes;
          role.copy("dS",
                    {{"global memory", Store::kGlobal, kGlobalDs, image, kM * 2, kKeys, kM,
                      Element::kBf16},
                     "input",
                     -1},
                    {{ds(cta, use, i), "dS", use, kLanding}}, {stage_of(b.full, use)});
        }
        const int half = kKeys / kCluster;
        std::vector<Access> to;
        std::vector<int> full;
        for (int other = 0; other < kCluster; ++other) {
          to.push_back({k(other, use).part(half * cta, half, 0, c_.head_dim), "K", use, kLanding});
          full.push_back(stage_of(at(other).full, use));
        }
        role.copy(
            "K",
            global_input(data_, kGlobalK, t.kv_row + n * kKeys + half * cta, half, 0, c_.head_dim),
            to, full);
      }
      role.set_step(round);
    });
  }

  void write_consumer(int cta, int consumer) {
    RoleWriter role(build_, consumer == 0 ? "consumer 0" : "consumer 1", cta, build_.add_pipe());
    Barriers& b = at(cta);
    const View dq = role.registers("registers", kM, c_.head_dim, Element::kF32);
    int use = 0;
    const auto wait_full = [&] { role.wait(stage_of(b.full, use), phase_of(b.full, use)); };
    const auto release = [&](int number) {
      role.arrive({stage_of(barriers_[0].empty, number), stage_of(barriers_[1].empty, number)});
    };
    // Stages with keys that only other rows of the cluster see.
    const auto skip = [&](int count) {
      for (; count > 0; --count, ++use) {
        wait_full();
        release(use);
      }
    };
    each_round(role, cta, [&](int, const sm90::WideDqTile& t) {
      const int own = t.own_end[consumer] - t.own_begin[consumer];
      const int before = own > 0 ? t.own_begin[consumer] - t.n_begin : 0;
      skip(before);
      for (int i = 0; i < own; ++i, ++use) {
        wait_full();
        role.product("dQ", {{dq, "dQ", use}},
                     i == 0 ? std::vector<Access>{} : std::vector<Access>{{dq, "dQ", use - 1}},
                     {{ds(cta, use, consumer), "dS", use, kOperands}},
                     {{k(cta, use), "K", use, kOperands}}, {.transpose_a = true});
        role.commit();
        role.wait_products(1);
        if (i > 0) {
          release(use - 1);
        }
      }
      const int last = use - 1;
      if (own > 0) {
        role.wait_products(0);
        release(last);
      }
      skip(t.n_end - t.n_begin - own - before);
      if (own > 0 && t.finishes[consumer] != 0) {
        const View all{"global memory", Store::kGlobal, kGlobalDq, 0, c_.head_dim * 4, 0, 0,
                       Element::kF32};
        role.store_scaled(
            {dq, "dQ", last},
            shared("staging", cta, c_.staging_offset() + consumer * kM * c_.head_dim * 2, kM,
                   c_.head_dim),
            all.part(t.q_row + kM * consumer, kM, 0, c_.head_dim), data_.scale);
      }
    });
  }

  const HeadData& data_;
  WideDqConfig c_;
  std::vector<sm90::WideDqTile> tiles_;
  ProgramBuilder build_;
  std::vector<Barriers> barriers_;
};

}  // namespace

Program sm90_wide_dq_program(const HeadData& data) { return WideDq(data).make(); }

}  // namespace flashgrad::plan
