// SPDX-License-Identifier: Apache-2.0
// The reader of safetensors files: a SAX pass over the header, which bounds depth and sees repeated
// names, then one check of each field.
#include "safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "memory.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little endian");

using nlohmann::json;

std::string tensor_message(std::string_view name, std::string_view message) {
  return fmt::format("tensor '{}': {}", printable(name), message);
}

// Accepts exactly {name: {"dtype": string, "shape": [whole numbers], "data_offsets": [whole number,
// whole number]}, "__metadata__": {string: string}}. Throws at the first event that does not fit,
// so depth never exceeds 3 and nothing unneeded is kept.
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  std::vector<TensorEntry> take_entries() { return std::move(entries_); }

  bool null() override { return unexpected("null"); }
  bool boolean(bool /*value*/) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t /*value*/) override { return number_error("negative"); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
    return number_error("not whole or too large");
  }
  bool binary(binary_t& /*value*/) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShape) {
      if (value > static_cast<number_unsigned_t>(INT64_MAX)) {
        return number_error("too large");
      }
      if (entry().shape.size() >= kMaxRank) {
        throw Error(tensor_message(entry().name,
                                   fmt::format("shape has more than {} dimensions", kMaxRank)));
      }
      entry().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsets) {
      if (num_offsets_ >= 2) {
        throw Error(tensor_message(entry().name, "data_offsets has more than 2 numbers"));
      }
      (num_offsets_++ == 0 ? entry().begin : entry().end) = value;
      return true;
    }
    return unexpected("a number");
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      return true;
    }
    if (place_ == Place::kTensor && key_ == "dtype") {
      entry().dtype = value;
      return true;
    }
    return unexpected("a string");
  }

  bool start_object(std::size_t /*elements*/) override {
    if (place_ == Place::kStart) {
      place_ = Place::kRoot;
      return true;
    }
    if (place_ == Place::kRoot) {
      place_ = key_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
      fields_.clear();
      if (place_ == Place::kTensor) {
        entries_.push_back({});
        entry().name = key_;
      }
      return true;
    }
    return unexpected("an object");
  }

  bool key(string_t& value) override {
    std::unordered_set<std::string>& keys = place_ == Place::kRoot ? names_ : fields_;
    if (!keys.insert(value).second) {
      throw Error(
          fmt::format("header: the name '{}' stands twice in {}", printable(value), where()));
    }
    if (place_ == Place::kTensor && value != "dtype" && value != "shape" &&
        value != "data_offsets") {
      throw Error(tensor_message(
          entry().name,
          fmt::format("unknown field '{}', want dtype, shape, data_offsets", printable(value))));
    }
    key_ = value;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!fields_.contains(field)) {
          throw Error(tensor_message(entry().name, fmt::format("{} is missing", field)));
        }
      }
    }
    place_ = place_ == Place::kRoot ? Place::kEnd : Place::kRoot;
    return true;
  }

  bool start_array(std::size_t /*elements*/) override {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
      return true;
    }
    if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
      num_offsets_ = 0;
      return true;
    }
    return unexpected("an array");
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && num_offsets_ != 2) {
      throw Error(tensor_message(entry().name,
                                 fmt::format("data_offsets has {} numbers, want 2", num_offsets_)));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    throw Error(fmt::format("header is not valid JSON (at its byte {})", position));
  }

 private:
  // DLPack counts dimensions in 32 bits and attention has at most 4; the limit only keeps a hostile
  // shape short.
  static constexpr std::size_t kMaxRank = 64;
  enum class Place : std::uint8_t { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  TensorEntry& entry() { return entries_.back(); }

  std::string where() {
    switch (place_) {
      case Place::kStart:
      case Place::kRoot:
      case Place::kEnd:
        return "the header";
      case Place::kMetadata:
        return "__metadata__";
      default:
        return fmt::format("tensor '{}'", printable(entry().name));
    }
  }

  bool unexpected(std::string_view got) {
    std::string want;
    switch (place_) {
      case Place::kStart:
      case Place::kEnd:
        want = "one JSON object";
        break;
      case Place::kRoot:
        want = fmt::format("an object for '{}'", printable(key_));
        break;
      case Place::kMetadata:
        want = "a string";
        break;
      case Place::kTensor:
        want = key_ == "dtype" ? "a string for dtype" : fmt::format("an array for {}", key_);
        break;
      default:
        want = "whole numbers in shape and data_offsets";
    }
    throw Error(fmt::format("header: got {} in {}, want {}", got, where(), want));
  }

  bool number_error(std::string_view problem) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) {
      return unexpected("a number");
    }
    throw Error(tensor_message(
        entry().name, fmt::format("a number in {} is {}",
                                  place_ == Place::kShape ? "shape" : "data_offsets", problem)));
  }

  Place place_ = Place::kStart;
  std::string key_;
  int num_offsets_ = 0;
  std::unordered_set<std::string> names_;   // keys of the root
  std::unordered_set<std::string> fields_;  // keys of the object inside it
  std::vector<TensorEntry> entries_;
};

