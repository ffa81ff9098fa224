// SPDX-License-Identifier: Apache-2.0
// The safetensors reader against damaged and hostile headers, and the writer's promise: whole or
// not at all.
#include "safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "text.hpp"
#include "whole_file.hpp"

namespace flashgrad::tool {
namespace {

namespace fs = std::filesystem;

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
         offsets + "}";
}

// The message of the refusal; empty if the header was accepted.
std::string refusal(const std::string& header, std::uint64_t data_bytes) {
  try {
    parse_header(header, data_bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_status(), kExitBadInput);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    EXPECT_LT(std::strlen(error.what()), 600U);
    return error.what();
  }
  return "";
}

TEST(ParseHeader, ReadsEveryDtypeInTheOrderOfTheBytes) {
  const std::string header =
      "{\"__metadata__\":{\"a\":\"b\",\"\":\"c\"}," + tensor("z", "BF16", "[2,3]", "[0,12]") + "," +
      tensor("a", "F64", "[1]", "[12,20]") + "," + tensor("scalar", "I32", "[]", "[20,24]") + "," +
      tensor("empty", "F16", "[0,7]", "[24,24]") + "}   ";
  const std::vector<TensorEntry> entries = parse_header(header, 24);
  ASSERT_EQ(entries.size(), 4U);
  EXPECT_EQ(entries[0].name, "z");
  EXPECT_EQ(entries[0].dtype, "BF16");
  EXPECT_EQ(entries[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(entries[1].name, "a");
  EXPECT_EQ(entries[1].begin, 12U);
  EXPECT_EQ(entries[1].end, 20U);
  EXPECT_EQ(entries[2].shape.size(), 0U);
  EXPECT_EQ(entries[3].name, "empty");
  EXPECT_TRUE(parse_header("{}", 0).empty());
}

struct HostileHeader {
  const char* what;
  std::string header;
  std::uint64_t data_bytes;
  const char* message;  // a part of it
};

// Without this, GoogleTest would print the struct's bytes, padding included.
void PrintTo(const HostileHeader& header, std::ostream* os) { *os << header.what; }

class HostileHeaderTest : public testing::TestWithParam<HostileHeader> {};

TEST_P(HostileHeaderTest, IsRefusedWithItsReason) {
  const std::string message = refusal(GetParam().header, GetParam().data_bytes);
  EXPECT_NE(message.find(GetParam().message), std::string::npos) << "got: " << message;
}

std::string repeat(const std::string& text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) {
    result += text;
  }
  return result;
}

const std::string kQ = tensor("q", "F32", "[1]", "[0,4]");

INSTANTIATE_TEST_SUITE_P(
    Headers, HostileHeaderTest,
    testing::Values(
        HostileHeader{"empty", "", 0, "does not begin"},
        HostileHeader{"array", "[]", 0, "does not begin"},
        HostileHeader{"leading_space", " {}", 0, "does not begin"},
        HostileHeader{"byte_order_mark", "\xef\xbb\xbf{}", 0, "does not begin"},
        HostileHeader{"unfinished", "{" + kQ, 4, "not valid JSON"},
        HostileHeader{"trailing_object", "{}{}", 0, "not valid JSON"},
        HostileHeader{"trailing_nul", std::string("{}\0", 3), 0, "not valid JSON"},
        HostileHeader{"comment", "{/**/}", 0, "not valid JSON"},
        HostileHeader{"bad_utf8", "{\"\xff\":1}", 0, "not valid JSON"},
        HostileHeader{"deep_arrays", "{\"q\":" + repeat("[", 200000), 0, "got an array"},
        HostileHeader{"deep_objects", repeat("{\"q\":", 200000), 0, "unknown field"},
        HostileHeader{"deep_shape", "{\"q\":{\"dtype\":\"F32\",\"shape\":" + repeat("[", 200000), 0,
                      "got an array"},
        HostileHeader{"tensor_is_number", "{\"q\":1}", 0, "got a number"},
        HostileHeader{"tensor_is_null", "{\"q\":null}", 0, "got null"},
        HostileHeader{"tensor_is_array", "{\"q\":[]}", 0, "got an array"},
        HostileHeader{"tensor_is_string", "{\"q\":\"F32\"}", 0, "got a string"},
        HostileHeader{"same_name_twice", "{" + kQ + "," + kQ + "}", 4, "stands twice"},
        HostileHeader{"same_field_twice",
                      R"({"q":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}})", 4,
                      "stands twice"},
        HostileHeader{"metadata_number", R"({"__metadata__":{"a":1}})", 0, "want a string"},
        HostileHeader{"metadata_object", R"({"__metadata__":{"a":{}}})", 0, "want a string"},
        HostileHeader{"metadata_array", R"({"__metadata__":[]})", 0, "got an array"},
        HostileHeader{"metadata_twice", R"({"__metadata__":{},"__metadata__":{}})", 0,
                      "stands twice"},
        HostileHeader{"no_dtype", R"({"q":{"shape":[1],"data_offsets":[0,4]}})", 4,
                      "dtype is missing"},
        HostileHeader{"no_shape", R"({"q":{"dtype":"F32","data_offsets":[0,4]}})", 4,
                      "shape is missing"},
        HostileHeader{"no_offsets", R"({"q":{"dtype":"F32","shape":[1]}})", 4,
                      "data_offsets is missing"},
        HostileHeader{"unknown_field", R"({"q":{"strides":[1]}})", 4, "unknown field"},
        HostileHeader{"dtype_unknown", "{" + tensor("q", "F33", "[1]", "[0,4]") + "}", 4,
                      "not a dtype"},
        HostileHeader{"dtype_lower_case", "{" + tensor("q", "f32", "[1]", "[0,4]") + "}", 4,
                      "not a dtype"},
        HostileHeader{"dtype_number", R"({"q":{"dtype":5}})", 4, "got a number"},
        HostileHeader{"dtype_escapes", "{" + tensor("q", "\\u001b[31m\\n", "[1]", "[0,4]") + "}", 4,
                      "\\x1b"},
        HostileHeader{"shape_negative", "{" + tensor("q", "F32", "[-1]", "[0,4]") + "}", 4,
                      "negative"},
        HostileHeader{"shape_minus_zero", "{" + tensor("q", "F32", "[-0]", "[0,0]") + "}", 0,
                      "negative"},
        HostileHeader{"shape_fraction", "{" + tensor("q", "F32", "[1.5]", "[0,4]") + "}", 4,
                      "not whole"},
        HostileHeader{"shape_exponent", "{" + tensor("q", "F32", "[1e0]", "[0,4]") + "}", 4,
                      "not whole"},
        HostileHeader{"shape_over_64_bits",
                      "{" + tensor("q", "F32", "[99999999999999999999]", "[0,4]") + "}", 4,
                      "too large"},
        HostileHeader{"shape_over_63_bits",
                      "{" + tensor("q", "F32", "[18446744073709551615]", "[0,4]") + "}", 4,
                      "too large"},
        HostileHeader{"shape_string", R"({"q":{"dtype":"F32","shape":["1"]}})", 4, "got a string"},
        HostileHeader{"shape_null", R"({"q":{"dtype":"F32","shape":[null]}})", 4, "got null"},
        HostileHeader{"shape_true", R"({"q":{"dtype":"F32","shape":[true]}})", 4, "got a boolean"},
        HostileHeader{"shape_object", R"({"q":{"dtype":"F32","shape":{}}})", 4, "got an object"},
        HostileHeader{"shape_rank",
                      "{" + tensor("q", "F32", "[1" + repeat(",1", 64) + "]", "[0,4]") + "}", 4,
                      "dimensions"},
        HostileHeader{"shape_overflow",
                      "{" + tensor("q", "F32", "[4294967296,4294967296]", "[0,0]") + "}", 0,
                      "overflows"},
        HostileHeader{"shape_overflow_by_element",
                      "{" + tensor("q", "F64", "[2305843009213693952]", "[0,0]") + "}", 0,
                      "overflows"},
        HostileHeader{"shape_overflow_and_zero",
                      "{" + tensor("q", "F32", "[0,4294967296,4294967296]", "[0,0]") + "}", 0,
                      "overflows"},
        HostileHeader{"offsets_reversed", "{" + tensor("q", "F32", "[1]", "[4,0]") + "}", 4,
                      "out of range"},
        HostileHeader{"offsets_past_data", "{" + tensor("q", "F32", "[2]", "[0,8]") + "}", 4,
                      "out of range"},
        HostileHeader{
            "offsets_huge",
            "{" + tensor("q", "F32", "[1]", "[18446744073709551612,18446744073709551615]") + "}", 4,
            "out of range"},
        HostileHeader{"offsets_negative", "{" + tensor("q", "F32", "[1]", "[-4,0]") + "}", 4,
                      "negative"},
        HostileHeader{"offsets_one", "{" + tensor("q", "F32", "[1]", "[0]") + "}", 4, "1 numbers"},
        HostileHeader{"offsets_three", "{" + tensor("q", "F32", "[1]", "[0,4,8]") + "}", 4,
                      "more than 2"},
        HostileHeader{"offsets_empty", "{" + tensor("q", "F32", "[1]", "[]") + "}", 4, "0 numbers"},
        HostileHeader{"offsets_not_the_shape", "{" + tensor("q", "F32", "[2]", "[0,4]") + "}", 4,
                      "want 8"},
        HostileHeader{"offsets_not_the_dtype", "{" + tensor("q", "BF16", "[1]", "[0,4]") + "}", 4,
                      "want 2"},
        HostileHeader{"overlap", "{" + kQ + "," + tensor("k", "F32", "[1]", "[2,6]") + "}", 6,
                      "overlap"},
        HostileHeader{"same_bytes_twice", "{" + kQ + "," + tensor("k", "F32", "[1]", "[0,4]") + "}",
                      4, "overlap"},
        HostileHeader{"empty_tensor_inside_another",
                      "{" + kQ + "," + tensor("k", "F32", "[0]", "[2,2]") + "}", 4, "overlap"},
        HostileHeader{"hole_first", "{" + tensor("q", "F32", "[1]", "[4,8]") + "}", 8,
                      "belong to no tensor"},
        HostileHeader{"hole_between", "{" + kQ + "," + tensor("k", "F32", "[1]", "[8,12]") + "}",
                      12, "belong to no tensor"},
        HostileHeader{"hole_last", "{" + kQ + "}", 8, "belong to no tensor"},
        HostileHeader{"name_with_line_break", "{\"a\\nb\":1}", 0, "a\\x0ab"},
        HostileHeader{"name_endless", "{\"" + repeat("x", 100000) + "\":1}", 0, "xxx..."}),
    [](const testing::TestParamInfo<HostileHeader>& param_info) { return param_info.param.what; });

TEST(ParseHeaderLength, KnowsTheFilesSize) {
  const auto parse = [](std::uint64_t length, std::uint64_t file_bytes) {
    return parse_header_length(std::as_bytes(std::span(&length, 1)), file_bytes);
  };
  EXPECT_EQ(parse(2, 10), 2U);
  EXPECT_THROW(parse(3, 10), Error);
  EXPECT_THROW(parse(std::uint64_t{1} << 63, 10), Error);
  EXPECT_THROW(parse(UINT64_MAX, 10), Error);
  EXPECT_THROW(parse(UINT64_MAX - 7, 10), Error);
  EXPECT_THROW(parse(0, 7), Error);
  EXPECT_THROW(parse(kMaxHeaderBytes + 1, kMaxHeaderBytes + 100), Error);
  EXPECT_EQ(parse(kMaxHeaderBytes, kMaxHeaderBytes + 8), kMaxHeaderBytes);
}

class SafetensorsFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "flashgrad-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory = name;
  }
  void TearDown() override { fs::remove_all(directory); }

