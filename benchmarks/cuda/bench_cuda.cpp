// SPDX-License-Identifier: Apache-2.0
// Times flashgrad on a GPU through its C interface, with nothing else in the process: whole calls
// in two regimes, and the kernels of a call one by one.
//
//   cool       single calls 40 ms apart, median of 11: clock cycles bind
//   sustained  0.9 s of calls after 0.4 s of warm-up: energy binds; with the clock and J/TFLOP
//
// Inputs are standard normals; out and lse of the backward are the forward's own. The tensors of a
// row exceed the L2.
#include <cuda_runtime_api.h>
#include <fmt/chrono.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <stdexcept>

#include "core/dtype.hpp"
#include "kernel_times.hpp"
#include "meter.hpp"
#include "rows.hpp"

namespace flashgrad::bench {
namespace {

using nlohmann::ordered_json;

void require(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(cudaGetErrorString(error));
  }
}
void require(fg_status status) {
  if (status != FG_OK) {
    throw std::runtime_error(fg_last_error());
  }
}

struct Arguments {
  std::vector<std::string> rows;
  std::string pass = "both";
  bool cool_only = false;
  bool kernels = false;
  bool odd_rows = false;
  bool long_run = false;
  std::string commit = "unknown";
  std::string json;
};

// Device memory of one row, freed together.
class Arena {
 public:
  Arena() = default;
  ~Arena() {
    for (void* pointer : pointers_) {
      static_cast<void>(cudaFree(pointer));
    }
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes) {
    void* pointer = nullptr;
    require(cudaMalloc(&pointer, bytes));
    pointers_.push_back(pointer);
    bytes_ += bytes;
    return pointer;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::vector<void*> pointers_;
  std::size_t bytes_ = 0;
};

// A DLTensor in an arena, compact unless strides are given.
struct DeviceTensor {
  static constexpr std::size_t kMaxOffset = 16;  // bytes behind the tensor
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  DLTensor dl{};
  std::size_t bytes = 0;

