// SPDX-License-Identifier: Apache-2.0
// The text of a case, both ways, and the command that repeats it.
#include "check/case.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>

namespace flashgrad::check {
namespace {

constexpr std::array<std::pair<Layout, const char*>, 7> kLayoutNames = {{
    {Layout::kCompact, "compact"},
    {Layout::kOwnStrides, "own"},
    {Layout::kFused, "fused"},
    {Layout::kSizeOne, "size1"},
    {Layout::kHugeStrides, "huge"},
    {Layout::kDoutView, "dout_view"},
    {Layout::kDoutStride0, "dout_0"},
}};

[[noreturn]] void bad(std::string_view key, std::string_view value, const std::string& want) {
  throw std::invalid_argument("--shape: " + std::string(key) + "=" + std::string(value) +
                              ", want " + want);
}

constexpr std::int64_t kLargest = std::int64_t{1} << 40;

std::int64_t parse_integer(std::string_view key, std::string_view text, std::int64_t minimum) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < minimum ||
      value > kLargest) {
    bad(key, text, "an integer from " + std::to_string(minimum) + " to 2^40");
  }
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(end + 1);
  }
}

template <class T>
std::vector<T> parse_list(std::string_view key, std::string_view text) {
  std::vector<T> values;
  for (const std::string_view part : split(text, ':')) {
    T value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc{} || end != part.data() + part.size()) {
      bad(key, text, "integers joined by ':'");
    }
    values.push_back(value);
  }
  return values;
}

template <class T>
std::string list_text(const std::vector<T>& values) {
  std::string text;
  for (const T value : values) {
    if (!text.empty()) {
      text += ':';
    }
    text += std::to_string(value);
  }
  return text;
}

std::string number_text(double x) {
  std::array<char, 32> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), x);
  return {buffer.data(), end};
}

std::string side_text(std::int64_t side) {
  return side >= kUnboundedFrom ? "inf" : std::to_string(side);
}

// "null=dq:dk"
void parse_null(std::string_view value, Case* c) {
  for (const std::string_view name : split(value, ':')) {
    if (name == "lse") {
      c->wants_lse = false;
    } else if (name == "dq") {
      c->wants_dq = false;
    } else if (name == "dk") {
      c->wants_dk = false;
    } else if (name == "dv") {
      c->wants_dv = false;
    } else {
      bad("null", value, "any of lse:dq:dk:dv");
    }
  }
}

void parse_layout(std::string_view value, Case* c) {
  for (const auto& [layout, name] : kLayoutNames) {
    if (value == name) {
      c->layout = layout;
      return;
    }
  }
  bad("layout", value, "compact, own, fused, size1, huge, dout_view or dout_0");
}

// A list of one number for each sequence, and `more`.
template <class T>
void check_size(const char* key, const std::vector<T>& list, std::int64_t batch, int more) {
  if (list.size() != static_cast<std::size_t>(batch + more)) {
    bad(key, list_text(list),
        std::to_string(batch + more) + " numbers (b=" + std::to_string(batch) +
            (more > 0 ? ", and the end)" : ")"));
  }
}

void check_lengths(const Case& c, const char* cu_key, const char* used_key, std::int64_t rows,
                   const std::vector<std::int32_t>& cu, const std::vector<std::int32_t>& used) {
  if (c.packed()) {
    check_size(cu_key, cu, c.batch, 1);
  }
  if (!used.empty()) {
    check_size(used_key, used, c.batch, 0);
  }
  const bool has_lists = c.packed() || !used.empty();
  for (std::size_t b = 0; has_lists && b < static_cast<std::size_t>(c.batch); ++b) {
    if (c.packed() && (cu[b] < 0 || cu[b + 1] < cu[b] || cu[b + 1] > rows)) {
      bad(cu_key, list_text(cu),
          "offsets from 0 to " + std::to_string(rows) + " that do not decrease");
    }
    if (!used.empty() && (used[b] < 0 || used[b] > (c.packed() ? cu[b + 1] - cu[b] : rows))) {
      bad(used_key, list_text(used), "from 0 to each sequence's length");
    }
  }
}

}  // namespace

DType parse_dtype(std::string_view text) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if (text == name(dtype)) {
      return dtype;
    }
  }
  throw std::invalid_argument("dtype " + std::string(text) + ", want f32, bf16, f16 or f64");
}