  [[nodiscard]] std::string path(const std::string& name) const {
    return (directory / name).string();
  }

  [[nodiscard]] std::string contents(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  void put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }

  [[nodiscard]] std::size_t num_files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
  }

  std::vector<float> values = {1.5F, -2, 3};
  [[nodiscard]] OutputTensor output() const {
    return {"x", "F32", {3}, std::as_bytes(std::span(values))};
  }

  fs::path directory;
};

TEST_F(SafetensorsFileTest, ReadsWhatItWrote) {
  const std::vector<std::uint16_t> halves = {1, 2, 3};
  const std::vector<OutputTensor> outputs = {
      {"h", "BF16", {3, 1}, std::as_bytes(std::span(halves))}, output()};
  write_safetensors(path("a"), outputs, {{"made by", "a test"}});
  const SafetensorsFile file(path("a"));
  ASSERT_NE(file.find("x"), nullptr);
  ASSERT_NE(file.find("h"), nullptr);
  EXPECT_EQ(file.find("y"), nullptr);
  const Buffer buffer = file.load(*file.find("x"));
  ASSERT_EQ(buffer.size(), 12U);
  EXPECT_EQ(std::memcmp(buffer.data(), values.data(), 12), 0);
  const Buffer half_buffer = file.load(*file.find("h"));
  EXPECT_EQ(std::memcmp(half_buffer.data(), halves.data(), 6), 0);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(SafetensorsFileTest, LoadsUnalignedDataAligned) {
  const std::string header =
      "{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("b", "F32", "[1]", "[1,5]") + "}";
  const std::uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), 8);
  const float value = 2.5F;
  bytes += header + "\x01" + std::string(reinterpret_cast<const char*>(&value), 4);
  put("a", bytes);
  const SafetensorsFile file(path("a"));
  const Buffer buffer = file.load(*file.find("b"));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0U);
  EXPECT_EQ(std::memcmp(buffer.data(), &value, 4), 0);
}

