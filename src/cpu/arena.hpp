// SPDX-License-Identifier: Apache-2.0
// Slices the caller's workspace. Run without memory (null), it measures: sizes and slices come from
// one piece of code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashgrad::cpu {

class Arena {
 public:
  // Two cache lines, so that neighbouring slices share none, prefetched pairs included.
  static constexpr std::size_t kAlignment = 128;

  explicit Arena(void* memory = nullptr) : begin_(reinterpret_cast<std::uintptr_t>(memory)) {
    const std::uintptr_t misaligned = begin_ % kAlignment;
    used_ = misaligned == 0 ? 0 : kAlignment - misaligned;
  }

  template <class T>
  T* take(std::int64_t count) {
    const std::uintptr_t at = begin_ + used_;
    used_ += round_up(static_cast<std::size_t>(count) * sizeof(T));
    return begin_ == 0 ? nullptr : reinterpret_cast<T*>(at);  // NOLINT(performance-no-int-to-ptr)
  }

  // What was taken, with what the alignment of the first slice needed.
  [[nodiscard]] std::size_t used_bytes() const { return used_; }

 private:
  static constexpr std::size_t round_up(std::size_t n) {
    return (n + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::uintptr_t begin_;
  std::size_t used_ = 0;
};

}  // namespace flashgrad::cpu
