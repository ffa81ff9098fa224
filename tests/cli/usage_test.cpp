// SPDX-License-Identifier: Apache-2.0
// What the command line refuses before it looks at a file, and what it says of itself.
#include <csignal>

#include "tool.hpp"

namespace flashgrad::tool {
namespace {

class Usage : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    write_input({noise("q", "F32", {1, 5, 2, 8}), noise("k", "F32", {1, 5, 2, 8}),
                 noise("v", "F32", {1, 5, 2, 8})});
  }
};

TEST_F(Usage, HelpAndVersion) {
  const std::vector<std::vector<std::string>> forms = {
      {"--help"},         {"-h"},       {"run", "--help"}, {"check", "--help"}, {"bench", "--help"},
      {"info", "--help"}, {"--version"}};
  for (const std::vector<std::string>& arguments : forms) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_status, 0) << arguments[0];
    EXPECT_NE(result.out, "");
    EXPECT_EQ(result.err, "");
  }
  // What an option takes by name is listed.
  const std::string check = run_tool({"check", "--help"}).out;
  for (const char* word :
       {"cu_q=", "used_kv", "q_offset", "layout", "null=", " big_logits,", " sink_only_row"}) {
    EXPECT_NE(check.find(word), std::string::npos) << word;
  }
  EXPECT_EQ(run_tool({"--version"}).out, "flashgrad " FLASHGRAD_EXPECTED_VERSION "\n");
}

TEST_F(Usage, HelpThatCannotBeWrittenIsAnError) {
  ToolEnvironment environment;
  environment.out_file = "/dev/full";
  for (const char* option : {"--help", "--version"}) {
    const ToolResult result = run_tool({option}, environment);
    EXPECT_EQ(result.exit_status, 2) << option;
    EXPECT_NE(result.err.find("can't write"), std::string::npos) << result.err;
  }
}

TEST_F(Usage, APipeThatNobodyReadsIsAnError) {
  ToolEnvironment environment;
  environment.nobody_reads = true;
  const std::vector<std::vector<std::string>> forms = {
      {"--help"}, {"info"}, {"run", "--input", path("in"), "--output", path("out")}};
  for (const std::vector<std::string>& arguments : forms) {
    const ToolResult result = run_tool(arguments, environment);
    EXPECT_EQ(result.exit_status, 2) << arguments[0];
    EXPECT_NE(result.err.find("can't write to standard output"), std::string::npos) << result.err;
  }
  EXPECT_EQ(num_files(), 1U);
}

// GNU's OpenMP exits with status 1 then, which would read as a failed check. (clang's aborts.)
TEST_F(Usage, ThreadsThatCannotStart) {
  write_input({noise("q", "F32", {1, 300, 4, 64}), noise("k", "F32", {1, 300, 4, 64}),
               noise("v", "F32", {1, 300, 4, 64})});
  ToolEnvironment environment;
  environment.variables = {"OMP_STACKSIZE=100000G"};
  const ToolResult result = run({"--threads", "3"}, environment);
  if (result.exit_status != 0 && result.exit_status != 128 + SIGABRT) {
    EXPECT_EQ(result.exit_status, 2);
    EXPECT_NE(result.err.find("flashgrad: OpenMP ended the program"), std::string::npos)
        << result.err;
    EXPECT_EQ(num_files(), 1U);
  }
}

TEST_F(Usage, Info) {
  const ToolResult result = run_tool({"info"});
  EXPECT_EQ(result.exit_status, 0);
  for (const char* word : {FLASHGRAD_EXPECTED_VERSION, "cpu", "reference", "instruction sets",
                           "FLASHGRAD_CPU_ISA", "f32", "bf16", "f16", "head_dim", "causal"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in:\n" << result.out;
  }
}

TEST_F(Usage, NoSuchCommand) {
  const std::vector<std::vector<std::string>> forms = {{},
                                                       {"walk"},
                                                       {"--fast"},
                                                       {"run"},
                                                       {"run", "--input", "x"},
                                                       {"run", "--output", "x"},
                                                       {"info", "extra"},
                                                       {"run", "run"},
                                                       {"check", "extra"},
                                                       {""}};
  for (const std::vector<std::string>& arguments : forms) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.exit_status, 2);
    EXPECT_TRUE(result.err.starts_with("flashgrad: ")) << result.err;
    EXPECT_EQ(result.out, "");
  }
  EXPECT_EQ(run_tool({"walk"}).err,
            "flashgrad: command: got 'walk', want one of: run, check, bench, plan, info "
            "(flashgrad --help tells more)\n");
  EXPECT_EQ(run_tool({"plan"}).err,
            "flashgrad: command: got none, want one of: roofline, memory, schedule, simulate, "
            "predict (flashgrad plan --help tells more)\n");
}