  DeviceTensor(Arena& arena, DLDataType dtype, std::vector<std::int64_t> extents,
               std::vector<std::int64_t> its_strides = {})
      : shape(std::move(extents)), strides(std::move(its_strides)), bytes(dtype.bits / 8U) {
    if (strides.empty()) {
      for (const std::int64_t extent : shape) {
        bytes *= static_cast<std::size_t>(extent);
      }
    } else {
      std::int64_t last = 0;
      for (std::size_t i = 0; i < shape.size(); ++i) {
        last += (shape[i] - 1) * strides[i];
      }
      bytes *= static_cast<std::size_t>(last + 1);
      dl.strides = strides.data();
    }
    dl.data = arena.allocate(bytes + kMaxOffset);
    dl.device = {kDLCUDA, 0};
    dl.ndim = static_cast<int>(shape.size());
    dl.dtype = dtype;
    dl.shape = shape.data();
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
};

// Fills with pieces of a pool of normals, each from another place of it.
void fill_normal(const DeviceTensor& tensor, bool f16, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(std::size_t{1} << 20);
  for (std::uint16_t& x : pool) {
    x = f16 ? f32_to_f16(normal(random)) : f32_to_bf16(normal(random));
  }
  Arena arena;
  auto* device_pool = static_cast<std::byte*>(arena.allocate(pool.size() * 2));
  require(cudaMemcpy(device_pool, pool.data(), pool.size() * 2, cudaMemcpyHostToDevice));
  auto* to = static_cast<std::byte*>(tensor.dl.data) + tensor.dl.byte_offset;
  for (std::size_t done = 0; done < tensor.bytes;) {
    const std::size_t from = random() % pool.size() * 2;
    const std::size_t count = std::min(pool.size() * 2 - from, tensor.bytes - done);
    require(cudaMemcpy(to + done, device_pool + from, count, cudaMemcpyDeviceToDevice));
    done += count;
  }
  require(cudaDeviceSynchronize());
}

// A row's tensors and workspaces, ready to be called.
class Call {
 public:
  explicit Call(const Row& row)
      : row_(row),
        q_(arena_, dtype(), shape(row.heads_q, row.head_dim), strides(row.heads_q, row.head_dim)),
        k_(arena_, dtype(), shape(row.heads_kv, row.head_dim),
           strides(row.heads_kv, row.head_dim, row.layout == Layout::kKeyHeadShared)),
        v_(arena_, dtype(), shape(row.heads_kv, row.head_dim_v),
           strides(row.heads_kv, row.head_dim_v, row.layout == Layout::kKeyHeadShared)),
        out_(arena_, dtype(), shape(row.heads_q, row.head_dim_v),
             strides(row.heads_q, row.head_dim_v)),
        dout_(arena_, dtype(), shape(row.heads_q, row.head_dim_v),
              row.layout == Layout::kDoutShared ? std::vector<std::int64_t>(4, 0)
                                                : strides(row.heads_q, row.head_dim_v)),
        lse_(arena_, {kDLFloat, 32, 1}, lse_shape()),
        dq_(arena_, dtype(), shape(row.heads_q, row.head_dim), strides(row.heads_q, row.head_dim)),
        dk_(arena_, dtype(), shape(row.heads_kv, row.head_dim),
            strides(row.heads_kv, row.head_dim)),
        dv_(arena_, dtype(), shape(row.heads_kv, row.head_dim_v),
            strides(row.heads_kv, row.head_dim_v)) {
    if (row.layout == Layout::kOffset) {
      for (DeviceTensor* tensor : {&q_, &k_, &v_}) {
        tensor->dl.byte_offset = 2;
      }
    }
    std::uint64_t seed = 0;
    for (const DeviceTensor* tensor : {&q_, &k_, &v_, &dout_}) {
      fill_normal(*tensor, row.f16, ++seed);
    }
    tensors_.q = &q_.dl;
    tensors_.k = &k_.dl;
    tensors_.v = &v_.dl;
    tensors_.out = &out_.dl;
    tensors_.dout = &dout_.dl;
    tensors_.lse = &lse_.dl;
    tensors_.dq = &dq_.dl;
    tensors_.dk = &dk_.dl;
    tensors_.dv = &dv_.dl;
    options_.backend = "sm90";
    options_.window_left = row.window_left;
    options_.window_right = row.window_right;
    options_.deterministic = row.deterministic ? 1 : 0;
    if (!row.lengths.empty()) {
      std::vector<std::int32_t> offsets = {0};
      for (const std::int32_t length : row.lengths) {
        offsets.push_back(offsets.back() + length);
      }
      cu_seqlens_.emplace(arena_, DLDataType{kDLInt, 32, 1},
                          std::vector<std::int64_t>{static_cast<std::int64_t>(offsets.size())});
      require(cudaMemcpy(cu_seqlens_->dl.data, offsets.data(), cu_seqlens_->bytes,
                         cudaMemcpyHostToDevice));
      tensors_.cu_seqlens_q = tensors_.cu_seqlens_kv = &cu_seqlens_->dl;
      options_.max_seqlen_q = options_.max_seqlen_kv =
          *std::max_element(row.lengths.begin(), row.lengths.end());
    }
    // One workspace: the passes run one after the other.
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      std::size_t preferred = 0;
      require(fg_workspace_size(pass, &tensors_, &options_, nullptr, &preferred));
      workspace_bytes_ = std::max(workspace_bytes_, preferred);
    }
    workspace_ = arena_.allocate(workspace_bytes_);
    flush_ = flush_arena_.allocate(kFlushBytes);
    require(cudaStreamCreate(&stream_));
    require(cudaEventCreate(&begin_));
    require(cudaEventCreate(&end_));
    enqueue(FG_FORWARD);  // the backward's out and lse
    require(cudaStreamSynchronize(stream_));
  }
  ~Call() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void enqueue(fg_pass pass) const {
    const auto call = pass == FG_FORWARD ? fg_forward : fg_backward;
    require(call(&tensors_, &options_, workspace_, workspace_bytes_, stream_));
  }

  // The GPU's time for `count` calls, one after the other. It writes another buffer first: the L2
  // then holds nothing of the tensors, and the calls are there when the GPU comes to them.
  [[nodiscard]] double milliseconds(fg_pass pass, int count) const {
    require(cudaMemsetAsync(flush_, 0, kFlushBytes, stream_));
    require(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < count; ++i) {
      enqueue(pass);
    }
    require(cudaEventRecord(end_, stream_));
    require(cudaEventSynchronize(end_));
    float result = 0;
    require(cudaEventElapsedTime(&result, begin_, end_));
    return result;
  }

  // Until a call returns, in a row of some that the GPU has room for.
  [[nodiscard]] double host_microseconds(fg_pass pass) const {
    constexpr int kCalls = 32;
    require(cudaStreamSynchronize(stream_));
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      enqueue(pass);
    }
    const std::chrono::duration<double, std::micro> elapsed =
        std::chrono::steady_clock::now() - begin;
    require(cudaStreamSynchronize(stream_));
    return elapsed.count() / kCalls;
  }

  [[nodiscard]] std::vector<KernelTime> kernels(fg_pass pass) const {
    return kernel_times(stream_, [&] { enqueue(pass); });
  }

