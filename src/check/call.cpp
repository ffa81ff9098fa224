// SPDX-License-Identifier: Apache-2.0
// Makes the tensors of a case in their layouts, and calls the C interface on them.
#include "check/call.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <stdexcept>

#include "check/data.hpp"

namespace flashgrad::check {
namespace {

constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};

DLDataType dl_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return {kDLFloat, 64, 1};
    case DType::kF32:
      return {kDLFloat, 32, 1};
    case DType::kBF16:
      return {kDLBfloat, 16, 1};
    case DType::kF16:
      return {kDLFloat, 16, 1};
  }
  return {};
}

struct Shapes {
  std::vector<std::int64_t> q, k, v, out, lse;
  DLDataType dtype, grad_dtype, stat_dtype;
};

Shapes shapes_of(const Case& c) {
  const auto rows = [&](std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
    return c.packed() ? std::vector<std::int64_t>{seqlen, heads, dim}
                      : std::vector<std::int64_t>{c.batch, seqlen, heads, dim};
  };
  return {rows(c.seqlen_q, c.heads_q, c.head_dim),
          rows(c.seqlen_kv, c.heads_kv, c.head_dim),
          rows(c.seqlen_kv, c.heads_kv, c.head_dim_v),
          rows(c.seqlen_q, c.heads_q, c.head_dim_v),
          c.packed() ? std::vector<std::int64_t>{c.heads_q, c.seqlen_q}
                     : std::vector<std::int64_t>{c.batch, c.heads_q, c.seqlen_q},
          dl_dtype(c.dtype),
          dl_dtype(c.grad_f32 ? DType::kF32 : c.dtype),
          dl_dtype(statistics_dtype(c.dtype))};
}

// A tensor of the case in the layout of the case. `kind` tells the tensors apart: each gets other
// strides.
HostTensor place(const Case& c, DLDataType dtype, const std::vector<std::int64_t>& shape,
                 int kind) {
  const std::size_t ndim = shape.size();
  std::vector<std::int64_t> strides(ndim);
  // Dimensions from the innermost outwards, each `pad` elements wider than it must be.
  const auto nest = [&](const std::vector<std::size_t>& order, std::int64_t pad) {
    std::int64_t stride = 1;
    for (const std::size_t k : order) {
      strides[k] = stride;
      stride *= shape[k];
      stride += pad;
    }
  };
  switch (c.layout) {
    case Layout::kOwnStrides: {
      std::vector<std::size_t> order(ndim);
      for (std::size_t k = 0; k < ndim; ++k) {
        order[k] = ndim - 1 - k;
      }
      std::rotate(order.begin() + 1, order.begin() + 1 + kind % static_cast<int>(ndim - 1),
                  order.end());
      nest(order, 1 + kind % 7);
      if (kind % 4 == 2) {  // backwards
        strides[0] = -strides[0];
      }
      break;
    }
    case Layout::kSizeOne: {
      nest({ndim - 1}, 0);
      static constexpr std::array<std::int64_t, 3> kOdd = {0, 3331333, 99990001};
      std::int64_t stride = 1;
      for (std::size_t k = ndim; k-- > 0;) {
        strides[k] = shape[k] == 1 ? kOdd[(k + static_cast<std::size_t>(kind)) % 3] : stride;
        stride *= shape[k];
      }
      break;
    }
    case Layout::kHugeStrides: {
      if (ndim < 3) {
        return {dtype, shape};
      }
      const std::size_t row = c.packed() ? 0 : 1;
      strides[ndim - 1] = 1;
      strides[ndim - 2] = shape[ndim - 1];
      strides[row] = 65537;
      if (row > 0) {
        strides[0] = 65537 * shape[1];
      }
      break;
    }
    default:
      return {dtype, shape};
  }
  return {dtype, shape, strides};
}

HostTensor expanded(DLDataType dtype, const std::vector<std::int64_t>& shape) {
  return {dtype, shape, std::vector<std::int64_t>(shape.size(), 0)};
}

// (..., s, h, d) as every second row of a buffer twice as long.
HostTensor every_second_row(DLDataType dtype, const std::vector<std::int64_t>& shape) {
  const std::size_t row = shape.size() - 3;
  std::vector<std::int64_t> strides(shape.size(), 1);
  strides[row + 1] = shape[row + 2];
  strides[row] = 2 * shape[row + 1] * shape[row + 2];
  if (row > 0) {
    strides[0] = strides[row] * shape[row];
  }
  return {dtype, shape, strides};
}

