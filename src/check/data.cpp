// SPDX-License-Identifier: Apache-2.0
// Random numbers, special contents, and NaN where nothing may read.
#include "check/data.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace flashgrad::check {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// 2^16 draws of a standard normal (Box-Muller), which large tensors then pick from.
const std::vector<float>& normal_draws() {
  static const std::vector<float> kDraws = [] {
    std::vector<float> x(1U << 16);
    for (std::size_t n = 0; n < x.size(); ++n) {
      const std::uint64_t bits = mix(n);
      const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
      const double w = static_cast<double>(bits & 0xffffffffU) * 0x1p-32;
      x[n] = static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * w));
    }
    return x;
  }();
  return kDraws;
}

// Element is an integer as wide as the tensor's.
template <class Element>
void fill_normal(const HostTensor& t, double factor, std::uint64_t stream) {
  const std::vector<float>& draws = normal_draws();
  const std::int64_t dim = t.shape().back();
  const std::int64_t vectors = dim == 0 ? 0 : t.num_elements() / dim;
  const std::int64_t step = t.strides().back() * static_cast<std::int64_t>(sizeof(Element));
  // The draws as elements: tensors of billions of them would round each too often.
  std::vector<Element> elements(draws.size());
  for (std::size_t n = 0; n < draws.size(); ++n) {
    store(t.dtype(), reinterpret_cast<std::byte*>(&elements[n]),
          factor * static_cast<double>(draws[n]));
  }
#pragma omp parallel for if (vectors * dim > 100000)
  for (std::int64_t n = 0; n < vectors; ++n) {
    std::byte* element = t.address(n * dim);
    std::uint64_t bits = 0;
    for (std::int64_t c = 0; c < dim; ++c, element += step) {
      const std::int64_t e = n * dim + c;
      bits = c % 4 == 0 ? mix(stream ^ mix(static_cast<std::uint64_t>(e))) : bits >> 16;
      std::memcpy(element, &elements[bits & 0xffff], sizeof(Element));
    }
  }
}

void fill_normal(const HostTensor& t, double factor, std::uint64_t stream) {
  switch (t.dtype().bits) {
    case 16:
      return fill_normal<std::uint16_t>(t, factor, stream);
    case 32:
      return fill_normal<std::uint32_t>(t, factor, stream);
    default:
      return fill_normal<std::uint64_t>(t, factor, stream);
  }
}

// The number that the whole text is ("3", "-inf"), if it is one.
std::optional<double> number_of(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(value)
                                                                  : std::nullopt;
}

double require_number(std::string_view text) {
  const std::optional<double> value = number_of(text);
  if (!value) {
    throw std::invalid_argument("--shape: contents \"" + std::string(text) +
                                "\", want n, 3n or a number");
  }
  return *value;
}

// The factor of "n", "3n", "0.5n".
std::optional<double> normal_factor(std::string_view text) {
  if (!text.ends_with('n')) {
    return std::nullopt;
  }
  text.remove_suffix(1);
  return text.empty() ? 1 : number_of(text);
}

// All heads of row i of a batch entry.
void set_nan(const HostTensor& t, bool packed, std::int64_t batch_index, std::int64_t i) {
  if (!t.given()) {
    return;
  }
  const std::vector<std::int64_t>& shape = t.shape();
  const std::size_t row = packed ? 0 : 1;
  const std::int64_t size = shape[row + 1] * shape[row + 2];
  const std::int64_t begin = (batch_index * shape[row] + i) * size;
  for (std::int64_t e = begin; e < begin + size; ++e) {
    t.set(e, kNaN);
  }
}

void set_lse_nan(const HostTensor& t, bool packed, std::int64_t batch_index, std::int64_t i) {
  if (!t.given()) {
    return;
  }
  const std::vector<std::int64_t>& shape = t.shape();
  const std::int64_t heads = packed ? shape[0] : shape[1];
  const std::int64_t rows = packed ? shape[1] : shape[2];
  for (std::int64_t h = 0; h < heads; ++h) {
    t.set((batch_index * heads + h) * rows + i, kNaN);
  }
}

}  // namespace

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

