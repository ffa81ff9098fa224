// SPDX-License-Identifier: Apache-2.0
// Implements predict.hpp.
#include "plan/predict.hpp"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "plan/account.hpp"
#include "plan/schedule.hpp"

namespace flashgrad::plan {
namespace {

using nlohmann::json;

// AVX-512: vectors of 16 floats; a bf16 dot product takes two numbers of each lane.
constexpr double kLanes = 16;

// Vector instructions for a vector of 16 logits besides the products, counted in
// src/cpu/forward_tiles.hpp and backward_tile.hpp; rounding, fraction and scalef of exp2 count
// twice, since Zen 5 starts one of them a cycle and two multiply-adds.
double elementwise_instructions(bool backward, bool pairs) {
  // exp2: round, fraction, scalef; multiply-adds by its degree.
  const double exp2 = 6 + (pairs ? (backward ? 3 : 4) : 6);
  if (backward) {
    // p: multiply-add, minimum; ds: add, multiply. Pairs: store of the weight, two narrowings and
    // an interleaving, each of two vectors; else: log2(e).
    return exp2 + 4 + (pairs ? 3 : 1);
  }
  // Maximum, subtract, multiply, sum; pairs: narrow and interleave.
  return exp2 + 4 + (pairs ? 1.5 : 1);
}

// Fitted on the rows of 2026-11-29-zen5-bench.json and -bench-quiet.json (two cores of a Zen 5):
// the products take a tenth longer than their multiply-adds (panels stream from the second cache),
// and tensors are packed and unpacked at this rate.
constexpr double kProductCost = 1.1;
constexpr double kPackBytesPerSecond = 16e9;
// Keys that a row of a causal mask pays for beyond those it sees: tiles and blocks at the edge.
constexpr double kEdgeKeys = 128;

// Bytes per token and head that packing reads or writes; a unit is 4 bytes, of one or two numbers.
double packed_bytes(const Call& call, double numbers_per_unit) {
  const double unit = 4 * static_cast<double>(call.head_dim);
  // Forward: q, k, v; out twice. Backward: q and dout twice, k twice, v; dq, dk, dv and out.
  return call.backward ? unit * (6 / numbers_per_unit + 4) : unit * (3 / numbers_per_unit + 2);
}

// The sm90 kernels' products and exponentials do not hide each other: the steps that were measured
// take the sum of both (docs/model.md).
double step_cycles(const Account& a) { return a.mma + a.exp; }

// Of preparing and finishing the backward, each a kernel: out and dout are read, the f32 dq sums
// cleared, read and converted.
double prepare_and_finish_bytes(const Call& call) {
  return 14.0 * static_cast<double>(call.batch * call.heads * call.seqlen * call.head_dim);
}

constexpr double kLaunchSeconds = 5e-6;

// The SM clock of the backward's short bursts, from its own numbers: 3095 clocks a step at 729
// TFLOP/s. The result file has none.
constexpr double kBackwardMhz = 1630;

std::int64_t number_after(const std::string& text, const std::string& key) {
  const std::size_t at = text.find(key + "=");
  if (at == std::string::npos) {
    throw std::invalid_argument("a shape without " + key);
  }
  return std::stoll(text.substr(at + key.size() + 1));
}

DType parse_dtype(const std::string& text) {
  return text == "bf16" ? DType::kBF16 : text == "f16" ? DType::kF16 : DType::kF32;
}

// f16 tensors are computed in f32.
bool computes_in_pairs(const Call& call) { return call.dtype == DType::kBF16; }

void add_bench(const json& run, std::vector<Measured>* rows) {
  const double ratio = run.at("f32_peak").at("gflops").get<double>() /
                       run.at("bf16_peak").at("gflops").get<double>();
  for (const json& row : run.at("rows")) {
    const auto shape = row.at("shape").get<std::string>();
    for (const bool backward : {false, true}) {
      Measured m;
      m.call.backward = backward;
      m.call.dtype = parse_dtype(row.at("dtype").get<std::string>());
      m.call.batch = number_after(shape, "b");
      m.call.heads = number_after(shape, "hq");
      m.call.seqlen = number_after(shape, "sq");
      m.call.head_dim = number_after(shape, ",d");
      m.call.causal = row.at("mask").get<std::string>().find("causal") == 0;
      m.seconds = row.at(backward ? "backward" : "forward").at("seconds").get<double>();
      m.f32_gflops =
          row.at("peak_gflops").get<double>() * (computes_in_pairs(m.call) ? ratio : 1.0);
      rows->push_back(m);
    }
  }
}

void add_peers(const json& file, std::vector<Measured>* rows) {
  // The same machine's, measured by `flashgrad bench` on the same day.
  constexpr double kF32Gflops = 534;
  for (const json& row : file.at("rows")) {
    const json& problem = row.at("second").at("problem");
    Measured m;
    m.call.backward = row.at("pass") == "backward";
    m.call.dtype = parse_dtype(problem.at("dtype").get<std::string>());
    m.call.batch = problem.at("batch").get<std::int64_t>();
    m.call.heads = problem.at("heads_q").get<std::int64_t>();
    m.call.seqlen = problem.at("seqlen").get<std::int64_t>();
    m.call.head_dim = problem.at("head_dim").get<std::int64_t>();
    m.call.causal = !problem.at("window").is_null();
    m.seconds = row.at("second").at("seconds").get<double>();
    m.f32_gflops = kF32Gflops;
    rows->push_back(m);
  }
}

// Rows of a table like "d128 causal 4096" or "d64 full 16k, cluster": rates in TFLOP/s, cool and
// sustained, then MHz if it was read.
void add_sm90(const json& table, bool backward, std::vector<Measured>* rows) {
  for (const auto& [name, values] : table.items()) {
    std::istringstream words(name);
    std::string d;
    std::string mask;
    std::string length;
    words >> d >> mask >> length;
    Measured m;
    m.call.backward = backward;
    m.call.dtype = DType::kBF16;
    m.call.head_dim = std::stoll(d.substr(1));
    m.call.seqlen = std::stoll(length) * (length.find('k') == std::string::npos ? 1 : 1024);
    m.call.heads = 2048 / m.call.head_dim;
    m.call.batch = 16384 / m.call.seqlen;
    m.call.causal = mask == "causal";
    const bool modelled = name.find("deterministic") == std::string::npos &&
                          name.find("heads") == std::string::npos &&
                          !(backward && m.call.head_dim > 128);
    if (!modelled) {
      continue;
    }
    m.clock_mhz = values.size() > 2 ? values.at(2).get<double>() : kBackwardMhz;
    const double tflops = values.at(values.size() > 2 ? 1 : 0).get<double>();
    m.seconds = m.call.flop() / (tflops * 1e12);
    rows->push_back(m);
  }
}

}  // namespace

double Call::flop() const {
  const double pairs = static_cast<double>(batch * heads) * static_cast<double>(seqlen) *
                       static_cast<double>(seqlen) / (causal ? 2 : 1);
  return pairs * static_cast<double>(head_dim) * (backward ? 10 : 4);
}

double predict_cpu_seconds(const Call& call, double f32_gflops) {
  const double numbers_per_unit = computes_in_pairs(call) ? 2 : 1;
  const auto seqlen = static_cast<double>(call.seqlen);
  const auto tokens = static_cast<double>(call.batch * call.heads * call.seqlen);
  const double keys = call.causal ? (seqlen + kEdgeKeys) / 2 : seqlen;
  const double products = call.backward ? 5 : 2;
  const double instructions =
      products * static_cast<double>(call.head_dim) / numbers_per_unit * kProductCost +
      elementwise_instructions(call.backward, computes_in_pairs(call));
  const double instructions_per_second = f32_gflops * 1e9 / (2 * kLanes);
  return tokens * keys / kLanes * instructions / instructions_per_second +
         tokens * packed_bytes(call, numbers_per_unit) / kPackBytesPerSecond;
}

double predict_sm90_seconds(const Call& call, double clock_mhz) {
  const Device& h200 = find_device("h200");
  // As find_variant in bwd_launch.cu and the forward choose.
  const bool cluster = call.backward && call.head_dim == 128 && call.seqlen > 128 &&
                       (!call.causal || call.seqlen >= 4096);
  const std::string d = std::to_string(call.head_dim);
  const Kernel& kernel = find_kernel((call.backward ? "sm90-backward-D" : "sm90-forward-D") + d +
                                     (cluster ? "Cluster" : ""));
  ScheduleProblem problem;
  problem.backward = call.backward;
  problem.batch = call.batch;
  problem.seqlen_q = problem.seqlen_kv = call.seqlen;
  problem.heads_q = problem.heads_kv = call.heads;
  problem.head_dim = call.head_dim;
  problem.mask.right = call.causal ? 0 : kUnbounded;
  Machine machine;
  machine.processors = static_cast<int>(h200.sm_count) / (cluster ? 2 : 1);
  const TileSize tile{.rows = kernel.queries,
                      .keys = kernel.keys,
                      .cluster = cluster ? 2 : 1,
                      .slots = machine.processors};
  problem.l2_bytes = static_cast<std::int64_t>(h200.l2_bytes);
  problem.section = heads_in_l2(problem, tile);
  machine.step_cycles = step_cycles(account(kernel, h200));
  machine.tile_cycles = machine.step_cycles;  // the first loads, the last products, the results
  const Policy& policy = find_policy(call.backward, "sections");
  const Timeline timeline = simulate(problem, launch_order(problem, policy, tile), policy, machine);
  return timeline.makespan / (clock_mhz * 1e6) + kLaunchSeconds +
         (call.backward ? prepare_and_finish_bytes(call) / h200.hbm_bytes_per_s : 0);
}

double predict_seconds(const Measured& row) {
  return row.clock_mhz > 0 ? predict_sm90_seconds(row.call, row.clock_mhz)
                           : predict_cpu_seconds(row.call, row.f32_gflops);
}

std::vector<Measured> measured_rows(const std::string& text) {
  std::vector<Measured> rows;
  try {
    const json file = json::parse(text);
    if (file.contains("suite")) {
      if (file.at("suite") != "speed") {
        throw std::invalid_argument("of benchmarks/peers.py only the suite speed is covered");
      }
      add_peers(file, &rows);
    } else if (file.contains("f32_peak")) {
      add_bench(file, &rows);
    } else if (file.contains("what")) {
      const bool backward = file.at("what").get<std::string>().find("sm90 backward") == 0;
      const json& newest = file.at("runs").at(0);
      add_sm90(newest.at(backward ? "bf16" : "cool / sustained / MHz / J per TFLOP"), backward,
               &rows);
    } else {
      for (const json& run : file.at("runs")) {
        add_bench(run, &rows);
      }
    }
  } catch (const json::exception& error) {
    throw std::invalid_argument(std::string("not a result file that is known: ") + error.what());
  }
  for (Measured& row : rows) {
    row.what = std::string(row.call.backward ? "backward" : "forward") + " " +
               (row.call.dtype == DType::kF32    ? "f32"
                : row.call.dtype == DType::kBF16 ? "bf16"
                                                 : "f16") +
               " " + std::to_string(row.call.batch) + "," + std::to_string(row.call.heads) + "," +
               std::to_string(row.call.seqlen) + "," + std::to_string(row.call.head_dim) +
               (row.call.causal ? " causal" : " full");
  }
  return rows;
}

}  // namespace flashgrad::plan