// q, k, v (or their gradients) as slices of one (b, s, heads_q + 2 heads_kv, d) buffer.
void place_fused(const Case& c, DLDataType dtype, HostTensor* q, HostTensor* k, HostTensor* v) {
  if (c.seqlen_q != c.seqlen_kv || c.head_dim != c.head_dim_v) {
    throw std::invalid_argument("layout fused: want seqlen_q = seqlen_kv and d = dv");
  }
  const std::int64_t d = c.head_dim;
  const std::int64_t row = (c.heads_q + 2 * c.heads_kv) * d;
  const std::int64_t rows = c.seqlen_q * (c.packed() ? 1 : c.batch);
  const auto buffer =
      std::make_shared<Buffer>(static_cast<std::size_t>(rows * row * dtype.bits / 8));
  const auto part = [&](std::int64_t heads, std::int64_t offset) {
    return c.packed() ? HostTensor(dtype, {c.seqlen_q, heads, d}, {row, d, 1}, buffer, offset)
                      : HostTensor(dtype, {c.batch, c.seqlen_q, heads, d},
                                   {c.seqlen_q * row, row, d, 1}, buffer, offset);
  };
  *q = part(c.heads_q, 0);
  *k = part(c.heads_kv, c.heads_q * d);
  *v = part(c.heads_kv, (c.heads_q + c.heads_kv) * d);
}

template <class T>
HostTensor vector_tensor(DLDataType dtype, const std::vector<T>& values) {
  HostTensor t(dtype, {static_cast<std::int64_t>(values.size())});
  for (std::size_t n = 0; n < values.size(); ++n) {
    t.set(static_cast<std::int64_t>(n), static_cast<double>(values[n]));
  }
  return t;
}

}  // namespace

fg_tensors CallTensors::c_tensors(Place place) {
  fg_tensors t = FG_TENSORS_INIT;
  t.q = q.dl(place);
  t.k = k.dl(place);
  t.v = v.dl(place);
  t.out = out.dl(place);
  t.lse = lse.dl(place);
  t.dout = dout.dl(place);
  t.dlse = dlse.dl(place);
  t.dq = dq.dl(place);
  t.dk = dk.dl(place);
  t.dv = dv.dl(place);
  t.dsinks = dsinks.dl(place);
  t.sinks = sinks.dl(place);
  t.cu_seqlens_q = cu_seqlens_q.dl(place);
  t.cu_seqlens_kv = cu_seqlens_kv.dl(place);
  t.seqused_q = seqused_q.dl(place);
  t.seqused_kv = seqused_kv.dl(place);
  t.q_offset = q_offset.dl(place);
  return t;
}

std::vector<NamedTensor> CallTensors::inputs() const {
  return {{"q", &q},
          {"k", &k},
          {"v", &v},
          {"dout", &dout},
          {"dlse", &dlse},
          {"sinks", &sinks},
          {"cu_seqlens_q", &cu_seqlens_q},
          {"cu_seqlens_kv", &cu_seqlens_kv},
          {"seqused_q", &seqused_q},
          {"seqused_kv", &seqused_kv},
          {"q_offset", &q_offset}};
}

std::vector<NamedTensor> CallTensors::outputs(fg_pass pass) const {
  if (pass == FG_FORWARD) {
    return {{"out", &out}, {"lse", &lse}};
  }
  return {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dsinks", &dsinks}};
}

std::vector<NamedTensor> CallTensors::all() const {
  std::vector<NamedTensor> tensors = inputs();
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    for (const NamedTensor& t : outputs(pass)) {
      tensors.push_back(t);
    }
  }
  return tensors;
}

std::vector<NamedTensor> CallTensors::taken_by(fg_pass pass) const {
  if (pass == FG_BACKWARD) {
    return all();
  }
  std::vector<NamedTensor> tensors = inputs();
  std::erase_if(tensors,
                [this](const NamedTensor& t) { return t.tensor == &dout || t.tensor == &dlse; });
  for (const NamedTensor& t : outputs(pass)) {
    tensors.push_back(t);
  }
  return tensors;
}

void CallTensors::download_inputs() const {
  for (const NamedTensor& t : inputs()) {
    if (t.tensor->given()) {
      t.tensor->download();
    }
  }
}

