// SPDX-License-Identifier: Apache-2.0
// Workspaces at odd addresses, between guards.
#include "check/workspace_memory.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace flashgrad::check {

void* WorkspaceMemory::resize(std::size_t bytes, bool odd, Place place) {
  const std::size_t by = odd ? 1 : 0;
  return place == Place::kCuda ? resize_on_device(bytes, by) : resize_on_host(bytes, by);
}

void* WorkspaceMemory::resize_on_host(std::size_t bytes, std::size_t after) {
  const std::size_t room = kGuardBytes + bytes + after;
  if (buffer_ == nullptr || buffer_->size_bytes() < room) {
    buffer_ = std::make_shared<Buffer>(room);
  }
  begin_ = buffer_->data() + (buffer_->size_bytes() - bytes - after);
  std::memset(begin_ - kGuardBytes, std::to_integer<int>(kGuard), kGuardBytes);
  return begin_;
}

void* WorkspaceMemory::resize_on_device(std::size_t bytes, std::size_t shift) {
  const std::size_t room = kGuardBytes + shift + bytes + kGuardBytes;
  if (device_.size_bytes() < room) {
    device_ = {};  // before the larger one is there
    device_ = DeviceMemory(room);
  }
  device_begin_ = device_.data() + kGuardBytes + shift;
  device_end_ = device_begin_ + bytes;
  std::array<std::byte, kGuardBytes> guard;
  guard.fill(kGuard);
  for (std::byte* to : {device_begin_ - kGuardBytes, device_end_}) {
    upload(guard.data(), to, {kGuardBytes, kGuardBytes});
  }
  return device_begin_;
}

bool WorkspaceMemory::guards_intact() const {
  const auto intact = [](const std::byte* begin) {
    return std::all_of(begin, begin + kGuardBytes, [](std::byte x) { return x == kGuard; });
  };
  if (begin_ != nullptr && !intact(begin_ - kGuardBytes)) {
    return false;
  }
  if (device_begin_ == nullptr) {
    return true;
  }
  std::array<std::byte, kGuardBytes> guard;
  for (const std::byte* from : {device_begin_ - kGuardBytes, device_end_}) {
    download(from, guard.data(), {kGuardBytes, kGuardBytes});
    if (!intact(guard.data())) {
      return false;
    }
  }
  return true;
}

}  // namespace flashgrad::check
