// SPDX-License-Identifier: Apache-2.0
// In what order the forward's tiles run, and which key blocks a tile meets. Plain arithmetic, for
// the device and for tests on the host.
#pragma once

#include <cstdint>

#include "core/mask.hpp"

namespace flashgrad::sm90 {

// A unit is a query head of a batch entry, or of the whole packed batch. Units run in sections, so
// that the keys in use stay in the L2; inside a section the longest tiles of all its units come
// first.
struct FwdOrder {
  std::uint32_t num_units;
  std::uint32_t section_units;  // of the last sections
  std::uint32_t wide_sections;  // so many at the start have one unit more
};

// Sections of at least `units_per_section`, the first of them one unit wider where they don't come
// out even: a last section with fewer tiles than the machine has SMs would leave them idle.
constexpr FwdOrder make_order(std::int64_t num_units, std::int64_t units_per_section) {
  const std::int64_t whole = num_units / units_per_section;
  const std::int64_t sections = whole > 0 ? whole : 1;
  return {static_cast<std::uint32_t>(num_units), static_cast<std::uint32_t>(num_units / sections),
          static_cast<std::uint32_t>(num_units % sections)};
}

struct FwdWorkItem {
  std::uint32_t unit;
  std::uint32_t rank;  // of the tile among its unit's, longest first
};

// Item `work` of num_units * tiles_per_unit.
FG_HOST_DEVICE constexpr FwdWorkItem work_item(const FwdOrder& order, std::uint32_t tiles_per_unit,
                                               std::uint32_t work) {
  std::uint32_t units = order.section_units + 1;
  std::uint32_t first_unit = 0;
  const std::uint32_t in_wide_sections = order.wide_sections * units * tiles_per_unit;
  if (work >= in_wide_sections) {
    work -= in_wide_sections;
    first_unit = order.wide_sections * units;
    units = order.section_units;
  }
  const std::uint32_t section = work / (units * tiles_per_unit);
  work -= section * units * tiles_per_unit;
  return {first_unit + section * units + work % units, work / units};
}

// Whether a row sees all keys of the rows before it, and more.
constexpr bool sees_more_later(const BandMask& mask) {
  return mask.left >= kUnboundedFrom && mask.right < kUnboundedFrom;
}

// Query rows [begin, end) of a sequence.
struct FwdRows {
  std::int32_t begin, end;
};

// The rows of tile `block` of a sequence. A tile with the rows of one consumer takes more than a
// third of the time, so the incomplete one is the first where later rows see more keys
// (`incomplete_first`), else the last. It ends between two consumers' rows: no row's bits depend on
// where.
FG_HOST_DEVICE constexpr FwdRows tile_rows(std::int64_t seqlen_q, std::int32_t block_m,
                                           std::int32_t block, bool incomplete_first) {
  const auto rows = static_cast<std::int32_t>(seqlen_q);
  // block_m is 64, 128 or 192, so that nothing is divided by what only the call knows.
  const std::int32_t before_last = (rows + 63) / 64 - 1;
  const std::int32_t left = block_m == 192 ? before_last % 3 : block_m == 128 ? before_last % 2 : 0;
  const std::int32_t first = incomplete_first && rows > 0 ? 64 * (left + 1) : block_m;
  const std::int32_t begin = block > 0 ? first + (block - 1) * block_m : 0;
  const std::int32_t end = block > 0 ? begin + block_m : first;
  return {begin, end < rows ? end : begin < rows ? rows : begin};
}

// Key blocks [begin, end) in three stretches: [begin, full_begin) and [full_end, end) need the
// mask, [full_begin, full_end) does not.
struct FwdBlocks {
  std::int32_t begin, full_begin, full_end, end;
};

// Of rows [m_begin, m_end).
template <int kBlockN>
FG_HOST_DEVICE constexpr FwdBlocks key_blocks(const Band& band, std::int64_t m_begin,
                                              std::int64_t m_end) {
  const Range hull = band.kv_range(m_begin, m_end);
  const Range full = band.kv_range_full(m_begin, m_end);
  if (hull.empty()) {
    return {0, 0, 0, 0};
  }
  FwdBlocks blocks{};
  blocks.begin = static_cast<std::int32_t>(hull.begin) / kBlockN;
  blocks.end = (static_cast<std::int32_t>(hull.end) + kBlockN - 1) / kBlockN;
  blocks.full_begin = blocks.begin;
  blocks.full_end = blocks.begin;
  if (!full.empty()) {
    blocks.full_begin = (static_cast<std::int32_t>(full.begin) + kBlockN - 1) / kBlockN;
    const std::int32_t full_end = static_cast<std::int32_t>(full.end) / kBlockN;
    blocks.full_end = full_end > blocks.full_begin ? full_end : blocks.full_begin;
  }
  return blocks;
}

}  // namespace flashgrad::sm90
