// SPDX-License-Identifier: Apache-2.0
// Checks the sm90 forward against a float64 textbook on the host, and times it. Stand-alone: no
// framework; it calls launch_forward.
//   sm90_forward check KERNEL...          sm90_forward time|cool SHAPES KERNEL...
// KERNEL is a name of kKernels or all; SHAPES are lengths with f (full) or c (causal) and g (4
// query heads a key head): 16384f,4096c,4096cg, at hidden size 2048 and 16k tokens in all.

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include "core/dtype.hpp"
#include "core/mask.hpp"
#include "cuda/sm90/fwd_launch.hpp"

using namespace flashgrad;

#define CK(x)                                                            \
  do {                                                                   \
    cudaError_t e_ = (x);                                                \
    if (e_ != cudaSuccess) {                                             \
      printf("CUDA error %s at %d\n", cudaGetErrorString(e_), __LINE__); \
      exit(2);                                                           \
    }                                                                    \
  } while (0)

namespace {

struct Kernel {
  const char* name;
  DType dtype;
  int head_dim, head_dim_v;
  Status (*run)(const Problem&, const Args&);
};
const Kernel kKernels[] = {
    {"d64", DType::kBF16, 64, 64, sm90::launch_forward},
    {"d96", DType::kBF16, 96, 96, sm90::launch_forward},
    {"d128", DType::kBF16, 128, 128, sm90::launch_forward},
    {"d192v128", DType::kBF16, 192, 128, sm90::launch_forward},
    {"d192", DType::kBF16, 192, 192, sm90::launch_forward},
    {"d256", DType::kBF16, 256, 256, sm90::launch_forward},
    {"d64h", DType::kF16, 64, 64, sm90::launch_forward},
    {"d96h", DType::kF16, 96, 96, sm90::launch_forward},
    {"d128h", DType::kF16, 128, 128, sm90::launch_forward},
    {"d192v128h", DType::kF16, 192, 128, sm90::launch_forward},
    {"d192h", DType::kF16, 192, 192, sm90::launch_forward},
    {"d256h", DType::kF16, 256, 256, sm90::launch_forward},
};

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::string name;
  int batch = 1, sq = 128, skv = 128, hq = 2, hkv = 2, d = 0, dv = 0;  // packed: sq, skv are totals
  BandMask mask;
  double scale = NAN, softcap = 0;
  std::vector<int> cu_q, cu_kv, used_q, used_kv;
  std::vector<std::int64_t> q_offset;
  bool sinks = false, no_lse = false, bhsd = false, odd_strides = false;
  int nan_mode = 0;  // 1: NaN in keys and values that no sequence uses; 2: a NaN in a visible query
  float amplitude = 1;
  bool minimum_workspace = false;
};

struct HostTensor {
  std::vector<std::uint16_t> data;
  std::int64_t bs, rs, hs;
};

std::uint16_t to16(float x, DType t) { return t == DType::kBF16 ? f32_to_bf16(x) : f32_to_f16(x); }
float from16(std::uint16_t x, DType t) {
  return t == DType::kBF16 ? bf16_to_f32(x) : f16_to_f32(x);
}

void parallel(std::int64_t n, const std::function<void(std::int64_t)>& f) {
  unsigned nt = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> ts;
  for (unsigned t = 0; t < nt; ++t)
    ts.emplace_back([&, t] {
      for (std::int64_t i = t; i < n; i += nt) f(i);
    });
  for (auto& t : ts) t.join();
}

