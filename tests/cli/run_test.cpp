// SPDX-License-Identifier: Apache-2.0
// `flashgrad run`: what it computes under each option, what it writes and prints.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <thread>

#include "tool.hpp"

namespace flashgrad::tool {
namespace {

namespace fs = std::filesystem;

using Names = std::vector<std::string>;
using Bytes = std::vector<std::byte>;

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kSeqlenQ = 33;
constexpr std::int64_t kSeqlenKv = 50;
constexpr std::int64_t kHeadsQ = 4;
constexpr std::int64_t kHeadsKv = 2;
constexpr std::int64_t kHeadDim = 24;
constexpr std::int64_t kHeadDimV = 16;

std::vector<FileTensor> forward_inputs(const std::string& dtype) {
  return {noise("q", dtype, {kBatch, kSeqlenQ, kHeadsQ, kHeadDim}),
          noise("k", dtype, {kBatch, kSeqlenKv, kHeadsKv, kHeadDim}),
          noise("v", dtype, {kBatch, kSeqlenKv, kHeadsKv, kHeadDimV})};
}

std::vector<FileTensor> inputs(const std::string& dtype) {
  std::vector<FileTensor> tensors = forward_inputs(dtype);
  tensors.push_back(noise("dout", dtype, {kBatch, kSeqlenQ, kHeadsQ, kHeadDimV}));
  return tensors;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]));
  }
  return largest;
}

class Run : public ToolTest {
 protected:
  // Runs with these options, which must succeed, and returns all output bytes.
  [[nodiscard]] std::vector<Bytes> outputs_with(const std::vector<std::string>& options) const {
    const ToolResult result = run(options);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    std::vector<Bytes> all;
    if (result.exit_status == 0) {
      for (const std::string& name : output_names()) {
        all.push_back(output_bytes(name));
      }
    }
    return all;
  }
};

TEST_F(Run, WritesWhatTheInputAsksFor) {
  write_input(forward_inputs("BF16"));
  ASSERT_EQ(run().exit_status, 0);
  EXPECT_EQ(output_names(), (Names{"lse", "out"}));

  write_input(inputs("BF16"));
  ASSERT_EQ(run().exit_status, 0);
  EXPECT_EQ(output_names(), (Names{"dk", "dq", "dv", "lse", "out"}));
  EXPECT_EQ(output_dtype("out"), "BF16");
  EXPECT_EQ(output_dtype("lse"), "F32");
  EXPECT_EQ(output_dtype("dq"), "BF16");

  std::vector<FileTensor> tensors = inputs("F16");
  tensors.push_back(noise("sinks", "F32", {kHeadsQ}));
  write_input(tensors);
  ASSERT_EQ(run({"--grad-dtype", "f32"}).exit_status, 0);
  EXPECT_EQ(output_names(), (Names{"dk", "dq", "dsinks", "dv", "lse", "out"}));
  EXPECT_EQ(output_dtype("out"), "F16");
  EXPECT_EQ(output_dtype("dq"), "F32");
  EXPECT_EQ(output_dtype("dk"), "F32");
  EXPECT_EQ(output_dtype("dv"), "F32");
  EXPECT_EQ(output_dtype("dsinks"), "F32");

  tensors = forward_inputs("F32");
  tensors.push_back(noise("dlse", "F32", {kBatch, kHeadsQ, kSeqlenQ}));
  write_input(tensors);
  ASSERT_EQ(run().exit_status, 0);
  EXPECT_EQ(output_names(), (Names{"dk", "dq", "dv", "lse", "out"}));
  const std::vector<double> dv = values("dv");
  EXPECT_TRUE(std::all_of(dv.begin(), dv.end(), [](double x) { return x == 0; }));
}

