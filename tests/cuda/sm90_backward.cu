// SPDX-License-Identifier: Apache-2.0
// Checks and times the sm90 backward by itself, against a float64 textbook computation on the same
// GPU.
//
//   sm90_backward check            every case below; exit status 1 if one fails
//   sm90_backward bench [shapes]   whole calls, TFLOP/s cool and sustained, one line a shape
//
// Inputs are random normals; rows and keys that nothing visible depends on, the gaps between
// strided rows, the outputs and the workspace are full of NaN before each call.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/sm90/sm90_backend.hpp"

using namespace flashgrad;

namespace {

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("CUDA error: %s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}
#define CHECK_CUDA(x) check_cuda((x), #x)

template <class T>
struct DeviceArray {
  T* data = nullptr;
  std::size_t count = 0;
  explicit DeviceArray(std::size_t n) : count(n) {
    CHECK_CUDA(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)));
    poison();
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    CHECK_CUDA(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  void poison() { CHECK_CUDA(cudaMemset(data, 0xff, std::max<std::size_t>(count, 1) * sizeof(T))); }
  std::vector<T> host() const {
    std::vector<T> result(count);
    CHECK_CUDA(cudaMemcpy(result.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return result;
  }
};

struct Case {
  const char* name;
  Problem p;
  std::vector<int> lens_q, lens_kv;  // packed if not empty
  std::vector<int> seqused_q, seqused_kv;
  std::vector<std::int64_t> q_offset;
  int head_pad = 0;       // elements between heads, odd: the copy engine can't be used
  int row_pad = 0;        // elements between rows
  bool plus_inf = false;  // lse of empty rows is +inf
  bool stride0 = false;   // dout is one element, expanded
  double logit_scale = 1;
};

// For every row of q, or key, of the tensors: what it meets.
struct Line {
  int batch_index;           // of the tensors
  int sequence;              // -1: none
  std::int64_t row;          // of the tensors, in its batch entry
  std::int64_t other_begin;  // first row of the sequence on the other side
  std::int64_t begin, end;   // visible, relative to that
};

struct Layout {
  std::int64_t batch, rows, heads, columns;
  int head_pad, row_pad;
  Tensor tensor(void* data, DType dtype) const {
    const std::int64_t head = columns + head_pad;
    const std::int64_t row = head * heads + row_pad;
    return {data, dtype, row * rows, row, head, 1};
  }
  std::int64_t elements() const { return batch * rows * ((columns + head_pad) * heads + row_pad); }
};

__device__ double load(const Tensor& t, std::int64_t at) {
  if (t.dtype == DType::kBF16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[at]);
  }
  if (t.dtype == DType::kF16) {
    return __half2float(static_cast<const __half*>(t.data)[at]);
  }
  return static_cast<const float*>(t.data)[at];
}
__device__ void store(const Tensor& t, std::int64_t at, double x) {
  if (t.dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(t.data)[at] = __double2bfloat16(x);
  } else if (t.dtype == DType::kF16) {
    static_cast<__half*>(t.data)[at] = __double2half(x);
  } else {
    static_cast<float*>(t.data)[at] = static_cast<float>(x);
  }
}

__device__ double normal(std::uint64_t i, std::uint64_t seed) {
  std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  const double u = (static_cast<double>(z >> 32) + 0.5) / 4294967296.0;
  const double v = static_cast<double>(z & 0xffffffffU) / 4294967296.0;
  return sqrt(-2 * log(u)) * cospi(2 * v);
}

// Rows that meet nothing stay NaN.
__global__ void fill(Tensor t, const Line* lines, std::int64_t num_lines, int heads, int columns,
                     std::uint64_t seed, double scale) {
  const std::int64_t total = num_lines * heads * columns;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const Line& line = lines[i / columns / heads];
    if (line.begin < line.end) {
      store(t, t.offset(line.batch_index, line.row, i / columns % heads) + i % columns,
            scale * normal(i, seed));
    }
  }
}

struct Reference {
  Problem p;
  Tensor q, k, v, dout, out, lse, dlse;
  const float* sinks;
  const Line* q_lines;
  const Line* kv_lines;
  double* out64;    // (rows, heads_q, head_dim_v)
  double* lse64;    // (rows, heads_q)
  double* delta64;  // (rows, heads_q)
  double* dq;       // (rows, heads_q, head_dim)
  double* dk;
  double* dv;
};

__device__ double logit(const Reference& r, std::int64_t q_at, std::int64_t k_at, double* factor) {
  double s = 0;
  for (int c = 0; c < r.p.head_dim; ++c) {
    s += load(r.q, q_at + c) * load(r.k, k_at + c);
  }
  s *= r.p.scale;
  *factor = 1;
  if (r.p.softcap > 0) {
    const double t = tanh(s / r.p.softcap);
    *factor = 1 - t * t;
    s = r.p.softcap * t;
  }
  return s;
}

__device__ double reduce(double x, bool maximum) {
  __shared__ double partial[128];
  __syncthreads();
  partial[threadIdx.x] = x;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (threadIdx.x < step) {
      const double y = partial[threadIdx.x + step];
      partial[threadIdx.x] = maximum ? fmax(partial[threadIdx.x], y) : partial[threadIdx.x] + y;
    }
    __syncthreads();
  }
  return partial[0];
}

// One block of 128 threads a row and head.
__global__ void reference_forward(Reference r) {
  extern __shared__ double p[];
  const std::int64_t index = blockIdx.x / r.p.heads_q;
  const std::int64_t head = blockIdx.x % r.p.heads_q;
  const Line line = r.q_lines[index];
  const std::int64_t kv_head = head / (r.p.heads_q / r.p.heads_kv);
  const std::int64_t q_at = r.q.offset(line.batch_index, line.row, head);
  const double sink = r.sinks != nullptr ? r.sinks[head] : -INFINITY;
  double maximum = sink;
  double factor;
  for (std::int64_t j = line.begin + threadIdx.x; j < line.end; j += 128) {
    p[j - line.begin] =
        logit(r, q_at, r.k.offset(line.batch_index, line.other_begin + j, kv_head), &factor);
    maximum = fmax(maximum, p[j - line.begin]);
  }
  maximum = reduce(maximum, true);
  double sum = 0;
  for (std::int64_t j = line.begin + threadIdx.x; j < line.end; j += 128) {
    p[j - line.begin] = exp(p[j - line.begin] - maximum);
    sum += p[j - line.begin];
  }
  sum = reduce(sum, false) + (sink == -INFINITY ? 0 : exp(sink - maximum));
  if (threadIdx.x == 0) {
    const bool outside = line.sequence < 0;
    r.lse64[blockIdx.x] =
        outside || (line.begin >= line.end && sink == -INFINITY) ? -INFINITY : maximum + log(sum);
  }
  for (int c = static_cast<int>(threadIdx.x); c < r.p.head_dim_v; c += 128) {
    double out = 0;
    for (std::int64_t j = line.begin; j < line.end; ++j) {
      out += p[j - line.begin] / sum *
             load(r.v, r.v.offset(line.batch_index, line.other_begin + j, kv_head) + c);
    }
    r.out64[blockIdx.x * r.p.head_dim_v + c] = out;
  }
}

__global__ void reference_round(Reference r, float empty_lse) {
  const std::int64_t index = blockIdx.x / r.p.heads_q;
  const std::int64_t head = blockIdx.x % r.p.heads_q;
  const Line line = r.q_lines[index];
  if (threadIdx.x == 0) {
    const double lse = r.lse64[blockIdx.x];
    store(r.lse, r.lse.offset(line.batch_index, line.row, head), isinf(lse) ? empty_lse : lse);
  }
  if (line.begin < line.end) {
    for (int c = static_cast<int>(threadIdx.x); c < r.p.head_dim_v; c += 128) {
      store(r.out, r.out.offset(line.batch_index, line.row, head) + c,
            r.out64[blockIdx.x * r.p.head_dim_v + c]);
    }
  }
}

__global__ void reference_row(Reference r) {
  extern __shared__ double ds[];
  const std::int64_t index = blockIdx.x / r.p.heads_q;
  const std::int64_t head = blockIdx.x % r.p.heads_q;
  const Line line = r.q_lines[index];
  const std::int64_t kv_head = head / (r.p.heads_q / r.p.heads_kv);
  const std::int64_t q_at = r.q.offset(line.batch_index, line.row, head);
  const std::int64_t do_at = r.dout.offset(line.batch_index, line.row, head);
  double delta = 0;
  if (line.begin < line.end && r.dout) {
    for (int c = static_cast<int>(threadIdx.x); c < r.p.head_dim_v; c += 128) {
      delta +=
          load(r.dout, do_at + c * r.dout.dim_stride) * r.out64[blockIdx.x * r.p.head_dim_v + c];
    }
  }
  delta = reduce(delta, false);
  double dlse = 0;
  if (r.dlse && line.sequence >= 0) {
    dlse = load(r.dlse, r.dlse.offset(line.batch_index, line.row, head));
  }
  if (threadIdx.x == 0) {
    r.delta64[blockIdx.x] = dlse - delta;
  }
  for (std::int64_t j = line.begin + threadIdx.x; j < line.end; j += 128) {
    double factor;
    const double s =
        logit(r, q_at, r.k.offset(line.batch_index, line.other_begin + j, kv_head), &factor);
    double dp = 0;
    if (r.dout) {
      const std::int64_t v_at = r.v.offset(line.batch_index, line.other_begin + j, kv_head);
      for (int c = 0; c < r.p.head_dim_v; ++c) {
        dp += load(r.dout, do_at + c * r.dout.dim_stride) * load(r.v, v_at + c);
      }
    }
    ds[j - line.begin] = exp(s - r.lse64[blockIdx.x]) * (dp - delta + dlse) * factor;
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < r.p.head_dim; c += 128) {
    double dq = 0;
    for (std::int64_t j = line.begin; j < line.end; ++j) {
      dq += ds[j - line.begin] *
            load(r.k, r.k.offset(line.batch_index, line.other_begin + j, kv_head) + c);
    }
    r.dq[blockIdx.x * r.p.head_dim + c] = dq * r.p.scale;
  }
}

__global__ void reference_key(Reference r, std::int64_t q_rows) {
  extern __shared__ double p[];
  const std::int64_t index = blockIdx.x / r.p.heads_kv;
  const std::int64_t kv_head = blockIdx.x % r.p.heads_kv;
  const Line line = r.kv_lines[index];
  const std::int64_t count = max(line.end - line.begin, std::int64_t{0});
  double* ds = p + count;
  const std::int64_t k_at = r.k.offset(line.batch_index, line.row, kv_head);
  const std::int64_t v_at = r.v.offset(line.batch_index, line.row, kv_head);
  double dk[2] = {0, 0};
  double dv[2] = {0, 0};
  for (std::int64_t head = kv_head * (r.p.heads_q / r.p.heads_kv);
       head < (kv_head + 1) * (r.p.heads_q / r.p.heads_kv); ++head) {
    __syncthreads();
    for (std::int64_t i = line.begin + threadIdx.x; i < line.end; i += 128) {
      const std::int64_t row = line.other_begin + i;
      const std::int64_t at = (line.batch_index * q_rows + row) * r.p.heads_q + head;
      double factor;
      const double s = logit(r, r.q.offset(line.batch_index, row, head), k_at, &factor);
      const std::int64_t do_at = r.dout.offset(line.batch_index, row, head);
      double dp = 0;
      if (r.dout) {
        for (int c = 0; c < r.p.head_dim_v; ++c) {
          dp += load(r.dout, do_at + c * r.dout.dim_stride) * load(r.v, v_at + c);
        }
      }
      p[i - line.begin] = exp(s - r.lse64[at]);
      ds[i - line.begin] = p[i - line.begin] * (dp + r.delta64[at]) * factor;
    }
    __syncthreads();
    for (int half = 0; half < 2; ++half) {
      const int c = static_cast<int>(threadIdx.x) + 128 * half;
      for (std::int64_t i = line.begin; i < line.end; ++i) {
        const std::int64_t row = line.other_begin + i;
        if (c < r.p.head_dim) {
          dk[half] += ds[i - line.begin] * load(r.q, r.q.offset(line.batch_index, row, head) + c);
        }
        if (c < r.p.head_dim_v && r.dout) {
          dv[half] += p[i - line.begin] * load(r.dout, r.dout.offset(line.batch_index, row, head) +
                                                           c * r.dout.dim_stride);
        }
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int c = static_cast<int>(threadIdx.x) + 128 * half;
    if (c < r.p.head_dim) {
      r.dk[blockIdx.x * r.p.head_dim + c] = dk[half] * r.p.scale;
    }
    if (c < r.p.head_dim_v) {
      r.dv[blockIdx.x * r.p.head_dim_v + c] = dv[half];
    }
  }
}

// Sequences on the host, by the project's own definitions.
struct HostLines {
  std::vector<Line> q, kv;
  std::vector<std::int32_t> cu_q, cu_kv;
};

HostLines make_lines(Case& c) {
  HostLines lines;
  Problem& p = c.p;
  Args args{};
  if (!c.lens_q.empty()) {
    p.packed = true;
    p.batch = static_cast<std::int64_t>(c.lens_q.size());
    lines.cu_q.push_back(static_cast<int>(p.batch) % 3);  // sometimes the first offset is not 0
    lines.cu_kv.push_back(static_cast<int>(p.batch) % 2);
    for (std::size_t i = 0; i < c.lens_q.size(); ++i) {
      lines.cu_q.push_back(lines.cu_q.back() + c.lens_q[i]);
      lines.cu_kv.push_back(lines.cu_kv.back() + c.lens_kv[i]);
    }
    p.seqlen_q = lines.cu_q.back() + 5;
    p.seqlen_kv = lines.cu_kv.back() + 3;
    args.cu_seqlens_q = lines.cu_q.data();
    args.cu_seqlens_kv = lines.cu_kv.data();
  }
  p.max_seqlen_q = p.seqlen_q;
  p.max_seqlen_kv = p.seqlen_kv;
  p.has_seqused_q = !c.seqused_q.empty();
  p.has_seqused_kv = !c.seqused_kv.empty();
  p.has_q_offset = !c.q_offset.empty();
  args.seqused_q = c.seqused_q.data();
  args.seqused_kv = c.seqused_kv.data();
  args.q_offset = c.q_offset.data();
  const std::int64_t entries = p.packed ? 1 : p.batch;
  for (std::int64_t b = 0; b < entries; ++b) {
    for (std::int64_t i = 0; i < p.seqlen_q; ++i) {
      lines.q.push_back({static_cast<int>(b), -1, i, 0, 0, 0});
    }
    for (std::int64_t j = 0; j < p.seqlen_kv; ++j) {
      lines.kv.push_back({static_cast<int>(b), -1, j, 0, 0, 0});
    }
  }
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, args, b);
    for (std::int64_t i = 0; i < s.band.seqlen_q; ++i) {
      Line& line = lines.q[static_cast<std::size_t>(s.batch_index * p.seqlen_q + s.q_begin + i)];
      const Range keys = s.band.kv_range(i, i + 1);
      line.sequence = static_cast<int>(b);
      line.other_begin = s.kv_begin;
      line.begin = keys.begin;
      line.end = keys.empty() ? keys.begin : keys.end;
    }
    for (std::int64_t j = 0; j < s.band.seqlen_kv; ++j) {
      Line& line = lines.kv[static_cast<std::size_t>(s.batch_index * p.seqlen_kv + s.kv_begin + j)];
      const Range rows = s.band.q_range(j, j + 1);
      line.sequence = static_cast<int>(b);
      line.other_begin = s.q_begin;
      line.begin = rows.begin;
      line.end = rows.empty() ? rows.begin : rows.end;
    }
  }
  return lines;
}

float to_float(const std::vector<unsigned char>& bytes, std::int64_t at, DType dtype) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, bytes.data() + 4 * at, 4);
    return x;
  }
  std::uint16_t h;
  std::memcpy(&h, bytes.data() + 2 * at, 2);
  return dtype == DType::kBF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

