// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan`: every figure that it is for is printed; what it refuses.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tool.hpp"

namespace flashgrad::tool {
namespace {

const std::string kResults = FLASHGRAD_DATA_DIR "/../benchmarks/results";

class Plan : public ToolTest {
 protected:
  static std::string out_of(const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {"plan"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ToolResult result = run_tool(all);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    return result.out;
  }
  static void expect_words(const std::string& text, const std::vector<std::string>& words) {
    for (const std::string& word : words) {
      EXPECT_NE(text.find(word), std::string::npos) << word << " in:\n" << text;
    }
  }
};

TEST_F(Plan, RooflinePrintsTheAccounts) {
  expect_words(out_of({"roofline", "--device", "b200", "--kernel", "fa4-forward"}),
               {"MMA                                                               1024",
                "exp                                                               1024", "768",
                "balanced"});
  expect_words(out_of({"roofline", "--device", "b200", "--kernel", "fa4-backward"}),
               {"2560", "1024", "2048", "account counts    1280",
                "account counts                 3328", "bottleneck: shared memory"});
  expect_words(out_of({"roofline", "--device", "b200", "--kernel", "fa4-backward-2cta"}),
               {"1536", "account counts    1152", "account counts                 2688",
                "shared, all written", "shared, all exchanged"});
  expect_words(out_of({"roofline", "--device", "h200"}),
               {"3072  120%", "2816  110%", "2688  105%", "2304   90%", "2176   85%", "2944  115%",
                "2560  100%", "4128  129%", "4208  132%", "3568  139%", "does not fit: registers"});
  expect_words(out_of({"roofline", "--generations"}),
               {"HBM traffic", "idle tensor cores", "exp and shared memory", "balanced"});
  expect_words(out_of({"roofline", "--kernel", "sm90-backward-D128Cluster"}),
               {"expected, warpgroups between products and softmax: 2", "3194"});
  expect_words(out_of({"roofline", "--sources"}), {"dsmem_bytes_per_clk", "assumed", "data sheet"});
  expect_words(out_of({"roofline", "--device", "cpu"}), {"this machine", "GFLOP/s", "caches"});
  expect_words(out_of({"roofline", "--kernel", "hopper-backward", "--head-dim", "192"}),
               {"64x96", "a 2-CTA cluster: -4.8 % speed"});
}

TEST_F(Plan, MemoryOfOneHeadOf512K) {
  expect_words(out_of({"memory", "--tokens", "512K", "--heads", "1"}),
               {"1.00 TiB", "1.26 GiB", "only the second fits"});
  expect_words(
      out_of({"memory", "--tokens", "4M", "--heads", "32", "--heads-kv", "8", "--gpus", "64"}),
      {"in a ring"});
}

TEST_F(Plan, ScheduleComparesAndDraws) {
  const std::string svg = path("gantt.svg");
  const std::string json = path("schedule.json");
  const std::string text = out_of({"schedule", "--tokens", "4096", "--heads", "8", "--causal",
                                   "--cluster", "2", "--compare", "--svg", svg, "--json", json});
  expect_words(text, {"sections", "turns-sm90", "turns-shortest-swizzled", "waiting"});
  expect_words(contents("gantt.svg"), {"<svg", "</svg>"});
  expect_words(contents("schedule.json"), {"makespan_cycles"});
  expect_words(
      out_of({"schedule", "--packed", "128,4096,512", "--causal", "--order", "longest-first"}),
      {"longest-first"});
  expect_words(out_of({"schedule", "--pass", "forward", "--device", "b200", "--window", "256,0"}),
               {"fa4-forward"});
}

// What the kernels do: units served where they are, with the clusters that do so in white.
TEST_F(Plan, ScheduleIsTheKernels) {
  const std::string svg = path("served.svg");
  const std::string json = path("served.json");
  expect_words(out_of({"schedule", "--tokens", "1024", "--batch", "16", "--causal", "--svg", svg,
                       "--json", json}),
               {"sm90-backward-D128 on 132 SMs", "units                         16",
                "a ring of 54 slots of 512.0 KiB; units are prepared 32 ahead and finished 32 "
                "behind, the last 32 by 4 clusters each"});
  expect_words(contents("served.svg"), {"white: serves a unit", "stroke=\"#000\""});
  expect_words(contents("served.json"), {"\"slots\": 54", "serving", "end_cycles"});
  const std::string text = out_of({"schedule", "--tokens", "1024", "--batch", "16", "--compare"});
  EXPECT_LT(text.find("  units"), text.find("  sections"));
  expect_words(text, {"(sm90-backward-D128Ordered on 66 pairs of SMs)"});
  expect_words(out_of({"schedule", "--packed", "3000,100", "--compare"}),
               {"units: not here: the sequences of a packed batch are one unit"});
  expect_words(out_of({"schedule", "--device", "b200", "--compare", "--tokens", "1024"}),
               {"units: not here: only the sm90 backward serves units"});
  for (const auto& [arguments, words] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--heads", "2"}, "too few units (2)"},
           {{"--window", "100,0"}, "narrow window"},
           {{"--cluster", "1"}, "the kernel of this call has clusters of 2"},
           {{"--section", "1000"}, "too few units for sections of 1000"}}) {
    std::vector<std::string> all = {"plan", "schedule", "--order", "units"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ToolResult result = run_tool(all);
    EXPECT_EQ(result.exit_status, 2) << result.out;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  }
}

// Fewer queries than keys: with the diagonal in the top left corner most keys are never seen.
TEST_F(Plan, ScheduleTakesAnyMaskAndBatch) {
  const auto cycles = [this](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "schedule");
    const std::string json = path("any.json");
    arguments.insert(arguments.end(), {"--causal", "--jitter", "0", "--spread", "0", "--order",
                                       "sections", "--cluster", "1", "--json", json});
    out_of(arguments);
    return nlohmann::json::parse(contents("any.json"))
        .at("orders")[0]
        .at("makespan_cycles")
        .get<double>();
  };
  const double bottom = cycles({"--tokens", "4096", "--tokens-kv", "16384"});
  EXPECT_GT(bottom,
            6 * cycles({"--tokens", "4096", "--tokens-kv", "16384", "--align", "top-left"}));
  EXPECT_EQ(bottom, cycles({"--packed", "4096", "--packed-kv", "16384"}));
  expect_words(out_of({"memory", "--tokens", "4096", "--tokens-kv", "1M"}),
               {"4096 tokens and 1048576 keys", "272.1 GiB"});
}

TEST_F(Plan, SimulateFindsAMissingWait) {
  expect_words(out_of({"simulate", "--program", "fa4-2cta", "--queries", "256", "--keys", "256"}),
               {"dq  error", "ok", "columns 384 to 511: dK"});
  const ToolResult faulty = run_tool({"plan", "simulate", "--program", "fa4", "--queries", "384",
                                      "--drop-wait", "products/0/dQ read"});
  EXPECT_EQ(faulty.exit_status, 1);
  expect_words(faulty.out, {"fault: tile 1: dP", "while dq of CTA 0 may still read dQ of tile 0"});
}

// The kernels above head dim 128 are two programs.
TEST_F(Plan, SimulatesBothWideKernels) {
  expect_words(out_of({"simulate", "--program", "sm90-wide-d192-v128", "--queries", "256", "--keys",
                       "256", "--causal"}),
               {"head_dim 192/128", "with sm90-wide-dq-d192 after it", "dv  error",
                "operands                                   81920      81920"});
  expect_words(
      out_of({"simulate", "--program", "sm90-wide-dq-d256", "--queries", "256", "--keys", "128"}),
      {"with sm90-wide-d256 before it",
       "landing                                    49152      49152"});
}

TEST_F(Plan, PredictReadsResults) {
  expect_words(out_of({"predict", "--results", kResults + "/2026-11-29-zen5-bench-quiet.json"}),
               {"14 of 14 within 15 %"});
}

TEST_F(Plan, AllCommandsDraw) {
  const std::string svg = path("picture.svg");
  for (const auto& [arguments, words] :
       std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>>{
           {{"roofline", "--kernel", "fa3-backward"}, {"fa3-backward", ">2944<"}},
           {{"roofline", "--generations"}, {"fa2-forward", "63 %, idle tensor cores"}},
           {{"memory", "--tokens", "512K"}, {"P made again", "dq sums"}},
           {{"schedule", "--tokens", "2048"}, {"40 processors of", "hsl("}},
           {{"simulate", "--program", "fa4", "--queries", "256", "--keys", "128"},
            {"tensor pipe 0", "loads of CTA 0: copies", "<title>dP, tile 1</title>"}},
           {{"predict", "--results", kResults + "/2026-11-29-zen5-bench-quiet.json"},
            {"<circle", "2026-11-29-zen5-bench-quiet.json</text>"}}}) {
    std::vector<std::string> all = arguments;
    all.insert(all.end(), {"--svg", svg});
    out_of(all);
    expect_words(contents("picture.svg"), {"<svg", "</svg>"});
    expect_words(contents("picture.svg"), words);
  }
}

// The kernel that runs at a head dim, if the device can hold it.
TEST_F(Plan, SchedulesTheKernelOfTheHeadDim) {
  expect_words(out_of({"schedule", "--head-dim", "64"}), {"sm90-backward-D64 on 132 SMs"});
  expect_words(out_of({"schedule", "--cluster", "2"}), {"sm90-backward-D128Cluster on 66 pairs"});
  expect_words(out_of({"schedule", "--pass", "forward", "--head-dim", "256"}),
               {"sm90-forward-D256 on 132 SMs"});
  for (const auto& [arguments, words] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--head-dim", "192"}, "want at most 128"},
           {{"--head-dim", "64", "--cluster", "2"}, "has no cluster"},
           {{"--device", "a100"}, "does not fit a100; shared memory"},
           {{"--device", "b200", "--head-dim", "192"}, "tensor memory: columns 640"}}) {
    std::vector<std::string> all = {"plan", "schedule"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ToolResult result = run_tool(all);
    EXPECT_EQ(result.exit_status, 2) << result.out;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  }
}

// A device of one's own, from a file; what it says may be anything.
TEST_F(Plan, DevicesFromFiles) {
  std::ifstream h200(FLASHGRAD_DATA_DIR "/../src/plan/devices/h200.json");
  const std::string text{std::istreambuf_iterator<char>(h200), {}};
  const std::string file = path("device.json");
  const auto with = [&](const std::string& old, const std::string& now) {
    std::string changed = text;
    const std::size_t at = changed.find(old);
    EXPECT_NE(at, std::string::npos) << old;
    std::ofstream(file) << changed.replace(at, old.size(), now);
  };
  const std::vector<std::string> roofline = {"roofline", "--device", file, "--kernel",
                                             "sm90-backward-D128"};
  with("\"h200\"", "\"h400 <&>\"");
  expect_words(out_of(roofline), {"sm90-backward-D128 on h400 <&>"});
  std::vector<std::string> drawn = roofline;
  drawn.insert(drawn.end(), {"--svg", path("device.svg")});
  out_of(drawn);
  expect_words(contents("device.svg"), {"h400 &lt;&amp;>"});
  with("\"value\": 4096", "\"value\": 8192");
  expect_words(out_of(roofline),
               {"MMA                                                               1280"});
  with("\"value\": 128,\n      \"source\": \"assumed",
       "\"value\": null,\n      \"source\": \"assumed");
  out_of(roofline);
  for (const auto& [old, now] : std::vector<std::pair<std::string, std::string>>{
           {"\"value\": 132", "\"value\": 0"},
           {"\"value\": 132", "\"value\": null"},
           {"\"value\": 132", "\"value\": \"132\""},
           {"\"value\": 1980", "\"value\": -1980"},
           {"\"value\": 1980", "\"value\": 1e999"},
           {"\"value\": 17", "\"value\": -17"},
           {"\"sm_count\"", "\"sms\""},
           {"\"figures\": {", "\"figures\": ["},
           {"NVIDIA H200 SXM", std::string("\xff\xfe")}}) {
    with(old, now);
    std::vector<std::string> all = {"plan"};
    all.insert(all.end(), roofline.begin(), roofline.end());
    const ToolResult result = run_tool(all);
    EXPECT_EQ(result.exit_status, 2) << now << result.out;
    EXPECT_TRUE(result.err.starts_with("flashgrad: device ")) << result.err;
  }
  EXPECT_EQ(run_tool({"plan", "roofline", "--device", path("none.json")}).exit_status, 2);
}

// Without results: one call, kernel by kernel.
TEST_F(Plan, PredictsACall) {
  const std::string json = path("call.json");
  expect_words(out_of({"predict", "--tokens", "4096", "--batch", "4", "--head-dim", "192",
                       "--head-dim-v", "128", "--causal", "--json", json}),
               {"backward bf16 4,16,4096,192/128 causal on an H200", "prepare",
                "sm90-backward-wide-D192V128             2", "the call", "TFLOP/s"});
  expect_words(contents("call.json"), {"cool_tflops", "\"launches\": 2"});
  expect_words(
      out_of({"predict", "--pass", "forward", "--packed", "100,3000", "--window", "64,64"}),
      {"forward bf16 2,16,packed,128 window 64,64", "sm90-forward-D128"});
  expect_words(out_of({"predict", "--deterministic"}), {"sm90-backward-D128Ordered"});
}

// A folder: whatever results are in it, and what of them is not predicted.
TEST_F(Plan, PredictReadsAFolder) {
  const std::string json = path("predicted.json");
  expect_words(out_of({"predict", "--results", kResults, "--json", json}),
               {"of 128 within 15 %", "deterministic, sustained", "192/128 causal, cool",
                "packed,128 causal", "window 1024,0", "16/4,4096",
                "not predicted: bytes, not times", "not predicted: the peers' times"});
  expect_words(contents("predicted.json"),
               {"measured_seconds", "predicted_seconds", "left_out", "mean_error"});
}

// What a result file says may be anything.
TEST_F(Plan, PredictRefusesOtherFiles) {
  const std::string file = path("hostile.json");
  for (const char* text :
       {"", "{}", "[[[[", R"({"suite": "cuda", "rows": 3})",
        R"({"f32_peak": {"gflops": 1}, "bf16_peak": {"gflops": 1}, "rows": [{"shape": "b=1"}]})",
        R"({"what": "sm90 backward", "rows": {"d0 full 0k": [1, 1]}})",
        R"({"what": "sm90 backward", "rows": {"d64 full 16k 3/2": [1, 1]}})",
        R"({"what": "sm90 backward", "rows": {"d64 full 16k": [0, 1]}})",
        R"({"what": "sm90 backward", "rows": {"d64 full 1000000k": [1, 1]}})",
        R"({"what": "sm90 backward", "rows": {"d64 full 4000k deterministic": [1, 1]}})"}) {
    std::ofstream(file) << text;
    const ToolResult result = run_tool({"plan", "predict", "--results", file});
    EXPECT_EQ(result.exit_status, 2) << text;
    EXPECT_NE(result.err.find("hostile.json"), std::string::npos) << result.err;
  }
}

// The command that was meant.
TEST_F(Plan, RefusalsNameTheirHelp) {
  for (const auto& [arguments, help] :
       {std::pair<std::vector<std::string>, std::string>{{"plan"}, "(flashgrad plan --help"},
        {{"plan", "memory", "--gpu", "3"}, "(flashgrad plan memory --help"},
        {{"bench", "--fast"}, "(flashgrad bench --help"},
        {{}, "(flashgrad --help"}}) {
    EXPECT_NE(run_tool(arguments).err.find(help), std::string::npos) << help;
  }
}

// Before the work, and what was there stays.
TEST_F(Plan, FilesThatCannotBeWritten) {
  const std::vector<std::string> memory = {"plan", "memory"};
  for (const std::string& file : {std::string(), directory.string(), path("no/such/folder"),
                                  std::string("/dev/full"), path(std::string(256, 'x'))}) {
    for (const char* option : {"--json", "--svg"}) {
      std::vector<std::string> arguments = memory;
      arguments.insert(arguments.end(), {option, file});
      const ToolResult result = run_tool(arguments);
      EXPECT_EQ(result.exit_status, 2) << option << " " << file;
      EXPECT_NE(result.err.find("can't write"), std::string::npos) << result.err;
      EXPECT_EQ(result.out, "");
    }
  }
  put("old", "untouched");
  ToolEnvironment full_disk;
  full_disk.file_size_limit = 200;
  full_disk.out_file = "/dev/null";
  const ToolResult result = run_tool({"plan", "predict", "--json", path("old")}, full_disk);
  EXPECT_EQ(result.exit_status, 2) << result.out;
  EXPECT_EQ(contents("old"), "untouched");
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(Plan, Refuses) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"plan"},
           {"plan", "roofline", "--device", "h20"},
           {"plan", "roofline", "--kernel", "fa5"},
           {"plan", "roofline", "--sources", "--svg", "x.svg"},
           {"plan", "roofline", "--sources", "--kernel", "fa4-forward"},
           {"plan", "roofline", "--generations", "--kernel", "fa4-forward"},
           {"plan", "roofline", "--generations", "--device", "h100"},
           {"plan", "roofline", "--head-dim", "64"},
           {"plan", "roofline", "--head-dim", "64", "--kernel", "fa4-forward"},
           {"plan", "schedule", "--compare", "--order", "natural"},
           {"plan", "schedule", "--packed", "9", "--tokens", "9"},
           {"plan", "schedule", "--packed", "9", "--batch", "2"},
           {"plan", "schedule", "--packed-kv", "9"},
           {"plan", "schedule", "--pass", "forward", "--cluster", "2"},
           {"plan", "schedule", "--pass", "forward", "--order", "units"},
           {"plan", "predict", "--results", kResults, "--causal"},
           {"plan", "predict", "--svg", "x.svg"},
           {"plan", "predict", "--packed", "9", "--tokens", "9"},
           {"plan", "predict", "--packed", "0,0"},
           {"plan", "memory", "--tokens", "12Q"},
           {"plan", "memory", "--heads", "6", "--heads-kv", "4"},
           {"plan", "schedule", "--order", "random"},
           {"plan", "schedule", "--tokens", "64M"},
           {"plan", "schedule", "--packed", "12,x"},
           {"plan", "schedule", "--packed", "0,0"},
           {"plan", "schedule", "--packed", "1,2", "--packed-kv", "1"},
           {"plan", "schedule", "--tokens-kv", "0"},
           {"plan", "schedule", "--align", "left"},
           {"plan", "schedule", "--window", "-1,-1"},
           {"plan", "schedule", "--batch", "65536", "--heads", "65536"},
           {"plan", "schedule", "--batch", "2147483647"},
           {"plan", "schedule", "--jitter", "nan"},
           {"plan", "schedule", "--step-cycles", "1e300"},
           {"plan", "schedule", "--turn-cycles", "-1"},
           {"plan", "memory", "--tokens", "16", "--gpus", "17"},
           {"plan", "roofline", "--kernel", "hopper-backward", "fa4-forward"},
           {"plan", "predict", "--results", FLASHGRAD_DATA_DIR "/../scripts"},
           {"plan", "predict", "--tokens", "1024M"},
           {"plan", "predict", "--window", "-1,-5"},
           {"plan", "predict", "--pass", "forward", "--deterministic"},
           {"plan", "predict", "--tokens-kv", "64"},
           {"plan", "simulate", "--program", "fa5"},
           {"plan", "simulate", "--drop-wait", "nobody"},
           {"plan", "simulate", "--program", "fa4-2cta", "--keys", "128", "--queries", "128"},
           {"plan", "simulate", "--causal", "--queries", "1024", "--keys", "512"},
           {"plan", "predict", "--results", "nowhere.json"}}) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_status, 2) << arguments.back() << result.out;
    EXPECT_TRUE(result.err.starts_with("flashgrad: ")) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

}  // namespace
}  // namespace flashgrad::tool