std::vector<Sequence> sequences(const Case& c) {
  if (!c.packed() && c.seqlen_q == 0 && c.seqlen_kv == 0) {
    return {};  // a batch of nothing, however large, is not walked through
  }
  Problem p;
  p.packed = c.packed();
  p.seqlen_q = c.seqlen_q;
  p.seqlen_kv = c.seqlen_kv;
  p.mask = c.mask;
  p.has_seqused_q = !c.seqused_q.empty();
  p.has_seqused_kv = !c.seqused_kv.empty();
  p.has_q_offset = !c.q_offset.empty();
  Args a;
  a.cu_seqlens_q = c.cu_seqlens_q.data();
  a.cu_seqlens_kv = c.cu_seqlens_kv.data();
  a.seqused_q = c.seqused_q.data();
  a.seqused_kv = c.seqused_kv.data();
  a.q_offset = c.q_offset.data();
  std::vector<Sequence> result;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    result.push_back(sequence(p, a, b));
  }
  return result;
}

double flops(const Case& c) {
  double pairs = 0;
  for (const Sequence& s : sequences(c)) {
    for (std::int64_t i = 0; i < s.band.seqlen_q; ++i) {
      pairs += static_cast<double>(s.band.kv_range(i, i + 1).size());
    }
  }
  return pairs * static_cast<double>(c.heads_q * (8 * c.head_dim + 6 * c.head_dim_v));
}

WorkspaceQuery query_workspace(const Case& c, const std::string& backend) {
  const Shapes s = shapes_of(c);
  const DLDevice device = dl_device(place_of(backend));
  const auto describe = [device](DLDataType dtype, std::vector<std::int64_t> shape) {
    return std::pair<DLTensor, std::vector<std::int64_t>>{
        DLTensor{nullptr, device, static_cast<int>(shape.size()), dtype, nullptr, nullptr, 0},
        std::move(shape)};
  };
  auto q = describe(s.dtype, s.q);
  auto k = describe(s.dtype, s.k);
  auto v = describe(s.dtype, s.v);
  auto out = describe(s.dtype, s.out);
  auto lse = describe(s.stat_dtype, s.lse);
  auto dq = describe(s.grad_dtype, s.q);
  auto dk = describe(s.grad_dtype, s.k);
  auto dv = describe(s.grad_dtype, s.v);
  auto cu_q = describe(kInt32, {c.batch + 1});
  auto cu_kv = describe(kInt32, {c.batch + 1});
  for (auto* t : {&q, &k, &v, &out, &lse, &dq, &dk, &dv, &cu_q, &cu_kv}) {
    t->first.shape = t->second.data();
  }
  fg_tensors t = FG_TENSORS_INIT;
  t.q = &q.first;
  t.k = &k.first;
  t.v = &v.first;
  t.out = t.dout = &out.first;
  t.lse = &lse.first;
  t.dq = &dq.first;
  t.dk = &dk.first;
  t.dv = &dv.first;
  if (c.packed()) {
    t.cu_seqlens_q = &cu_q.first;
    t.cu_seqlens_kv = &cu_kv.first;
  }
  fg_options o = make_options(c);
  o.backend = backend.c_str();
  WorkspaceQuery query;
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    query.status = fg_workspace_size(pass, &t, &o, &query.minimum[pass], &query.preferred[pass]);
    if (query.status != FG_OK) {
      query.message = fg_last_error();
      break;
    }
  }
  return query;
}

CallTensors make_tensors(const Case& c) {
  const auto [of_q, of_k, of_v, of_out, of_lse, dtype, grad_dtype, stat_dtype] = shapes_of(c);
  CallTensors t;
  if (c.layout == Layout::kFused) {
    place_fused(c, dtype, &t.q, &t.k, &t.v);
    place_fused(c, grad_dtype, &t.dq, &t.dk, &t.dv);
  } else {
    t.q = place(c, dtype, of_q, 0);
    t.k = place(c, dtype, of_k, 1);
    t.v = place(c, dtype, of_v, 2);
    t.dq = place(c, grad_dtype, of_q, 3);
    t.dk = place(c, grad_dtype, of_k, 4);
    t.dv = place(c, grad_dtype, of_v, 5);
  }
  t.out = place(c, dtype, of_out, 7);
  t.lse = place(c, stat_dtype, of_lse, 8);
  if (c.dout != "none") {
    t.dout = c.layout == Layout::kDoutStride0 ? expanded(dtype, of_out)
             : c.layout == Layout::kDoutView  ? every_second_row(dtype, of_out)
                                              : place(c, dtype, of_out, 9);
  }
  if (c.dlse != "none") {
    t.dlse = place(c, stat_dtype, of_lse, 11);
  }
  if (c.sinks != "none") {
    t.sinks = HostTensor(stat_dtype, {c.heads_q});
    t.dsinks = HostTensor(stat_dtype, {c.heads_q});
  }
  if (!c.wants_dq) {
    t.dq = {};
  }
  if (!c.wants_dk) {
    t.dk = {};
  }
  if (!c.wants_dv) {
    t.dv = {};
  }
  if (c.packed()) {
    t.cu_seqlens_q = vector_tensor(kInt32, c.cu_seqlens_q);
    t.cu_seqlens_kv = vector_tensor(kInt32, c.cu_seqlens_kv);
  }
  if (!c.seqused_q.empty()) {
    t.seqused_q = vector_tensor(kInt32, c.seqused_q);
  }
  if (!c.seqused_kv.empty()) {
    t.seqused_kv = vector_tensor(kInt32, c.seqused_kv);
  }
  if (!c.q_offset.empty()) {
    t.q_offset = vector_tensor(kInt64, c.q_offset);
  }

  const auto stream = [&](std::uint64_t kind) { return mix(c.seed * 16 + kind); };
  fill(t.q, c.q, stream(0));
  fill(t.k, c.k, stream(1));
  fill(t.v, c.v, stream(2));
  if (t.dout.given()) {
    fill(t.dout, c.layout == Layout::kDoutStride0 ? "0.75" : c.dout, stream(3));
  }
  if (t.dlse.given()) {
    fill(t.dlse, c.dlse, stream(4));
  }
  if (t.sinks.given()) {
    fill_sinks(c, t.sinks, stream(5));
  }
  hide_unread(c, t);
  return t;
}

