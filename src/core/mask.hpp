// SPDX-License-Identifier: Apache-2.0
// The only mask of flashgrad: a diagonal band. Causal, sliding windows and full are members. Every
// backend and the oracle ask here; no other code compares row and column indices.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FG_HOST_DEVICE __host__ __device__
#else
#define FG_HOST_DEVICE
#endif

namespace flashgrad {

enum class Alignment : std::uint8_t { kBottomRight, kTopLeft };

// Any side of 2^31 or more is open.
inline constexpr std::int64_t kUnboundedFrom = std::int64_t{1} << 31;
inline constexpr std::int64_t kUnbounded = INT64_MAX;

// Row i sees key j iff i + shift - left <= j <= i + shift + right.
struct BandMask {
  std::int64_t left = kUnbounded;
  std::int64_t right = kUnbounded;
  Alignment alignment = Alignment::kBottomRight;

  bool operator==(const BandMask&) const = default;
};

// A half-open range of rows or keys; empty if end <= begin.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] FG_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
  [[nodiscard]] FG_HOST_DEVICE constexpr std::int64_t size() const {
    return empty() ? 0 : end - begin;
  }
  bool operator==(const Range&) const = default;
};

// A BandMask applied to one sequence of seqlen_q rows and seqlen_kv keys: row i sees key j iff 0 <=
// j < seqlen_kv, 0 <= i < seqlen_q and i + lo <= j <= i + hi.
struct Band {
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_kv = 0;
  std::int64_t lo = 0;
  std::int64_t hi = 0;

  // Far beyond any row or key, yet the sum of two of them does not overflow.
  static constexpr std::int64_t kFar = std::int64_t{1} << 61;

  // a - b, and a + b, exact near 0 and saturated at about +-kFar. Halves can't overflow.
  FG_HOST_DEVICE static constexpr std::int64_t difference_far(std::int64_t a, std::int64_t b) {
    const std::int64_t half = a / 2 - b / 2;
    return half >= kFar / 2 ? kFar : half <= -kFar / 2 ? -kFar : a - b;
  }

  FG_HOST_DEVICE static constexpr std::int64_t sum_far(std::int64_t a, std::int64_t b) {
    const std::int64_t half = a / 2 + b / 2;
    return half >= kFar / 2 ? kFar : half <= -kFar / 2 ? -kFar : a + b;
  }

  FG_HOST_DEVICE static constexpr Band with_shift(const BandMask& mask, std::int64_t seqlen_q,
                                                  std::int64_t seqlen_kv, std::int64_t shift) {
    Band band{seqlen_q, seqlen_kv, 0, 0};
    band.lo = mask.left >= kUnboundedFrom ? -kFar : difference_far(shift, mask.left);
    band.hi = mask.right >= kUnboundedFrom ? kFar : sum_far(shift, mask.right);
    return band;
  }

  // The band of a sequence whose first query stands at `*q_offset` if given, else as the alignment
  // says.
  FG_HOST_DEVICE static constexpr Band of(const BandMask& mask, std::int64_t seqlen_q,
                                          std::int64_t seqlen_kv,
                                          const std::int64_t* q_offset = nullptr) {
    const std::int64_t aligned =
        mask.alignment == Alignment::kBottomRight ? seqlen_kv - seqlen_q : 0;
    return with_shift(mask, seqlen_q, seqlen_kv, q_offset != nullptr ? *q_offset : aligned);
  }

  [[nodiscard]] FG_HOST_DEVICE constexpr bool visible(std::int64_t i, std::int64_t j) const {
    return i >= 0 && i < seqlen_q && j >= 0 && j < seqlen_kv && j >= i + lo && j <= i + hi;
  }

  // The keys that at least one of rows [begin, end) may see: the hull of the rows' ranges, clipped
  // to the keys that exist.
  [[nodiscard]] FG_HOST_DEVICE constexpr Range kv_range(std::int64_t begin,
                                                        std::int64_t end) const {
    end = end < seqlen_q ? end : seqlen_q;
    if (end <= begin || lo > hi) {
      return {0, 0};
    }
    const std::int64_t first = begin + lo > 0 ? begin + lo : 0;
    const std::int64_t last = end - 1 + hi < seqlen_kv - 1 ? end - 1 + hi : seqlen_kv - 1;
    return first <= last ? Range{first, last + 1} : Range{0, 0};
  }

  // The keys that each of those rows of [begin, end) that exist sees.
  [[nodiscard]] FG_HOST_DEVICE constexpr Range kv_range_full(std::int64_t begin,
                                                             std::int64_t end) const {
    end = end < seqlen_q ? end : seqlen_q;
    if (end <= begin || lo > hi) {
      return {0, 0};
    }
    const std::int64_t first = end - 1 + lo > 0 ? end - 1 + lo : 0;
    const std::int64_t last = begin + hi < seqlen_kv - 1 ? begin + hi : seqlen_kv - 1;
    return first <= last ? Range{first, last + 1} : Range{0, 0};
  }

  // The rows that may see at least one of keys [begin, end), likewise.
  [[nodiscard]] FG_HOST_DEVICE constexpr Range q_range(std::int64_t begin, std::int64_t end) const {
    end = end < seqlen_kv ? end : seqlen_kv;
    if (end <= begin || lo > hi) {
      return {0, 0};
    }
    const std::int64_t first = begin - hi > 0 ? begin - hi : 0;
    const std::int64_t last = end - 1 - lo < seqlen_q - 1 ? end - 1 - lo : seqlen_q - 1;
    return first <= last ? Range{first, last + 1} : Range{0, 0};
  }

  // The rows that see all of keys [n_begin, n_end); empty if one of the keys does not exist.
  [[nodiscard]] FG_HOST_DEVICE constexpr Range q_range_full(std::int64_t n_begin,
                                                            std::int64_t n_end) const {
    if (n_begin < 0 || n_end > seqlen_kv || n_end <= n_begin) {
      return {0, 0};
    }
    const std::int64_t first = n_end - 1 - hi > 0 ? n_end - 1 - hi : 0;
    const std::int64_t last = n_begin - lo < seqlen_q - 1 ? n_begin - lo : seqlen_q - 1;
    return first <= last ? Range{first, last + 1} : Range{0, 0};
  }

  // True iff every row of [m_begin, m_end) exists and sees every key of [n_begin, n_end).
  [[nodiscard]] FG_HOST_DEVICE constexpr bool is_full(std::int64_t m_begin, std::int64_t m_end,
                                                      std::int64_t n_begin,
                                                      std::int64_t n_end) const {
    return m_begin >= 0 && n_begin >= 0 && m_end <= seqlen_q && n_end <= seqlen_kv &&
           n_begin >= m_end - 1 + lo && n_end - 1 <= m_begin + hi;
  }

  // True iff no row of [m_begin, m_end) sees any key of [n_begin, n_end).
  [[nodiscard]] FG_HOST_DEVICE constexpr bool is_empty(std::int64_t m_begin, std::int64_t m_end,
                                                       std::int64_t n_begin,
                                                       std::int64_t n_end) const {
    m_end = m_end < seqlen_q ? m_end : seqlen_q;
    n_end = n_end < seqlen_kv ? n_end : seqlen_kv;
    return m_end <= m_begin || n_end <= n_begin || lo > hi || n_end - 1 < m_begin + lo ||
           n_begin > m_end - 1 + hi;
  }
};

}  // namespace flashgrad
