// SPDX-License-Identifier: Apache-2.0
// The workspace of a call, in memory that notices writes outside of it.
#pragma once

#include <cstddef>
#include <memory>

#include "check/device_memory.hpp"
#include "check/host_tensor.hpp"

namespace flashgrad::check {

// A workspace that keeps what earlier calls left in it.
class WorkspaceMemory {
 public:
  // Room for `bytes`, all of it poison or older scratch. On the host it ends where reading traps
  // or, if `odd`, a byte before; on the device a guard follows.
  void* resize(std::size_t bytes, bool odd, Place place = Place::kHost);
  // Whether nothing was written just before or, on the device, just after it.
  [[nodiscard]] bool guards_intact() const;

 private:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr std::byte kGuard{0xa7};
  void* resize_on_host(std::size_t bytes, std::size_t after);
  void* resize_on_device(std::size_t bytes, std::size_t shift);

  std::shared_ptr<Buffer> buffer_;
  std::byte* begin_ = nullptr;
  DeviceMemory device_;
  std::byte* device_begin_ = nullptr;
  std::byte* device_end_ = nullptr;
};

}  // namespace flashgrad::check