// Compares a gradient and looks for traces outside its elements. Returns "" or what is wrong.
std::string compare(const char* name, const std::vector<unsigned char>& bytes, const Tensor& t,
                    const Layout& layout, const std::vector<double>& want,
                    const std::vector<Line>& lines, double bar, std::string* report) {
  double error2 = 0;
  double norm2 = 0;
  double max_error = 0;
  double max_norm = 0;
  std::size_t at = 0;
  std::vector<bool> inside(static_cast<std::size_t>(layout.elements()), false);
  bool structural = true;
  bool finite = true;
  for (const Line& line : lines) {
    for (std::int64_t h = 0; h < layout.heads; ++h) {
      for (std::int64_t c = 0; c < layout.columns; ++c, ++at) {
        const std::int64_t element = t.offset(line.batch_index, line.row, h) + c;
        inside[static_cast<std::size_t>(element)] = true;
        const double got = to_float(bytes, element, t.dtype);
        finite = finite && std::isfinite(got);
        structural = structural && (line.begin < line.end || got == 0);
        const double e = std::abs(got - want[at]);
        error2 += e * e;
        norm2 += want[at] * want[at];
        max_error = std::max(max_error, e);
        max_norm = std::max(max_norm, std::abs(want[at]));
      }
    }
  }
  const double relative = norm2 > 0 ? std::sqrt(error2 / norm2) : std::sqrt(error2);
  char text[160];
  std::snprintf(text, sizeof(text), " %s %.2e (max %.1e of %.1e)", name, relative, max_error,
                max_norm);
  *report += text;
  if (!finite) {
    return std::string(name) + " not finite";
  }
  if (!structural) {
    return std::string(name) + " not 0 where nothing is visible";
  }
  if (!(relative < bar) || !(max_error < std::max(0.03 * max_norm, 1e-6))) {
    return std::string(name) + " too far off";
  }
  const int size = size_bytes(t.dtype);
  for (std::size_t i = 0; i < inside.size(); ++i) {
    for (int b = 0; b < size && !inside[i]; ++b) {
      if (bytes[i * static_cast<std::size_t>(size) + static_cast<std::size_t>(b)] != 0xff) {
        return std::string(name) + " wrote outside its elements";
      }
    }
  }
  return "";
}