  [[nodiscard]] std::size_t bytes() const { return arena_.bytes(); }
  [[nodiscard]] std::size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  [[nodiscard]] DLDataType dtype() const {
    return {static_cast<std::uint8_t>(row_.f16 ? kDLFloat : kDLBfloat), 16, 1};
  }
  [[nodiscard]] std::vector<std::int64_t> shape(std::int64_t heads, std::int64_t dim) const {
    return row_.lengths.empty() ? std::vector{row_.batch, row_.seqlen, heads, dim}
                                : std::vector{row_.tokens(), heads, dim};
  }
  // Of a tensor with that many heads, or with one head that is seen so often.
  [[nodiscard]] std::vector<std::int64_t> strides(std::int64_t heads, std::int64_t dim,
                                                  bool head_shared = false) const {
    if (row_.layout == Layout::kHeadsFirst) {
      return {heads * row_.seqlen * dim, dim, row_.seqlen * dim, 1};
    }
    if (head_shared) {
      return {row_.seqlen * dim, dim, 0, 1};
    }
    if (row_.layout == Layout::kBetweenOthers) {
      const std::int64_t wide = heads * (dim + 1);
      return {row_.seqlen * wide, wide, dim + 1, 1};
    }
    return {};
  }
  [[nodiscard]] std::vector<std::int64_t> lse_shape() const {
    return row_.lengths.empty() ? std::vector{row_.batch, row_.heads_q, row_.seqlen}
                                : std::vector{row_.heads_q, row_.tokens()};
  }

  Row row_;
  Arena arena_;
  DeviceTensor q_, k_, v_, out_, dout_, lse_, dq_, dk_, dv_;
  std::optional<DeviceTensor> cu_seqlens_;
  fg_tensors tensors_ = FG_TENSORS_INIT;
  fg_options options_ = FG_OPTIONS_INIT;
  void* workspace_ = nullptr;
  static constexpr std::size_t kFlushBytes = std::size_t{1} << 30;
  Arena flush_arena_;  // apart, so that bytes() is what attention needs
  void* flush_ = nullptr;
  std::size_t workspace_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// One pass of a row: a line on standard output, and the same for the file.
ordered_json measure(const Row& row, const Call& call, fg_pass pass, const Arguments& arguments,
                     const Meter& meter) {
  constexpr int kCoolCalls = 11;
  constexpr auto kPauseMicroseconds = 40000;
  const double flops = row.flops(pass);
  const char* pass_name = pass == FG_FORWARD ? "forward" : "backward";
  static_cast<void>(call.milliseconds(pass, 1));  // loads the kernels
  const double host_us = call.host_microseconds(pass);
  std::vector<double> cool;
  for (int i = 0; i < kCoolCalls; ++i) {
    usleep(kPauseMicroseconds);
    cool.push_back(call.milliseconds(pass, 1));
  }
  const double cool_ms = median(cool);
  const auto tflops = [&](double milliseconds) { return flops / milliseconds * 1e-9; };
  ordered_json result = {{"row", row.name()},
                         {"pass", pass_name},
                         {"flops", flops},
                         {"cool_ms", cool_ms},
                         {"cool_tflops", tflops(cool_ms)},
                         {"host_us", host_us},
                         {"workspace_bytes", call.workspace_bytes()}};
  std::printf("%-36s %-8s cool %6.1f", row.name().c_str(), pass_name, tflops(cool_ms));
  if (!arguments.cool_only) {
    static_cast<void>(call.milliseconds(pass, std::max(1, static_cast<int>(400 / cool_ms))));
    const int count = std::max(1, static_cast<int>(900 / cool_ms));
    const double joules = meter.joules();
    const double milliseconds = call.milliseconds(pass, count) / count;
    const double joules_per_tflop = (meter.joules() - joules) / (flops * count * 1e-12);
    const unsigned megahertz = meter.megahertz();
    result["sustained_ms"] = milliseconds;
    result["sustained_tflops"] = tflops(milliseconds);
    result["sustained_mhz"] = megahertz;
    result["joules_per_tflop"] = joules_per_tflop;
    std::printf(" sustained %6.1f TFLOP/s %4u MHz %.3f J/TFLOP", tflops(milliseconds), megahertz,
                joules_per_tflop);
  }
  std::printf(", host %.1f us\n", host_us);
  if (arguments.kernels) {
    ordered_json kernels = ordered_json::array();
    for (const KernelTime& kernel : call.kernels(pass)) {
      kernels.push_back({{"kernel", kernel.name}, {"ms", kernel.milliseconds}});
      std::printf("    %9.4f ms %6.1f TFLOP/s if all of it  %s\n", kernel.milliseconds,
                  tflops(kernel.milliseconds), kernel.name.c_str());
    }
    result["kernels"] = kernels;
  }
  std::fflush(stdout);
  return result;
}

// Once through 512K tokens, and what it took.
ordered_json measure_long() {
  const Row row = long_row();
  const Call call(row);
  ordered_json result = {{"row", row.name()}, {"heads", row.heads_q}};
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    const double milliseconds = call.milliseconds(pass, 1);
    const char* name = pass == FG_FORWARD ? "forward" : "backward";
    result[name] = {{"ms", milliseconds}, {"tflops", row.flops(pass) / milliseconds * 1e-9}};
    std::printf("%s %s %.1f ms, %.1f TFLOP/s\n", row.name().c_str(), name, milliseconds,
                row.flops(pass) / milliseconds * 1e-9);
  }
  result["memory_bytes"] = call.bytes();
  result["workspace_bytes"] = call.workspace_bytes();
  result["standard_bytes_per_head"] = row.standard_bytes() / static_cast<double>(row.heads_q);
  std::printf(
      "memory %.2f GB: tensors and %.2f GB of workspace; standard attention's S and P: "
      "%.0f GB a head, %ld heads\n",
      static_cast<double>(call.bytes()) * 1e-9, static_cast<double>(call.workspace_bytes()) * 1e-9,
      row.standard_bytes() / static_cast<double>(row.heads_q) * 1e-9,
      static_cast<long>(row.heads_q));
  std::fflush(stdout);
  return result;
}

ordered_json describe(const Meter& meter, const std::string& command, const std::string& commit) {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0));
  return {{"version", fg_version()},
          {"commit", commit},
          {"date", fmt::format("{:%FT%TZ}", fmt::gmtime(std::time(nullptr)))},
          {"command", command},
          {"device", properties.name},
          {"multiprocessors", properties.multiProcessorCount},
          {"driver", meter.driver_version()},
          {"max_mhz", meter.max_megahertz()},
          {"power_limit_watts", meter.power_limit_watts()},
          {"cool", "single calls 40 ms apart, median of 11, the L2 flushed before each"},
          {"sustained", "0.9 s of calls after 0.4 s of warm-up"}};
}

