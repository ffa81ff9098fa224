// SPDX-License-Identifier: Apache-2.0
// `flashgrad check` and `flashgrad bench`: what they accept, print and write.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "check/case.hpp"
#include "tool.hpp"

namespace flashgrad::tool {
namespace {

using Words = std::vector<std::string>;

class Check : public ToolTest {};
class Bench : public ToolTest {};

void expect_one_line_refusal(const Words& arguments, int exit_status, const std::string& message) {
  const ToolResult result = run_tool(arguments);
  SCOPED_TRACE(testing::PrintToString(arguments));
  EXPECT_EQ(result.exit_status, exit_status) << result.err;
  EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

TEST_F(Check, AShapeOnEveryBackend) {
  const ToolResult result =
      run_tool({"check", "--shape", "b=1,hq=8,hkv=2,sq=64,sk=96,d=64,dv=32", "--dtype", "f16",
                "--window=-3,20", "--softcap", "5", "--seed", "7", "--grad-dtype", "f32"});
  EXPECT_EQ(result.exit_status, 0) << result.out << result.err;
  for (const char* word : {"cpu (", "reference (", "PASS", "out ", "lse ", "dq ", "dk ", "dv ",
                           "2 passed, 0 failed"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
  }
  const ToolResult one = run_tool({"check", "--shape", "sq=9,d=3", "--backend", "cpu"});
  EXPECT_EQ(one.exit_status, 0);
  EXPECT_EQ(one.out.find("reference"), std::string::npos);
  EXPECT_NE(one.out.find("1 passed, 0 failed"), std::string::npos);
}

TEST_F(Check, DtypesAndRefusals) {
  for (const char* dtype : {"f32", "bf16", "f16", "f64"}) {
    EXPECT_EQ(run_tool({"check", "--shape", "hq=2,sq=17,d=8", "--dtype", dtype}).exit_status, 0)
        << dtype;
  }
  // Not wrong, but not served either.
  const ToolResult refused =
      run_tool({"check", "--shape", "sq=8,d=8", "--dtype", "f64", "--backend", "cpu"});
  EXPECT_EQ(refused.exit_status, 3);
  EXPECT_NE(refused.out.find("refused"), std::string::npos);
  EXPECT_EQ(run_tool({"check", "--shape", "sq=8,d=300"}).exit_status, 3);
  // A batch of nothing, however large, takes no time.
  EXPECT_EQ(run_tool({"check", "--shape", "b=1099511627776,sq=0,d=8"}).exit_status, 0);
}

TEST_F(Check, BadShapes) {
  for (const char* shape : {"",
                            "x",
                            "b=",
                            "b=x",
                            "b=-1",
                            "b=1.5",
                            "b=1,b=2",
                            "b=1,hq=2,,",
                            "=3",
                            "q=1=2",
                            "w=3",
                            "b=nan",
                            "b=99999999999999999999",
                            "hq=3,hkv=2",
                            "hq=0",
                            "d=0",
                            "d=-5",
                            "sq=8,cu_q=0:9,cu_kv=0:8",
                            "cu_q=0:5:3,cu_kv=0:4:5",
                            "cu_q=0:5",
                            "sq=4611686018427387904,hq=4611686018427387904",
                            "b=4294967296,hq=4294967296,sq=4294967296"}) {
    expect_one_line_refusal({"check", "--shape", shape}, 2, "flashgrad: ");
  }
  expect_one_line_refusal({"check", "--shape", "b=1,cu_q=0:5:8,cu_kv=0:4:8"}, 2,
                          "cu_q=0:5:8, want 2 numbers (b=1");
  expect_one_line_refusal({"check", "--shape", "b=2,sq=8,q_offset=3"}, 2,
                          "q_offset=3, want 2 numbers");
  expect_one_line_refusal({"check", "--shape", "cu_q=0:9:8,cu_kv=0:4:8"}, 2,
                          "cu_q=0:9:8, want offsets from 0 to 8");
  expect_one_line_refusal({"check", "--shape", "b=2,sq=8,used_kv=8:9"}, 2,
                          "used_kv=8:9, want from 0 to each");
  expect_one_line_refusal({"check", "--shape", "sq=8", "--dtype", "f8"}, 2, "dtype");
  expect_one_line_refusal({"check", "--shape", "sq=8", "--seed", "-1"}, 2, "--seed");
  expect_one_line_refusal({"check", "--shape", "sq=8", "--seed", "x"}, 2, "--seed");
  expect_one_line_refusal({"check", "--shape", "sq=8", "--seed", "9223372036854775808"}, 2,
                          "want 0 to 9223372036854775807");
  expect_one_line_refusal({"check", "--shape", "sq=8", "--case", "one_key"}, 2, "--case");
  expect_one_line_refusal({"check", "--causal"}, 2, "--shape");
  expect_one_line_refusal({"check", "--dtype", "f32"}, 2, "--shape");
  expect_one_line_refusal({"check", "--case", "no_such_case"}, 2, "no_such_case");
}

TEST_F(Check, EntriesOfTheTable) {
  const ToolResult result = run_tool({"check", "--case", "cu_padded", "--seed", "3"});
  EXPECT_EQ(result.exit_status, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("cu_padded"), std::string::npos);
  EXPECT_EQ(run_tool({"check", "--case", "big_logits/3"}).exit_status, 0);
}

// What a failing case prints must be a command that this program takes and that describes the same
// case.
TEST_F(Check, ThePrintedCommandRepeatsTheCase) {
  for (const char* id : {"one_key", "seqused", "cu_padded", "lse_of_empty_rows", "sink_only_row",
                         "size1_dim_any_stride", "stride_of_dout_is_its_own"}) {
    check::Case c = check::find_cases(id).at(0);
    c.id.clear();  // as if it were no table entry: the whole case must be in the command
    std::istringstream words(check::command_line(c));
    Words arguments;
    for (std::string word; words >> word;) {
      arguments.push_back(word);
    }
    ASSERT_EQ(arguments.at(0), "flashgrad");
    arguments.erase(arguments.begin());
    arguments.insert(arguments.end(), {"--backend", "cpu"});
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_status, 0) << check::command_line(c) << "\n" << result.err << result.out;
    EXPECT_NE(result.out.find("1 passed"), std::string::npos);
  }
}

TEST_F(Bench, AShapeAndItsJson) {
  const ToolResult result = run_tool({"bench", "--shape", "b=2,hq=4,hkv=2,sq=48,sk=80,d=16,dv=8",
                                      "--dtype", "f32", "--causal", "--json", path("result.json")});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  for (const char* word : {"GFLOP/s", "peak", "memory", "standard", "forward", "backward"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
  }
  EXPECT_NE(result.err, "") << "progress";
  const nlohmann::json report = nlohmann::json::parse(contents("result.json"));
  for (const char* key : {"version", "date", "cpu", "threads", "f32_peak", "bf16_peak"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
  const nlohmann::json& row = report.at("rows").at(0);
  EXPECT_EQ(row.at("dtype"), "f32");
  EXPECT_GT(row.at("forward").at("seconds").get<double>(), 0);
  EXPECT_GT(row.at("backward").at("fraction_of_peak").get<double>(), 0);
  // Either the baseline ran (and agreed), or the row says why not.
  EXPECT_NE(row.at("backward").contains("speedup"), row.contains("no_standard"));
}

TEST_F(Bench, SuitesFromFiles) {
  put("suite.json", R"({"shapes": [
    {"shape": "hq=2,sq=32,d=16", "dtypes": ["bf16", "f16"], "masks": ["full", "3,0"]},
    {"shape": "hq=2,d=8,cu_q=0:5:5:20,cu_kv=0:9:12:20", "dtypes": ["f32"], "masks": ["causal"]}]})");
  const ToolResult result =
      run_tool({"bench", "--suite", path("suite.json"), "--json", path("result.json")});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(contents("result.json")).at("rows").size(), 5U);

  for (const char* text : {"", "[]", "{}", R"({"shapes": [{}]})"}) {
    put("suite.json", text);
    expect_one_line_refusal({"bench", "--suite", path("suite.json")}, 2, R"(; want {"shapes": [)");
  }
  for (const char* text :
       {"", "{", "[]", "{}", R"({"shapes": 3})", R"({"shapes": [{}]})",
        R"({"shapes": [{"shape": "x", "dtypes": ["f32"], "masks": ["full"]}]})",
        R"({"shapes": [{"shape": "sq=8", "dtypes": ["f33"], "masks": ["full"]}]})",
        R"({"shapes": [{"shape": "sq=8", "dtypes": ["f32"], "masks": ["half"]}]})",
        R"({"shapes": [{"shape": 8, "dtypes": "f32", "masks": ["full"]}]})"}) {
    put("suite.json", text);
    expect_one_line_refusal({"bench", "--suite", path("suite.json")}, 2, "suite");
  }
}

// A suite goes on without what is not served; what leaves nothing to measure is unsupported.
TEST_F(Bench, WhatIsNotServed) {
  const ToolResult shape = run_tool({"bench", "--shape", "sq=8,d=300"});
  EXPECT_EQ(shape.exit_status, 3);
  EXPECT_NE(shape.err.find("\nflashgrad: q: head_dim 300"), std::string::npos) << shape.err;
  const ToolResult memory = run_tool({"bench", "--memory", "--dtype", "f64", "--backend", "cpu"});
  EXPECT_EQ(memory.exit_status, 3);
  EXPECT_NE(memory.err.find("dtype f64"), std::string::npos) << memory.err;
  const std::string wide = R"({"shape": "sq=8,d=300", "dtypes": ["bf16"], "masks": ["full"]})";
  const std::string other = R"({"shape": "sq=8,d=8", "dtypes": ["bf16"], "masks": ["full"]})";
  put("suite.json", R"({"shapes": [)" + wide + "," + other + "]}");
  const Words suite = {"bench", "--suite", path("suite.json"), "--json", path("result.json")};
  const ToolResult result = run_tool(suite);
  EXPECT_EQ(result.exit_status, 0) << result.err;
  EXPECT_NE(result.out.find("refused: q: head_dim 300"), std::string::npos) << result.out;
  EXPECT_EQ(nlohmann::json::parse(contents("result.json")).at("rows").size(), 1U);
  std::filesystem::remove(path("result.json"));
  put("suite.json", R"({"shapes": [)" + wide + "," + wide + "]}");
  EXPECT_EQ(run_tool(suite).exit_status, 3);
  EXPECT_FALSE(std::filesystem::exists(path("result.json")));
}

// What would be read for ever.
TEST_F(Bench, SuitesFromOtherThanFiles) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string& suite : {path("pipe"), std::string("/dev/zero"), path("")}) {
    expect_one_line_refusal({"bench", "--suite", suite}, 2, "neither a suite");
  }
}

TEST_F(Bench, RefusedOptions) {
  expect_one_line_refusal({"bench", "--suite", "no_such_suite"}, 2, "no_such_suite");
  expect_one_line_refusal({"bench", "--shape", "sq=8", "--suite", "cpu"}, 2, "--suite");
  expect_one_line_refusal({"bench", "--memory", "--suite", "cpu"}, 2, "--suite");
  expect_one_line_refusal({"bench", "--dtype", "f32"}, 2, "--dtype: a suite's");
  expect_one_line_refusal({"bench", "--memory", "--dtype", "f8"}, 2, "dtype f8, want f32");
  expect_one_line_refusal({"bench", "--suite", "cpu", "--causal"}, 2, "--causal: a suite's");
  expect_one_line_refusal({"bench", "--window", "3,0"}, 2, "--window: a suite's");
  expect_one_line_refusal({"bench", "--align", "top-left"}, 2, "--align: a suite's");
  for (const char* key : {"used_q=3", "used_kv=3", "q_offset=1", "q=0", "dout=0", "dlse=n",
                          "sinks=n", "layout=own", "null=dq"}) {
    expect_one_line_refusal({"bench", "--shape", std::string("sq=8,") + key}, 2, "no other key");
  }
  put("suite.json",
      R"({"shapes": [{"shape": "sq=8,sinks=n", "dtypes": ["f32"], "masks": ["full"]}]})");
  expect_one_line_refusal({"bench", "--suite", path("suite.json")}, 2, "no other key");
  expect_one_line_refusal({"bench", "--shape", "sq=8", "--threads", "0"}, 2, "--threads");
  expect_one_line_refusal({"bench", "--shape", "sq=8", "--json", path("no/such/folder")}, 2,
                          "can't write");
  expect_one_line_refusal({"bench", "--shape", "sq=1000000000000,hq=1000000,d=64"}, 2, "memory");
  EXPECT_EQ(num_files(), 1U);  // the suite
  // Bounds of packed lengths count as they do in a call: one that is too low is refused.
  const ToolResult low = run_tool({"bench", "--shape", "d=8,cu_q=0:5:20,cu_kv=0:5:20,max_q=7"});
  EXPECT_EQ(low.exit_status, 2);
  EXPECT_NE(low.err.find("max_seqlen_q: 7"), std::string::npos) << low.err;
}

TEST_F(Bench, MemoryByLength) {
  const ToolResult result = run_tool({"bench", "--memory", "--json", path("memory.json")});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  const nlohmann::json rows = nlohmann::json::parse(contents("memory.json")).at("memory");
  ASSERT_EQ(rows.size(), 10U);
  EXPECT_EQ(rows.front().at("tokens"), 1024);
  EXPECT_EQ(rows.front().at("how"), "measured");
  EXPECT_EQ(rows.back().at("tokens"), 512 * 1024);
  EXPECT_EQ(rows.back().at("how"), "computed");
  for (const char* word : {"524288", "measured", "computed", "1.00 TiB"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
  }
  // Linear, not quadratic.
  EXPECT_LT(rows.back().at("computed_memory_bytes").get<double>(),
            600 * rows.front().at("computed_memory_bytes").get<double>());
}

}  // namespace
}  // namespace flashgrad::tool