TEST_F(Run, PrintsBackendTimeSpeedAndMemory) {
  write_input(inputs("BF16"));
  const ToolResult result = run();
  for (const char* word : {"backend ", "forward", "backward", "GFLOP/s", "workspace", " B ",
                           "standard attention would hold", "S and P", "P and dP"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
  }
  // 2 matrices x 2 batches x 4 heads x 33 x 50 x 2 bytes.
  EXPECT_NE(result.out.find("51.6 KiB (S and P)"), std::string::npos) << result.out;
  EXPECT_EQ(result.err, "");
}

TEST_F(Run, NamesWhatItDoesNotRead) {
  std::vector<FileTensor> tensors = forward_inputs("BF16");
  tensors.push_back(noise("queries", "F32", {3}));
  tensors.push_back({"flag", "BOOL", {2}, Bytes(2)});
  // What models with weights of few bits hold beside.
  tensors.push_back({"blocks", "F4", {3, 2}, Bytes(3)});
  tensors.push_back({"scales", "F8_E8M0", {5}, Bytes(5)});
  tensors.push_back({"six", "F6_E3M2", {4}, Bytes(3)});
  write_input(tensors);
  const ToolResult result = run();
  EXPECT_EQ(result.exit_status, 0);
  EXPECT_NE(result.err.find("'queries'"), std::string::npos);
  EXPECT_NE(result.err.find("'flag'"), std::string::npos);
}

TEST_F(Run, NamesAFewOfTheMany) {
  std::vector<FileTensor> tensors = forward_inputs("BF16");
  for (int i = 0; i < 1000; ++i) {
    tensors.push_back({"weight" + std::to_string(i), "F32", {0}, {}});
  }
  write_input(tensors);
  const ToolResult result = run();
  EXPECT_EQ(result.exit_status, 0);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 9);
  EXPECT_NE(result.err.find("992 more tensors are not read"), std::string::npos) << result.err;
}

TEST_F(Run, WindowForms) {
  write_input(inputs("F32"));
  const auto full = outputs_with({});
  const auto causal = outputs_with({"--causal"});
  EXPECT_NE(full, causal);
  EXPECT_EQ(outputs_with({"--window", "inf,0"}), causal);
  EXPECT_EQ(outputs_with({"--window=inf,0"}), causal);
  EXPECT_EQ(outputs_with({"--window", "inf,inf"}), full);
  EXPECT_EQ(outputs_with({"--window", "9223372036854775807,2147483648"}), full);

  const auto negative = outputs_with({"--window", "-12,20"});
  EXPECT_EQ(outputs_with({"--window=-12,20"}), negative);
  EXPECT_NE(negative, full);
  EXPECT_NE(outputs_with({"--window", "12,-2"}), negative);
  EXPECT_NE(outputs_with({"--window", "12,20"}), negative);

  // An empty band: nothing is seen.
  ASSERT_EQ(run({"--window", "-1,-1"}).exit_status, 0);
  for (const double x : values("lse")) {
    EXPECT_EQ(x, -HUGE_VAL);
  }
  for (const char* name : {"out", "dq", "dk", "dv"}) {
    for (const double x : values(name)) {
      EXPECT_EQ(x, 0);
    }
  }
  EXPECT_EQ(run({"--window", "-9223372036854775808,-9223372036854775808"}).exit_status, 0);
}

TEST_F(Run, SideOfTheWindow) {
  // One query and 5 keys, aligned at the bottom right: the query stands at key 4.
  write_input({noise("q", "F32", {1, 1, 1, 4}), noise("k", "F32", {1, 5, 1, 4}),
               noise("v", "F32", {1, 5, 1, 1})});
  const SafetensorsFile file(path("in"));
  const Buffer v = file.load(*file.find("v"));
  const auto key = [&](std::size_t j) {
    float value = 0;
    std::memcpy(&value, v.data() + j * sizeof(value), sizeof(value));
    return static_cast<double>(value);
  };
  ASSERT_EQ(run({"--window", "0,0"}).exit_status, 0);
  EXPECT_EQ(values("out"), (std::vector<double>{key(4)}));
  ASSERT_EQ(run({"--window", "0,0", "--align", "top-left"}).exit_status, 0);
  EXPECT_EQ(values("out"), (std::vector<double>{key(0)}));
  ASSERT_EQ(run({"--window", "-2,2", "--align", "top-left"}).exit_status, 0);
  EXPECT_EQ(values("out"), (std::vector<double>{key(2)}));
  ASSERT_EQ(run({"--window", "1,-1"}).exit_status, 0);
  EXPECT_EQ(values("out"), (std::vector<double>{key(3)}));
}

TEST_F(Run, AlignScaleSoftcap) {
  write_input(inputs("F32"));
  const auto causal = outputs_with({"--causal"});
  EXPECT_EQ(outputs_with({"--causal", "--align", "bottom-right"}), causal);
  EXPECT_NE(outputs_with({"--causal", "--align", "top-left"}), causal);

  const auto full = outputs_with({});
  EXPECT_NE(outputs_with({"--scale", "-0.3"}), full);
  EXPECT_NE(outputs_with({"--softcap", "1.5"}), full);
  EXPECT_EQ(outputs_with({"--softcap", "0"}), full);

  // Scale 0: every key alike, lse = log(50).
  ASSERT_EQ(run({"--scale", "0"}).exit_status, 0);
  for (const double x : values("lse")) {
    EXPECT_NEAR(x, std::log(50.0), 1e-5);
  }
  // Capped to +-1e-6: nearly alike.
  ASSERT_EQ(run({"--softcap=1e-6"}).exit_status, 0);
  for (const double x : values("lse")) {
    EXPECT_NEAR(x, std::log(50.0), 1e-5);
  }
}

