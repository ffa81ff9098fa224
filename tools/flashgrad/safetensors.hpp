// SPDX-License-Identifier: Apache-2.0
// Reads and writes safetensors files: 8 bytes of header length N (little endian), N bytes of JSON
// that name each tensor's dtype, shape and bytes, then the data.
// https://github.com/huggingface/safetensors describes the format. Every field of a file is hostile
// until checked here; whatever is wrong ends in one Error, never in a crash or a huge allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashgrad::tool {

// One tensor as the header describes it, checked: the bytes lie in the file and match dtype and
// shape.
struct TensorEntry {
  std::string name;
  std::string dtype;  // as the format spells it: "BF16"
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // offsets from the end of the header
  std::uint64_t end = 0;
};

// Bits of an element of a safetensors dtype; 0 if there is no such dtype. Those of less than a byte
// lie packed.
int element_bits(std::string_view dtype);

// Bytes of an element of a dtype of whole bytes, as all are that attention takes.
inline int element_bytes(std::string_view dtype) { return element_bits(dtype) / 8; }

// "(1, 512, 12, 32)".
std::string format_shape(std::span<const std::int64_t> shape);

// The largest header that is read, the same limit as the format's own reader has.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

// The length of the JSON header, from the file's first 8 bytes and its size; throws if no such
// header can be in the file.
std::uint64_t parse_header_length(std::span<const std::byte> prefix, std::uint64_t file_bytes);

// The tensors of a file whose data part has `data_bytes` bytes, in the order of their bytes. The
// tensors' bytes must tile the data part.
std::vector<TensorEntry> parse_header(std::string_view json, std::uint64_t data_bytes);

// Memory for a tensor's elements, aligned to a cache line whatever the file's offsets are, and not
// touched before it is written.
class Buffer {
 public:
  Buffer() = default;
  // Throws Error if the machine can't hold it.
  explicit Buffer(std::uint64_t bytes);

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::uint64_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::uint64_t bytes_ = 0;
};

// An open safetensors file whose header has been read and checked.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  [[nodiscard]] const std::vector<TensorEntry>& entries() const { return entries_; }
  // Null if the file has no such tensor.
  [[nodiscard]] const TensorEntry* find(std::string_view name) const;
  [[nodiscard]] Buffer load(const TensorEntry& entry) const;

 private:
  std::string path_;
  int fd_ = -1;
  std::uint64_t data_begin_ = 0;
  std::vector<TensorEntry> entries_;
};

// A tensor to write; compact, row-major.
struct OutputTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// Writes the file whole or not at all; see write_whole_file.
void write_safetensors(const std::string& path, std::span<const OutputTensor> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace flashgrad::tool