bool run_case(const Kernel& var, Case c) {
  if (c.d == 0) c.d = var.head_dim;
  if (c.dv == 0) c.dv = var.head_dim_v;
  const bool packed = !c.cu_q.empty();
  const int nb = packed ? 1 : c.batch;
  const int batch = packed ? (int)c.cu_q.size() - 1 : c.batch;
  const auto make = [&](int rows, int heads, int dim) {
    HostTensor t;
    std::int64_t pad = c.odd_strides ? 3 : 0;
    if (c.bhsd) {
      t.rs = dim + pad;
      t.hs = t.rs * rows;
      t.bs = t.hs * heads;
    } else {
      t.hs = dim + pad;
      t.rs = t.hs * heads;
      t.bs = t.rs * rows;
    }
    t.data.assign((size_t)std::max<std::int64_t>(1, t.bs * nb) + 64, to16(kNan, var.dtype));
    return t;
  };
  std::mt19937 rng(1234 + c.sq * 7 + c.skv);
  std::normal_distribution<float> normal;
  const auto fill = [&](HostTensor& t, int rows, int heads, int dim, float amp) {
    for (int b = 0; b < nb; ++b)
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h)
          for (int e = 0; e < dim; ++e)
            t.data[b * t.bs + r * t.rs + h * t.hs + e] = to16(normal(rng) * amp, var.dtype);
  };
  HostTensor q = make(c.sq, c.hq, c.d), k = make(c.skv, c.hkv, c.d), v = make(c.skv, c.hkv, c.dv),
             o = make(c.sq, c.hq, c.dv);
  fill(q, c.sq, c.hq, c.d, c.amplitude);
  fill(k, c.skv, c.hkv, c.d, c.amplitude);
  fill(v, c.skv, c.hkv, c.dv, 1);
  std::vector<float> sinks(c.hq);
  for (auto& s : sinks) s = normal(rng) * 3;
  if (c.sinks && c.hq > 1) sinks[1] = -kInf;
  Problem p;
  p.dtype = var.dtype;
  p.device_type = DeviceType::kCuda;
  p.batch = batch;
  p.seqlen_q = c.sq;
  p.seqlen_kv = c.skv;
  p.heads_q = c.hq;
  p.heads_kv = c.hkv;
  p.head_dim = c.d;
  p.head_dim_v = c.dv;
  p.max_seqlen_q = c.sq;
  p.max_seqlen_kv = c.skv;
  p.packed = packed;
  p.has_seqused_q = !c.used_q.empty();
  p.has_seqused_kv = !c.used_kv.empty();
  p.has_q_offset = !c.q_offset.empty();
  p.has_sinks = c.sinks;
  p.wants_lse = !c.no_lse;
  p.mask = c.mask;
  p.scale = std::isnan(c.scale) ? 1 / std::sqrt((double)c.d) : c.scale;
  p.softcap = c.softcap;
  Args host;
  host.cu_seqlens_q = c.cu_q.data();
  host.cu_seqlens_kv = c.cu_kv.data();
  host.seqused_q = c.used_q.data();
  host.seqused_kv = c.used_kv.data();
  host.q_offset = c.q_offset.data();
  std::vector<Sequence> seqs;
  for (int b = 0; b < batch; ++b) seqs.push_back(sequence(p, host, b));
  // Which rows and keys are read at all.
  std::vector<char> key_used((size_t)nb * c.skv, 0), row_used((size_t)nb * c.sq, 0);
  for (auto& s : seqs) {
    for (int i = 0; i < s.band.seqlen_q; ++i) {
      row_used[s.batch_index * c.sq + s.q_begin + i] = 1;
      Range r = s.band.kv_range(i, i + 1);
      for (auto j = r.begin; j < r.end; ++j) key_used[s.batch_index * c.skv + s.kv_begin + j] = 1;
    }
  }
  if (c.nan_mode == 1) {
    for (int b = 0; b < nb; ++b)
      for (int j = 0; j < c.skv; ++j)
        if (!key_used[(size_t)b * c.skv + j])
          for (int h = 0; h < c.hkv; ++h) {
            for (int e = 0; e < c.d; ++e)
              k.data[b * k.bs + j * k.rs + h * k.hs + e] = to16(e % 2 ? kNan : kInf, var.dtype);
            for (int e = 0; e < c.dv; ++e)
              v.data[b * v.bs + j * v.rs + h * v.hs + e] = to16(e % 2 ? kNan : kInf, var.dtype);
          }
    for (int b = 0; b < nb; ++b)
      for (int i = 0; i < c.sq; ++i)
        if (!row_used[(size_t)b * c.sq + i])
          for (int h = 0; h < c.hq; ++h)
            for (int e = 0; e < c.d; ++e)
              q.data[b * q.bs + i * q.rs + h * q.hs + e] = to16(kNan, var.dtype);
  }
  if (c.nan_mode == 2) q.data[(c.sq / 2) * q.rs + 3] = to16(kNan, var.dtype);
  if (c.nan_mode == 3) v.data[(c.skv / 2) * v.rs + 3] = to16(kNan, var.dtype);
  const auto up = [](const void* src, size_t bytes) {
    void* d;
    CK(cudaMalloc(&d, std::max<size_t>(bytes, 16)));
    if (bytes) CK(cudaMemcpy(d, src, bytes, cudaMemcpyHostToDevice));
    return d;
  };
  std::vector<void*> frees;
  const auto tensor = [&](HostTensor& t) {
    Tensor x;
    x.data = up(t.data.data(), t.data.size() * 2);
    frees.push_back(x.data);
    x.dtype = var.dtype;
    x.batch_stride = packed ? 0 : t.bs;
    x.row_stride = t.rs;
    x.head_stride = t.hs;
    return x;
  };
  Args a;
  a.q = tensor(q);
  a.k = tensor(k);
  a.v = tensor(v);
  a.out = tensor(o);
  std::vector<float> lse((size_t)nb * c.hq * c.sq, kNan);
  if (!c.no_lse) {
    a.lse.data = up(lse.data(), lse.size() * 4);
    frees.push_back(a.lse.data);
    a.lse.batch_stride = packed ? 0 : (std::int64_t)c.hq * c.sq;
    a.lse.row_stride = 1;
    a.lse.head_stride = c.sq;
  }
  const auto ints = [&](const std::vector<int>& x) {
    void* d = x.empty() ? nullptr : up(x.data(), x.size() * 4);
    if (d) frees.push_back(d);
    return (const std::int32_t*)d;
  };
  a.cu_seqlens_q = ints(c.cu_q);
  a.cu_seqlens_kv = ints(c.cu_kv);
  a.seqused_q = ints(c.used_q);
  a.seqused_kv = ints(c.used_kv);
  if (!c.q_offset.empty()) {
    a.q_offset = (const std::int64_t*)up(c.q_offset.data(), c.q_offset.size() * 8);
    frees.push_back((void*)a.q_offset);
  }
  if (c.sinks) {
    a.sinks = up(sinks.data(), sinks.size() * 4);
    frees.push_back((void*)a.sinks);
  }
  // One byte off, so that it is aligned to nothing, and no larger than was asked for.
  a.workspace_bytes = c.minimum_workspace ? sm90::forward_workspace_size(p).minimum
                                          : sm90::forward_workspace_size(p).preferred;
  void* workspace;
  CK(cudaMalloc(&workspace, a.workspace_bytes + 1));
  frees.push_back(workspace);
  CK(cudaMemset(workspace, 0xff, a.workspace_bytes + 1));
  a.workspace = static_cast<char*>(workspace) + 1;
  std::vector<std::uint16_t> first;
  bool ok = true;
  std::string why;
  for (int rep = 0; rep < 2; ++rep) {
    CK(cudaMemcpy(a.out.data, o.data.data(), o.data.size() * 2, cudaMemcpyHostToDevice));
    Status s = sm90::supports_forward(p);
    if (s.ok()) s = var.run(p, a);
    if (!s.ok()) {
      ok = false;
      why = s.message;
      break;
    }
    CK(cudaDeviceSynchronize());
    std::vector<std::uint16_t> got(o.data.size());
    CK(cudaMemcpy(got.data(), a.out.data, got.size() * 2, cudaMemcpyDeviceToHost));
    if (rep == 0)
      first = got;
    else if (memcmp(first.data(), got.data(), got.size() * 2) != 0) {
      ok = false;
      why += " not deterministic;";
    }
  }
  if (!c.no_lse) CK(cudaMemcpy(lse.data(), a.lse.data, lse.size() * 4, cudaMemcpyDeviceToHost));
  for (void* f : frees) cudaFree(f);
  // The textbook.
  const auto widen = [&](const HostTensor& t) {
    std::vector<float> x(t.data.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = from16(t.data[i], var.dtype);
    return x;
  };
  const std::vector<float> qf = widen(q), kf = widen(k), vf = widen(v);
  double worst_lse = 0;
  std::vector<double> se(64, 0), sr(64, 0), mx(64, 0);
  std::atomic<int> bad{0};
  const unsigned nt = std::max(1u, std::min(64u, std::thread::hardware_concurrency()));
  std::vector<double> wl(64, 0);
  std::vector<std::thread> ts;
  if (ok) {
    for (unsigned t = 0; t < nt; ++t)
      ts.emplace_back([&, t] {
        std::vector<double> s, acc;
        std::int64_t n = 0;
        for (auto& sq : seqs)
          for (int i = 0; i < sq.band.seqlen_q; ++i)
            for (int h = 0; h < c.hq; ++h) {
              if (n++ % nt != t) continue;
              const Range r = sq.band.kv_range(i, i + 1);
              const int kh = h / (c.hq / c.hkv);
              s.assign(r.size(), 0);
              acc.assign(c.dv, 0);
              double m = c.sinks ? sinks[h] : -kInf;
              const float* qr = &qf[sq.batch_index * q.bs + (sq.q_begin + i) * q.rs + h * q.hs];
              for (auto j = r.begin; j < r.end; ++j) {
                const float* kr = &kf[sq.batch_index * k.bs + (sq.kv_begin + j) * k.rs + kh * k.hs];
                double x = 0;
                for (int e = 0; e < c.d; ++e) x += (double)qr[e] * kr[e];
                x *= p.scale;
                if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
                s[j - r.begin] = x;
                if (x > m || std::isnan(x)) m = x;
              }
              double l = 0;
              if (c.sinks && m > -kInf) l = std::exp(sinks[h] - m);
              for (double x : s) l += std::exp(x - m);
              const double L =
                  (r.empty() && !(c.sinks && sinks[h] > -kInf)) ? -kInf : m + std::log(l);
              for (auto j = r.begin; j < r.end; ++j) {
                const float* vr = &vf[sq.batch_index * v.bs + (sq.kv_begin + j) * v.rs + kh * v.hs];
                const double pr = std::exp(s[j - r.begin] - L);
                for (int e = 0; e < c.dv; ++e) acc[e] += pr * vr[e];
              }
              const std::uint16_t* orow =
                  &first[sq.batch_index * o.bs + (sq.q_begin + i) * o.rs + h * o.hs];
              for (int e = 0; e < c.dv; ++e) {
                const double x = from16(orow[e], var.dtype), y = acc[e];
                if (std::isfinite(x) != std::isfinite(y) || (r.empty() && x != 0)) {
                  bad |= 1;
                  continue;
                }
                if (!std::isfinite(y)) continue;
                se[t] += (x - y) * (x - y);
                sr[t] += y * y;
                mx[t] = std::max(mx[t], std::fabs(x - y));
              }
              if (!c.no_lse) {
                const double x = lse[((size_t)sq.batch_index * c.hq + h) * c.sq + sq.q_begin + i];
                if (std::isnan(x) != std::isnan(L) || std::isinf(x) != std::isinf(L))
                  bad |= 2;
                else if (std::isfinite(L))
                  wl[t] = std::max(wl[t], std::fabs(x - L) / (1 + std::fabs(L)));
              }
            }
      });
    for (auto& t : ts) t.join();
    for (int b = 0; b < nb; ++b)
      for (int i = 0; i < c.sq; ++i)
        if (!row_used[(size_t)b * c.sq + i])
          for (int h = 0; h < c.hq; ++h) {
            for (int e = 0; e < c.dv; ++e)
              if (from16(first[b * o.bs + i * o.rs + h * o.hs + e], var.dtype) != 0) bad |= 4;
            if (!c.no_lse && lse[((size_t)b * c.hq + h) * c.sq + i] != -kInf) bad |= 8;
          }
    // Nothing written between the rows.
    if (c.odd_strides)
      for (int b = 0; b < nb; ++b)
        for (int i = 0; i < c.sq; ++i)
          for (int h = 0; h < c.hq; ++h)
            for (int e = c.dv; e < c.dv + 3; ++e)
              if (!std::isnan(from16(first[b * o.bs + i * o.rs + h * o.hs + e], var.dtype)))
                bad |= 16;
  }
  double e2 = 0, r2 = 0, m = 0;
  for (int t = 0; t < 64; ++t) {
    e2 += se[t];
    r2 += sr[t];
    m = std::max(m, mx[t]);
    worst_lse = std::max(worst_lse, wl[t]);
  }
  const double rel = r2 > 0 ? std::sqrt(e2 / r2) : 0;
  const double limit = var.dtype == DType::kBF16 ? 4e-3 : 6e-4;
  if (!(rel < limit)) {
    ok = false;
    why += " out;";
  }
  if (!(worst_lse < 1e-5)) {
    ok = false;
    why += " lse;";
  }
  if (bad) {
    ok = false;
    why += " places " + std::to_string(bad.load()) + ";";
  }
  printf("%-4s %-14s %-26s rel %.2e max %.1e lse %.1e %s\n", ok ? "ok" : "FAIL", var.name,
         c.name.c_str(), rel, m, worst_lse, why.c_str());
  fflush(stdout);
  return ok;
}

