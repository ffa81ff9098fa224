// SPDX-License-Identifier: Apache-2.0
// Implements check/device_memory.hpp in a build without CUDA.
#include <stdexcept>
#include <utility>

#include "check/device_memory.hpp"

namespace flashgrad::check {
namespace {

[[noreturn]] void refuse() { throw std::runtime_error("this build has no CUDA"); }

}  // namespace

DeviceMemory::DeviceMemory(std::size_t) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

void upload(const std::byte*, std::byte*, const Rows&) { refuse(); }
void download(const std::byte*, std::byte*, const Rows&) { refuse(); }
void copy_on_device(const std::byte*, std::byte*, std::size_t) { refuse(); }
void synchronize_device() { refuse(); }
std::size_t free_device_bytes() { refuse(); }

}  // namespace flashgrad::check
