// SPDX-License-Identifier: Apache-2.0
// A Case is one fully specified attention problem: with its seed it stands for the same tensors on
// every machine. Cases come from the table of known faults, from a --shape text, or from a random
// draw; each prints the one command that repeats it.
//
// Functions that parse throw std::invalid_argument with one clear line.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "check/device_memory.hpp"
#include "core/dtype.hpp"
#include "core/mask.hpp"

namespace flashgrad::check {

// How the tensors of a case lie in memory.
enum class Layout : std::uint8_t {
  kCompact,
  kOwnStrides,  // every tensor has other strides, with gaps, heads outside rows for some
  kFused,    // q, k, v and dq, dk, dv are slices of one buffer each, as one projection makes them
             // (equal shapes only)
  kSizeOne,  // dimensions of size 1 have the strides 0, 3331333, 99990001
  kHugeStrides,  // rows 65537 elements apart on sparse memory
  kDoutView,     // dout is every second head-row of a buffer twice as long
  kDoutStride0,  // dout is one element, expanded
};

struct Case {
  // Of the table: "big_logits", or "big_logits/3" for its third variant; else empty.
  std::string id;
  DType dtype = DType::kF32;
  bool grad_f32 = false;  // dq, dk, dv in f32
  std::int64_t batch = 1;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t seqlen_q = 1;   // packed: total
  std::int64_t seqlen_kv = 1;  // packed: total
  std::int64_t head_dim = 64;
  std::int64_t head_dim_v = 64;
  std::vector<std::int32_t> cu_seqlens_q;  // empty: fixed length
  std::vector<std::int32_t> cu_seqlens_kv;
  std::vector<std::int32_t> seqused_q;  // empty: not given
  std::vector<std::int32_t> seqused_kv;
  std::vector<std::int64_t> q_offset;
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_kv = 0;

  BandMask mask;
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: the default
  double softcap = 0;

  // What the tensors hold: "n" standard normal, "3n" 3 times that, a number everywhere, "none" (not
  // given), or one of the table's sentences, which the generator knows. Inputs that no visible
  // position reads are NaN in every case.
  std::string q = "n";
  std::string k = "n";
  std::string v = "n";
  std::string dout = "n";
  std::string dlse = "none";
  std::string sinks = "none";  // also a list "0.5:100:-3:20"

  Layout layout = Layout::kCompact;
  bool wants_lse = true;  // forward; backward always gets one
  bool wants_dq = true;
  bool wants_dk = true;
  bool wants_dv = true;
  bool deterministic = false;
  std::uint64_t seed = 1;

  [[nodiscard]] bool packed() const { return !cu_seqlens_q.empty(); }
};

// b=1,hq=8,hkv=2,sq=512,sk=512,d=64[,dv=64]. Left out: b=1, hq=1, hkv=hq, sk=sq, dv=d. Further
// keys, with lists joined by ':' -- cu_q, cu_kv, used_q, used_kv, q_offset, max_q, max_kv, q, k, v,
// dout, dlse, sinks, layout (own, fused, size1, huge, dout_view, dout_0), null (any of
// lse:dq:dk:dv). With cu_q, b, sq and sk may be left out. The caller sets dtype, mask, scale,
// softcap and seed afterwards.
Case parse_shape(std::string_view text);

// The text that parse_shape reads back.
std::string shape_text(const Case& c);

// `flashgrad check --shape ... --dtype ... --window ... --seed N`, or `flashgrad check --case ID
// --seed N`.
std::string command_line(const Case& c);

// "f32", "bf16", "f16", "f64".
DType parse_dtype(std::string_view text);

// One line of the table.
struct TableEntry {
  std::string id;
  std::string source;
  std::string right;            // the right answer, in words
  std::vector<Case> cases;      // "lists mean each of"; as a CPU runs them
  std::vector<Case> full_size;  // the same as the table has them
  std::string not_on_a_cpu;     // why nothing of it runs on a CPU, or empty
  std::string shrunk;           // what was made smaller for a CPU, or empty
};

// Parses one line of known_faults.jsonl.
TableEntry parse_entry(std::string_view json_line);

// The table that is compiled in.
const std::vector<TableEntry>& table();

// What of an entry runs there: on the host `cases`, none if nothing of it runs on a CPU; on a GPU
// `full_size`, with bf16 for f32, which no GPU backend takes.
std::vector<Case> cases_on(const TableEntry& entry, Place place);

// The cases of a table id: "big_logits" (all variants) or "big_logits/3".
std::vector<Case> find_cases(std::string_view id, Place place = Place::kHost);

// A member of the grids that other libraries' own test suites use, drawn by `seed`.
Case random_case(std::uint64_t seed);

}  // namespace flashgrad::check
