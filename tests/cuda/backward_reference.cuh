// SPDX-License-Identifier: Apache-2.0
// The textbook backward in float64 on the GPU: what sm90_backward compares with.
#pragma once

#include "backward_memory.cuh"

namespace flashgrad {

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

}  // namespace flashgrad