fg_options make_options(const Case& c) {
  fg_options o = FG_OPTIONS_INIT;
  o.window_left = c.mask.left;
  o.window_right = c.mask.right;
  o.alignment = c.mask.alignment == Alignment::kTopLeft ? FG_TOP_LEFT : FG_BOTTOM_RIGHT;
  o.scale = c.scale;
  o.softcap = c.softcap;
  o.deterministic = c.deterministic ? 1 : 0;
  o.max_seqlen_q = c.max_seqlen_q;
  o.max_seqlen_kv = c.max_seqlen_kv;
  return o;
}

PassResult run_pass(fg_pass pass, CallTensors& tensors, const fg_options& options,
                    Workspace workspace, WorkspaceMemory& memory, const Transfers& transfers) {
  const Place place = options.backend != nullptr ? place_of(options.backend) : Place::kHost;
  const auto contains = [](const std::vector<NamedTensor>& list, const HostTensor* tensor) {
    return std::any_of(list.begin(), list.end(),
                       [tensor](const NamedTensor& t) { return t.tensor == tensor; });
  };
  const std::vector<NamedTensor> outputs = tensors.outputs(pass);
  const std::vector<NamedTensor> of_forward = tensors.taken_by(FG_FORWARD);
  const auto for_each_taken = [&](void (HostTensor::*f)() const, auto&& wanted) {
    for (const auto& [name, tensor] : tensors.taken_by(pass)) {
      if (tensor->given() && (contains(outputs, tensor) || wanted(tensor))) {
        (tensor->*f)();
      }
    }
  };
  for (const auto& [name, tensor] : outputs) {
    if (tensor->given()) {
      tensor->poison();
    }
  }
  PassResult result;
  try {
    const fg_tensors t = tensors.c_tensors(place);
    result.status =
        fg_workspace_size(pass, &t, &options, &result.minimum_bytes, &result.preferred_bytes);
    if (result.status == FG_OK) {
      const std::size_t extra = result.preferred_bytes - result.minimum_bytes;
      const std::size_t bytes =
          result.minimum_bytes + (workspace == Workspace::kMinimum   ? 0
                                  : workspace == Workspace::kBetween ? extra / 2
                                                                     : extra);
      void* scratch = memory.resize(bytes, workspace == Workspace::kBetween, place);
      if (place == Place::kCuda) {
        for_each_taken(&HostTensor::upload, [&](const HostTensor* tensor) {
          return transfers.upload_forward || !contains(of_forward, tensor);
        });
      }
      const auto begin = std::chrono::steady_clock::now();
      result.status =
          (pass == FG_FORWARD ? fg_forward : fg_backward)(&t, &options, scratch, bytes, nullptr);
      if (place == Place::kCuda && result.status == FG_OK) {
        synchronize_device();
      }
      result.seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      if (place == Place::kCuda && result.status == FG_OK) {
        for_each_taken(&HostTensor::download,
                       [&](const HostTensor*) { return transfers.download_inputs; });
      }
    }
    if (result.status != FG_OK) {
      result.message = fg_last_error();
    }
  } catch (const std::runtime_error& error) {
    result.status = FG_DEVICE_ERROR;
    result.message = error.what();
  }
  return result;
}

}  // namespace flashgrad::check
