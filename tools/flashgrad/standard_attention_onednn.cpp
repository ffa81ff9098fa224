// SPDX-License-Identifier: Apache-2.0
// Standard attention: oneDNN multiplies, S and P (and dP) are whole matrices per head in q's dtype,
// as training frameworks keep them. Grouped heads are repeated to heads_q, and their gradients
// summed, likewise. The full matrix is multiplied whatever the mask.
#include <fmt/format.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>
#include <vector>

#include "core/mask.hpp"
#include "memory.hpp"
#include "softmax_rows.hpp"
#include "standard_attention.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using dnnl::memory;

// Sequences of equal lengths that are multiplied together: a fixed-length batch, or one sequence of
// a packed one.
struct Part {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0;  // row of the tensors
  std::int64_t kv_begin = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_kv = 0;
  std::int64_t matrix_begin = 0;  // element of S, P and dP
  Band band;
};

// A matrix per batch entry and head in a buffer: rows of a (batch, rows, heads, columns) tensor or
// S, perhaps transposed.
struct Matrix {
  std::byte* data = nullptr;
  memory::dims dims;     // batch, heads, rows, columns
  memory::dims strides;  // in elements

  [[nodiscard]] Matrix transposed() const {
    Matrix result = *this;
    std::swap(result.dims[2], result.dims[3]);
    std::swap(result.strides[2], result.strides[3]);
    return result;
  }
};

// c = a b, prepared once.
struct Product {
  dnnl::matmul primitive;
  memory a, b, c;
};

class OnednnAttention final : public StandardAttention {
 public:
  OnednnAttention(const AttentionCall& call, const fg_options& options)
      : call_(call),
        heads_q_(call.q.shape[call.q.shape.size() - 2]),
        heads_kv_(call.k.shape[call.k.shape.size() - 2]),
        head_dim_(call.q.shape.back()),
        head_dim_v_(call.v.shape.back()),
        element_bytes_(element_bytes(call.q.dtype)),
        type_(call.q.dtype == "BF16" ? memory::data_type::bf16 : memory::data_type::f32),
        scale_(static_cast<float>(std::isnan(options.scale)
                                      ? 1 / std::sqrt(static_cast<double>(head_dim_))
                                      : options.scale)) {
    make_parts(options);
    const Part& last = parts_.back();
    const std::int64_t matrix_elements =
        last.matrix_begin + last.batch * heads_q_ * last.seqlen_q * last.seqlen_kv;
    for (Buffer* matrix : {&s_, &p_, &dp_}) {
      *matrix = Buffer(static_cast<std::uint64_t>(matrix_elements * element_bytes_));
    }
    out_ = Buffer(call.out.buffer.size());
    dq_ = Buffer(call.q.buffer.size());
    dk_ = Buffer(call.k.buffer.size());
    dv_ = Buffer(call.v.buffer.size());
    // Rows that belong to no sequence are not computed.
    for (const Buffer* result : {&out_, &dq_, &dk_, &dv_}) {
      std::memset(result->data(), 0, result->size());
    }
    if (group() > 1) {
      for (Buffer* repeated : {&k_repeated_, &dk_repeated_}) {
        *repeated = Buffer(call.k.buffer.size() * static_cast<std::uint64_t>(group()));
      }
      for (Buffer* repeated : {&v_repeated_, &dv_repeated_}) {
        *repeated = Buffer(call.v.buffer.size() * static_cast<std::uint64_t>(group()));
      }
    }
    for (const Part& part : parts_) {
      prepare(part);
    }
  }

  void forward() override {
    repeat_heads(call_.k.buffer, k_repeated_, head_dim_);
    repeat_heads(call_.v.buffer, v_repeated_, head_dim_v_);
    execute(s_products_);
    if (type_ == memory::data_type::bf16) {
      softmax<std::uint16_t>();
    } else {
      softmax<float>();
    }
    execute(out_products_);
  }

  void backward() override {
    execute(dv_products_);
    execute(dp_products_);
    if (type_ == memory::data_type::bf16) {
      softmax_backward<std::uint16_t>();
    } else {
      softmax_backward<float>();
    }
    execute(dq_products_);
    execute(dk_products_);
    sum_heads(dk_repeated_, dk_, head_dim_);
    sum_heads(dv_repeated_, dv_, head_dim_v_);
  }

  const Buffer& out() const override { return out_; }
  const Buffer& dq() const override { return dq_; }
  const Buffer& dk() const override { return dk_; }
  const Buffer& dv() const override { return dv_; }

 private:
  [[nodiscard]] std::int64_t group() const { return heads_q_ / heads_kv_; }

