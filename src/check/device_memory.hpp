// SPDX-License-Identifier: Apache-2.0
// Where the tensors of a call lie, and memory of the GPU. Everything is filled and judged on the
// host; what a GPU backend gets is a copy. Without CUDA in the build there is no device memory:
// asking for some throws.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flashgrad::check {

enum class Place : std::uint8_t { kHost, kCuda };

// Where a backend takes its tensors. GPU backends are named by their architecture.
constexpr Place place_of(std::string_view backend) {
  return backend.starts_with("sm") ? Place::kCuda : Place::kHost;
}

// The first device of the place.
constexpr DLDevice dl_device(Place place) { return {place == Place::kCuda ? kDLCUDA : kDLCPU, 0}; }

// `count` rows of `width_bytes` each, their beginnings `pitch_bytes` apart, in host and in device
// memory alike.
struct Rows {
  std::size_t width_bytes = 0;
  std::size_t pitch_bytes = 0;
  std::size_t count = 1;
};

// Memory of the first CUDA device, full of NaN at the start. All functions throw
// std::runtime_error with the runtime's words.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t size_bytes);
  // Does nothing where the library was built without CUDA.
  ~DeviceMemory();  // NOLINT(performance-trivially-destructible)
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

// Copies that have ended, with all work that was launched before them, when they return.
void upload(const std::byte* host, std::byte* device, const Rows& rows);
void download(const std::byte* device, std::byte* host, const Rows& rows);

// From one place on the device to another; may still be under way on return.
void copy_on_device(const std::byte* from, std::byte* to, std::size_t size_bytes);

// Waits for the device and throws if something that ran on it failed.
void synchronize_device();

// What can still be allocated.
std::size_t free_device_bytes();

}  // namespace flashgrad::check
