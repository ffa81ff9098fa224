// SPDX-License-Identifier: Apache-2.0
// Counts in the program's own operator new.
#include "allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::size_t> total_bytes{0};
}  // namespace

// A program's own operator new is the library's too.
// NOLINTBEGIN(cppcoreguidelines-no-malloc): this is the allocator.
void* operator new(std::size_t size) {
  total_bytes += size;
  if (void* memory = std::malloc(size > 0 ? size : 1)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
// NOLINTEND(cppcoreguidelines-no-malloc)

namespace flashgrad::check {

std::size_t allocated_bytes() { return total_bytes; }

}  // namespace flashgrad::check