std::vector<Case> cases(const Kernel& v) {
  const BandMask full{}, causal{kUnbounded, 0, Alignment::kBottomRight},
      causal_tl{kUnbounded, 0, Alignment::kTopLeft};
  std::vector<Case> r;
  const auto add = [&](Case c) { r.push_back(std::move(c)); };
  add({.name = "softcap", .batch = 2, .sq = 300, .skv = 413, .mask = causal, .softcap = 15});
  add({.name = "softcap 30", .sq = 300, .skv = 413, .scale = 1, .softcap = 30});
  add({.name = "negative scale", .sq = 300, .skv = 300, .mask = causal, .scale = -0.1});
  add({.name = "zero scale", .sq = 300, .skv = 300, .mask = causal, .scale = 0});
  add({.name = "softcap packed nan",
       .sq = 500,
       .skv = 400,
       .mask = causal,
       .softcap = 20,
       .cu_q = {0, 200, 500},
       .cu_kv = {0, 300, 400},
       .used_kv = {211, 99},
       .nan_mode = 1});
  add({.name = "odd strides, no room",
       .batch = 2,
       .sq = 130,
       .skv = 257,
       .mask = causal,
       .odd_strides = true,
       .minimum_workspace = true});
  add({.name = "odd dims, no room",
       .batch = 2,
       .sq = 130,
       .skv = 257,
       .d = v.head_dim - 3,
       .dv = v.head_dim_v - 5,
       .mask = causal,
       .minimum_workspace = true});
  add({.name = "seqused nan, no room",
       .batch = 3,
       .sq = 300,
       .skv = 500,
       .d = v.head_dim - 1,
       .dv = v.head_dim_v - 1,
       .mask = causal,
       .used_q = {300, 0, 111},
       .used_kv = {33, 500, 450},
       .nan_mode = 1,
       .minimum_workspace = true});
  add({.name = "one tile", .sq = 128, .skv = 128});
  add({.name = "full 1024", .batch = 2, .sq = 1024, .skv = 1024});
  add({.name = "causal 1024", .batch = 2, .sq = 1024, .skv = 1024, .mask = causal});
  add({.name = "causal 999 1301 gqa",
       .batch = 2,
       .sq = 999,
       .skv = 1301,
       .hq = 6,
       .hkv = 2,
       .mask = causal});
  add({.name = "causal tl 1301 999 bhsd",
       .batch = 2,
       .sq = 1301,
       .skv = 999,
       .hq = 4,
       .hkv = 1,
       .mask = causal_tl,
       .bhsd = true});
  add({.name = "causal br 300 100", .sq = 300, .skv = 100, .mask = causal});
  add({.name = "window 100 50",
       .batch = 2,
       .sq = 700,
       .skv = 900,
       .mask = {100, 50, Alignment::kBottomRight}});
  add({.name = "window 1024 0",
       .sq = 3000,
       .skv = 3000,
       .hq = 1,
       .hkv = 1,
       .mask = {1024, 0, Alignment::kBottomRight}});
  add({.name = "band -128 864", .sq = 700, .skv = 900, .mask = {-128, 864, Alignment::kTopLeft}});
  add({.name = "left only", .sq = 700, .skv = 900, .mask = {300, kUnbounded, Alignment::kTopLeft}});
  add({.name = "empty band", .sq = 200, .skv = 200, .mask = {-1, -1, Alignment::kTopLeft}});
  add({.name = "sinks", .batch = 2, .sq = 300, .skv = 200, .mask = causal, .sinks = true});
  add({.name = "sinks big logits",
       .sq = 300,
       .skv = 300,
       .mask = causal,
       .sinks = true,
       .amplitude = 5});
  add({.name = "big logits", .sq = 300, .skv = 300, .scale = 1, .amplitude = 3});
  add({.name = "no lse, 1x1", .batch = 5, .sq = 1, .skv = 1, .no_lse = true});
  add({.name = "3 799", .sq = 3, .skv = 799, .mask = causal});
  add({.name = "799 3", .sq = 799, .skv = 3, .mask = causal});
  add({.name = "skv 0", .sq = 70, .skv = 0, .mask = causal});
  add({.name = "odd strides",
       .batch = 2,
       .sq = 130,
       .skv = 257,
       .mask = causal,
       .odd_strides = true});
  add({.name = "odd dims",
       .batch = 2,
       .sq = 130,
       .skv = 257,
       .d = v.head_dim - 3,
       .dv = v.head_dim_v - 5,
       .mask = causal});
  add({.name = "dims - 8",
       .batch = 2,
       .sq = 130,
       .skv = 257,
       .d = v.head_dim - 8,
       .dv = v.head_dim_v - 8,
       .mask = causal});
  add({.name = "batch 70000", .batch = 70000, .sq = 1, .skv = 2, .hq = 1, .hkv = 1});
  const std::vector<int> cq{0, 0, 5, 400, 401, 1000, 1000, 1290},
      ck{0, 7, 7, 500, 900, 1100, 1100, 1390};
  add({.name = "packed full", .sq = 1290, .skv = 1390, .cu_q = cq, .cu_kv = ck});
  add({.name = "packed causal gqa",
       .sq = 1290,
       .skv = 1390,
       .hq = 4,
       .hkv = 2,
       .mask = causal,
       .cu_q = cq,
       .cu_kv = ck});
  add({.name = "packed window",
       .sq = 1290,
       .skv = 1390,
       .mask = {70, 10, Alignment::kTopLeft},
       .cu_q = cq,
       .cu_kv = ck});
  add({.name = "packed used, gaps, nan",
       .sq = 1400,
       .skv = 1500,
       .mask = causal,
       .cu_q = {3, 3, 8, 400, 401, 1000, 1000, 1290},
       .cu_kv = {10, 17, 17, 500, 900, 1100, 1100, 1390},
       .used_q = {0, 5, 301, 0, 590, 0, 200},
       .used_kv = {7, 0, 400, 400, 130, 0, 290},
       .sinks = true,
       .nan_mode = 1});
  add({.name = "seqused nan",
       .batch = 3,
       .sq = 300,
       .skv = 500,
       .mask = causal,
       .used_q = {300, 0, 111},
       .used_kv = {33, 500, 450},
       .nan_mode = 1});
  add({.name = "q_offset",
       .batch = 3,
       .sq = 300,
       .skv = 500,
       .mask = causal,
       .q_offset = {0, 100, -200}});
  add({.name = "q_offset nan",
       .batch = 2,
       .sq = 300,
       .skv = 500,
       .mask = {60, 0, Alignment::kBottomRight},
       .q_offset = {50, 130},
       .nan_mode = 1});
  add({.name = "nan in a query", .sq = 300, .skv = 300, .mask = causal, .nan_mode = 2});
  add({.name = "nan in a value", .sq = 300, .skv = 300, .mask = causal, .nan_mode = 3});
  return r;
}