// Where factors leave the range of f32 the result is that of the limit, or the call is refused.
TEST_F(Run, ScaleAndSoftcapOfExtremeSize) {
  write_input(inputs("F32"));
  const auto full = outputs_with({});
  EXPECT_EQ(outputs_with({"--softcap", "1e300"}), full);
  EXPECT_EQ(outputs_with({"--softcap", "1e38"}), full);
  EXPECT_EQ(outputs_with({"--scale", "1e-50", "--softcap", "15"}),
            outputs_with({"--scale", "1e-50"}));
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--scale", "1e-20", "--softcap", "1e30"},
        {"--scale", "-1e-37", "--softcap", "1.5"},
        {"--softcap", "1e-45"},
        {"--softcap", "1e-300"},
        {"--softcap", "1e30"}}) {
    for (const char* isa : {"generic", ""}) {
      SCOPED_TRACE(testing::PrintToString(options) + isa);
      std::vector<std::string> checked = options;
      checked.emplace_back("--check");
      ToolEnvironment environment;
      environment.variables = {std::string("FLASHGRAD_CPU_ISA=") + isa};
      const ToolResult result = run(checked, environment);
      EXPECT_EQ(result.exit_status, 0) << result.out << result.err;
    }
  }
  std::filesystem::remove(path("out"));
  expect_refused({"--scale", "-1e39"}, 2, "scale: -1e+39, want a number in the range of f32");
}

TEST_F(Run, ThreadsGiveTheSameBits) {
  write_input(inputs("BF16"));
  const auto one = outputs_with({"--threads", "1"});
  EXPECT_EQ(outputs_with({"--threads", "2"}), one);
  EXPECT_EQ(outputs_with({"--threads=7"}), one);
  EXPECT_EQ(outputs_with({"--deterministic", "--threads", "3"}), one);
  const ToolResult many = run({"--threads", "1000000"});
  EXPECT_EQ(many.exit_status, 0) << many.err;
  EXPECT_NE(many.err.find("note"), std::string::npos);
}

TEST_F(Run, Backends) {
  write_input(inputs("F32"));
  ASSERT_EQ(run({"--backend", "reference"}).exit_status, 0);
  const std::vector<double> reference = values("dq");
  for (const char* backend : {"auto", "cpu"}) {
    const ToolResult result = run({"--backend", backend});
    ASSERT_EQ(result.exit_status, 0) << result.err;
    EXPECT_LT(largest_difference(values("dq"), reference), 1e-4);
    EXPECT_NE(result.out.find("backend cpu"), std::string::npos) << result.out;
  }
  EXPECT_NE(run({"--backend", "reference"}).out.find("backend reference"), std::string::npos);
  ToolEnvironment forced;
  forced.variables = {"FLASHGRAD_BACKEND=reference"};
  EXPECT_NE(run({}, forced).out.find("backend reference"), std::string::npos);
}

TEST_F(Run, DoubleIsForTheReference) {
  write_input(inputs("F64"));
  fs::remove(path("out"));
  expect_refused({"--backend", "cpu"}, 3, "f64");
  ASSERT_EQ(run({"--backend", "reference"}).exit_status, 0);
  EXPECT_EQ(output_dtype("out"), "F64");
  EXPECT_EQ(output_dtype("lse"), "F64");
  EXPECT_EQ(output_dtype("dk"), "F64");
}

