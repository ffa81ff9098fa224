// SPDX-License-Identifier: Apache-2.0
// Implements measured.hpp.
#include "plan/measured.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "core/problem.hpp"

namespace flashgrad::plan {
namespace {

using nlohmann::json;

constexpr std::int64_t kGpuTokens = 16384;  // of every batch measured on a GPU
constexpr std::int64_t kGpuHidden = 2048;   // heads_q times head_dim, up to head dim 128 and at 256

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (text == name(dtype)) {
      return dtype;
    }
  }
  throw std::invalid_argument("a dtype that no backend here has: " + text);
}

void require_positive(double x) {
  if (!(x > 0) || std::isinf(x)) {
    throw std::invalid_argument("a time or a rate that is not positive");
  }
}

void add(const Call& call, double seconds, double f32_gflops, ResultFile* file) {
  require_sane(call);
  require_positive(seconds);
  require_positive(f32_gflops);
  file->rows.push_back(
      {.what = shape_of(call), .call = call, .seconds = seconds, .f32_gflops = f32_gflops});
}

void add(const Call& call, double seconds, Regime regime, ResultFile* file) {
  require_sane(call);
  require_positive(seconds);
  file->rows.push_back({.what = shape_of(call) + ", " + name_of(regime),
                        .call = call,
                        .seconds = seconds,
                        .gpu = true,
                        .regime = regime});
}

// None, "causal", or how many keys before its own a row sees.
BandMask parse_window(const json& window) {
  BandMask mask;
  if (!window.is_null()) {
    mask.right = 0;
    mask.left = window.is_number() ? window.get<std::int64_t>() : kUnbounded;
  }
  return mask;
}

std::int64_t number_after(const std::string& text, const std::string& key) {
  const std::size_t at = text.find(key + "=");
  if (at == std::string::npos) {
    throw std::invalid_argument("a shape without " + key);
  }
  return std::stoll(text.substr(at + key.size() + 1));
}

// `flashgrad bench`.
void add_bench(const json& run, ResultFile* file) {
  const double ratio = run.at("f32_peak").at("gflops").get<double>() /
                       run.at("bf16_peak").at("gflops").get<double>();
  for (const json& row : run.at("rows")) {
    const auto shape = row.at("shape").get<std::string>();
    Call call;
    call.dtype = parse_dtype(row.at("dtype").get<std::string>());
    call.batch = number_after(shape, "b");
    call.heads_q = number_after(shape, "hq");
    call.heads_kv = number_after(shape, "hkv");
    call.seqlen = number_after(shape, "sq");
    call.head_dim = number_after(shape, ",d");
    call.head_dim_v = number_after(shape, "dv");
    call.mask.right = row.at("mask").get<std::string>().find("causal") == 0 ? 0 : kUnbounded;
    for (const bool backward : {false, true}) {
      call.backward = backward;
      add(call, row.at(backward ? "backward" : "forward").at("seconds").get<double>(),
          row.at("peak_gflops").get<double>() * (call.dtype == DType::kBF16 ? ratio : 1.0), file);
    }
  }
}

void add_peers_row(const json& measured, bool backward, ResultFile* file) {
  // benchmarks/peers.py measures no peak: the same machine's, by `flashgrad bench`
  // (2026-11-29-zen5-bench.json).
  constexpr double kF32Gflops = 534;
  const json& problem = measured.at("problem");
  Call call;
  call.backward = backward;
  call.dtype = parse_dtype(problem.at("dtype").get<std::string>());
  call.batch = problem.at("batch").get<std::int64_t>();
  call.heads_q = problem.at("heads_q").get<std::int64_t>();
  call.heads_kv = problem.at("heads_kv").get<std::int64_t>();
  call.seqlen = problem.at("seqlen").get<std::int64_t>();
  call.head_dim = call.head_dim_v = problem.at("head_dim").get<std::int64_t>();
  call.mask = parse_window(problem.at("window"));
  add(call, measured.at("seconds").get<double>(), kF32Gflops, file);
}

// benchmarks/peers.py on the CPU: pairs of measurements.
void add_peers(const json& results, ResultFile* file) {
  for (const json& row : results.at("rows")) {
    for (const char* const which : {"first", "second"}) {
      if (row.at(which).at("library") == "flashgrad") {
        add_peers_row(row.at(which), row.at("pass") == "backward", file);
      }
    }
  }
  if (results.at("suite") == "speed") {
    file->left_out.emplace_back("PyTorch's times: another library's kernels");
  }
}