// The bytes of the elements; throws if their bits do not fit 63 bits or are no whole bytes. A
// dimension of 0 does not excuse the others.
std::uint64_t checked_bytes(const TensorEntry& entry) {
  const int bits = element_bits(entry.dtype);
  if (bits == 0) {
    throw Error(tensor_message(
        entry.name, fmt::format("'{}' is not a dtype of the format", printable(entry.dtype))));
  }
  bool empty = false;
  std::int64_t product = bits;
  for (const std::int64_t extent : entry.shape) {
    empty |= extent == 0;
    if (extent != 0 && __builtin_mul_overflow(product, extent, &product)) {
      throw Error(tensor_message(
          entry.name, fmt::format("the product of shape {} overflows", format_shape(entry.shape))));
    }
  }
  if (empty) {
    return 0;
  }
  if (product % 8 != 0) {
    throw Error(tensor_message(entry.name, fmt::format("{} {} is not a whole number of bytes",
                                                       entry.dtype, format_shape(entry.shape))));
  }
  return static_cast<std::uint64_t>(product / 8);
}

[[noreturn]] void throw_errno(const std::string& path, std::string_view action) {
  throw Error(fmt::format("{}: can't {}: {}", printable(path), action, std::strerror(errno)));
}

// Reads exactly `bytes` bytes at `offset`.
void read_exactly(int fd, const std::string& path, std::byte* to, std::uint64_t bytes,
                  std::uint64_t offset) {
  while (bytes > 0) {
    const std::size_t chunk = std::min<std::uint64_t>(bytes, std::uint64_t{1} << 30);
    const ssize_t got = pread(fd, to, chunk, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      throw_errno(path, "read");
    }
    if (got == 0) {
      throw Error(fmt::format("{}: the file became shorter while it was read", printable(path)));
    }
    to += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
}

}  // namespace

