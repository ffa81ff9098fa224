// SPDX-License-Identifier: Apache-2.0
// From a tile index to a sequence, on the device: nothing about a packed batch is copied to the
// host.
//
// The rows of a tensor are cut into spans that cover all of them once. Fixed length: span b is
// batch entry b. Packed: span 0 holds the rows before the first offset, span b + 1 sequence b with
// its unused rows, the last span the rows past the last offset; the first and the last belong to no
// sequence. Blocks of kBlock rows are numbered through all spans with gaps, so that no prefix sum
// is needed: span s begins at block floor(begin / kBlock) + s. `num_blocks` bounds the numbers.
#pragma once

#include <cstdint>

#include "core/mask.hpp"
#include "core/problem.hpp"

namespace flashgrad::sm90 {

// The part of Problem and Args that says where sequences lie.
struct Sequences {
  std::int64_t batch;
  std::int64_t rows_q;   // of a batch entry, or of all sequences together if packed
  std::int64_t rows_kv;  // likewise
  BandMask mask;
  const std::int32_t* cu_seqlens_q;   // (batch + 1), or null: fixed length
  const std::int32_t* cu_seqlens_kv;  // (batch + 1), or null
  const std::int32_t* seqused_q;      // (batch), or null
  const std::int32_t* seqused_kv;     // (batch), or null
  const std::int64_t* q_offset;       // (batch), or null

  FG_HOST_DEVICE constexpr bool packed() const { return cu_seqlens_q != nullptr; }
};

inline Sequences make_sequences(const Problem& p, const Args& args) {
  return {p.batch,
          p.seqlen_q,
          p.seqlen_kv,
          p.mask,
          args.cu_seqlens_q,
          args.cu_seqlens_kv,
          p.has_seqused_q ? args.seqused_q : nullptr,
          p.has_seqused_kv ? args.seqused_kv : nullptr,
          p.has_q_offset ? args.q_offset : nullptr};
}

constexpr std::int64_t num_blocks(bool packed, std::int64_t batch, std::int64_t rows,
                                  std::int64_t block) {
  return packed ? rows / block + batch + 3 : batch * ((rows + block - 1) / block);
}

// Half-open rows [begin, end) of a tensor.
struct Span {
  std::int64_t begin;
  std::int64_t end;
};

// Offsets are data: they are clamped here, so that bad ones give wrong numbers, not wild accesses.
FG_HOST_DEVICE inline Span packed_span(const std::int32_t* cu_seqlens, std::int64_t batch,
                                       std::int64_t rows, std::int64_t span) {
  const auto clamp = [rows](std::int64_t x) { return x < 0 ? 0 : x > rows ? rows : x; };
  const std::int64_t begin = span == 0 ? 0 : clamp(cu_seqlens[span - 1]);
  const std::int64_t end = span == batch + 1 ? rows : clamp(cu_seqlens[span]);
  return {begin, end < begin ? begin : end};
}

FG_HOST_DEVICE inline std::int64_t first_block(const std::int32_t* cu_seqlens, std::int64_t batch,
                                               std::int64_t rows, std::int64_t span,
                                               std::int64_t block) {
  return cu_seqlens == nullptr ? span * ((rows + block - 1) / block)
                               : packed_span(cu_seqlens, batch, rows, span).begin / block + span;
}

// The span of block number `index`: the last one that begins at or before it.
FG_HOST_DEVICE inline std::int64_t span_of_block(const std::int32_t* cu_seqlens, std::int64_t batch,
                                                 std::int64_t rows, std::int64_t index,
                                                 std::int64_t block) {
  if (cu_seqlens == nullptr) {
    // 32 bits, since the kernels have fewer than 2^31 CTAs: a 64-bit division costs four times
    // that.
    return static_cast<std::uint32_t>(index) /
           static_cast<std::uint32_t>((rows + block - 1) / block);
  }
  std::int64_t low = 0;
  std::int64_t high = batch + 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (first_block(cu_seqlens, batch, rows, middle, block) <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A span of queries with its keys. Rows of q stand at q.begin (batch entry `batch_index`), keys at
// kv.begin; the band counts from there and holds the lengths in use (0 outside the sequences).
struct SequenceSpan {
  std::int64_t batch_index;
  Span q;
  Span kv;
  Band band;
};

FG_HOST_DEVICE inline SequenceSpan sequence_span(const Sequences& s, std::int64_t span) {
  SequenceSpan result{};
  std::int64_t index = span;
  bool inside = true;
  if (s.packed()) {
    result.q = packed_span(s.cu_seqlens_q, s.batch, s.rows_q, span);
    result.kv = packed_span(s.cu_seqlens_kv, s.batch, s.rows_kv, span);
    inside = span > 0 && span <= s.batch;
    index = inside ? span - 1 : 0;
  } else {
    result.batch_index = span;
    result.q = {0, s.rows_q};
    result.kv = {0, s.rows_kv};
  }
  std::int64_t seqlen_q = inside ? result.q.end - result.q.begin : 0;
  std::int64_t seqlen_kv = inside ? result.kv.end - result.kv.begin : 0;
  const auto used = [index](const std::int32_t* seqused, std::int64_t length) {
    if (seqused == nullptr) {
      return length;
    }
    const std::int64_t x = seqused[index];
    return x < 0 ? 0 : x < length ? x : length;
  };
  if (inside) {
    seqlen_q = used(s.seqused_q, seqlen_q);
    seqlen_kv = used(s.seqused_kv, seqlen_kv);
  }
  result.band = Band::of(s.mask, seqlen_q, seqlen_kv,
                         s.q_offset != nullptr && inside ? s.q_offset + index : nullptr);
  return result;
}

}  // namespace flashgrad::sm90