// benchmarks/peers.py --device cuda (peers_cuda.py).
void add_peers_cuda(const json& results, ResultFile* file) {
  for (const json& record : results.at("rows")) {
    const json& row = record.at("row");
    Call call;
    call.dtype = parse_dtype(row.at("dtype").get<std::string>());
    call.heads_q = row.at("heads_q").get<std::int64_t>();
    call.heads_kv = row.at("heads_kv").get<std::int64_t>();
    call.seqlen = row.at("seqlen").get<std::int64_t>();
    call.head_dim = row.at("head_dim").get<std::int64_t>();
    call.head_dim_v =
        row.at("head_dim_v").is_null() ? call.head_dim : row.at("head_dim_v").get<std::int64_t>();
    call.deterministic = row.at("deterministic").get<bool>();
    call.mask = parse_window(row.at("window"));
    row.at("lengths").get_to(call.lengths);
    call.batch = std::max<std::int64_t>(1, kGpuTokens / std::max<std::int64_t>(1, call.seqlen));
    const json& ours = record.at("results").at("flashgrad");
    for (const bool backward : {false, true}) {
      const auto pass = ours.find(backward ? "backward" : "forward");
      if (pass != ours.end()) {
        call.backward = backward;
        add(call, pass->at("cool_seconds").get<double>(), Regime::kCool, file);
        add(call, pass->at("seconds").get<double>(), Regime::kSustained, file);
      }
    }
  }
  file->left_out.emplace_back("the peers' times: other libraries' kernels");
}

// "bf16 d192/128 causal 4k GQA 16/4 deterministic", "d128 full 16384", "d128 window 1024,0 16k".
Call parse_row(const std::string& row, bool backward) {
  Call call;
  call.backward = backward;
  call.dtype = DType::kBF16;
  std::istringstream words(row);
  std::string word;
  while (words >> word) {
    const std::size_t slash = word.find('/');
    const bool digit = word[0] >= '0' && word[0] <= '9';
    if (word[0] == 'd' && word.size() > 1 && word[1] >= '0' && word[1] <= '9') {
      call.head_dim = std::stoll(word.substr(1));
      call.head_dim_v =
          slash == std::string::npos ? call.head_dim : std::stoll(word.substr(slash + 1));
      call.heads_q = call.heads_kv =
          call.head_dim == 192 ? 16 : kGpuHidden / std::max<std::int64_t>(1, call.head_dim);
    } else if (word == "bf16" || word == "f16") {
      call.dtype = parse_dtype(word);
    } else if (word == "causal") {
      call.mask.right = 0;
    } else if (word == "window") {
      words >> word;
      call.mask = {std::stoll(word), 0, Alignment::kBottomRight};
    } else if (word == "deterministic") {
      call.deterministic = true;
    } else if (digit && slash != std::string::npos) {
      call.heads_q = std::stoll(word);
      call.heads_kv = std::stoll(word.substr(slash + 1));
    } else if (digit) {
      call.seqlen = std::stoll(word) * (word.find('k') == std::string::npos ? 1 : 1024);
      call.batch = std::max<std::int64_t>(1, kGpuTokens / std::max<std::int64_t>(1, call.seqlen));
    }
  }
  if (call.head_dim == 0 || call.seqlen == 0) {
    throw std::invalid_argument("a row without head_dim or length: " + row);
  }
  return call;
}

// Rates in TFLOP/s, cool and sustained.
void add_rates(const json& table, bool backward, ResultFile* file) {
  for (const auto& [row, rates] : table.items()) {
    const Call call = parse_row(row, backward);
    for (const Regime regime : {Regime::kCool, Regime::kSustained}) {
      const double tflops = rates.at(regime == Regime::kCool ? 0 : 1).get<double>();
      add(call, call.flop() / (tflops * 1e12), regime, file);
    }
  }
}