  void make_parts(const fg_options& options) {
    const BandMask mask{
        options.window_left, options.window_right,
        options.alignment == FG_TOP_LEFT ? Alignment::kTopLeft : Alignment::kBottomRight};
    if (!call_.cu_seqlens_q.given()) {
      const std::int64_t seqlen_q = call_.q.shape[1];
      const std::int64_t seqlen_kv = call_.k.shape[1];
      parts_.push_back(
          {call_.q.shape[0], 0, 0, seqlen_q, seqlen_kv, 0, Band::of(mask, seqlen_q, seqlen_kv)});
      return;
    }
    std::int64_t matrix_begin = 0;
    const auto offset = [](const HostTensor& cu_seqlens, std::int64_t b) {
      std::int32_t value = 0;
      std::memcpy(&value, cu_seqlens.buffer.data() + b * std::int64_t{sizeof(value)},
                  sizeof(value));
      return std::int64_t{value};
    };
    for (std::int64_t b = 0; b + 1 < call_.cu_seqlens_q.shape[0]; ++b) {
      const std::int64_t q_begin = offset(call_.cu_seqlens_q, b);
      const std::int64_t kv_begin = offset(call_.cu_seqlens_kv, b);
      const std::int64_t seqlen_q = offset(call_.cu_seqlens_q, b + 1) - q_begin;
      const std::int64_t seqlen_kv = offset(call_.cu_seqlens_kv, b + 1) - kv_begin;
      if (seqlen_q > 0 && seqlen_kv > 0) {
        parts_.push_back({1, q_begin, kv_begin, seqlen_q, seqlen_kv, matrix_begin,
                          Band::of(mask, seqlen_q, seqlen_kv)});
        matrix_begin += heads_q_ * seqlen_q * seqlen_kv;
      }
    }
  }

  // Rows [begin, begin + rows) of a tensor (batch, rows, heads_q, columns).
  [[nodiscard]] Matrix rows_of(const Buffer& buffer, const Part& part, std::int64_t begin,
                               std::int64_t rows, std::int64_t columns) const {
    return {buffer.data() + begin * heads_q_ * columns * element_bytes_,
            {part.batch, heads_q_, rows, columns},
            {rows * heads_q_ * columns, columns, heads_q_ * columns, 1}};
  }

  [[nodiscard]] Matrix square_of(const Buffer& buffer, const Part& part) const {
    return {buffer.data() + part.matrix_begin * element_bytes_,
            {part.batch, heads_q_, part.seqlen_q, part.seqlen_kv},
            {heads_q_ * part.seqlen_q * part.seqlen_kv, part.seqlen_q * part.seqlen_kv,
             part.seqlen_kv, 1}};
  }

  [[nodiscard]] Product product(const Matrix& a, const Matrix& b, const Matrix& c) const {
    const memory::desc a_desc(a.dims, type_, a.strides);
    const memory::desc b_desc(b.dims, type_, b.strides);
    const memory::desc c_desc(c.dims, type_, c.strides);
    return {dnnl::matmul(
                dnnl::matmul::primitive_desc(dnnl::matmul::desc(a_desc, b_desc, c_desc), engine_)),
            memory(a_desc, engine_, a.data), memory(b_desc, engine_, b.data),
            memory(c_desc, engine_, c.data)};
  }

  void prepare(const Part& part) {
    const bool grouped = group() > 1;
    const Matrix q = rows_of(call_.q.buffer, part, part.q_begin, part.seqlen_q, head_dim_);
    const Matrix k = rows_of(grouped ? k_repeated_ : call_.k.buffer, part, part.kv_begin,
                             part.seqlen_kv, head_dim_);
    const Matrix v = rows_of(grouped ? v_repeated_ : call_.v.buffer, part, part.kv_begin,
                             part.seqlen_kv, head_dim_v_);
    const Matrix dout = rows_of(call_.dout.buffer, part, part.q_begin, part.seqlen_q, head_dim_v_);
    const Matrix out = rows_of(out_, part, part.q_begin, part.seqlen_q, head_dim_v_);
    const Matrix dq = rows_of(dq_, part, part.q_begin, part.seqlen_q, head_dim_);
    const Matrix dk =
        rows_of(grouped ? dk_repeated_ : dk_, part, part.kv_begin, part.seqlen_kv, head_dim_);
    const Matrix dv =
        rows_of(grouped ? dv_repeated_ : dv_, part, part.kv_begin, part.seqlen_kv, head_dim_v_);
    const Matrix s = square_of(s_, part);
    const Matrix p = square_of(p_, part);
    const Matrix dp = square_of(dp_, part);
    s_products_.push_back(product(q, k.transposed(), s));
    out_products_.push_back(product(p, v, out));
    dv_products_.push_back(product(p.transposed(), dout, dv));
    dp_products_.push_back(product(dout, v.transposed(), dp));
    dq_products_.push_back(product(dp, k, dq));
    dk_products_.push_back(product(dp.transposed(), q, dk));
  }

