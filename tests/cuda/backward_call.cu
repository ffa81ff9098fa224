// SPDX-License-Identifier: Apache-2.0
// Implements backward_call.hpp.
#include <algorithm>
#include <cmath>
#include <random>

#include "backward_call.hpp"
#include "backward_compare.hpp"
#include "backward_reference.cuh"
#include "cuda/sm90/sm90_backend.hpp"

namespace flashgrad {
namespace {

std::size_t elements(const Layout& layout) { return static_cast<std::size_t>(layout.elements()); }

std::size_t bytes(const Layout& layout, DType dtype) {
  return elements(layout) * static_cast<std::size_t>(size_bytes(dtype));
}

std::size_t compact_elements(const Layout& layout) {
  return static_cast<std::size_t>(layout.batch * layout.rows * layout.heads * layout.columns);
}

std::int64_t entries(const Problem& p) { return p.packed ? 1 : p.batch; }

// Of tensor number `n`, as Case::first says.
int first(const Case& c, int n) { return c.first > 0 ? c.first + n : 0; }

Tensor tensor_if(bool wanted, const Layout& layout, void* data, DType dtype) {
  return wanted ? layout.tensor(data, dtype) : Tensor{};
}

}  // namespace

BackwardCall::BackwardCall(const Case& c, const HostLines& lines)
    : case_(c),
      lines_(lines),
      p_(c.p),
      q_layout_{entries(p_), p_.seqlen_q, p_.heads_q, p_.head_dim,
                c.head_pad,  c.row_pad,   first(c, 0)},
      out_layout_{entries(p_), p_.seqlen_q, p_.heads_q, p_.head_dim_v,
                  c.head_pad,  c.row_pad,   first(c, 3)},
      k_layout_{entries(p_), p_.seqlen_kv, p_.heads_kv, p_.head_dim,
                c.head_pad,  c.row_pad,    first(c, 1)},
      v_layout_{entries(p_), p_.seqlen_kv, p_.heads_kv, p_.head_dim_v,
                c.head_pad,  c.row_pad,    first(c, 2)},
      num_statistics_(static_cast<std::size_t>(entries(p_) * p_.seqlen_q * p_.heads_q)),
      q_lines_(lines.q),
      kv_lines_(lines.kv),
      q_(elements(q_layout_)),
      k_(elements(k_layout_)),
      v_(elements(v_layout_)),
      out_(elements(out_layout_)),
      dout_(elements(out_layout_)),
      lse_(num_statistics_),
      dlse_(num_statistics_),
      sinks_(static_cast<std::size_t>(p_.heads_q)),
      dsinks_(static_cast<std::size_t>(p_.heads_q)),
      dq_(bytes(q_layout_, p_.dq_dtype)),
      dk_(bytes(k_layout_, p_.dk_dtype)),
      dv_(bytes(v_layout_, p_.dv_dtype)),
      cu_q_(lines.cu_q),
      cu_kv_(lines.cu_kv),
      used_q_(c.seqused_q),
      used_kv_(c.seqused_kv),
      offset_(c.q_offset),
      out64_(compact_elements(out_layout_)),
      lse64_(num_statistics_),
      delta64_(num_statistics_),
      dq64_(compact_elements(q_layout_)),
      dk64_(compact_elements(k_layout_)),
      dv64_(compact_elements(v_layout_)) {
  make_args();
  fill_inputs();
  compute_textbook();
}

void BackwardCall::make_args() {
  args_.q = q_layout_.tensor(q_.data, p_.dtype);
  args_.k = k_layout_.tensor(k_.data, p_.dtype);
  args_.v = v_layout_.tensor(v_.data, p_.dtype);
  args_.out = out_layout_.tensor(out_.data, p_.dtype);
  args_.lse = {lse_.data, DType::kF32, p_.seqlen_q * p_.heads_q, 1, p_.seqlen_q, 1};
  args_.dout = tensor_if(p_.has_dout, out_layout_, dout_.data, p_.dtype);
  if (p_.has_dout && case_.stride0) {
    args_.dout.batch_stride = args_.dout.row_stride = args_.dout.head_stride = 0;
    args_.dout.dim_stride = 0;
  }
  if (p_.has_dlse) {
    args_.dlse = args_.lse;
    args_.dlse.data = dlse_.data;
  }
  args_.dq = tensor_if(p_.wants_dq, q_layout_, dq_.data, p_.dq_dtype);
  args_.dk = tensor_if(p_.wants_dk, k_layout_, dk_.data, p_.dk_dtype);
  args_.dv = tensor_if(p_.wants_dv, v_layout_, dv_.data, p_.dv_dtype);
  args_.sinks = p_.has_sinks ? sinks_.data : nullptr;
  args_.dsinks = p_.wants_dsinks ? dsinks_.data : nullptr;
  args_.cu_seqlens_q = p_.packed ? cu_q_.data : nullptr;
  args_.cu_seqlens_kv = p_.packed ? cu_kv_.data : nullptr;
  args_.seqused_q = p_.has_seqused_q ? used_q_.data : nullptr;
  args_.seqused_kv = p_.has_seqused_kv ? used_kv_.data : nullptr;
  args_.q_offset = p_.has_q_offset ? offset_.data : nullptr;
}

void BackwardCall::fill_inputs() {
  const auto fill_tensor = [](const Tensor& t, const DeviceArray<Line>& lines, const Layout& layout,
                              int seed, double scale) {
    fill<<<512, 256>>>(t, lines.data, static_cast<std::int64_t>(lines.count),
                       static_cast<int>(layout.heads), static_cast<int>(layout.columns),
                       static_cast<std::uint64_t>(seed), scale);
  };
  fill_tensor(args_.q, q_lines_, q_layout_, 1, case_.logit_scale);
  fill_tensor(args_.k, kv_lines_, k_layout_, 2, case_.logit_scale);
  fill_tensor(args_.v, kv_lines_, v_layout_, 3, 1);
  if (p_.has_dout) {
    fill_tensor(args_.dout, q_lines_, out_layout_, 4, 1);
  }
  for (std::int64_t h = 0; h < p_.heads_q; ++h) {
    host_sinks_.push_back(h % 4 == 3 ? -INFINITY : 0.5F * static_cast<float>(h));
  }
  sinks_.upload(host_sinks_);
  std::vector<float> dlse(num_statistics_, NAN);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const Line& line : lines_.q) {
    for (std::int64_t h = 0; h < p_.heads_q; ++h) {
      if (line.sequence >= 0 && (!line.meets_nothing() || p_.has_sinks)) {
        dlse[static_cast<std::size_t>(args_.lse.offset(line.batch_index, line.row, h))] =
            normal(random);
      }
    }
  }
  dlse_.upload(dlse);
}

