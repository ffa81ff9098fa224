// SPDX-License-Identifier: Apache-2.0
// Random members of the grids that other libraries' own test suites use (their lengths, head
// dimensions, heads, masks, packings).
#include <algorithm>
#include <array>
#include <initializer_list>
#include <random>
#include <tuple>
#include <utility>

#include "check/case.hpp"

namespace flashgrad::check {
namespace {

constexpr std::array<std::pair<int, int>, 30> kLengths = {{
    {1, 1},       {3, 3},       {64, 32},     {64, 128},    {64, 1},      {128, 128},
    {128, 192},   {256, 256},   {255, 256},   {239, 1},     {1, 239},     {799, 3},
    {3, 799},     {113, 203},   {113, 128},   {128, 217},   {113, 211},   {108, 256},
    {256, 512},   {384, 256},   {640, 128},   {512, 256},   {127, 512},   {127, 513},
    {1024, 1024}, {1023, 1024}, {1024, 1023}, {2048, 2048}, {4096, 4096}, {4224, 4224},
}};
constexpr std::array<int, 6> kTiles = {16, 32, 64, 128, 256, 512};
constexpr std::array<int, 20> kHeadDims = {1,  8,  16,  21,  32,  33,  40,  59,  64,  72,
                                           80, 96, 104, 111, 128, 160, 192, 203, 224, 256};
constexpr std::array<std::pair<int, int>, 6> kHeads = {
    {{6, 6}, {6, 3}, {6, 2}, {6, 1}, {9, 3}, {28, 4}}};

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  // From [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return integer(1, 100) <= percent; }
  template <class C>
  auto one_of(const C& values) {
    return *(values.begin() + integer(0, static_cast<std::int64_t>(values.size()) - 1));
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + integer(0, static_cast<std::int64_t>(values.size()) - 1));
  }

 private:
  std::mt19937_64 random_;
};

void draw_lengths(Draw& draw, Case& c) {
  if (draw.chance(70)) {
    std::tie(c.seqlen_q, c.seqlen_kv) = draw.one_of(kLengths);
    return;
  }
  const auto near_a_tile = [&] { return draw.one_of(kTiles) + draw.integer(-1, 1); };
  c.seqlen_q = near_a_tile();
  c.seqlen_kv = near_a_tile();
}

// Lengths of `batch` sequences up to `longest`: random, thirds, or full; some 0, at the start, the
// middle or the end.
std::vector<std::int32_t> draw_sequence_lengths(Draw& draw, std::int64_t batch,
                                                std::int64_t longest) {
  std::vector<std::int32_t> lengths;
  const auto mode = draw.integer(0, 2);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = mode == 0   ? draw.integer(1, longest)
                                : mode == 1 ? std::max<std::int64_t>(1, longest / (1 + b % 3))
                                            : longest;
    lengths.push_back(static_cast<std::int32_t>(length));
  }
  for (const std::int64_t at : {std::int64_t{0}, batch / 2, batch - 1}) {
    if (draw.chance(25)) {
      lengths[static_cast<std::size_t>(at)] = 0;
    }
  }
  return lengths;
}

std::vector<std::int32_t> draw_used(Draw& draw, const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> used;
  for (const std::int32_t length : lengths) {
    used.push_back(
        static_cast<std::int32_t>(draw.integer(draw.chance(20) ? 0 : length / 2, length)));
  }
  return used;
}

// Offsets, perhaps with rows of no sequence before the first and after the last.
std::vector<std::int32_t> draw_offsets(Draw& draw, const std::vector<std::int32_t>& lengths,
                                       std::int64_t* total) {
  std::vector<std::int32_t> offsets = {draw.chance(20) ? 5 : 0};
  for (const std::int32_t length : lengths) {
    offsets.push_back(offsets.back() + length);
  }
  *total = offsets.back() + (draw.chance(20) ? 7 : 0);
  return offsets;
}

void draw_packing(Draw& draw, Case& c) {
  c.batch = draw.one_of({1, 7, 20, 49});
  const std::int64_t longest_q =
      std::max<std::int64_t>(1, std::min<std::int64_t>(c.seqlen_q, 1024) / (c.batch > 7 ? 8 : 2));
  const std::int64_t longest_kv =
      std::max<std::int64_t>(1, std::min<std::int64_t>(c.seqlen_kv, 1024) / (c.batch > 7 ? 8 : 2));
  const auto lengths_q = draw_sequence_lengths(draw, c.batch, longest_q);
  const auto lengths_kv = draw_sequence_lengths(draw, c.batch, longest_kv);
  c.cu_seqlens_q = draw_offsets(draw, lengths_q, &c.seqlen_q);
  c.cu_seqlens_kv = draw_offsets(draw, lengths_kv, &c.seqlen_kv);
  if (draw.chance(25)) {
    c.seqused_q = draw_used(draw, lengths_q);
  }
  if (draw.chance(25)) {
    c.seqused_kv = draw_used(draw, lengths_kv);
  }
  if (draw.chance(50)) {
    c.max_seqlen_q = longest_q + draw.integer(0, 100);
    c.max_seqlen_kv = longest_kv + draw.integer(0, 100);
  }
}

