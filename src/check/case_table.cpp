// SPDX-License-Identifier: Apache-2.0
// The table of known faults: from its lines to cases.
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "check/case.hpp"
#include "check/case_table_text.hpp"

namespace flashgrad::check {
namespace {

using nlohmann::json;

// Each of a list, or the one value.
std::vector<json> each(const json& line, const char* key) {
  if (!line.contains(key)) {
    return {};
  }
  const json& value = line.at(key);
  return value.is_array() ? value.get<std::vector<json>>() : std::vector<json>{value};
}

// Makes every case once per value.
template <class F>
void expand(std::vector<Case>& cases, const std::vector<json>& values, F&& apply) {
  if (values.empty()) {
    return;
  }
  std::vector<Case> expanded;
  for (const Case& c : cases) {
    for (const json& value : values) {
      expanded.push_back(c);
      apply(expanded.back(), value);
    }
  }
  cases = std::move(expanded);
}

std::vector<std::int32_t> offsets_of(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> offsets = {0};
  for (const std::int32_t length : lengths) {
    offsets.push_back(offsets.back() + length);
  }
  return offsets;
}

// -1 is unbounded in flash-attn's notation; "s-1" counts from the sequence's length.
std::int64_t window_side(const json& side, const Case& c) {
  if (side.is_string()) {
    if (side.get<std::string>() != "s-1") {
      throw std::invalid_argument("window side " + side.dump());
    }
    return c.seqlen_kv - 1;
  }
  return side.get<std::int64_t>() == -1 ? kUnbounded : side.get<std::int64_t>();
}

// `note` names the numbers of each shape: "b, sq, sk".
void apply_shape(Case& c, const json& shape, const std::string& note) {
  std::size_t begin = 0;
  for (const json& number : shape) {
    const std::size_t end = std::min(note.find(", ", begin), note.size());
    const std::string key = note.substr(begin, end - begin);
    const auto value = number.get<std::int64_t>();
    if (key == "b") {
      c.batch = value;
    } else if (key == "sq") {
      c.seqlen_q = value;
    } else if (key == "sk") {
      c.seqlen_kv = value;
    } else if (key == "s") {
      c.seqlen_q = c.seqlen_kv = value;
    } else if (key == "h") {
      c.heads_q = c.heads_kv = value;
    } else if (key == "d") {
      c.head_dim = c.head_dim_v = value;
    } else {
      throw std::invalid_argument("shape key " + key);
    }
    begin = end + 2;
  }
}

// Sequence lengths, offsets and totals of a packed batch.
void apply_packing(Case& c, const json& line) {
  const auto offsets = [&](const char* cu_key, const char* lens_key) {
    return line.contains(cu_key) ? line.at(cu_key).get<std::vector<std::int32_t>>()
           : line.contains(lens_key)
               ? offsets_of(line.at(lens_key).get<std::vector<std::int32_t>>())
               : std::vector<std::int32_t>{};
  };
  c.cu_seqlens_q = offsets("cu_q", "lens_q");
  c.cu_seqlens_kv = offsets("cu_kv", "lens_kv");
  if (line.contains("sequences")) {
    // The table gives total 2153, 8 sequences and a longest one of 513; the lengths are this
    // project's choice.
    c.cu_seqlens_q = offsets_of({513, 1, 400, 300, 255, 128, 43, 513});
    if (c.cu_seqlens_q.back() != line.at("total").get<std::int32_t>() ||
        c.cu_seqlens_q.size() != line.at("sequences").get<std::size_t>() + 1) {
      throw std::invalid_argument("sequences: the lengths chosen for them no longer fit the table");
    }
  }
  if (line.contains("lens")) {
    // `b` sequences whose lengths repeat the list.
    const auto lens = line.at("lens").get<std::vector<std::int32_t>>();
    std::vector<std::int32_t> lengths;
    for (std::size_t b = 0; b < line.at("b").get<std::size_t>(); ++b) {
      lengths.push_back(lens[b % lens.size()]);
    }
    c.cu_seqlens_q = offsets_of(lengths);
  }
  if (c.cu_seqlens_kv.empty()) {
    c.cu_seqlens_kv = c.cu_seqlens_q;
  }
  if (c.packed()) {
    c.batch = static_cast<std::int64_t>(c.cu_seqlens_q.size()) - 1;
    c.seqlen_q = line.value("total", static_cast<std::int64_t>(c.cu_seqlens_q.back()));
    c.seqlen_kv = line.value("total", static_cast<std::int64_t>(c.cu_seqlens_kv.back()));
    c.max_seqlen_q = c.max_seqlen_kv = line.value("max_seqlen", std::int64_t{0});
  }
  c.seqused_q = line.value("seqused_q", std::vector<std::int32_t>{});
  c.seqused_kv = line.value("seqused_kv", std::vector<std::int32_t>{});
}

void apply_data(Case& c, const json& line) {
  c.q = line.value("q", c.q);
  c.k = line.value("k", c.k);
  c.v = line.value("v", c.v);
  c.dout = line.value("dout", c.dout);
  c.dlse = line.value("dlse", c.dlse);
  if (line.contains("sinks")) {
    c.sinks.clear();
    for (const json& sink : line.at("sinks")) {
      c.sinks += (c.sinks.empty() ? "" : ":") + sink.dump();
    }
  }
  const auto take_layout = [&](const std::string& text, Layout layout) {
    if (line.value("layout", "") == text) {
      c.layout = layout;
    } else if (c.dout == text) {
      c.layout = layout;
      c.dout = "n";
    } else {
      return false;
    }
    return true;
  };
  const bool known = take_layout("one (b, s, 3, h, d) buffer", Layout::kFused) ||
                     take_layout("row stride 65537", Layout::kHugeStrides) ||
                     take_layout("view [:, ::2] of a buffer twice as long", Layout::kDoutView) ||
                     take_layout("stride 0", Layout::kDoutStride0);
  if (line.contains("layout") && !known) {
    throw std::invalid_argument("layout " + line.at("layout").dump());
  }
}

// What the words of `right` ask for besides the fields.
void apply_words(TableEntry& entry) {
  std::vector<Case>& cases = entry.cases;
  const auto variants = [&](std::initializer_list<void (*)(Case&)> changes) {
    std::vector<Case> all;
    for (const Case& c : cases) {
      for (const auto change : changes) {
        all.push_back(c);
        change(all.back());
      }
    }
    cases = std::move(all);
  };
  if (entry.id == "every_tensor_own_strides") {
    variants({[](Case& c) { c.layout = Layout::kOwnStrides; }});
  } else if (entry.id == "size1_dim_any_stride") {
    variants({[](Case& c) { c.layout = Layout::kSizeOne; }});
  } else if (entry.id == "window_right_huge") {
    variants({[](Case&) {}, [](Case& c) { c.mask.right = kUnbounded; }});
  } else if (entry.id == "skip_frozen") {
    variants({[](Case&) {}, [](Case& c) { c.wants_dq = false; },
              [](Case& c) { c.wants_dk = false; }, [](Case& c) { c.wants_dv = false; },
              [](Case& c) { c.wants_dq = c.wants_dk = false; },
              [](Case& c) { c.wants_dk = c.wants_dv = false; }});
  } else if (entry.id == "lse_gradient") {
    variants({[](Case&) {}, [](Case& c) { c.dout = "none"; }, [](Case& c) { c.dlse = "0"; }});
  } else if (entry.id == "heads_equal_length") {
    variants({[](Case&) {}, [](Case& c) { c.seqlen_q = c.seqlen_kv = 48; }});
  } else if (entry.id == "no_window" || entry.id == "noncausal_is_noncausal") {
    variants({[](Case& c) { c.mask = {}; }});
  } else if (entry.id == "one_by_one") {
    variants({[](Case&) {},
              [](Case& c) {
                c.seqlen_q = 7;
                c.seqlen_kv = 3;
                c.mask.left = 2;
                c.mask.right = 1;
              }});
  }
}

// What is made smaller, or left to a GPU, so that a machine of two cores runs the whole table in
// minutes.
void fit_cpu(TableEntry& entry) {
  const auto each_case = [&](void (*change)(Case&)) {
    for (Case& c : entry.cases) {
      change(c);
    }
  };
  if (entry.id == "over_2_31_elements") {
    entry.not_on_a_cpu = "needs 9 GB per tensor and 10^14 operations";
  } else if (entry.id == "sequence_4m") {
    entry.shrunk = "sq 2048 -> 4, d 128 -> 32";
    each_case([](Case& c) {
      c.seqlen_q = 4;
      c.head_dim = c.head_dim_v = 32;
    });
  } else if (entry.id == "window_costs_window") {
    entry.shrunk = "8 heads -> 1 (the cost itself is measured by the benchmark)";
    each_case([](Case& c) { c.heads_q = c.heads_kv = 1; });
  } else if (entry.id == "gqa_memory") {
    entry.shrunk = "b 24 -> 1, sk 12288 -> 3072 (the workspace is asked at full size)";
    each_case([](Case& c) {
      c.batch = 1;
      c.seqlen_kv = 3072;
    });
  } else if (entry.id == "int64_workspace") {
    entry.shrunk = "b 44 -> 3, lengths / 16, 48 heads -> 4 (the workspace is asked at full size)";
    each_case([](Case& c) {
      c.batch = 3;
      c.heads_q = c.heads_kv = 4;
      c.cu_seqlens_q = c.cu_seqlens_kv = {0, 512, 535, 847};
      c.seqlen_q = c.seqlen_kv = 847;
    });
  }
}

}  // namespace

TableEntry parse_entry(std::string_view json_line) {
  static const std::set<std::string> kKeys = {
      "id",     "source",       "dtype",     "b",     "hq",        "hkv",        "s",
      "sq",     "sk",           "d",         "dv",    "q",         "k",          "v",
      "dout",   "dlse",         "right",     "cu_q",  "cu_kv",     "lens_q",     "lens_kv",
      "lens",   "total",        "sequences", "pairs", "seqused_q", "seqused_kv", "causal",
      "window", "align",        "softcap",   "sinks", "note",      "max_seqlen", "shapes",
      "layout", "deterministic"};
  TableEntry entry;
  try {
    const json line = json::parse(json_line);
    for (const auto& [key, value] : line.items()) {
      if (!kKeys.contains(key)) {
        throw std::invalid_argument("key " + key);
      }
    }
    entry.id = line.at("id");
    entry.source = line.at("source");
    entry.right = line.at("right");
    Case c;
    c.dtype = parse_dtype(line.at("dtype").get<std::string>());
    c.batch = line.value("b", c.batch);
    c.heads_q = line.value("hq", c.heads_q);
    c.heads_kv = line.value("hkv", c.heads_kv);
    c.seqlen_q = line.value("sq", c.seqlen_q);
    c.seqlen_kv = line.value("sk", c.seqlen_kv);
    c.softcap = line.value("softcap", c.softcap);
    c.deterministic = line.value("deterministic", false);
    if (line.value("align", "") == "top-left") {
      c.mask.alignment = Alignment::kTopLeft;
    }
    apply_packing(c, line);
    apply_data(c, line);
    entry.cases = {c};
    const std::string note = line.value("note", "");
    expand(entry.cases, each(line, "shapes"),
           [&](Case& x, const json& shape) { apply_shape(x, shape, note); });
    expand(entry.cases, each(line, "pairs"),
           [](Case& x, const json& pair) { apply_shape(x, pair, "sq, sk"); });
    expand(entry.cases, each(line, "s"),
           [](Case& x, const json& s) { x.seqlen_q = x.seqlen_kv = s.get<std::int64_t>(); });
    expand(entry.cases, each(line, "d"),
           [](Case& x, const json& d) { x.head_dim = x.head_dim_v = d.get<std::int64_t>(); });
    expand(entry.cases, each(line, "dv"),
           [](Case& x, const json& dv) { x.head_dim_v = dv.get<std::int64_t>(); });
    expand(entry.cases, each(line, "causal"),
           [](Case& x, const json& causal) { x.mask.right = causal.get<bool>() ? 0 : kUnbounded; });
    if (line.contains("window")) {
      for (Case& x : entry.cases) {
        x.mask.left = window_side(line.at("window").at(0), x);
        x.mask.right = window_side(line.at("window").at(1), x);
      }
    }
    apply_words(entry);
  } catch (const std::exception& error) {
    throw std::invalid_argument("case table: " + std::string(error.what()) + ": " +
                                std::string(json_line.substr(0, 120)));
  }
  for (std::size_t n = 0; n < entry.cases.size(); ++n) {
    entry.cases[n].id = entry.cases.size() == 1 ? entry.id : entry.id + "/" + std::to_string(n + 1);
  }
  entry.full_size = entry.cases;
  fit_cpu(entry);
  return entry;
}

const std::vector<TableEntry>& table() {
  static const std::vector<TableEntry> kEntries = [] {
    std::vector<TableEntry> result;
    std::string_view text = kCaseTable;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      if (end > 0) {
        result.push_back(parse_entry(text.substr(0, end)));
      }
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return result;
  }();
  return kEntries;
}

}  // namespace flashgrad::check