void BackwardCall::compute_textbook() {
  const Reference r{p_,
                    args_.q,
                    args_.k,
                    args_.v,
                    args_.dout,
                    args_.out,
                    args_.lse,
                    args_.dlse,
                    static_cast<const float*>(args_.sinks),
                    q_lines_.data,
                    kv_lines_.data,
                    out64_.data,
                    lse64_.data,
                    delta64_.data,
                    dq64_.data,
                    dk64_.data,
                    dv64_.data};
  const auto shared =
      static_cast<int>(std::max<std::int64_t>(1, std::max(2 * p_.seqlen_q, p_.seqlen_kv)) * 8);
  for (const void* kernel : {reinterpret_cast<const void*>(reference_forward),
                             reinterpret_cast<const void*>(reference_row),
                             reinterpret_cast<const void*>(reference_key)}) {
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    std::max(shared, 1024)));
  }
  const auto q_grid = static_cast<unsigned>(num_statistics_);
  const auto kv_grid = static_cast<unsigned>(kv_lines_.count) * static_cast<unsigned>(p_.heads_kv);
  if (q_grid > 0) {
    reference_forward<<<q_grid, 128, shared>>>(r);
    reference_round<<<q_grid, 128>>>(r, case_.plus_inf ? INFINITY : -INFINITY);
    reference_row<<<q_grid, 128, shared>>>(r);
  }
  if (kv_grid > 0) {
    reference_key<<<kv_grid, 128, shared>>>(r, p_.seqlen_q);
  }
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaDeviceSynchronize());
}

Gradients BackwardCall::download() const { return {dq_.host(), dk_.host(), dv_.host()}; }

std::string BackwardCall::run(int room) {
  const Status supported = sm90_backend.supports(p_, Pass::kBackward);
  if (!supported.ok()) {
    return "refused: " + std::string(supported.message);
  }
  const WorkspaceSize size = sm90_backend.workspace_size(p_, Pass::kBackward);
  args_.workspace_bytes =
      size.minimum + (size.preferred - size.minimum) * static_cast<std::size_t>(room) / 100;
  DeviceArray<unsigned char> workspace(args_.workspace_bytes + 8, case_.unwritten_workspace);
  args_.workspace = workspace.data + 4;  // any alignment
  const Status status = sm90_backend.backward(p_, args_);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  if (!status.ok()) {
    return status.message;
  }
  gradients_ = download();
  return p_.deterministic ? repeat(&workspace) : "";
}

std::string BackwardCall::repeat(DeviceArray<unsigned char>* workspace) {
  for (int i = 0; i < case_.num_repeats; ++i) {
    for (DeviceArray<unsigned char>* gradient : {&dq_, &dk_, &dv_}) {
      gradient->poison();
    }
    if (!case_.unwritten_workspace) {
      workspace->poison();
    }
    const Status status = sm90_backend.backward(p_, args_);
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess || !status.ok()) {
      return error != cudaSuccess ? cudaGetErrorString(error) : std::string(status.message);
    }
    if (download() != gradients_) {
      return "other bits in repeat " + std::to_string(i);
    }
  }
  return "";
}

std::string BackwardCall::compare_with_textbook(std::string* report) const {
  const double bar = (p_.dtype == DType::kBF16 ? 5e-3 : 1e-3) * (p_.head_dim < 8 ? 2 : 1);
  std::string wrong;
  if (p_.wants_dq) {
    wrong =
        compare({"dq", gradients_[0], args_.dq, q_layout_, lines_.q}, dq64_.host(), bar, report);
  }
  if (p_.wants_dk && wrong.empty()) {
    wrong =
        compare({"dk", gradients_[1], args_.dk, k_layout_, lines_.kv}, dk64_.host(), bar, report);
  }
  if (p_.wants_dv && wrong.empty()) {
    wrong =
        compare({"dv", gradients_[2], args_.dv, v_layout_, lines_.kv}, dv64_.host(), bar, report);
  }
  if (p_.wants_dsinks && wrong.empty()) {
    wrong = compare_dsinks(dsinks_.host(), host_sinks_, lse64_.host(), delta64_.host());
  }
  return wrong;
}

}  // namespace flashgrad