namespace {

using Texts = std::map<std::string_view, std::string_view>;  // KEY=VALUE

Texts key_values(std::string_view text) {
  Texts given;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      throw std::invalid_argument("--shape: \"" + std::string(part) + "\", want key=value");
    }
    if (!given.emplace(part.substr(0, equals), part.substr(equals + 1)).second) {
      bad(part.substr(0, equals), part.substr(equals + 1), "each key once");
    }
  }
  return given;
}

// What the keys say, each by itself.
Case parse_values(const Texts& given) {
  Case c;
  using Parse = std::function<void(std::string_view, std::string_view)>;
  const auto integer = [](std::int64_t* to, std::int64_t minimum) -> Parse {
    return [=](auto key, auto value) { *to = parse_integer(key, value, minimum); };
  };
  const auto list = [](auto* to) -> Parse {
    return [=](auto key, auto value) {
      *to = parse_list<typename std::remove_pointer_t<decltype(to)>::value_type>(key, value);
    };
  };
  const auto word = [](std::string* to) -> Parse { return [=](auto, auto value) { *to = value; }; };
  const std::map<std::string_view, Parse> parsers = {
      {"b", integer(&c.batch, 0)},
      {"hq", integer(&c.heads_q, 1)},
      {"hkv", integer(&c.heads_kv, 1)},
      {"sq", integer(&c.seqlen_q, 0)},
      {"sk", integer(&c.seqlen_kv, 0)},
      {"d", integer(&c.head_dim, 1)},
      {"dv", integer(&c.head_dim_v, 1)},
      {"cu_q", list(&c.cu_seqlens_q)},
      {"cu_kv", list(&c.cu_seqlens_kv)},
      {"used_q", list(&c.seqused_q)},
      {"used_kv", list(&c.seqused_kv)},
      {"q_offset", list(&c.q_offset)},
      {"max_q", integer(&c.max_seqlen_q, 0)},
      {"max_kv", integer(&c.max_seqlen_kv, 0)},
      {"q", word(&c.q)},
      {"k", word(&c.k)},
      {"v", word(&c.v)},
      {"dout", word(&c.dout)},
      {"dlse", word(&c.dlse)},
      {"sinks", word(&c.sinks)},
      {"layout", [&c](auto, auto value) { parse_layout(value, &c); }},
      {"null", [&c](auto, auto value) { parse_null(value, &c); }},
  };
  for (const auto& [key, value] : given) {
    const auto parser = parsers.find(key);
    if (parser == parsers.end()) {
      bad(key, value, "one of the keys that --help lists: b, hq, hkv, sq, sk, d, dv, ...");
    }
    parser->second(key, value);
  }
  return c;
}

}  // namespace

Case parse_shape(std::string_view text) {
  const Texts given = key_values(text);
  Case c = parse_values(given);
  const auto has = [&](const char* key) { return given.contains(key); };
  if (has("cu_q") != has("cu_kv")) {
    throw std::invalid_argument("--shape: cu_q and cu_kv go together");
  }
  if (c.packed()) {
    if (!has("b")) {
      c.batch = static_cast<std::int64_t>(c.cu_seqlens_q.size()) - 1;
    }
    if (!has("sq")) {
      c.seqlen_q = c.cu_seqlens_q.back();
    }
    if (!has("sk")) {
      c.seqlen_kv = c.cu_seqlens_kv.back();
    }
  } else if (!has("sk")) {
    c.seqlen_kv = c.seqlen_q;
  }
  if (!has("hkv")) {
    c.heads_kv = c.heads_q;
  }
  if (!has("dv")) {
    c.head_dim_v = c.head_dim;
  }
  check_lengths(c, "cu_q", "used_q", c.seqlen_q, c.cu_seqlens_q, c.seqused_q);
  check_lengths(c, "cu_kv", "used_kv", c.seqlen_kv, c.cu_seqlens_kv, c.seqused_kv);
  if (!c.q_offset.empty()) {
    check_size("q_offset", c.q_offset, c.batch, 0);
  }
  if (c.dout == "none" && c.dlse == "none") {
    throw std::invalid_argument("--shape: dout=none wants a dlse");
  }
  return c;
}