bool run_case(Case c) {
  HostLines lines = make_lines(c);
  Problem& p = c.p;
  p.device_type = DeviceType::kCuda;
  const std::int64_t batch = p.packed ? 1 : p.batch;
  const Layout q_layout{batch, p.seqlen_q, p.heads_q, p.head_dim, c.head_pad, c.row_pad};
  const Layout out_layout{batch, p.seqlen_q, p.heads_q, p.head_dim_v, c.head_pad, c.row_pad};
  const Layout k_layout{batch, p.seqlen_kv, p.heads_kv, p.head_dim, c.head_pad, c.row_pad};
  const Layout v_layout{batch, p.seqlen_kv, p.heads_kv, p.head_dim_v, c.head_pad, c.row_pad};
  const auto size = [](const Layout& l) { return static_cast<std::size_t>(l.elements()); };
  DeviceArray<std::uint16_t> q(size(q_layout)), k(size(k_layout)), v(size(v_layout)),
      out(size(out_layout)), dout(size(out_layout));
  DeviceArray<Line> q_lines(lines.q), kv_lines(lines.kv);
  const auto q_rows = static_cast<std::int64_t>(lines.q.size());
  const auto kv_rows = static_cast<std::int64_t>(lines.kv.size());
  const auto stat_count = static_cast<std::size_t>(q_rows * p.heads_q);
  DeviceArray<float> lse(stat_count), dlse(stat_count), sinks(static_cast<std::size_t>(p.heads_q)),
      dsinks(static_cast<std::size_t>(p.heads_q));
  DeviceArray<double> out64(stat_count * static_cast<std::size_t>(p.head_dim_v)), lse64(stat_count),
      delta64(stat_count), dq64(stat_count * static_cast<std::size_t>(p.head_dim)),
      dk64(static_cast<std::size_t>(kv_rows * p.heads_kv * p.head_dim)),
      dv64(static_cast<std::size_t>(kv_rows * p.heads_kv * p.head_dim_v));
  const auto bytes_of = [](const Layout& l, DType t) {
    return static_cast<std::size_t>(l.elements() * size_bytes(t));
  };
  DeviceArray<unsigned char> dq(bytes_of(q_layout, p.dq_dtype)), dk(bytes_of(k_layout, p.dk_dtype)),
      dv(bytes_of(v_layout, p.dv_dtype));
  DeviceArray<std::int32_t> cu_q(lines.cu_q), cu_kv(lines.cu_kv), used_q(c.seqused_q),
      used_kv(c.seqused_kv);
  DeviceArray<std::int64_t> offset(c.q_offset);

  Args args{};
  args.q = q_layout.tensor(q.data, p.dtype);
  args.k = k_layout.tensor(k.data, p.dtype);
  args.v = v_layout.tensor(v.data, p.dtype);
  args.out = out_layout.tensor(out.data, p.dtype);
  args.lse = {lse.data, DType::kF32, p.seqlen_q * p.heads_q, 1, p.seqlen_q, 1};
  if (p.has_dout) {
    args.dout = out_layout.tensor(dout.data, p.dtype);
    if (c.stride0) {
      args.dout.batch_stride = args.dout.row_stride = args.dout.head_stride = 0;
      args.dout.dim_stride = 0;
    }
  }
  if (p.has_dlse) {
    args.dlse = args.lse;
    args.dlse.data = dlse.data;
  }
  args.dq = p.wants_dq ? q_layout.tensor(dq.data, p.dq_dtype) : Tensor{};
  args.dk = p.wants_dk ? k_layout.tensor(dk.data, p.dk_dtype) : Tensor{};
  args.dv = p.wants_dv ? v_layout.tensor(dv.data, p.dv_dtype) : Tensor{};
  args.sinks = p.has_sinks ? sinks.data : nullptr;
  args.dsinks = p.wants_dsinks ? dsinks.data : nullptr;
  args.cu_seqlens_q = p.packed ? cu_q.data : nullptr;
  args.cu_seqlens_kv = p.packed ? cu_kv.data : nullptr;
  args.seqused_q = p.has_seqused_q ? used_q.data : nullptr;
  args.seqused_kv = p.has_seqused_kv ? used_kv.data : nullptr;
  args.q_offset = p.has_q_offset ? offset.data : nullptr;

  const auto fill_tensor = [&](const Tensor& t, bool of_q, std::int64_t heads, std::int64_t columns,
                               int seed, double scale) {
    fill<<<512, 256>>>(t, of_q ? q_lines.data : kv_lines.data, of_q ? q_rows : kv_rows,
                       static_cast<int>(heads), static_cast<int>(columns),
                       static_cast<std::uint64_t>(seed), scale);
  };
  fill_tensor(args.q, true, p.heads_q, p.head_dim, 1, c.logit_scale);
  fill_tensor(args.k, false, p.heads_kv, p.head_dim, 2, c.logit_scale);
  fill_tensor(args.v, false, p.heads_kv, p.head_dim_v, 3, 1);
  if (p.has_dout) {
    fill_tensor(args.dout, true, p.heads_q, p.head_dim_v, 4, 1);
  }
  std::vector<float> host_sinks(static_cast<std::size_t>(p.heads_q));
  for (std::size_t h = 0; h < host_sinks.size(); ++h) {
    host_sinks[h] = h % 4 == 3 ? -INFINITY : 0.5F * static_cast<float>(h);
  }
  CHECK_CUDA(
      cudaMemcpy(sinks.data, host_sinks.data(), host_sinks.size() * 4, cudaMemcpyHostToDevice));
  std::vector<float> host_dlse(stat_count, NAN);
  std::mt19937 random(7);
  std::normal_distribution<float> distribution;
  for (std::int64_t i = 0; i < q_rows; ++i) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      const Line& line = lines.q[static_cast<std::size_t>(i)];
      if (line.sequence >= 0 && (line.begin < line.end || p.has_sinks)) {
        host_dlse[static_cast<std::size_t>(args.lse.offset(line.batch_index, line.row, h))] =
            distribution(random);
      }
    }
  }
  CHECK_CUDA(cudaMemcpy(dlse.data, host_dlse.data(), stat_count * 4, cudaMemcpyHostToDevice));

  const Reference r{p,
                    args.q,
                    args.k,
                    args.v,
                    args.dout,
                    args.out,
                    args.lse,
                    args.dlse,
                    static_cast<const float*>(args.sinks),
                    q_lines.data,
                    kv_lines.data,
                    out64.data,
                    lse64.data,
                    delta64.data,
                    dq64.data,
                    dk64.data,
                    dv64.data};
  const auto shared =
      static_cast<int>(std::max<std::int64_t>(1, std::max(2 * p.seqlen_q, p.seqlen_kv)) * 8);
  for (const void* kernel : {reinterpret_cast<const void*>(reference_forward),
                             reinterpret_cast<const void*>(reference_row),
                             reinterpret_cast<const void*>(reference_key)}) {
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    std::max(shared, 1024)));
  }
  const auto q_grid = static_cast<unsigned>(q_rows * p.heads_q);
  const auto kv_grid = static_cast<unsigned>(kv_rows * p.heads_kv);
  if (q_grid > 0) {
    reference_forward<<<q_grid, 128, shared>>>(r);
    reference_round<<<q_grid, 128>>>(r, c.plus_inf ? INFINITY : -INFINITY);
    reference_row<<<q_grid, 128, shared>>>(r);
  }
  if (kv_grid > 0) {
    reference_key<<<kv_grid, 128, shared>>>(r, p.seqlen_q);
  }
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaDeviceSynchronize());

  std::string report;
  std::string wrong;
  const Status supported = sm90_backend.supports(p, Pass::kBackward);
  if (!supported.ok()) {
    std::printf("%-28s refused: %s\n", c.name, supported.message.c_str());
    return true;
  }
  const WorkspaceSize workspace_size = sm90_backend.workspace_size(p, Pass::kBackward);
  DeviceArray<unsigned char> workspace(workspace_size.minimum + 8);
  args.workspace = workspace.data + 4;  // any alignment
  args.workspace_bytes = workspace_size.minimum;
  const Status status = sm90_backend.backward(p, args);
  cudaError_t error = cudaDeviceSynchronize();
  if (status.ok() && error == cudaSuccess && p.deterministic) {
    const std::vector<unsigned char> first[3] = {dq.host(), dk.host(), dv.host()};
    for (int repeat = 0; repeat < 20 && wrong.empty(); ++repeat) {
      dq.poison();
      dk.poison();
      dv.poison();
      workspace.poison();
      static_cast<void>(sm90_backend.backward(p, args));
      error = cudaDeviceSynchronize();
      if (dq.host() != first[0] || dk.host() != first[1] || dv.host() != first[2]) {
        wrong = "other bits in repeat " + std::to_string(repeat);
      }
    }
  }
  if (!status.ok()) {
    wrong = status.message;
  } else if (error != cudaSuccess) {
    wrong = cudaGetErrorString(error);
  } else if (wrong.empty()) {
    const double bar = (p.dtype == DType::kBF16 ? 5e-3 : 1e-3) * (p.head_dim < 8 ? 2 : 1);
    const auto test = [&](bool wanted, const char* name, DeviceArray<unsigned char>& got,
                          const Tensor& t, const Layout& layout, DeviceArray<double>& want,
                          const std::vector<Line>& of) {
      if (wanted && wrong.empty()) {
        wrong = compare(name, got.host(), t, layout, want.host(), of, bar, &report);
      }
    };
    test(p.wants_dq, "dq", dq, args.dq, q_layout, dq64, lines.q);
    test(p.wants_dk, "dk", dk, args.dk, k_layout, dk64, lines.kv);
    test(p.wants_dv, "dv", dv, args.dv, v_layout, dv64, lines.kv);
    if (p.wants_dsinks) {
      const std::vector<double> lse_host = lse64.host();
      const std::vector<double> delta_host = delta64.host();
      const std::vector<float> got = dsinks.host();
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        double want = 0;
        double scale = 0;
        for (std::int64_t i = 0; i < q_rows; ++i) {
          const auto at = static_cast<std::size_t>(i * p.heads_q + h);
          if (!std::isinf(lse_host[at]) && !std::isinf(host_sinks[static_cast<std::size_t>(h)])) {
            const double x =
                std::exp(host_sinks[static_cast<std::size_t>(h)] - lse_host[at]) * delta_host[at];
            want += x;
            scale += std::abs(x);
          }
        }
        if (!(std::abs(got[static_cast<std::size_t>(h)] - want) <= 3e-3 * scale + 1e-6)) {
          wrong = "dsinks[" + std::to_string(h) + "] " +
                  std::to_string(got[static_cast<std::size_t>(h)]) + ", want " +
                  std::to_string(want);
        }
      }
    }
  }
  std::printf("%-28s %s%s%s\n", c.name, wrong.empty() ? "ok  " : "FAIL", report.c_str(),
              wrong.empty() ? "" : ("  " + wrong).c_str());
  std::fflush(stdout);
  if (error != cudaSuccess) {
    std::exit(1);
  }
  return wrong.empty();
}