// The programs of tests/cuda. Runs stand newest first.
void add_sm90(const json& results, ResultFile* file) {
  const auto what = results.at("what").get<std::string>();
  if (what.find("sm90 forward") == 0) {
    add_rates(results.at("runs").at(0).at("cool / sustained / MHz / J per TFLOP"), false, file);
    file->left_out.emplace_back("older runs: kernels that have changed since");
  } else if (results.contains("rows")) {
    add_rates(results.at("rows"), true, file);
  } else {
    for (const json& run : results.at("runs")) {
      if (run.contains("commit")) {
        json table = run.at("bf16");
        if (what.find("above head dim 128") == std::string::npos) {
          for (auto row = table.begin(); row != table.end();) {
            const bool replaced =
                row.key().find("d256") == 0 || row.key().find("deterministic") != std::string::npos;
            row = replaced ? table.erase(row) : std::next(row);
          }
          file->left_out.emplace_back(
              "d256 and deterministic: kernels that others have replaced since");
        }
        add_rates(table, true, file);
      }
    }
  }
}

// bench_cuda.
void add_bench_cuda(const json& results, ResultFile* file) {
  for (const json& row : results.at("rows")) {
    const auto row_name = row.at("row").get<std::string>();
    const Call call = parse_row(row_name, row.at("pass") == "backward");
    if (call.deterministic) {
      file->left_out.push_back(row_name + ": kernels that others have replaced since");
    } else {
      add(call, call.flop() / (row.at("cool_tflops").get<double>() * 1e12), Regime::kCool, file);
    }
  }
  const json& whole = results.at("long");
  for (const bool backward : {false, true}) {
    Call call = parse_row(whole.at("row").get<std::string>(), backward);
    call.heads_q = call.heads_kv = whole.at("heads").get<std::int64_t>();
    add(call, whole.at(backward ? "backward" : "forward").at("ms").get<double>() / 1e3,
        Regime::kSustained, file);
  }
}

// The same as the program writes it.
void add_bench_cuda_rows(const json& results, ResultFile* file) {
  for (const json& row : results.at("rows")) {
    const Call call = parse_row(row.at("row").get<std::string>(), row.at("pass") == "backward");
    add(call, row.at("cool_ms").get<double>() / 1e3, Regime::kCool, file);
    if (row.contains("sustained_ms")) {
      add(call, row.at("sustained_ms").get<double>() / 1e3, Regime::kSustained, file);
    }
  }
}

// From when on the kernels of main serve units (unit_pipeline.hpp), the forward's incomplete tile
// is the one that sees the fewest keys (fwd_schedule.hpp), and key heads are divided
// (bwd_plan.hpp): rows that were measured before are predicted without. A file without a date is of
// today's kernels.
constexpr const char* kServesUnitsSince = "2026-11-30T02:50";
constexpr const char* kIncompleteFirstSince = "2026-11-30T09:00";
constexpr const char* kPartsSince = "2026-11-30T19:00";

bool is_since(const json& results, const char* time) {
  return !results.contains("date") || results.at("date").get<std::string>() >= time;
}

// Files without times of calls, by what only they have.
const char* reason_to_leave_out(const json& results) {
  if (results.contains("suite") && results.at("suite") == "memory") {
    return "bytes, not times: `flashgrad plan memory`";
  }
  if (results.contains("torch_us")) {
    return "what Python adds to a call of one row: no kernel's work";
  }
  if (results.contains("comparison")) {
    return "whole training steps, most of which is PyTorch's";
  }
  if (results.contains("gradients")) {
    return "errors, not times";
  }
  if (results.contains("before_and_after")) {
    return "the same calls by two commits: what a change moved";
  }
  if (results.contains("windows")) {
    return "the same calls by builds of several forms: what serving units moved";
  }
  if (results.contains("columns")) {
    return "clocks, on which the model's clock is fitted, not times";
  }
  if (results.contains("what") &&
      results.at("what").get<std::string>().find("The tests of label gpu") == 0) {
    return "tests that ran, not times";
  }
  return nullptr;
}

}  // namespace

