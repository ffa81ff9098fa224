// SPDX-License-Identifier: Apache-2.0
// Checks and times the sm90 backward by itself, against a float64 textbook computation on the same
// GPU.
//
//   sm90_backward check [name [least [largest]]]   every case of backward_cases.cpp and
//                                                  backward_short_sequences.cpp (whose name
//                                                  contains `name`, of head dims from `least` to
//                                                  `largest`); exit status 1 if one fails
//   sm90_backward short [name [least [largest]]]   those of backward_short_cases.cpp
//   sm90_backward bench [shapes]   whole calls, TFLOP/s cool and sustained, one line a shape
//
// Inputs are random normals; rows and keys that nothing visible depends on, the gaps between
// strided rows, the outputs and the workspace are full of NaN before each call (but of the short
// cases the workspace, which is left as it was allocated).
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backward_bench.hpp"
#include "backward_case.hpp"
#include "backward_reference.cuh"
#include "cuda/sm90/sm90_backend.hpp"

using namespace flashgrad;

namespace {

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
  p.max_seqlen_q = c.max_seqlen > 0 ? c.max_seqlen : p.seqlen_q;
  p.max_seqlen_kv = c.max_seqlen > 0 ? c.max_seqlen : p.seqlen_kv;
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

// `room`: how much of the workspace between minimum and preferred it gets, in percent.
// Its gradients go to `gradients`.
bool run_case(Case c, int room, std::vector<unsigned char> (&gradients)[3]) {
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
    std::printf("%-28s FAIL refused: %s\n", c.name, supported.message.c_str());
    return false;
  }
  const WorkspaceSize workspace_size = sm90_backend.workspace_size(p, Pass::kBackward);
  args.workspace_bytes =
      workspace_size.minimum +
      (workspace_size.preferred - workspace_size.minimum) * static_cast<std::size_t>(room) / 100;
  DeviceArray<unsigned char> workspace(args.workspace_bytes + 8, c.unwritten_workspace);
  args.workspace = workspace.data + 4;  // any alignment
  const Status status = sm90_backend.backward(p, args);
  cudaError_t error = cudaDeviceSynchronize();
  gradients[0] = dq.host();
  gradients[1] = dk.host();
  gradients[2] = dv.host();
  if (status.ok() && error == cudaSuccess && p.deterministic) {
    for (int repeat = 0; repeat < c.num_repeats && wrong.empty(); ++repeat) {
      dq.poison();
      dk.poison();
      dv.poison();
      if (!c.unwritten_workspace) {
        workspace.poison();
      }
      static_cast<void>(sm90_backend.backward(p, args));
      error = cudaDeviceSynchronize();
      if (dq.host() != gradients[0] || dk.host() != gradients[1] || dv.host() != gradients[2]) {
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
  std::printf("%3d/%-3d %-28s %3d %% %s%s%s\n", static_cast<int>(p.head_dim),
              static_cast<int>(p.head_dim_v), c.name, room, wrong.empty() ? "ok  " : "FAIL",
              report.c_str(), wrong.empty() ? "" : ("  " + wrong).c_str());
  std::fflush(stdout);
  if (error != cudaSuccess) {
    std::exit(1);
  }
  return wrong.empty();
}

// A case with all of the preferred workspace and, above head dim 128, with less. There dk and dv
// have the same bits with any workspace, and dq has one of two: it depends only on whether dS is
// kept.
int run_with_workspaces(const Case& c) {
  std::vector<unsigned char> preferred[3];
  int failures = run_case(c, 100, preferred) ? 0 : 1;
  if (std::max(c.p.head_dim, c.p.head_dim_v) <= 128) {
    return failures;
  }
  std::vector<unsigned char> minimum[3];
  failures += run_case(c, 0, minimum) ? 0 : 1;
  if (c.rooms.empty()) {
    return failures;
  }
  bool several_passes = false;
  for (const int room : c.rooms) {
    std::vector<unsigned char> got[3];
    failures += run_case(c, room, got) ? 0 : 1;
    several_passes = several_passes || got[0] == preferred[0];
    if (got[1] != preferred[1] || got[2] != preferred[2] ||
        (got[0] != preferred[0] && got[0] != minimum[0])) {
      std::printf("%-28s FAIL: other bits with %d %% of the room\n", c.name, room);
      ++failures;
    }
  }
  if (minimum[0] == preferred[0] || !several_passes || minimum[1] != preferred[1] ||
      minimum[2] != preferred[2]) {
    std::printf("%-28s FAIL: not the plans that it is meant to compare\n", c.name);
    ++failures;
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  std::printf("sm90: %s\n", sm90_backend.detail());
  if (!sm90_backend.available()) {
    std::printf("skipped: no Hopper GPU\n");
    return 77;
  }
  if (mode == "check" || mode == "short") {
    int failures = 0;
    int count = 0;
    std::vector<Case> all = mode == "check" ? cases() : short_cases();
    for (Case& c : mode == "check" ? short_sequence_cases() : std::vector<Case>{}) {
      all.push_back(std::move(c));
    }
    for (const Case& c : all) {
      if ((argc > 2 && std::string(c.name).find(argv[2]) == std::string::npos) ||
          (argc > 3 && std::max(c.p.head_dim, c.p.head_dim_v) < std::atoi(argv[3])) ||
          (argc > 4 && std::max(c.p.head_dim, c.p.head_dim_v) > std::atoi(argv[4]))) {
        continue;
      }
      failures += run_with_workspaces(c);
      ++count;
    }
    std::printf("%d cases, %d failures\n", count, failures);
    return failures == 0 && count > 0 ? 0 : 1;
  }
  if (mode == "bench") {
    // d, seqlen / 1024, mask (0 full, 1 causal, w1024 a window to the left), heads_q, heads_kv [,
    // dtype, deterministic]: groups of seven numbers.
    for (int i = 2; i + 6 < argc; i += 7) {
      const char* slash = std::strchr(argv[i], '/');  // 192/128: of v 128
      bench_backward(std::atoi(argv[i]), std::atoi(slash != nullptr ? slash + 1 : argv[i]),
                     1024 * std::atoll(argv[i + 1]), argv[i + 2], std::atoll(argv[i + 3]),
                     std::atoll(argv[i + 4]),
                     std::string(argv[i + 5]) == "f16" ? DType::kF16 : DType::kBF16,
                     std::atoi(argv[i + 6]) != 0);
    }
    return 0;
  }
  std::printf(
      "usage: sm90_backward check|short [name [least head_dim [largest]]] | bench (d k causal "
      "heads_q heads_kv dtype det)...\n");
  return 2;
}