TEST_F(Usage, RefusedOptions) {
  struct Refused {
    std::vector<std::string> options;
    const char* message;
  };
  const std::vector<Refused> all = {
      {{"--fast"}, "--fast"},
      {{"extra"}, "extra"},
      {{"--causal", "--window", "1,1"}, "--window"},
      {{"--causal", "--window=inf,0"}, "--window"},
      {{"--causal=maybe"}, "causal"},
      {{"--window"}, "--window"},
      {{"--window", ""}, "--window"},
      {{"--window", "1"}, "--window"},
      {{"--window", "1,"}, "--window"},
      {{"--window", ",1"}, "--window"},
      {{"--window", "1,2,3"}, "--window"},
      {{"--window", "1, 2"}, "--window"},
      {{"--window", "1.5,2"}, "--window"},
      {{"--window", "nan,2"}, "--window"},
      {{"--window", "-inf,2"}, "--window"},
      {{"--window", "infinity,2"}, "--window"},
      {{"--window", "1,9223372036854775808"}, "--window"},
      {{"--window", "1,1", "--window", "2,2"}, "--window"},
      {{"--align", "left"}, "--align"},
      {{"--align", ""}, "--align"},
      {{"--scale", "nan"}, "--scale"},
      {{"--scale", "inf"}, "--scale"},
      {{"--scale", "-inf"}, "--scale"},
      {{"--scale", "1e400"}, "--scale"},
      {{"--scale", "1,5"}, "--scale"},
      {{"--scale", "0.1x"}, "--scale"},
      {{"--scale", ""}, "--scale"},
      {{"--scale", " 1"}, "--scale"},
      {{"--scale", "--causal"}, "--scale"},
      {{"--scale", "1", "--scale", "2"}, "--scale"},
      {{"--softcap", "nan"}, "--softcap"},
      {{"--softcap", "inf"}, "--softcap"},
      {{"--softcap", "-1"}, "--softcap"},
      {{"--softcap", "x"}, "--softcap"},
      {{"--backend", "gpu"}, "--backend"},
      {{"--backend", ""}, "--backend"},
      {{"--backend", "CPU"}, "--backend"},
      {{"--threads", "0"}, "--threads"},
      {{"--threads", "-1"}, "--threads"},
      {{"--threads", "1.5"}, "--threads"},
      {{"--threads", "two"}, "--threads"},
      {{"--threads", ""}, "--threads"},
      {{"--threads", "0x2"}, "--threads"},
      {{"--threads", "nan"}, "--threads"},
      {{"--threads", "2147483648"}, "--threads"},
      {{"--threads", "99999999999999999999"}, "--threads"},
      {{"--max-seqlen-q", "-1"}, "--max-seqlen-q"},
      {{"--max-seqlen-q", "nan"}, "--max-seqlen-q"},
      {{"--max-seqlen-kv", "1e3"}, "--max-seqlen-kv"},
      {{"--max-seqlen-kv", "9223372036854775808"}, "--max-seqlen-kv"},
      {{"--grad-dtype", "bf16"}, "--grad-dtype"},
      {{"--grad-dtype", ""}, "--grad-dtype"},
      {{"--check=2x"}, "check"},
      {{"--check="}, "--check=: nothing follows"},
      {{"--causal="}, "--causal=: nothing follows"},
      {{"--deterministic="}, "--deterministic="},
      {{"--scale="}, "--scale="},
      {{"--window="}, "--window="},
      {{"--deterministic=x"}, "deterministic"},
      {{"--input", "y"}, "--input"},
  };
  for (const Refused& refused : all) {
    SCOPED_TRACE(testing::PrintToString(refused.options));
    expect_refused(refused.options, 2, refused.message);
  }
}

TEST_F(Usage, EnvironmentIsCheckedToo) {
  ToolEnvironment environment;
  environment.variables = {"FLASHGRAD_BACKEND=abacus"};
  const ToolResult result = run({}, environment);
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_NE(result.err.find("abacus"), std::string::npos) << result.err;
  environment.variables = {"FLASHGRAD_BACKEND=reference"};
  const ToolResult forced = run_tool({"check", "--shape", "sq=8,d=8"}, environment);
  EXPECT_EQ(forced.out.find("cpu ("), std::string::npos) << forced.out;
  EXPECT_NE(forced.out.find("1 passed"), std::string::npos) << forced.out;
  environment.variables = {"FLASHGRAD_CPU_ISA=mmx"};
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"run", "--input", path("in"), "--output", path("out")},
        {"check", "--shape", "sq=8,d=8"}}) {
    const ToolResult refused = run_tool(arguments, environment);
    EXPECT_EQ(refused.exit_status, 2);
    EXPECT_NE(refused.err.find("FLASHGRAD_CPU_ISA: \"mmx\""), std::string::npos) << refused.err;
  }
  EXPECT_EQ(run_tool({"info"}, environment).exit_status, 0);
  environment.variables = {"FLASHGRAD_CPU_ISA=generic"};
  EXPECT_NE(run({}, environment).out.find("backend cpu: generic"), std::string::npos);
}

}  // namespace
}  // namespace flashgrad::tool
