// SPDX-License-Identifier: Apache-2.0
// A case of sm90_forward as a call: its problem, its tensors on both sides, and what came out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "forward_case.hpp"

namespace flashgrad {

// A native width of the kernels, in one dtype.
struct Kernel {
  const char* name;
  DType dtype;
  int head_dim;
  int head_dim_v;
};

inline float widen(std::uint16_t x, DType dtype) {
  return dtype == DType::kBF16 ? bf16_to_f32(x) : f16_to_f32(x);
}
inline std::uint16_t narrow(float x, DType dtype) {
  return dtype == DType::kBF16 ? f32_to_bf16(x) : f32_to_f16(x);
}

// Frees at the end what it allocated.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();
  void* allocate(std::size_t bytes);
  // On the device, of `bytes` on the host; null if there are none.
  void* copy(const void* data, std::size_t bytes);
  template <class T>
  T* copy(const std::vector<T>& values) {
    return static_cast<T*>(copy(values.data(), values.size() * sizeof(T)));
  }

 private:
  std::vector<void*> pointers_;
};

// A tensor on both sides. Everything between its elements is NaN.
struct HostTensor {
  std::int64_t entries = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t columns = 0;
  Tensor on_device;
  std::vector<std::uint16_t> bits;
  std::vector<float> values;  // of `bits`

  void upload();
  [[nodiscard]] std::vector<std::uint16_t> download() const;
  [[nodiscard]] std::size_t at(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return static_cast<std::size_t>(on_device.offset(b, i, h));
  }
};

struct ForwardCall {
  ForwardCall(const Kernel& kernel, const Case& spec);

  // Calls the forward twice and keeps what came out in `out.bits` and `lse`. Returns what is wrong,
  // or "": a refusal, an error, or bits that differ between the two.
  std::string run();

  const Case& spec;
  Problem problem;
  DeviceMemory memory;  // of all that is on the device
  HostTensor q, k, v, out;
  std::vector<float> lse;    // (entries, heads_q, seqlen_q)
  std::vector<float> sinks;  // empty: none
  std::vector<Sequence> sequences;
  // For each row and key of each entry, whether a sequence uses it, or a row sees it.
  std::vector<char> row_used, key_read;

 private:
  // With odd addresses it begins `number` elements behind a multiple of 16 bytes.
  [[nodiscard]] HostTensor make_tensor(int number, std::int64_t rows, std::int64_t heads,
                                       std::int64_t columns);
  void find_sequences();
  void poison();
  void make_args();

  Args args_;
};

}  // namespace flashgrad