bool chosen(const Row& row, const Arguments& arguments) {
  return arguments.rows.empty() ||
         std::any_of(arguments.rows.begin(), arguments.rows.end(), [&](const std::string& words) {
           return (row.name() + " ").find(words + " ") != std::string::npos;
         });
}

void write_report(const ordered_json& report, const std::string& path) {
  if (path.empty()) {
    return;
  }
  std::ofstream file(path);
  file << report.dump(1) << "\n";
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

void run(const Arguments& arguments, const std::string& command) {
  const Meter meter;
  ordered_json report = describe(meter, command, arguments.commit);
  std::printf("%s, driver %s\n", report["device"].get<std::string>().c_str(),
              report["driver"].get<std::string>().c_str());
  ordered_json rows = ordered_json::array();
  for (const Row& row : arguments.odd_rows ? odd_rows() : all_rows()) {
    if (arguments.long_run || !chosen(row, arguments)) {
      continue;
    }
    const Call call(row);
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      // A forward is always deterministic.
      if (arguments.pass != (pass == FG_FORWARD ? "backward" : "forward") &&
          !(row.deterministic && pass == FG_FORWARD)) {
        rows.push_back(measure(row, call, pass, arguments, meter));
      }
    }
    // Row by row: a run that is cut short leaves what it has.
    report["rows"] = rows;
    write_report(report, arguments.json);
  }
  if (arguments.long_run) {
    report["long"] = measure_long();
    write_report(report, arguments.json);
  }
}

}  // namespace
}  // namespace flashgrad::bench

int main(int argc, char** argv) {
  using namespace flashgrad::bench;  // NOLINT(google-build-using-namespace)
  CLI::App app("Times flashgrad on a GPU, whole calls and kernels.", "bench_cuda");
  Arguments arguments;
  app.add_option("--rows", arguments.rows,
                 "Only rows whose name holds one of these: 'd128 causal 4k', '16k', 'f16 d64'");
  app.add_option("--pass", arguments.pass, "forward, backward or both")
      ->check(CLI::IsMember({"forward", "backward", "both"}));
  app.add_flag("--cool", arguments.cool_only, "Leave the sustained regime out");
  app.add_flag("--kernels", arguments.kernels, "Also each kernel of a call");
  app.add_flag("--odd", arguments.odd_rows,
               "Instead: odd head dims and strides, and their even neighbours");
  app.add_flag("--long", arguments.long_run, "Instead: 512K tokens, with memory");
  app.add_option("--commit", arguments.commit, "Goes into the file");
  app.add_option("--json", arguments.json, "Writes the results there");
  CLI11_PARSE(app, argc, argv);
  std::string command;
  for (int i = 0; i < argc; ++i) {
    command += (i > 0 ? " " : "") + std::string(argv[i]);
  }
  try {
    run(arguments, command);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cuda: %s\n", error.what());
    return 1;
  }
  return 0;
}