TEST_F(Run, BackwardUsesTheGivenPair) {
  for (const char* dtype : {"F32", "BF16"}) {
    std::vector<FileTensor> tensors = inputs(dtype);
    write_input(tensors);
    const auto whole = outputs_with({"--causal"});
    tensors.push_back({"out", dtype, {kBatch, kSeqlenQ, kHeadsQ, kHeadDimV}, output_bytes("out")});
    tensors.push_back({"lse", "F32", {kBatch, kHeadsQ, kSeqlenQ}, output_bytes("lse")});
    write_input(tensors);
    EXPECT_EQ(outputs_with({"--causal"}), whole);
    EXPECT_EQ(run({"--causal"}).out.find("forward "), std::string::npos);

    // Another pair, which forward would not have computed, is used and handed on as it is.
    const FileTensor other = noise("out", dtype, {kBatch, kSeqlenQ, kHeadsQ, kHeadDimV});
    std::erase_if(tensors, [](const FileTensor& tensor) { return tensor.name == "out"; });
    tensors.push_back(other);
    write_input(tensors);
    EXPECT_NE(outputs_with({"--causal"}), whole);
    EXPECT_EQ(output_bytes("out"), other.bytes);
    EXPECT_EQ(output_names(), (Names{"dk", "dq", "dv", "lse", "out"}));
  }
}

TEST_F(Run, APairWithoutGradientsIsComputedAnew) {
  std::vector<FileTensor> tensors = forward_inputs("F32");
  write_input(tensors);
  const auto forward = outputs_with({});
  tensors.push_back(noise("out", "F32", {kBatch, kSeqlenQ, kHeadsQ, kHeadDimV}));
  tensors.push_back(noise("lse", "F32", {kBatch, kHeadsQ, kSeqlenQ}));
  write_input(tensors);
  EXPECT_EQ(outputs_with({}), forward);
  EXPECT_NE(run().err.find("note"), std::string::npos);
}

TEST_F(Run, PackedSequencesAreTheSequences) {
  // Two sequences, of 3 and 2 queries and 4 and 5 keys, alone and packed.
  std::vector<FileTensor> packed = {{"q", "F32", {5, 2, 8}, {}},
                                    {"k", "F32", {9, 2, 8}, {}},
                                    {"v", "F32", {9, 2, 8}, {}},
                                    {"dout", "F32", {5, 2, 8}, {}}};
  std::vector<double> dk;
  for (const std::int64_t b : {0, 1}) {
    std::vector<FileTensor> tensors = {
        noise("q", "F32", {1, 3 - b, 2, 8}), noise("k", "F32", {1, 4 + b, 2, 8}),
        noise("v", "F32", {1, 4 + b, 2, 8}), noise("dout", "F32", {1, 3 - b, 2, 8})};
    write_input(tensors);
    ASSERT_EQ(run({"--causal"}).exit_status, 0);
    const std::vector<double> more = values("dk");
    dk.insert(dk.end(), more.begin(), more.end());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      packed[i].bytes.insert(packed[i].bytes.end(), tensors[i].bytes.begin(),
                             tensors[i].bytes.end());
    }
  }
  packed.push_back(integers("cu_seqlens_q", "I32", {0, 3, 5}));
  packed.push_back(integers("cu_seqlens_kv", "I32", {0, 4, 9}));
  write_input(packed);
  ASSERT_EQ(run({"--causal", "--max-seqlen-q", "3", "--max-seqlen-kv", "5"}).exit_status, 0);
  EXPECT_LT(largest_difference(values("dk"), dk), 1e-5);
}

TEST_F(Run, SequsedAndOffset) {
  std::vector<FileTensor> tensors = inputs("F32");
  write_input(tensors);
  const auto whole = outputs_with({"--causal"});
  // The alignment's own shift, given as an offset.
  tensors.push_back(integers("q_offset", "I64", {kSeqlenKv - kSeqlenQ, kSeqlenKv - kSeqlenQ}));
  write_input(tensors);
  EXPECT_EQ(outputs_with({"--causal"}), whole);
  tensors.back() = integers("seqused_kv", "I32", {kSeqlenKv, 10});
  tensors.push_back(integers("seqused_q", "I32", {kSeqlenQ, 0}));
  write_input(tensors);
  ASSERT_EQ(run({"--causal"}).exit_status, 0);
  const std::vector<double> out = values("out");
  EXPECT_TRUE(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(out.size() / 2), out.end(),
                          [](double x) { return x == 0; }));
}

TEST_F(Run, EmptyInputs) {
  write_input({noise("q", "BF16", {0, 5, 2, 8}), noise("k", "BF16", {0, 7, 2, 8}),
               noise("v", "BF16", {0, 7, 2, 8}), noise("dout", "BF16", {0, 5, 2, 8})});
  EXPECT_EQ(run({"--check"}).exit_status, 0);
  write_input({noise("q", "BF16", {1, 5, 2, 8}), noise("k", "BF16", {1, 0, 2, 8}),
               noise("v", "BF16", {1, 0, 2, 8}), noise("dout", "BF16", {1, 5, 2, 8})});
  EXPECT_EQ(run({"--check"}).exit_status, 0);
  for (const double x : values("lse")) {
    EXPECT_EQ(x, -HUGE_VAL);
  }
}