  void execute(const std::vector<Product>& products) {
    for (const Product& product : products) {
      product.primitive.execute(
          stream_,
          {{DNNL_ARG_SRC, product.a}, {DNNL_ARG_WEIGHTS, product.b}, {DNNL_ARG_DST, product.c}});
    }
    stream_.wait();
  }

  template <class T>
  void softmax() {
    for (const Part& part : parts_) {
      const T* s = reinterpret_cast<const T*>(s_.data()) + part.matrix_begin;
      T* p = reinterpret_cast<T*>(p_.data()) + part.matrix_begin;
#pragma omp parallel for schedule(static)
      for (std::int64_t row = 0; row < part.batch * heads_q_ * part.seqlen_q; ++row) {
        const std::int64_t i = row % part.seqlen_q;
        const Range keys = part.band.kv_range(i, i + 1);
        softmax_row(s + row * part.seqlen_kv, p + row * part.seqlen_kv, part.seqlen_kv, keys.begin,
                    keys.end, scale_);
      }
    }
  }

  template <class T>
  void softmax_backward() {
    for (const Part& part : parts_) {
      const T* p = reinterpret_cast<const T*>(p_.data()) + part.matrix_begin;
      T* dp = reinterpret_cast<T*>(dp_.data()) + part.matrix_begin;
#pragma omp parallel for schedule(static)
      for (std::int64_t row = 0; row < part.batch * heads_q_ * part.seqlen_q; ++row) {
        softmax_backward_row(p + row * part.seqlen_kv, dp + row * part.seqlen_kv, part.seqlen_kv,
                             scale_);
      }
    }
  }

  // Copies each head of (rows, heads_kv, dim) for the query heads of its group.
  void repeat_heads(const Buffer& from, const Buffer& to, std::int64_t dim) const {
    if (group() == 1) {
      return;
    }
    const std::int64_t bytes = dim * element_bytes_;
    const auto heads = static_cast<std::int64_t>(from.size()) / bytes;
#pragma omp parallel for schedule(static)
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t g = 0; g < group(); ++g) {
        std::memcpy(to.data() + (h * group() + g) * bytes, from.data() + h * bytes,
                    static_cast<std::size_t>(bytes));
      }
    }
  }

  void sum_heads(const Buffer& from, const Buffer& to, std::int64_t dim) const {
    if (group() == 1) {
      return;
    }
    if (type_ == memory::data_type::bf16) {
      sum_heads_of<std::uint16_t>(from, to, dim);
    } else {
      sum_heads_of<float>(from, to, dim);
    }
  }

  template <class T>
  void sum_heads_of(const Buffer& from, const Buffer& to, std::int64_t dim) const {
    const auto heads = static_cast<std::int64_t>(to.size()) / (dim * element_bytes_);
    const T* source = reinterpret_cast<const T*>(from.data());
    T* target = reinterpret_cast<T*>(to.data());
#pragma omp parallel for schedule(static)
    for (std::int64_t h = 0; h < heads; ++h) {
      sum_rows(source + h * group() * dim, group(), dim, target + h * dim);
    }
  }

  const AttentionCall& call_;
  std::int64_t heads_q_;
  std::int64_t heads_kv_;
  std::int64_t head_dim_;
  std::int64_t head_dim_v_;
  std::int64_t element_bytes_;
  memory::data_type type_;
  float scale_;
  std::vector<Part> parts_;
  Buffer s_, p_, dp_, out_, dq_, dk_, dv_;
  Buffer k_repeated_, v_repeated_, dk_repeated_, dv_repeated_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::vector<Product> s_products_, out_products_, dv_products_, dp_products_, dq_products_,
      dk_products_;
};

}  // namespace

std::unique_ptr<StandardAttention> make_standard_attention(const AttentionCall& call,
                                                           const fg_options& options,
                                                           std::string& reason) {
  if (call.q.dtype != "F32" && call.q.dtype != "BF16") {
    reason = "oneDNN multiplies no such dtype here";
    return nullptr;
  }
  const Cost cost = cost_of(call, options);
  if (cost.visible_pairs == 0 || options.softcap != 0 || call.seqused_q.given() ||
      call.seqused_kv.given() || call.q_offset.given() || call.sinks.given()) {
    reason = "it has none of softcap, sinks, seqused, q_offset";
    return nullptr;
  }
  // S, P and dP are kept at once: half as much again as cost_of counts for one pass.
  const double bytes = 1.5 * cost.standard_bytes;
  if (bytes > 0.8 * static_cast<double>(available_memory_bytes())) {
    reason = fmt::format("its S, P and dP would take {}", format_bytes(bytes));
    return nullptr;
  }
  try {
    return std::make_unique<OnednnAttention>(call, options);
  } catch (const dnnl::error& error) {
    reason = fmt::format("oneDNN: {}", error.what());
    return nullptr;
  }
}

}  // namespace flashgrad::tool
