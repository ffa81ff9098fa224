// SPDX-License-Identifier: Apache-2.0
// Starts the built `flashgrad` as a user would, with files of chosen tensors in a folder of its
// own.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "safetensors.hpp"

namespace flashgrad::tool {

struct ToolResult {
  int exit_status = -1;  // 128 + the signal's number if one ended it
  std::string out;
  std::string err;
};

struct ToolEnvironment {
  std::vector<std::string> variables;  // "NAME=value", besides the test's own
  std::string directory;               // to start in; empty: the test's own
  std::uint64_t file_size_limit = 0;   // as if the disk were full after so many bytes; 0: none
  std::string out_file;                // takes standard output; empty: into ToolResult::out
  bool nobody_reads = false;           // standard output is a pipe whose other end is closed
};

// Runs `flashgrad arguments...` and waits, at most two minutes.
ToolResult run_tool(const std::vector<std::string>& arguments,
                    const ToolEnvironment& environment = {});

// A tensor for an input file.
struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

// Numbers that look random and are the same each time, in any float dtype.
FileTensor noise(const std::string& name, const std::string& dtype,
                 const std::vector<std::int64_t>& shape);
FileTensor integers(const std::string& name, const std::string& dtype,
                    const std::vector<std::int64_t>& values);

class ToolTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  [[nodiscard]] std::string path(const std::string& name) const;
  void put(const std::string& name, const std::string& bytes) const;
  [[nodiscard]] std::string contents(const std::string& name) const;
  [[nodiscard]] std::size_t num_files() const;

  void write_input(const std::vector<FileTensor>& tensors) const;

  // `run --input in --output out` and more.
  [[nodiscard]] ToolResult run(const std::vector<std::string>& more = {},
                               const ToolEnvironment& environment = {}) const;
  // The same must end with that status and one line on stderr that holds `message`, and leave no
  // file behind.
  void expect_refused(const std::vector<std::string>& more, int exit_status,
                      const std::string& message) const;

  // Tensor `name` of the output as doubles; fails the test if there is none.
  [[nodiscard]] std::vector<double> values(const std::string& name) const;
  // The names in the output file, sorted.
  [[nodiscard]] std::vector<std::string> output_names() const;
  [[nodiscard]] std::string output_dtype(const std::string& name) const;
  [[nodiscard]] std::vector<std::byte> output_bytes(const std::string& name) const;

  std::filesystem::path directory;
};

}  // namespace flashgrad::tool