// ---- timing
using Init = int (*)();
using Handle = int (*)(unsigned, void**);
using Energy = int (*)(void*, unsigned long long*);
using Clock = int (*)(void*, int, unsigned*);
Energy energy_function = nullptr;
Clock clock_function = nullptr;
void* nvml_device = nullptr;
void open_nvml() {
  void* l = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (l == nullptr) l = dlopen("/usr/local/nvidia/lib64/libnvidia-ml.so.1", RTLD_NOW);
  if (l == nullptr) return;
  ((Init)dlsym(l, "nvmlInit_v2"))();
  ((Handle)dlsym(l, "nvmlDeviceGetHandleByIndex_v2"))(0, &nvml_device);
  energy_function = (Energy)dlsym(l, "nvmlDeviceGetTotalEnergyConsumption");
  clock_function = (Clock)dlsym(l, "nvmlDeviceGetClockInfo");
}
double joules() {
  unsigned long long e = 0;
  if (energy_function) energy_function(nvml_device, &e);
  return e * 1e-3;
}
unsigned megahertz() {
  unsigned c = 0;
  if (clock_function) clock_function(nvml_device, 1, &c);
  return c;
}
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// All variants with the same head dims and dtype run on the same tensors, alternating.
void time_variants(const std::vector<Kernel>& vs, int s, bool causal, bool sustained,
                   int hkv_divisor) {
  const Kernel& v0 = vs.front();
  const int heads = 2048 / v0.head_dim_v, batch = 16384 / s, hkv = heads / hkv_divisor;
  Problem p;
  p.dtype = v0.dtype;
  p.device_type = DeviceType::kCuda;
  p.batch = batch;
  p.seqlen_q = p.seqlen_kv = p.max_seqlen_q = p.max_seqlen_kv = s;
  p.heads_q = heads;
  p.heads_kv = hkv;
  p.head_dim = v0.head_dim;
  p.head_dim_v = v0.head_dim_v;
  p.wants_lse = true;
  p.scale = 1 / std::sqrt((double)v0.head_dim);
  if (causal) p.mask.right = 0;
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(1 << 20);
  for (auto& x : pool) x = to16(normal(rng), v0.dtype);
  std::vector<void*> frees;
  const auto make = [&](int h, int d, int shift) {
    Tensor t;
    size_t n = (size_t)batch * s * h * d;
    CK(cudaMalloc(&t.data, n * 2));
    frees.push_back(t.data);
    std::vector<std::uint16_t> host(n);
    // The pool again and again, each time from another place.
    for (size_t i = 0, turn = 0; i < n; ++turn) {
      const size_t from = (turn * 40503u + shift * 7919u) % pool.size();
      const size_t count = std::min(pool.size() - from, n - i);
      std::copy_n(pool.begin() + static_cast<std::ptrdiff_t>(from), count,
                  host.begin() + static_cast<std::ptrdiff_t>(i));
      i += count;
    }
    CK(cudaMemcpy(t.data, host.data(), n * 2, cudaMemcpyHostToDevice));
    t.dtype = v0.dtype;
    t.head_stride = d;
    t.row_stride = (std::int64_t)h * d;
    t.batch_stride = t.row_stride * s;
    return t;
  };
  Args a;
  a.q = make(heads, v0.head_dim, 1);
  a.k = make(hkv, v0.head_dim, 2);
  a.v = make(hkv, v0.head_dim_v, 3);
  a.out = make(heads, v0.head_dim_v, 4);
  CK(cudaMalloc(&a.lse.data, (size_t)batch * heads * s * 4));
  frees.push_back(a.lse.data);
  a.lse.batch_stride = (std::int64_t)heads * s;
  a.lse.head_stride = s;
  a.lse.row_stride = 1;
  a.workspace_bytes = 1 << 20;
  CK(cudaMalloc(&a.workspace, a.workspace_bytes));
  frees.push_back(a.workspace);
  const double fl =
      2.0 * batch * heads * (double)s * s * (v0.head_dim + v0.head_dim_v) * (causal ? 0.5 : 1);
  cudaEvent_t e0, e1;
  cudaEventCreate(&e0);
  cudaEventCreate(&e1);
  const auto run = [&](const Kernel& v) {
    Status st = v.run(p, a);
    if (!st.ok()) {
      printf("%s\n", st.message.c_str());
      exit(3);
    }
  };
  std::vector<std::vector<float>> t(vs.size());
  for (auto& v : vs) run(v);
  CK(cudaDeviceSynchronize());
  for (int i = 0; i < (sustained ? 10 : 8); ++i)
    for (size_t j = 0; j < vs.size(); ++j) {
      usleep(40000);
      cudaEventRecord(e0);
      run(vs[j]);
      cudaEventRecord(e1);
      CK(cudaEventSynchronize(e1));
      float ms;
      cudaEventElapsedTime(&ms, e0, e1);
      t[j].push_back(ms);
    }
  for (size_t j = 0; j < vs.size(); ++j) {
    std::sort(t[j].begin(), t[j].end());
    const double ms0 = t[j][t[j].size() / 2];
    printf("%5d %s%s d%d/%d %-8s cool %6.1f", s, causal ? "causal" : "full  ",
           hkv_divisor > 1 ? " gqa" : "", v0.head_dim, v0.head_dim_v, vs[j].name, fl / ms0 * 1e-9);
    if (sustained) {
      const double dt = ms0 * 1e-3;
      const int nw = std::max(1, (int)(0.4 / dt)), nn = std::max(1, (int)(0.9 / dt));
      for (int i = 0; i < nw; ++i) run(vs[j]);
      CK(cudaDeviceSynchronize());
      unsigned mz = 0;
      const double en0 = joules();
      cudaEventRecord(e0);
      for (int i = 0; i < nn; ++i) run(vs[j]);
      cudaEventRecord(e1);
      while (cudaEventQuery(e1) == cudaErrorNotReady) {
        mz = megahertz();
        usleep(50000);
      }
      CK(cudaEventSynchronize(e1));
      const double en1 = joules();
      float ms;
      cudaEventElapsedTime(&ms, e0, e1);
      printf("  sustained %6.1f  %4u MHz  %.3f J/TFLOP", fl * nn / ms * 1e-9, mz,
             (en1 - en0) / (fl * nn * 1e-12));
    }
    printf("\n");
    fflush(stdout);
  }
  for (void* f : frees) cudaFree(f);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  int first = 2;
  std::string shapes;
  if (mode == "time" || mode == "cool") shapes = argv[first++];
  std::vector<Kernel> chosen;
  for (int i = first; i < argc; ++i)
    for (auto& v : kKernels)
      if (std::string(v.name) == argv[i] || std::string(argv[i]) == "all") chosen.push_back(v);
  if (mode == "check") {
    int failed = 0, count = 0;
    for (auto& v : chosen)
      for (auto& c : cases(v)) {
        ++count;
        failed += !run_case(v, c);
      }
    printf("%d of %d cases failed\n", failed, count);
    return failed != 0;
  }
  open_nvml();
  std::string list = shapes + ",";
  for (size_t pos = 0; pos < list.size();) {
    const std::string s = list.substr(pos, list.find(',', pos) - pos);
    pos = list.find(',', pos) + 1;
    if (s.empty()) continue;
    time_variants(chosen, atoi(s.c_str()), s.find('c') != std::string::npos, mode == "time",
                  s.find('g') != std::string::npos ? 4 : 1);
  }
  return 0;
}
