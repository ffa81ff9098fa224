// SPDX-License-Identifier: Apache-2.0
// Host memory that notices misuse, and tensors over it. Everything starts as NaN poison, guards
// stand before and after, and the elements between those of a strided tensor are gaps that nobody
// may touch. For a GPU backend a buffer has a copy on the device, which goes there and back whole.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check/device_memory.hpp"

namespace flashgrad::check {

// Every 16-bit word of poison. Any width of float reads it as a quiet NaN, integers as negative
// numbers.
inline constexpr std::uint16_t kPoison = 0xffe5;

// Untouched pages cost nothing, so a buffer may be far larger than the machine's memory.
class Buffer {
 public:
  explicit Buffer(std::size_t size_bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_bytes() const { return size_bytes_; }
  // Of a buffer over this size only the poison around the used elements is written and looked at.
  [[nodiscard]] bool sparse() const { return size_bytes_ > (std::size_t{1} << 31); }
  void poison() const;
  // Those of the host's memory, and of the device's if there is any.
  [[nodiscard]] bool guards_intact() const;

  // What data() is on the device: at the same address modulo 256, between guards. Allocated when it
  // is first asked for.
  [[nodiscard]] std::byte* device_data();

 private:
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr std::size_t kDeviceAlignment = 256;
  [[nodiscard]] std::size_t device_offset() const;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  DeviceMemory device_;
};

// Writes `value`, rounded once, as an element of that dtype.
void store(DLDataType dtype, std::byte* element, double value);

// A tensor of up to 4 dimensions with any strides, perhaps a part of a buffer that others share.
// Converts to what the C interface takes.
class HostTensor {
 public:
  HostTensor() = default;  // absent
  // Compact, in a buffer of its own.
  HostTensor(DLDataType dtype, const std::vector<std::int64_t>& shape);
  // With `strides` in elements, in a buffer of its own that is just large enough.
  HostTensor(DLDataType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides);
  // From element `offset` of a buffer that others use too.
  HostTensor(DLDataType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
             std::shared_ptr<Buffer> buffer, std::int64_t offset);

  [[nodiscard]] bool given() const { return buffer_ != nullptr; }
  // Null if absent. Valid until this tensor is moved or destroyed.
  [[nodiscard]] const DLTensor* dl(Place place = Place::kHost);
  // Brings the elements with all that is around them to the device, and back.
  void upload() const;
  void download() const;

  [[nodiscard]] DLDataType dtype() const { return dtype_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] const std::vector<std::int64_t>& strides() const { return strides_; }
  [[nodiscard]] std::int64_t num_elements() const;
  [[nodiscard]] const std::shared_ptr<Buffer>& buffer() const { return buffer_; }

  // Element of the flat row-major index `n` (that of a compact tensor).
  [[nodiscard]] double get(std::int64_t n) const;
  void set(std::int64_t n, double value) const;
  [[nodiscard]] std::byte* address(std::int64_t n) const;

  // Makes the elements and the gaps around them poison.
  void poison() const;
  // A 64-bit digest of the elements' bits in row-major order: equal digests, equal bits.
  [[nodiscard]] std::uint64_t digest() const;

 private:
  DLDataType dtype_{};
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> strides_;
  std::shared_ptr<Buffer> buffer_;
  std::int64_t offset_ = 0;
  DLTensor dl_{};
};

// Whether all poison around the elements of these tensors stands: guards and gaps of every buffer
// they live in. Empty, or the name of the first tensor whose surroundings were written.
struct NamedTensor {
  const char* name;
  const HostTensor* tensor;
};
std::string damaged_surroundings(const std::vector<NamedTensor>& tensors);

}  // namespace flashgrad::check