TEST_F(SafetensorsFileTest, EveryTruncationIsRefused) {
  write_safetensors(path("a"), std::vector{output()}, {});
  const std::string whole = contents("a");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    put("b", whole.substr(0, size));
    EXPECT_THROW(SafetensorsFile{path("b")}, Error) << size;
  }
  put("b", whole + "x");
  EXPECT_THROW(SafetensorsFile{path("b")}, Error);
  put("b", whole);
  EXPECT_NO_THROW(SafetensorsFile{path("b")});
}

TEST_F(SafetensorsFileTest, OnlyRegularFilesAreRead) {
  EXPECT_THROW(SafetensorsFile{directory.string()}, Error);
  EXPECT_THROW(SafetensorsFile{"/dev/zero"}, Error);
  EXPECT_THROW(SafetensorsFile{path("missing")}, Error);
  EXPECT_THROW(SafetensorsFile{""}, Error);
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(SafetensorsFile{path("pipe")}, Error);
}

TEST_F(SafetensorsFileTest, AFileThatShrinksWhileOpenIsRefused) {
  write_safetensors(path("a"), std::vector{output()}, {});
  const SafetensorsFile file(path("a"));
  fs::resize_file(path("a"), fs::file_size(path("a")) - 1);
  EXPECT_THROW((void)file.load(*file.find("x")), Error);
}