int element_bits(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, int>, 22> kDtypes = {
      {{"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
       {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
       {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
       {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
       {"I64", 64},        {"U64", 64}}};
  const auto* const it = std::find_if(kDtypes.begin(), kDtypes.end(),
                                      [&](const auto& entry) { return entry.first == dtype; });
  return it == kDtypes.end() ? 0 : it->second;
}

std::string format_shape(std::span<const std::int64_t> shape) {
  // Not more than the first 8, so that a hostile shape stays a part of one line.
  const std::size_t shown = std::min<std::size_t>(shape.size(), 8);
  return fmt::format("({}{})", fmt::join(shape.first(shown), ", "),
                     shown < shape.size() ? ", ..." : "");
}

std::uint64_t parse_header_length(std::span<const std::byte> prefix, std::uint64_t file_bytes) {
  std::uint64_t length = 0;
  if (file_bytes < sizeof(length) || prefix.size() < sizeof(length)) {
    throw Error(fmt::format("not a safetensors file: {} bytes, want at least 8", file_bytes));
  }
  std::memcpy(&length, prefix.data(), sizeof(length));
  if (length > file_bytes - sizeof(length)) {
    throw Error(
        fmt::format("header length {} is beyond the file's {} bytes (truncated, or not a "
                    "safetensors file)",
                    length, file_bytes));
  }
  if (length > kMaxHeaderBytes) {
    throw Error(fmt::format("header length {} is over the limit of {}", length, kMaxHeaderBytes));
  }
  return length;
}

std::vector<TensorEntry> parse_header(std::string_view text, std::uint64_t data_bytes) {
  if (!text.starts_with('{')) {
    throw Error("header does not begin with '{': not a safetensors file");
  }
  // The JSON parser takes a NUL for the end of the text and would ignore what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw Error(fmt::format("header is not valid JSON (at its byte {})", nul + 1));
  }
  HeaderHandler handler;
  json::sax_parse(text.begin(), text.end(), &handler);
  std::vector<TensorEntry> entries = handler.take_entries();

  for (const TensorEntry& entry : entries) {
    const std::uint64_t want = checked_bytes(entry);
    if (entry.begin > entry.end || entry.end > data_bytes) {
      throw Error(tensor_message(entry.name,
                                 fmt::format("data_offsets [{}, {}] are out of range: the data has "
                                             "{} bytes",
                                             entry.begin, entry.end, data_bytes)));
    }
    if (entry.end - entry.begin != want) {
      throw Error(tensor_message(
          entry.name,
          fmt::format("data_offsets hold {} bytes, want {} for {} {}", entry.end - entry.begin,
                      want, entry.dtype, format_shape(entry.shape))));
    }
  }
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t covered = 0;
  for (const TensorEntry& entry : entries) {
    if (entry.begin != covered) {
      throw Error(tensor_message(
          entry.name, entry.begin < covered
                          ? fmt::format("its bytes from {} overlap another tensor's up to {}",
                                        entry.begin, covered)
                          : fmt::format("the bytes from {} to {} before it belong to no tensor",
                                        covered, entry.begin)));
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    throw Error(fmt::format("the data's last {} bytes belong to no tensor", data_bytes - covered));
  }
  return entries;
}

Buffer::Buffer(std::uint64_t bytes) : bytes_(bytes) {
  constexpr std::uint64_t kAlignment = 64;
  require_memory(static_cast<double>(bytes));
  // Never 0 bytes, so that an empty tensor has an address too.
  const std::uint64_t rounded = (std::max<std::uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded * kAlignment)));
  if (data_ == nullptr) {
    throw std::bad_alloc();
  }
}

void Buffer::Free::operator()(std::byte* data) const { std::free(data); }

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  // Without O_NONBLOCK the open of a pipe without a writer would wait for ever.
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    throw_errno(path_, "open");
  }
  try {
    struct stat info {};
    if (fstat(fd_, &info) != 0) {
      throw_errno(path_, "read");
    }
    if (!S_ISREG(info.st_mode)) {
      throw Error(fmt::format("{}: not a regular file", printable(path_)));
    }
    const auto file_bytes = static_cast<std::uint64_t>(info.st_size);
    std::array<std::byte, 8> prefix{};
    read_exactly(fd_, path_, prefix.data(), std::min<std::uint64_t>(file_bytes, prefix.size()), 0);
    try {
      const std::uint64_t length = parse_header_length(prefix, file_bytes);
      std::string header(length, '\0');
      read_exactly(fd_, path_, std::as_writable_bytes(std::span(header)).data(), length,
                   prefix.size());
      data_begin_ = prefix.size() + length;
      entries_ = parse_header(header, file_bytes - data_begin_);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", printable(path_), error.what()));
    }
  } catch (...) {
    close(fd_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { close(fd_); }

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::find_if(entries_.begin(), entries_.end(),
                               [&](const TensorEntry& entry) { return entry.name == name; });
  return it == entries_.end() ? nullptr : &*it;
}

Buffer SafetensorsFile::load(const TensorEntry& entry) const {
  Buffer buffer(entry.end - entry.begin);
  read_exactly(fd_, path_, buffer.data(), buffer.size(), data_begin_ + entry.begin);
  return buffer;
}

}  // namespace flashgrad::tool
