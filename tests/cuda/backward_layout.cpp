// SPDX-License-Identifier: Apache-2.0
// Implements backward_layout.hpp.
#include "backward_layout.hpp"

#include "core/mask.hpp"

namespace flashgrad {
namespace {

void make_offsets(const Case& c, HostLines* lines) {
  const auto count = static_cast<std::int32_t>(c.lens_q.size());
  lines->cu_q.push_back(count % 3);  // sometimes the first offset is not 0
  lines->cu_kv.push_back(count % 2);
  for (std::size_t i = 0; i < c.lens_q.size(); ++i) {
    lines->cu_q.push_back(lines->cu_q.back() + c.lens_q[i]);
    lines->cu_kv.push_back(lines->cu_kv.back() + c.lens_kv[i]);
  }
}

// Every row of the tensors, as if no sequence held it.
std::vector<Line> empty_lines(std::int64_t entries, std::int64_t rows) {
  std::vector<Line> lines;
  for (std::int64_t b = 0; b < entries; ++b) {
    for (std::int64_t i = 0; i < rows; ++i) {
      lines.push_back({static_cast<int>(b), -1, i, 0, 0, 0});
    }
  }
  return lines;
}

void set(Line* line, std::int64_t sequence, std::int64_t other_begin, const Range& visible) {
  line->sequence = static_cast<int>(sequence);
  line->other_begin = other_begin;
  line->begin = visible.begin;
  line->end = visible.empty() ? visible.begin : visible.end;
}

}  // namespace

HostLines make_lines(Case* c) {
  HostLines lines;
  Problem& p = c->p;
  Args args{};
  if (!c->lens_q.empty()) {
    make_offsets(*c, &lines);
    p.packed = true;
    p.batch = static_cast<std::int64_t>(c->lens_q.size());
    p.seqlen_q = lines.cu_q.back() + 5;
    p.seqlen_kv = lines.cu_kv.back() + 3;
    args.cu_seqlens_q = lines.cu_q.data();
    args.cu_seqlens_kv = lines.cu_kv.data();
  }
  p.max_seqlen_q = c->max_seqlen > 0 ? c->max_seqlen : p.seqlen_q;
  p.max_seqlen_kv = c->max_seqlen > 0 ? c->max_seqlen : p.seqlen_kv;
  p.has_seqused_q = !c->seqused_q.empty();
  p.has_seqused_kv = !c->seqused_kv.empty();
  p.has_q_offset = !c->q_offset.empty();
  args.seqused_q = c->seqused_q.data();
  args.seqused_kv = c->seqused_kv.data();
  args.q_offset = c->q_offset.data();
  const auto is_unaligned = [c](std::int64_t columns) {
    return c->first > 0 || (columns + c->head_pad) % 8 != 0 || c->row_pad % 8 != 0;
  };
  p.unaligned_q = p.unaligned_k = p.unaligned_dq = p.unaligned_dk = is_unaligned(p.head_dim);
  p.unaligned_v = p.unaligned_out = p.unaligned_dv = is_unaligned(p.head_dim_v);
  p.unaligned_dout = p.has_dout && (c->stride0 || p.unaligned_out);
  const std::int64_t entries = p.packed ? 1 : p.batch;
  lines.q = empty_lines(entries, p.seqlen_q);
  lines.kv = empty_lines(entries, p.seqlen_kv);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, args, b);
    const std::int64_t first_row = s.batch_index * p.seqlen_q + s.q_begin;
    const std::int64_t first_key = s.batch_index * p.seqlen_kv + s.kv_begin;
    for (std::int64_t i = 0; i < s.band.seqlen_q; ++i) {
      set(&lines.q[static_cast<std::size_t>(first_row + i)], b, s.kv_begin,
          s.band.kv_range(i, i + 1));
    }
    for (std::int64_t j = 0; j < s.band.seqlen_kv; ++j) {
      set(&lines.kv[static_cast<std::size_t>(first_key + j)], b, s.q_begin,
          s.band.q_range(j, j + 1));
    }
  }
  return lines;
}

}  // namespace flashgrad