Problem problem(DType dtype, std::int64_t batch, std::int64_t sq, std::int64_t skv, std::int64_t hq,
                std::int64_t hkv, std::int64_t d, std::int64_t dv) {
  Problem p;
  p.dtype = p.dq_dtype = p.dk_dtype = p.dv_dtype = dtype;
  p.device_type = DeviceType::kCuda;
  p.batch = batch;
  p.seqlen_q = p.max_seqlen_q = sq;
  p.seqlen_kv = p.max_seqlen_kv = skv;
  p.heads_q = hq;
  p.heads_kv = hkv;
  p.head_dim = d;
  p.head_dim_v = dv;
  p.has_dout = p.wants_dq = p.wants_dk = p.wants_dv = true;
  p.scale = 1 / std::sqrt(static_cast<double>(d));
  return p;
}

const BandMask kFull{};
const BandMask kCausal{kUnbounded, 0, Alignment::kBottomRight};
const BandMask kCausalTop{kUnbounded, 0, Alignment::kTopLeft};

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&list](const char* name, Problem p, const BandMask& mask,
                           const std::function<void(Case&)>& change = {}) {
    Case c{};
    c.name = name;
    c.p = p;
    c.p.mask = mask;
    if (change) {
      change(c);
    }
    list.push_back(std::move(c));
  };
  constexpr DType kB = DType::kBF16;
  constexpr DType kH = DType::kF16;
  for (const int d : {128, 64, 256}) {
    for (const DType t : {kB, kH}) {
      add(d == 256   ? "d256 full 512"
          : d == 128 ? "d128 full 512"
                     : "d64 full 512",
          problem(t, 1, 512, 512, 2, 2, d, d), kFull);
      add(d == 256   ? "d256 causal 1024"
          : d == 128 ? "d128 causal 1024"
                     : "d64 causal 1024",
          problem(t, 2, 1024, 1024, 2, 2, d, d), kCausal);
    }
    add("full tails 300x451", problem(kB, 2, 300, 451, 3, 3, d, d), kFull);
    add("causal tails 451x300", problem(kB, 2, 451, 300, 2, 2, d, d), kCausal);
    add("causal tails 300x451", problem(kB, 2, 300, 451, 2, 2, d, d), kCausal);
    add("causal top-left 300x451", problem(kB, 1, 300, 451, 2, 2, d, d), kCausalTop);
    add("1x1", problem(kB, 2, 1, 1, 2, 2, d, d), kFull);
    add("3x799", problem(kB, 2, 3, 799, 2, 2, d, d), kCausal);
    add("799x3", problem(kB, 2, 799, 3, 2, 2, d, d), kCausal);
    add("window (100, 50)", problem(kB, 1, 1024, 1024, 2, 2, d, d),
        BandMask{100, 50, Alignment::kBottomRight});
    add("band (-128, 864)", problem(kB, 1, 700, 1100, 2, 2, d, d),
        BandMask{-128, 864, Alignment::kTopLeft});
    add("empty band", problem(kB, 1, 200, 200, 2, 2, d, d),
        BandMask{-1, -1, Alignment::kBottomRight});
    add("gqa 8/2 causal", problem(kB, 2, 500, 500, 8, 2, d, d), kCausal);
    add("mqa 6/1 full", problem(kB, 1, 333, 257, 6, 1, d, d), kFull);
    add("f32 gradients", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32; });
    add("dlse", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.has_dlse = true; });
    add("dlse without dout", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal, [](Case& c) {
      c.p.has_dlse = true;
      c.p.has_dout = false;
      c.p.wants_dv = false;
    });
    add("sinks", problem(kB, 2, 300, 200, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true; });
    add("softcap 15", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.softcap = 15; });
    add("negative scale", problem(kB, 1, 300, 300, 2, 2, d, d), kCausal,
        [](Case& c) { c.p.scale = -0.1; });
    add("plus inf lse", problem(kB, 1, 451, 300, 2, 2, d, d), kCausal,
        [](Case& c) { c.plus_inf = true; });
    add("strides", problem(kB, 2, 301, 200, 3, 3, d, d), kCausal, [](Case& c) {
      c.head_pad = 8;
      c.row_pad = 64;
    });
    add("odd strides", problem(kB, 2, 301, 200, 3, 3, d, d), kCausal, [](Case& c) {
      c.head_pad = 3;
      c.row_pad = 5;
    });
    add("stride-0 dout", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal,
        [](Case& c) { c.stride0 = true; });
    add("packed causal", problem(kB, 0, 0, 0, 4, 2, d, d), kCausal, [](Case& c) {
      c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
      c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
    });
    add("packed seqused window", problem(kB, 0, 0, 0, 4, 2, d, d),
        BandMask{60, 20, Alignment::kBottomRight}, [](Case& c) {
          c.lens_q = {100, 64, 1, 300, 20, 513, 30};
          c.lens_kv = {100, 128, 77, 200, 50, 600, 2};
          c.seqused_q = {99, 64, 0, 200, 20, 400, 30};
          c.seqused_kv = {50, 128, 7, 190, 0, 555, 2};
        });
    add("deterministic", problem(kB, 2, 600, 700, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.deterministic = true; });
    add("deterministic packed", problem(kB, 0, 0, 0, 4, 2, d, d),
        BandMask{200, 20, Alignment::kBottomRight}, [](Case& c) {
          c.p.deterministic = true;
          c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
          c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
        });
    add("deterministic softcap", problem(kH, 1, 300, 300, 4, 2, d, d), kCausal, [](Case& c) {
      c.p.deterministic = true;
      c.p.softcap = 15;
      c.head_pad = 1;
    });
    add("no dq", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.wants_dq = false; });
    add("only dq", problem(kB, 1, 300, 300, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.wants_dk = c.p.wants_dv = false; });
    add("seqused, q_offset", problem(kB, 3, 200, 300, 2, 2, d, d), kCausal, [](Case& c) {
      c.seqused_q = {200, 100, 0};
      c.seqused_kv = {250, 300, 20};
      c.q_offset = {30, 200, 0};
    });
  }
  add("d72", problem(kB, 2, 200, 200, 4, 4, 72, 72), kCausal);
  add("d96, dv 40", problem(kB, 2, 200, 300, 4, 2, 96, 40), kCausal);
  add("d33", problem(kB, 2, 200, 200, 4, 4, 33, 33), kCausal);
  add("d1, dv 128", problem(kB, 2, 130, 200, 4, 4, 1, 128), kFull);
  add("big logits f16", problem(kH, 2, 300, 300, 2, 2, 64, 64), kCausal,
      [](Case& c) { c.logit_scale = 4; });
  add("d128 full 2048", problem(kB, 1, 2048, 2048, 4, 4, 128, 128), kFull);
  // Long enough for clusters.
  add("causal 8200x8301", problem(kB, 1, 8200, 8301, 2, 1, 128, 128), kCausal);
  add("left 3000, 8200x8301", problem(kB, 1, 8200, 8301, 1, 1, 128, 128),
      BandMask{3000, kUnbounded, Alignment::kBottomRight});
  add("causal 8301x8200", problem(kH, 1, 8301, 8200, 1, 1, 128, 128), kCausal);
  add("d203, dv 72", problem(kB, 1, 300, 300, 4, 2, 203, 72), kCausal);
  add("d192, dv 128", problem(kB, 1, 300, 300, 4, 2, 192, 128), kCausal);
  return list;
}