TEST_F(Run, Check) {
  std::vector<FileTensor> tensors = inputs("BF16");
  tensors.push_back(noise("sinks", "F32", {kHeadsQ}));
  tensors.push_back(noise("dlse", "F32", {kBatch, kHeadsQ, kSeqlenQ}));
  write_input(tensors);
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--check"},
        {"--check", "--causal", "--softcap", "2"},
        {"--check", "--window", "7,-3", "--scale", "-0.4", "--grad-dtype", "f32"}}) {
    const ToolResult result = run(options);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    for (const char* word :
         {"out ", "lse ", "dq ", "dk ", "dv ", "dsinks ", "error", "bound", "PASS"}) {
      EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
    }
  }
}

TEST_F(Run, UnalignedDataGivesTheSameBits) {
  write_input(inputs("F32"));
  const auto aligned = outputs_with({});
  // The same file behind a header one byte longer.
  std::string bytes = contents("in");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  bytes.insert(sizeof(length) + length, 1, ' ');
  ++length;
  std::memcpy(bytes.data(), &length, sizeof(length));
  put("in", bytes);
  EXPECT_EQ(outputs_with({}), aligned);
}

TEST_F(Run, WorksFromAnyFolder) {
  write_input(inputs("BF16"));
  ToolEnvironment environment;
  environment.directory = directory.string();
  EXPECT_EQ(run_tool({"run", "--input", "in", "--output", "out"}, environment).exit_status, 0);
  const SafetensorsFile file(path("out"));
  EXPECT_NE(file.find("dq"), nullptr);
  EXPECT_EQ(num_files(), 2U);
}

TEST_F(Run, FailuresLeaveTheOldOutput) {
  write_input(inputs("F32"));
  put("out", "old");
  EXPECT_EQ(run({"--threads", "0"}).exit_status, 2);
  EXPECT_EQ(contents("out"), "old");

  ToolEnvironment full_disk;
  full_disk.file_size_limit = 8192;
  const ToolResult result = run({}, full_disk);
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_NE(result.err.find("can't write"), std::string::npos) << result.err;
  EXPECT_EQ(contents("out"), "old");

  if (fs::exists("/dev/full")) {
    ToolEnvironment no_stdout;
    no_stdout.out_file = "/dev/full";
    EXPECT_EQ(run({}, no_stdout).exit_status, 2);
    EXPECT_EQ(contents("out"), "old");
  }
  put("in", contents("in").substr(0, 1000));
  EXPECT_EQ(run().exit_status, 2);
  EXPECT_EQ(contents("out"), "old");
  EXPECT_EQ(num_files(), 2U);
}

TEST_F(Run, OutputsThatCannotBeWritten) {
  write_input(inputs("F32"));
  for (const std::string& output :
       {path("no/such/folder/out"), directory.string(), std::string("/dev/null"),
        std::string("/proc/out"), path("out/"), path(std::string(256, 'x'))}) {
    const ToolResult result = run_tool({"run", "--input", path("in"), "--output", output});
    EXPECT_EQ(result.exit_status, 2) << output;
    EXPECT_NE(result.err.find("can't write"), std::string::npos) << result.err;
  }
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(Run, RealData) {
  const fs::path data = FLASHGRAD_DATA_DIR;
  fs::copy_file(data / "minilm_layer0.safetensors", path("in"));
  const ToolResult result = run({"--check"});
  EXPECT_EQ(result.exit_status, 0) << result.err;
  EXPECT_NE(result.out.find("PASS"), std::string::npos) << result.out;
  const SafetensorsFile expected((data / "minilm_layer0_expected.safetensors").string());
  for (const char* name : {"out", "lse", "dq", "dk", "dv"}) {
    const TensorEntry* entry = expected.find(name);
    ASSERT_NE(entry, nullptr);
    const Buffer buffer = expected.load(*entry);
    std::vector<double> right(buffer.size() / sizeof(float));
    double largest = 0;
    for (std::size_t i = 0; i < right.size(); ++i) {
      float value = 0;
      std::memcpy(&value, buffer.data() + i * sizeof(value), sizeof(value));
      right[i] = value;
      largest = std::max(largest, std::abs(right[i]));
    }
    EXPECT_LT(largest_difference(values(name), right), 0.02 * largest) << name;
  }
}

}  // namespace
}  // namespace flashgrad::tool