std::string shape_text(const Case& c) {
  std::string text = "b=" + std::to_string(c.batch);
  const auto add = [&](const char* key, const std::string& value) {
    text += std::string(",") + key + "=" + value;
  };
  add("hq", std::to_string(c.heads_q));
  add("hkv", std::to_string(c.heads_kv));
  add("sq", std::to_string(c.seqlen_q));
  add("sk", std::to_string(c.seqlen_kv));
  add("d", std::to_string(c.head_dim));
  add("dv", std::to_string(c.head_dim_v));
  const auto add_list = [&](const char* key, const auto& values) {
    if (!values.empty()) {
      add(key, list_text(values));
    }
  };
  add_list("cu_q", c.cu_seqlens_q);
  add_list("cu_kv", c.cu_seqlens_kv);
  add_list("used_q", c.seqused_q);
  add_list("used_kv", c.seqused_kv);
  add_list("q_offset", c.q_offset);
  if (c.max_seqlen_q != 0) {
    add("max_q", std::to_string(c.max_seqlen_q));
  }
  if (c.max_seqlen_kv != 0) {
    add("max_kv", std::to_string(c.max_seqlen_kv));
  }
  const Case standard;
  const auto add_word = [&](const char* key, const std::string& value, const std::string& usual) {
    if (value != usual) {
      add(key, value);
    }
  };
  add_word("q", c.q, standard.q);
  add_word("k", c.k, standard.k);
  add_word("v", c.v, standard.v);
  add_word("dout", c.dout, standard.dout);
  add_word("dlse", c.dlse, standard.dlse);
  add_word("sinks", c.sinks, standard.sinks);
  if (c.layout != Layout::kCompact) {
    for (const auto& [layout, name] : kLayoutNames) {
      if (layout == c.layout) {
        add("layout", name);
      }
    }
  }
  std::string null;
  for (const auto& [wanted, name] : {std::pair{c.wants_lse, "lse"},
                                     {c.wants_dq, "dq"},
                                     {c.wants_dk, "dk"},
                                     {c.wants_dv, "dv"}}) {
    if (!wanted) {
      if (!null.empty()) {
        null += ':';
      }
      null += name;
    }
  }
  if (!null.empty()) {
    add("null", null);
  }
  return text;
}

std::string command_line(const Case& c) {
  const std::string seed = " --seed " + std::to_string(c.seed);
  if (!c.id.empty()) {
    return "flashgrad check --case " + c.id + seed;
  }
  std::string text = "flashgrad check --shape " + shape_text(c) + " --dtype " + name(c.dtype);
  if (c.grad_f32) {
    text += " --grad-dtype f32";
  }
  if (c.mask.left < kUnboundedFrom || c.mask.right < kUnboundedFrom) {
    text += " --window=" + side_text(c.mask.left) + "," + side_text(c.mask.right);
  }
  if (c.mask.alignment == Alignment::kTopLeft) {
    text += " --align top-left";
  }
  if (!std::isnan(c.scale)) {
    text += " --scale=" + number_text(c.scale);
  }
  if (c.softcap != 0) {
    text += " --softcap " + number_text(c.softcap);
  }
  if (c.deterministic) {
    text += " --deterministic";
  }
  return text + seed;
}

std::vector<Case> cases_on(const TableEntry& entry, Place place) {
  if (place == Place::kHost) {
    return entry.not_on_a_cpu.empty() ? entry.cases : std::vector<Case>{};
  }
  std::vector<Case> cases = entry.full_size;
  for (Case& c : cases) {
    c.dtype = c.dtype == DType::kF32 ? DType::kBF16 : c.dtype;
  }
  return cases;
}

std::vector<Case> find_cases(std::string_view id, Place place) {
  for (const TableEntry& entry : table()) {
    for (const Case& c : entry.cases) {
      if (entry.id == id || c.id == id) {
        std::vector<Case> cases = cases_on(entry, place);
        if (entry.id != id) {
          std::erase_if(cases, [&](const Case& other) { return other.id != id; });
        }
        if (cases.empty()) {
          throw std::invalid_argument("case " + std::string(id) + ": " + entry.not_on_a_cpu);
        }
        return cases;
      }
    }
  }
  throw std::invalid_argument("--case: '" + std::string(id) +
                              "' is not in the table, whose ids check --help lists");
}

}  // namespace flashgrad::check
