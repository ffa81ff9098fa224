// SPDX-License-Identifier: Apache-2.0
// The safetensors reader on any bytes: it accepts a sound layout or throws its Error, nothing else.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "safetensors.hpp"
#include "text.hpp"

namespace {

// Aborts unless the tensors tile the data and match their shapes, as parse_header promises.
void require_sound(const std::vector<flashgrad::tool::TensorEntry>& entries,
                   std::uint64_t data_bytes) {
  std::uint64_t covered = 0;
  for (const flashgrad::tool::TensorEntry& entry : entries) {
    unsigned __int128 bits = static_cast<unsigned>(flashgrad::tool::element_bits(entry.dtype));
    for (const std::int64_t extent : entry.shape) {
      if (extent < 0) {
        std::abort();
      }
      // At most 8 * data_bytes before, so the product fits 128 bits.
      bits =
          bits > 8 * data_bytes && extent != 0 ? bits : bits * static_cast<std::uint64_t>(extent);
    }
    if (entry.begin != covered || 8 * (entry.end - entry.begin) != bits) {
      std::abort();
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const std::uint64_t length = flashgrad::tool::parse_header_length(bytes, size);
    const std::string_view header(reinterpret_cast<const char*>(data) + 8, length);
    require_sound(flashgrad::tool::parse_header(header, size - 8 - length), size - 8 - length);
  } catch (const flashgrad::tool::Error&) {
    // What is refused is refused in this way.
  }
  // Most random files fail at their length; all of the input as the header gets further.
  try {
    const std::string_view header(reinterpret_cast<const char*>(data), size);
    require_sound(flashgrad::tool::parse_header(header, 16), 16);
  } catch (const flashgrad::tool::Error&) {
  }
  return 0;
}
