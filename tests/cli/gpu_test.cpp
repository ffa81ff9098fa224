// SPDX-License-Identifier: Apache-2.0
// `--backend sm90`: results on a machine with such a GPU, one clear line on any other.
#include "tool.hpp"

namespace flashgrad::tool {
namespace {

class Gpu : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    const std::string info = run_tool({"info"}).out;
    ASSERT_NE(info.find("\n  sm90 "), std::string::npos) << info;
    const std::string not_here = "\n  sm90       not here: ";
    const std::size_t begin = info.find(not_here);
    has_gpu = begin == std::string::npos;
    if (!has_gpu) {
      const std::size_t end = info.find('\n', begin + 1);
      refusal = "sm90: " + info.substr(begin + not_here.size(), end - begin - not_here.size());
      EXPECT_NE(refusal, "sm90: ");
    }
  }

  void write_inputs(const std::string& dtype) const {
    write_input({noise("q", dtype, {1, 70, 4, 64}), noise("k", dtype, {1, 90, 2, 64}),
                 noise("v", dtype, {1, 90, 2, 32}), noise("dout", dtype, {1, 70, 4, 32})});
  }

  bool has_gpu = false;
  std::string refusal;  // why not, in the words of `flashgrad info`
};

TEST_F(Gpu, RunsOrSaysWhyNot) {
  write_inputs("BF16");
  if (!has_gpu) {
    expect_refused({"--backend", "sm90"}, 3, "--backend " + refusal);
    ToolEnvironment forced;
    forced.variables = {"FLASHGRAD_BACKEND=sm90"};
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"check", "--shape", "sq=8,d=8"},
          {"check"},
          {"bench"},
          {"bench", "--memory"}}) {
      std::vector<std::string> all = arguments;
      all.insert(all.end(), {"--backend", "sm90"});
      const ToolResult by_option = run_tool(all);
      EXPECT_EQ(by_option.exit_status, 3);
      EXPECT_EQ(by_option.err, "flashgrad: --backend " + refusal + "\n");
      EXPECT_EQ(by_option.out, "");
      const ToolResult by_variable = run_tool(arguments, forced);
      EXPECT_EQ(by_variable.exit_status, 3);
      EXPECT_EQ(by_variable.err, "flashgrad: FLASHGRAD_BACKEND " + refusal + "\n");
    }
    return;
  }
  const ToolResult result = run({"--backend", "sm90", "--check", "--causal"});
  EXPECT_EQ(result.exit_status, 0) << result.out << result.err;
  for (const char* word : {"backend sm90: cuda:0", "forward", "backward", "dq", "PASS"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
  }
  EXPECT_EQ(output_names(), (std::vector<std::string>{"dk", "dq", "dv", "lse", "out"}));
  EXPECT_EQ(run_tool({"check", "--shape", "hq=2,sq=99,d=40", "--backend", "sm90"}).exit_status, 0);
}

TEST_F(Gpu, RefusesF32) {
  write_inputs("F32");
  expect_refused({"--backend", "sm90"}, 3, has_gpu ? "dtype f32 on cuda:0" : refusal);
  const ToolResult bench =
      run_tool({"bench", "--shape", "sq=8,d=8", "--dtype", "f32", "--backend", "sm90"});
  EXPECT_EQ(bench.exit_status, 3) << bench.out;
  EXPECT_NE(bench.err, "");
}

}  // namespace
}  // namespace flashgrad::tool