TEST_F(SafetensorsFileTest, AHugeSparseFileIsNotAllocated) {
  const std::string header = "{" + tensor("q", "U8", "[8796093022208]", "[0,8796093022208]") + "}";
  const std::uint64_t length = header.size();
  put("a", std::string(reinterpret_cast<const char*>(&length), 8) + header);
  std::error_code error;
  fs::resize_file(path("a"), 8 + length + (std::uint64_t{1} << 43), error);
  if (error) {
    // A file system without files of 8 TiB: the size is then as hostile as it can be here.
    GTEST_SKIP() << "no sparse file of 8 TiB here: " << error.message();
  }
  const SafetensorsFile file(path("a"));
  EXPECT_THROW((void)file.load(*file.find("q")), Error);
}

// Runs `write` with a limit on file sizes, as if the disk were full after `bytes`.
template <class F>
void with_full_disk(rlim_t bytes, F&& write) {
  rlimit old_limit{};
  getrlimit(RLIMIT_FSIZE, &old_limit);
  const rlimit limit{bytes, old_limit.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limit);
  write();
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
}

TEST_F(SafetensorsFileTest, AFullDiskLeavesTheOldFileAndNoOther) {
  put("old", "untouched");
  const std::vector<std::byte> big(100000);
  const std::vector<OutputTensor> outputs = {{"x", "U8", {100000}, big}};
  with_full_disk(50000, [&] {
    EXPECT_THROW(write_safetensors(path("old"), outputs, {}), Error);
    EXPECT_THROW(write_safetensors(path("new"), outputs, {}), Error);
  });
  EXPECT_EQ(contents("old"), "untouched");
  EXPECT_FALSE(fs::exists(path("new")));
  EXPECT_EQ(num_files(), 1U);
}

