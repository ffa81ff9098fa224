// SPDX-License-Identifier: Apache-2.0
// Implements plan_shape.hpp.
#include "plan_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "options.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

std::int64_t parse_count(const std::string& text, const char* option) {
  const bool kilo = !text.empty() && text.back() == 'K';
  const bool mega = !text.empty() && text.back() == 'M';
  const std::int64_t number = parse_integer(
      std::string_view(text).substr(0, text.size() - (kilo || mega ? 1 : 0)), option, 1, 1 << 30);
  return number * (kilo ? 1 << 10 : mega ? 1 << 20 : 1);
}

std::vector<std::int32_t> parse_list(const std::string& text, const char* option) {
  std::vector<std::int32_t> lengths;
  std::int64_t total = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    lengths.push_back(static_cast<std::int32_t>(
        parse_integer(std::string_view(text).substr(begin, end - begin), option, 0, 1 << 24)));
    total += lengths.back();
    begin = end + 1;
  }
  if (total > 1 << 30) {
    throw Error(fmt::format("{}: more than 2^30 tokens", option));
  }
  return lengths;
}

}  // namespace

std::string read_text(const std::string& path, const char* option) {
  constexpr std::streamsize kMaxBytes = 64 << 20;
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(kMaxBytes) + 1, '\0');
  file.read(text.data(), kMaxBytes + 1);
  if (file.gcount() > kMaxBytes) {
    throw Error(fmt::format("{}: '{}' has more than 64 MiB", option, printable(path)));
  }
  if (file.bad() || !file.eof()) {
    throw Error(fmt::format("{}: '{}' can't be read", option, printable(path)));
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

plan::Device device_of(const PlanArguments& arguments) {
  return arguments.device.ends_with(".json")
             ? plan::parse_device(read_text(arguments.device, "--device"))
             : plan::find_device(arguments.device);
}

Tokens parse_tokens(const PlanArguments& arguments) {
  const std::int64_t q = parse_count(arguments.tokens, "--tokens");
  return {q, arguments.tokens_kv.empty() ? q : parse_count(arguments.tokens_kv, "--tokens-kv")};
}

Lengths parse_lengths(const PlanArguments& arguments) {
  Lengths lengths;
  lengths.q = parse_list(arguments.packed, "--packed");
  lengths.kv =
      arguments.packed_kv.empty() ? lengths.q : parse_list(arguments.packed_kv, "--packed-kv");
  if (lengths.q.size() != lengths.kv.size()) {
    throw Error(fmt::format("--packed-kv: {} lengths, want {} (those of --packed)",
                            lengths.kv.size(), lengths.q.size()));
  }
  return lengths;
}

int heads_kv(const PlanArguments& arguments) {
  const int heads = arguments.heads_kv == 0 ? arguments.heads : arguments.heads_kv;
  if (arguments.heads % heads != 0) {
    throw Error(
        fmt::format("--heads-kv: {} does not divide {} query heads", heads, arguments.heads));
  }
  return heads;
}

BandMask plan_mask(const PlanArguments& arguments) {
  CallArguments call;
  call.causal = arguments.causal;
  if (!arguments.window.empty()) {
    call.window = arguments.window;
  }
  const CallOptions options(call);
  return {options.options.window_left, options.options.window_right,
          arguments.align == "top-left" ? Alignment::kTopLeft : Alignment::kBottomRight};
}

}  // namespace flashgrad::tool