void draw_mask(Draw& draw, Case& c) {
  if (draw.chance(30)) {
    c.mask.alignment = Alignment::kTopLeft;
  }
  switch (draw.integer(0, 5)) {
    case 0:
      break;
    case 1:
    case 2:
      c.mask.right = 0;
      break;
    case 3:
      c.mask.left = draw.integer(0, std::max<std::int64_t>(0, c.seqlen_kv - 1));
      c.mask.right = draw.integer(0, std::max<std::int64_t>(0, c.seqlen_kv - 1));
      break;
    case 4:
      (draw.chance(50) ? c.mask.left : c.mask.right) =
          draw.integer(0, std::max<std::int64_t>(0, c.seqlen_kv - 1));
      break;
    default: {  // a band off the diagonal, as (-128, 864)
      const std::int64_t side = draw.integer(1, std::max<std::int64_t>(1, c.seqlen_kv / 4));
      const std::int64_t other = draw.integer(0, c.seqlen_kv);
      c.mask.left = draw.chance(50) ? -side : other;
      c.mask.right = c.mask.left < 0 ? other : -side;
    }
  }
}

}  // namespace

Case random_case(std::uint64_t seed) {
  Draw draw(seed);
  Case c;
  c.seed = seed;
  c.dtype = draw.one_of({DType::kF32, DType::kBF16, DType::kF16});
  c.grad_f32 = draw.chance(20);
  draw_lengths(draw, c);
  c.batch = draw.integer(1, 3);
  std::tie(c.heads_q, c.heads_kv) = draw.one_of(kHeads);
  c.head_dim = draw.one_of(kHeadDims);
  c.head_dim_v = draw.chance(60) ? c.head_dim : draw.one_of({64, 128, 17, 33, 7});
  if (draw.chance(35)) {
    draw_packing(draw, c);
  } else if (draw.chance(20)) {
    const auto full = [&](std::int64_t length) {
      return std::vector<std::int32_t>(static_cast<std::size_t>(c.batch),
                                       static_cast<std::int32_t>(length));
    };
    c.seqused_q = draw.chance(50) ? draw_used(draw, full(c.seqlen_q)) : c.seqused_q;
    c.seqused_kv = draw_used(draw, full(c.seqlen_kv));
  }
  draw_mask(draw, c);
  if (draw.chance(15)) {
    for (std::int64_t b = 0; b < c.batch; ++b) {
      c.q_offset.push_back(draw.integer(-5, c.seqlen_kv + 5));
    }
  }
  if (draw.chance(40)) {
    c.scale = draw.one_of({0.1, 1.0, -0.125});
  }
  c.softcap = draw.one_of({0.0, 0.0, 15.0, 30.0});
  c.sinks = draw.one_of<std::string>({"none", "none", "n", "20"});
  if (draw.chance(25)) {
    c.dlse = std::string("n");
    c.dout = draw.chance(20) ? std::string("none") : c.dout;
  }
  if (draw.chance(10)) {
    (draw.chance(33) ? c.wants_dq : draw.chance(50) ? c.wants_dk : c.wants_dv) = false;
  }
  c.wants_lse = !draw.chance(10);
  c.layout = draw.chance(40)                       ? Layout::kOwnStrides
             : draw.chance(10) && c.dout != "none" ? Layout::kDoutStride0
                                                   : Layout::kCompact;
  // Long and many-headed draws shrink to what a CPU computes in a second or so.
  const auto cost = [&] {
    return static_cast<double>(c.seqlen_q) * static_cast<double>(c.seqlen_kv) *
           static_cast<double>(c.packed() ? c.heads_q : c.batch * c.heads_q) *
           static_cast<double>(c.head_dim + c.head_dim_v) /
           static_cast<double>(c.packed() ? c.batch : 1);
  };
  constexpr double kMaxCost = 4e8;
  while (cost() > kMaxCost && c.heads_kv > 1) {
    const std::int64_t group = c.heads_q / c.heads_kv;
    --c.heads_kv;
    c.heads_q = group * c.heads_kv;
  }
  while (!c.packed() && cost() > kMaxCost && c.batch > 1) {
    --c.batch;
  }
  if (cost() > 4 * kMaxCost) {
    c.heads_q = 1;
  }
  const auto trim = [&](auto& values) {
    if (!c.packed() && values.size() > static_cast<std::size_t>(c.batch)) {
      values.resize(static_cast<std::size_t>(c.batch));
    }
  };
  trim(c.seqused_q);
  trim(c.seqused_kv);
  trim(c.q_offset);
  return c;
}

}  // namespace flashgrad::check