void fill(const HostTensor& t, const std::string& pattern, std::uint64_t stream) {
  const std::int64_t n = t.num_elements();
  const std::int64_t dim = t.shape().back();
  const std::vector<std::int64_t>& shape = t.shape();
  if (const std::optional<double> factor = normal_factor(pattern)) {
    fill_normal(t, *factor, stream);
  } else if (pattern == "n with one NaN") {
    fill(t, "n", stream);
    if (n > 0) {
      // The second half of the last row but one; with several heads, not of the first.
      t.set(n - 1 - dim / 2 - (shape.size() > 2 ? shape[shape.size() - 2] * dim : 0), kNaN);
    }
  } else if (pattern == "NaN in the last 4 rows") {
    fill(t, "n", stream);
    for (std::int64_t e = std::max<std::int64_t>(0, n - 4 * shape[shape.size() - 2] * dim); e < n;
         ++e) {
      t.set(e, kNaN);
    }
  } else if (pattern == "first component 1") {
    fill(t, "n", stream);
    for (std::int64_t e = 0; e < n; e += dim) {
      t.set(e, 1);
    }
  } else if (pattern == "first component -100*sqrt(d), the others 0") {
    for (std::int64_t e = 0; e < n; ++e) {
      t.set(e, e % dim == 0 ? -100 * std::sqrt(static_cast<double>(dim)) : 0);
    }
  } else {
    const double value = require_number(pattern);
    for (std::int64_t e = 0; e < n; ++e) {
      t.set(e, value);
    }
  }
}

void hide_unread(const Case& c, const CallTensors& t) {
  const std::int64_t entries = c.packed() ? 1 : c.batch;
  std::vector<bool> row_read(static_cast<std::size_t>(entries * c.seqlen_q));
  std::vector<bool> row_has_dlse(row_read.size());
  std::vector<bool> key_read(static_cast<std::size_t>(entries * c.seqlen_kv));
  for (const Sequence& s : sequences(c)) {
    for (std::int64_t i = 0; i < s.band.seqlen_q; ++i) {
      const auto row = static_cast<std::size_t>(s.batch_index * c.seqlen_q + s.q_begin + i);
      row_read[row] = !s.band.kv_range(i, i + 1).empty();
      row_has_dlse[row] = row_read[row] || t.sinks.given();
    }
    for (std::int64_t j = 0; j < s.band.seqlen_kv; ++j) {
      key_read[static_cast<std::size_t>(s.batch_index * c.seqlen_kv + s.kv_begin + j)] =
          !s.band.q_range(j, j + 1).empty();
    }
  }
  for (std::size_t row = 0; row < row_read.size(); ++row) {
    const std::int64_t b = static_cast<std::int64_t>(row) / c.seqlen_q;
    const std::int64_t i = static_cast<std::int64_t>(row) % c.seqlen_q;
    if (!row_read[row]) {
      set_nan(t.q, c.packed(), b, i);
      if (c.layout != Layout::kDoutStride0) {
        set_nan(t.dout, c.packed(), b, i);
      }
    }
    if (!row_has_dlse[row]) {
      set_lse_nan(t.dlse, c.packed(), b, i);
    }
  }
  for (std::size_t key = 0; key < key_read.size(); ++key) {
    if (!key_read[key]) {
      const std::int64_t b = static_cast<std::int64_t>(key) / c.seqlen_kv;
      const std::int64_t j = static_cast<std::int64_t>(key) % c.seqlen_kv;
      set_nan(t.k, c.packed(), b, j);
      set_nan(t.v, c.packed(), b, j);
    }
  }
}

void fill_sinks(const Case& c, const HostTensor& sinks, std::uint64_t stream) {
  if (c.sinks.find(':') == std::string::npos && c.sinks != "-inf") {
    fill(sinks, c.sinks, stream);
    return;
  }
  std::size_t begin = 0;
  for (std::int64_t h = 0; h < c.heads_q; ++h) {
    const std::size_t end = std::min(c.sinks.find(':', begin), c.sinks.size());
    sinks.set(h, require_number(std::string_view(c.sinks).substr(begin, end - begin)));
    begin = std::min(end + 1, c.sinks.size());
    if (begin == c.sinks.size()) {
      begin = 0;  // a shorter list repeats
    }
  }
}

}  // namespace flashgrad::check