std::string shape_of(const Call& call) {
  const auto side = [](std::int64_t reach) {
    return reach >= kUnboundedFrom ? std::string("inf") : std::to_string(reach);
  };
  std::string text = std::string(call.backward ? "backward " : "forward ") + name(call.dtype) + " ";
  text += call.lengths.empty() ? std::to_string(call.batch) : std::to_string(call.lengths.size());
  text += "," + std::to_string(call.heads_q);
  text += call.heads_kv == call.heads_q ? "" : "/" + std::to_string(call.heads_kv);
  text += "," + (call.lengths.empty() ? std::to_string(call.seqlen) : std::string("packed"));
  text += "," + std::to_string(call.head_dim);
  text += call.head_dim_v == call.head_dim ? "" : "/" + std::to_string(call.head_dim_v);
  if (call.causal()) {
    text += " causal";
  } else if (call.mask.left >= kUnboundedFrom && call.mask.right >= kUnboundedFrom) {
    text += " full";
  } else {
    text += " window " + side(call.mask.left) + "," + side(call.mask.right);
  }
  return text + (call.deterministic ? " deterministic" : "");
}

void require_sane(const Call& call) {
  constexpr std::int64_t kMaxTokens = 1 << 22;
  constexpr double kMaxTiles = 1 << 22;
  constexpr double kMaxTurns = 1 << 26;  // at dq, of 64 queries and 64 keys; a minute
  const auto between = [](std::int64_t x, std::int64_t low, std::int64_t high) {
    return x >= low && x <= high;
  };
  bool sane = between(call.batch, 1, 1 << 16) && between(call.heads_kv, 1, 1 << 12) &&
              between(call.heads_q, call.heads_kv, 1 << 12) && call.heads_q % call.heads_kv == 0 &&
              between(call.seqlen, 1, kMaxTokens) && between(call.head_dim, 1, kMaxHeadDim) &&
              between(call.head_dim_v, 1, kMaxHeadDim);
  std::int64_t sum = 0;
  for (const std::int32_t length : call.lengths) {
    sane = sane && between(length, 0, kMaxTokens) && between(sum += length, 0, kMaxTokens);
  }
  if (sane && call.pairs() == 0) {
    throw std::invalid_argument("nothing to do: no row sees a key: " + shape_of(call));
  }
  sane = sane &&
         static_cast<double>(call.tokens()) * static_cast<double>(call.heads_q) / 64 <= kMaxTiles &&
         (!call.deterministic ||
          static_cast<double>(call.heads_q) * call.pairs() / (64 * 64) <= kMaxTurns);
  if (!sane) {
    throw std::invalid_argument("a call that can't be, or is too large to predict: " +
                                shape_of(call));
  }
}

ResultFile read_results(const std::string& text) {
  ResultFile file;
  try {
    const json results = json::parse(text);
    if (const char* const reason = reason_to_leave_out(results)) {
      file.left_out.emplace_back(reason);
    } else if (results.contains("suite")) {
      results.at("suite") == "cuda" ? add_peers_cuda(results, &file) : add_peers(results, &file);
    } else if (results.contains("f32_peak")) {
      add_bench(results, &file);
    } else if (results.contains("multiprocessors")) {
      add_bench_cuda_rows(results, &file);
    } else if (!results.contains("what")) {
      for (const json& run : results.at("runs")) {
        add_bench(run, &file);
      }
    } else if (results.contains("long")) {
      add_bench_cuda(results, &file);
    } else {
      add_sm90(results, &file);
    }
    for (Measured& row : file.rows) {
      row.call.may_serve = is_since(results, kServesUnitsSince);
      row.call.may_part = is_since(results, kPartsSince);
      row.call.incomplete_first = is_since(results, kIncompleteFirstSince);
    }
  } catch (const json::exception& error) {
    throw std::invalid_argument(std::string("not a result file that is known: ") + error.what());
  } catch (const std::logic_error& error) {  // of stoll, and this file's own
    throw std::invalid_argument(std::string("not a result file that is known: ") + error.what());
  }
  return file;
}

std::vector<double> predict_seconds(const std::vector<Measured>& rows) {
  std::vector<double> predicted;
  const Call* last = nullptr;  // both regimes of a call follow each other
  std::vector<KernelTime> kernels;
  for (const Measured& row : rows) {
    if (!row.gpu) {
      predicted.push_back(predict_cpu_seconds(row.call, row.f32_gflops));
      continue;
    }
    if (last == nullptr || !(*last == row.call)) {
      kernels = predict_sm90_kernels(row.call);
      last = &row.call;
    }
    double seconds = 0;
    for (const KernelTime& kernel : kernels) {
      seconds += seconds_of(kernel, row.regime);
    }
    predicted.push_back(seconds);
  }
  return predicted;
}

}  // namespace flashgrad::plan
