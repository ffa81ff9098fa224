// SPDX-License-Identifier: Apache-2.0
// Implements backward_compare.hpp.
#include "backward_compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/dtype.hpp"

namespace flashgrad {
namespace {

float to_float(const std::vector<unsigned char>& bytes, std::int64_t at, DType dtype) {
  if (dtype == DType::kF32) {
    float x = 0;
    std::memcpy(&x, bytes.data() + 4 * at, 4);
    return x;
  }
  std::uint16_t h = 0;
  std::memcpy(&h, bytes.data() + 2 * at, 2);
  return dtype == DType::kBF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

struct Errors {
  double squared = 0;
  double squared_norm = 0;
  double largest = 0;
  double largest_norm = 0;
  bool finite = true;
  bool zero_where_nothing_is_visible = true;

  void add(double got, double want, bool meets_nothing) {
    const double error = std::abs(got - want);
    squared += error * error;
    squared_norm += want * want;
    largest = std::max(largest, error);
    largest_norm = std::max(largest_norm, std::abs(want));
    finite = finite && std::isfinite(got);
    zero_where_nothing_is_visible = zero_where_nothing_is_visible && (!meets_nothing || got == 0);
  }
  [[nodiscard]] double relative() const {
    return std::sqrt(squared_norm > 0 ? squared / squared_norm : squared);
  }
};

}  // namespace

std::string compare(const Gradient& gradient, const std::vector<double>& want, double bar,
                    std::string* report) {
  const auto& [name, bytes, tensor, layout, lines] = gradient;
  Errors errors;
  std::size_t at = 0;
  std::vector<bool> inside(static_cast<std::size_t>(layout.elements()), false);
  for (const Line& line : lines) {
    for (std::int64_t h = 0; h < layout.heads; ++h) {
      for (std::int64_t c = 0; c < layout.columns; ++c, ++at) {
        const std::int64_t element =
            layout.first + tensor.offset(line.batch_index, line.row, h) + c;
        inside[static_cast<std::size_t>(element)] = true;
        errors.add(to_float(bytes, element, tensor.dtype), want[at], line.meets_nothing());
      }
    }
  }
  char text[160];
  std::snprintf(text, sizeof(text), " %s %.2e (max %.1e of %.1e)", name, errors.relative(),
                errors.largest, errors.largest_norm);
  *report += text;
  if (!errors.finite) {
    return std::string(name) + " not finite";
  }
  if (!errors.zero_where_nothing_is_visible) {
    return std::string(name) + " not 0 where nothing is visible";
  }
  if (!(errors.relative() < bar) ||
      !(errors.largest < std::max(0.03 * errors.largest_norm, 1e-6))) {
    return std::string(name) + " too far off";
  }
  const auto size = static_cast<std::size_t>(size_bytes(tensor.dtype));
  for (std::size_t i = 0; i < inside.size(); ++i) {
    for (std::size_t b = 0; b < size && !inside[i]; ++b) {
      if (bytes[i * size + b] != 0xff) {
        return std::string(name) + " wrote outside its elements";
      }
    }
  }
  return "";
}

std::string compare_dsinks(const std::vector<float>& dsinks, const std::vector<float>& sinks,
                           const std::vector<double>& lse, const std::vector<double>& delta) {
  std::string wrong;
  const std::size_t heads = sinks.size();
  for (std::size_t h = 0; h < heads; ++h) {
    double want = 0;
    double scale = 0;
    for (std::size_t at = h; at < lse.size(); at += heads) {
      if (!std::isinf(lse[at]) && !std::isinf(sinks[h])) {
        const double x = std::exp(sinks[h] - lse[at]) * delta[at];
        want += x;
        scale += std::abs(x);
      }
    }
    if (!(std::abs(dsinks[h] - want) <= 3e-3 * scale + 1e-6)) {
      wrong = "dsinks[" + std::to_string(h) + "] " + std::to_string(dsinks[h]) + ", want " +
              std::to_string(want);
    }
  }
  return wrong;
}

}  // namespace flashgrad