// Ctrl-C in the middle of the writing, which the single bytes draw out.
TEST_F(SafetensorsFileTest, ASignalLeavesTheOldFileAndNoOther) {
  put("old", "untouched");
  const std::byte byte{};
  const std::vector<std::span<const std::byte>> parts(std::size_t{1} << 20, {&byte, 1});
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = fork();
    if (child == 0) {
      std::signal(signal, SIG_DFL);
      write_whole_file(path("old"), parts);
      _exit(0);
    }
    for (int i = 0; i < 10000 && num_files() == 1; ++i) {
      usleep(100);
    }
    kill(child, signal);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the writing was over before the signal came";
    EXPECT_EQ(WTERMSIG(status), signal);
    EXPECT_EQ(contents("old"), "untouched");
    EXPECT_EQ(num_files(), 1U);
  }
}

TEST_F(SafetensorsFileTest, PathsThatCannotBeWrittenAreRefusedAtOnce) {
  for (const std::string& bad :
       {std::string(), directory.string(), path("no/such/directory/x"), path("x/"),
        std::string("/dev/null"), path("dangling"), path(std::string(256, 'x'))}) {
    fs::remove(path("dangling"));
    fs::create_symlink(path("nowhere/at/all"), path("dangling"));
    EXPECT_THROW(check_writable(bad), Error) << bad;
    EXPECT_THROW(write_safetensors(bad, std::vector{output()}, {}), Error) << bad;
  }
  EXPECT_NO_THROW(check_writable(path("fine")));
  EXPECT_FALSE(fs::exists(path("fine")));
}

TEST_F(SafetensorsFileTest, WritesThroughASymbolicLinkAndKeepsTheMode) {
  put("real", "old");
  ASSERT_EQ(chmod(path("real").c_str(), 0640), 0);
  fs::create_symlink(path("real"), path("link"));
  write_safetensors(path("link"), std::vector{output()}, {});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_NO_THROW(SafetensorsFile{path("real")});
  struct stat info {};
  ASSERT_EQ(stat(path("real").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0640U);
}

TEST(ParseNumbers, AcceptWholeStringsOnly) {
  EXPECT_EQ(parse_integer("-128", "x", INT64_MIN, INT64_MAX), -128);
  EXPECT_EQ(parse_integer("9223372036854775807", "x", 0, INT64_MAX), INT64_MAX);
  for (const char* bad : {"", " 1", "1 ", "1x", "0x10", "+1", "1.0", "1e3", "nan", "inf", "--1",
                          "9223372036854775808", "-9223372036854775809", "99999999999999999999"}) {
    EXPECT_THROW(parse_integer(bad, "x", INT64_MIN, INT64_MAX), Error) << bad;
  }
  EXPECT_THROW(parse_integer("0", "x", 1, 10), Error);
  EXPECT_THROW(parse_integer("11", "x", 1, 10), Error);

  EXPECT_EQ(parse_real("-1.5e-3", "x"), -1.5e-3);
  for (const char* bad : {"", "nan", "NaN", "-nan", "inf", "-inf", "infinity", "1e999", "1e-999",
                          "1,5", "1.5x", " 1", "1 ", "0x1p3", "1e", "--1"}) {
    EXPECT_THROW(parse_real(bad, "x"), Error) << bad;
  }
}

}  // namespace
}  // namespace flashgrad::tool