// Whole calls on `total` tokens, hidden size 2048.
void bench(int d, std::int64_t seqlen, bool causal, std::int64_t heads, std::int64_t heads_kv,
           DType dtype, bool deterministic) {
  const std::int64_t batch = std::max<std::int64_t>(1, 16384 / seqlen);
  Problem p = problem(dtype, batch, seqlen, seqlen, heads, heads_kv, d, d);
  p.mask = causal ? kCausal : kFull;
  p.deterministic = deterministic;
  char name[96];
  std::snprintf(name, sizeof(name), "%s d%d %s %lldk %lld/%lld%s", ::flashgrad::name(dtype), d,
                causal ? "causal" : "full", static_cast<long long>(seqlen / 1024),
                static_cast<long long>(heads), static_cast<long long>(heads_kv),
                deterministic ? " det" : "");
  const Status supported = sm90_backend.supports(p, Pass::kBackward);
  if (!supported.ok()) {
    std::printf("%-28s refused: %s\n", name, supported.message.c_str());
    return;
  }
  const Layout q_layout{batch, seqlen, heads, d, 0, 0};
  const Layout k_layout{batch, seqlen, heads_kv, d, 0, 0};
  const auto elements = static_cast<std::size_t>(q_layout.elements());
  const auto kv_elements = static_cast<std::size_t>(k_layout.elements());
  DeviceArray<std::uint16_t> q(elements), k(kv_elements), v(kv_elements), out(elements),
      dout(elements), dq(elements), dk(kv_elements), dv(kv_elements);
  std::vector<Line> lines;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < seqlen; ++i) {
      lines.push_back({static_cast<int>(b), 0, i, 0, 0, 1});
    }
  }
  DeviceArray<Line> device_lines(lines);
  const auto fill_one = [&](const Layout& layout, std::uint16_t* data, int seed, double scale) {
    fill<<<1024, 256>>>(layout.tensor(data, dtype), device_lines.data, batch * seqlen,
                        static_cast<int>(layout.heads), d, static_cast<std::uint64_t>(seed), scale);
  };
  fill_one(q_layout, q.data, 1, 1);
  fill_one(k_layout, k.data, 2, 1);
  fill_one(k_layout, v.data, 3, 1);
  fill_one(q_layout, dout.data, 4, 1);
  fill_one(q_layout, out.data, 5, 0.05);
  // lse of random normals: log(count) + 1/2, near enough for the time.
  std::vector<float> host_lse(static_cast<std::size_t>(batch * heads * seqlen));
  for (std::size_t i = 0; i < host_lse.size(); ++i) {
    const auto row = static_cast<double>(i % static_cast<std::size_t>(seqlen));
    host_lse[i] = static_cast<float>(std::log(causal ? row + 1 : static_cast<double>(seqlen)) +
                                     (causal && row < 8 ? 2.0 : 0.5));
  }
  DeviceArray<float> lse(host_lse);
  Args args{};
  args.q = q_layout.tensor(q.data, dtype);
  args.k = k_layout.tensor(k.data, dtype);
  args.v = k_layout.tensor(v.data, dtype);
  args.out = q_layout.tensor(out.data, dtype);
  args.dout = q_layout.tensor(dout.data, dtype);
  args.dq = q_layout.tensor(dq.data, dtype);
  args.dk = k_layout.tensor(dk.data, dtype);
  args.dv = k_layout.tensor(dv.data, dtype);
  args.lse = {lse.data, DType::kF32, seqlen * heads, 1, seqlen, 1};
  const WorkspaceSize size = sm90_backend.workspace_size(p, Pass::kBackward);
  DeviceArray<unsigned char> workspace(size.preferred);
  args.workspace = workspace.data;
  args.workspace_bytes = size.preferred;
  const double flops = 10.0 * static_cast<double>(batch * heads) * static_cast<double>(seqlen) *
                       static_cast<double>(seqlen) * d * (causal ? 0.5 : 1.0);
  cudaEvent_t begin;
  cudaEvent_t end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  const auto call = [&] {
    const Status status = sm90_backend.backward(p, args);
    if (!status.ok()) {
      std::printf("%s: %s\n", name, status.message.c_str());
      std::exit(1);
    }
  };
  call();
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<double> cool;
  for (int i = 0; i < 11; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    CHECK_CUDA(cudaEventRecord(begin));
    call();
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    cool.push_back(ms);
  }
  std::sort(cool.begin(), cool.end());
  const double cool_ms = cool[cool.size() / 2];
  const auto loop = [&](double seconds) {
    const int count = std::max(2, static_cast<int>(seconds * 1e3 / cool_ms));
    CHECK_CUDA(cudaEventRecord(begin));
    for (int i = 0; i < count; ++i) {
      call();
    }
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms / count;
  };
  loop(0.25);
  const double sustained_ms = loop(0.5);
  std::printf("%-28s cool %.3f ms %.1f TFLOP/s, sustained %.3f ms %.1f TFLOP/s\n", name, cool_ms,
              flops / cool_ms * 1e-9, sustained_ms, flops / sustained_ms * 1e-9);
  std::fflush(stdout);
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  std::printf("sm90: %s\n", sm90_backend.detail());
  if (!sm90_backend.available()) {
    std::printf("skipped: no Hopper GPU\n");
    return 77;
  }
  if (mode == "check") {
    int failures = 0;
    for (Case& c : cases()) {
      if (argc > 2 && std::string(c.name).find(argv[2]) == std::string::npos) {
        continue;
      }
      failures += run_case(c) ? 0 : 1;
    }
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
  }
  if (mode == "bench") {
    // d, seqlen / 1024, causal, heads_q, heads_kv [, dtype, deterministic]: groups of seven
    // numbers.
    for (int i = 2; i + 6 < argc; i += 7) {
      bench(std::atoi(argv[i]), 1024 * std::atoll(argv[i + 1]), std::atoi(argv[i + 2]) != 0,
            std::atoll(argv[i + 3]), std::atoll(argv[i + 4]),
            std::string(argv[i + 5]) == "f16" ? DType::kF16 : DType::kBF16,
            std::atoi(argv[i + 6]) != 0);
    }
    return 0;
  }
  std::printf(
      "usage: sm90_backward check [name] | bench (d k causal heads_q heads_kv dtype det)...\n");
  return 2;
}
