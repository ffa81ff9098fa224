// SPDX-License-Identifier: Apache-2.0
// What memory the machine can still give, and what this process has used at most.
#pragma once

#include <cstdint>

namespace flashgrad::tool {

// Memory that can be allocated without swapping, the limits of this process's control group
// included.
std::uint64_t available_memory_bytes();

// Throws Error if `bytes` is more than what is available. Linux hands out addresses far beyond its
// memory and ends a process that uses them, so a failed allocation alone would be too late a sign.
void require_memory(double bytes);

// The most memory that was resident since the last `reset_peak_memory`; 0 if the system does not
// tell.
std::uint64_t peak_memory_bytes();
// What is resident now.
std::uint64_t resident_memory_bytes();
// False if the system can't reset its mark: the peak then counts from the process's start.
bool reset_peak_memory();

}  // namespace flashgrad::tool
