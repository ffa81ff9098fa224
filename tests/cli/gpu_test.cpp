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
    if (info.find("sm90") == std::string::npos) {
      GTEST_SKIP() << "built without CUDA";
    }
    has_gpu = info.find("cuda:0") != std::string::npos;
  }

  void write_inputs(const std::string& dtype) const {
    write_input({noise("q", dtype, {1, 70, 4, 64}), noise("k", dtype, {1, 90, 2, 64}),
                 noise("v", dtype, {1, 90, 2, 32}), noise("dout", dtype, {1, 70, 4, 32})});
  }

  bool has_gpu = false;
};

TEST_F(Gpu, RunsOrSaysWhyNot) {
  write_inputs("BF16");
  if (!has_gpu) {
    expect_refused({"--backend", "sm90"}, 3, "--backend sm90: no CUDA");
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"check", "--shape", "sq=8,d=8"}, {"check"}, {"bench"}}) {
      std::vector<std::string> all = arguments;
      all.insert(all.end(), {"--backend", "sm90"});
      const ToolResult result = run_tool(all);
      EXPECT_EQ(result.exit_status, 3);
      EXPECT_NE(result.err.find("--backend sm90: no CUDA"), std::string::npos) << result.err;
      EXPECT_EQ(result.out, "");
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
  expect_refused({"--backend", "sm90"}, 3, has_gpu ? "dtype f32 on cuda:0" : "no CUDA");
}

}  // namespace
}  // namespace flashgrad::tool
