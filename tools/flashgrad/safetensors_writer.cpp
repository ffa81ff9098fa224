// SPDX-License-Identifier: Apache-2.0
// The writer of safetensors files.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "safetensors.hpp"
#include "whole_file.hpp"

namespace flashgrad::tool {
namespace {

// The length and the JSON, padded with spaces so that the data begins at a multiple of 8 bytes.
std::string header_of(std::span<const OutputTensor> tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    header["__metadata__"] = metadata;
  }
  std::uint64_t offset = 0;
  for (const OutputTensor& tensor : tensors) {
    const std::uint64_t end = offset + tensor.bytes.size();
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  return prefix + text;
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const OutputTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide elements first: then each tensor begins at a multiple of its element's size.
  std::vector<OutputTensor> sorted(tensors.begin(), tensors.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const OutputTensor& a, const OutputTensor& b) {
    return element_bytes(a.dtype) > element_bytes(b.dtype);
  });
  const std::string header = header_of(sorted, metadata);
  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(header))};
  for (const OutputTensor& tensor : sorted) {
    parts.push_back(tensor.bytes);
  }
  write_whole_file(path, parts);
}

}  // namespace flashgrad::tool
