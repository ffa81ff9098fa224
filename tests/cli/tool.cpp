// SPDX-License-Identifier: Apache-2.0
// Starts the built `flashgrad` and reads what it wrote.
#include "tool.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>

#include "core/dtype.hpp"

namespace flashgrad::tool {
namespace {

namespace fs = std::filesystem;

constexpr unsigned kTimeoutSeconds = 120;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

DType float_dtype(const std::string& dtype) {
  return dtype == "F64"    ? DType::kF64
         : dtype == "F32"  ? DType::kF32
         : dtype == "BF16" ? DType::kBF16
                           : DType::kF16;
}

std::int64_t num_elements(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    product *= extent;
  }
  return product;
}

// In the child: what the environment asks for, then the program.
[[noreturn]] void become_tool(const std::vector<std::string>& arguments,
                              const ToolEnvironment& environment, const std::string& out,
                              const std::string& err) {
  const int out_fd = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  const int err_fd = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(out_fd, STDOUT_FILENO);
  if (std::array<int, 2> ends{}; environment.nobody_reads && pipe(ends.data()) == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
  }
  dup2(err_fd, STDERR_FILENO);
  if (!environment.directory.empty() && chdir(environment.directory.c_str()) != 0) {
    _exit(126);
  }
  for (const std::string& variable : environment.variables) {
    const std::size_t equals = variable.find('=');
    setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
  }
  if (environment.file_size_limit > 0) {
    const rlimit limit{environment.file_size_limit, environment.file_size_limit};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  alarm(kTimeoutSeconds);
  std::vector<std::string> words = {"flashgrad"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  execv(FLASHGRAD_TOOL_PATH, argv.data());
  _exit(127);
}

std::string make_directory() {
  std::string name = (fs::temp_directory_path() / "flashgrad-cli-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) {
    ADD_FAILURE() << "mkdtemp: " << std::strerror(errno);
  }
  return name;
}

}  // namespace

ToolResult run_tool(const std::vector<std::string>& arguments, const ToolEnvironment& environment) {
  const fs::path directory = make_directory();
  const std::string out =
      environment.out_file.empty() ? (directory / "out").string() : environment.out_file;
  const std::string err = (directory / "err").string();
  const pid_t child = fork();
  if (child == 0) {
    become_tool(arguments, environment, out, err);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ToolResult result;
  result.exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.out = environment.out_file.empty() ? read_file(out) : "";
  result.err = read_file(err);
  fs::remove_all(directory);
  return result;
}

FileTensor noise(const std::string& name, const std::string& dtype,
                 const std::vector<std::int64_t>& shape) {
  const DType type = float_dtype(dtype);
  const std::int64_t count = num_elements(shape);
  FileTensor tensor{name, dtype, shape,
                    std::vector<std::byte>(static_cast<std::size_t>(count * size_bytes(type)))};
  // A linear congruential generator, started by the name so that no two tensors are alike.
  std::uint64_t state = std::hash<std::string>{}(name);
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const double uniform = static_cast<double>(state >> 11) * 0x1p-53;
    store_f64(tensor.bytes.data(), type, i, 3 * uniform - 1.5);
  }
  return tensor;
}

FileTensor integers(const std::string& name, const std::string& dtype,
                    const std::vector<std::int64_t>& values) {
  FileTensor tensor{name, dtype, {static_cast<std::int64_t>(values.size())}, {}};
  for (const std::int64_t value : values) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    tensor.bytes.insert(tensor.bytes.end(), bytes, bytes + element_bytes(dtype));
  }
  return tensor;
}

void ToolTest::SetUp() { directory = make_directory(); }

void ToolTest::TearDown() { fs::remove_all(directory); }

std::string ToolTest::path(const std::string& name) const { return (directory / name).string(); }

void ToolTest::put(const std::string& name, const std::string& bytes) const {
  std::ofstream(path(name), std::ios::binary) << bytes;
}

std::string ToolTest::contents(const std::string& name) const { return read_file(path(name)); }

std::size_t ToolTest::num_files() const {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
}

void ToolTest::write_input(const std::vector<FileTensor>& tensors) const {
  std::vector<OutputTensor> outputs;
  outputs.reserve(tensors.size());
  for (const FileTensor& tensor : tensors) {
    outputs.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes});
  }
  write_safetensors(path("in"), outputs, {});
}

ToolResult ToolTest::run(const std::vector<std::string>& more,
                         const ToolEnvironment& environment) const {
  std::vector<std::string> arguments = {"run", "--input", path("in"), "--output", path("out")};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_tool(arguments, environment);
}

void ToolTest::expect_refused(const std::vector<std::string>& more, int exit_status,
                              const std::string& message) const {
  const std::size_t num_files_before = num_files();
  const ToolResult result = run(more);
  EXPECT_EQ(result.exit_status, exit_status) << result.err;
  EXPECT_NE(result.err.find(message), std::string::npos)
      << "got: " << result.err << "want: " << message;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_TRUE(result.err.ends_with('\n'));
  EXPECT_EQ(result.out, "");
  EXPECT_FALSE(fs::exists(path("out")));
  EXPECT_EQ(num_files(), num_files_before);
}

std::vector<double> ToolTest::values(const std::string& name) const {
  const SafetensorsFile file(path("out"));
  const TensorEntry* entry = file.find(name);
  if (entry == nullptr) {
    ADD_FAILURE() << "no " << name << " in the output";
    return {};
  }
  const Buffer buffer = file.load(*entry);
  std::vector<double> result(static_cast<std::size_t>(num_elements(entry->shape)));
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = load_f64(buffer.data(), float_dtype(entry->dtype), static_cast<std::int64_t>(i));
  }
  return result;
}

std::vector<std::string> ToolTest::output_names() const {
  const SafetensorsFile file(path("out"));
  std::vector<std::string> names;
  for (const TensorEntry& entry : file.entries()) {
    names.push_back(entry.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string ToolTest::output_dtype(const std::string& name) const {
  const SafetensorsFile file(path("out"));
  const TensorEntry* entry = file.find(name);
  return entry == nullptr ? "" : entry->dtype;
}

std::vector<std::byte> ToolTest::output_bytes(const std::string& name) const {
  const SafetensorsFile file(path("out"));
  const TensorEntry* entry = file.find(name);
  if (entry == nullptr) {
    return {};
  }
  const Buffer buffer = file.load(*entry);
  return {buffer.data(), buffer.data() + buffer.size()};
}

}  // namespace flashgrad::tool
