// SPDX-License-Identifier: Apache-2.0
// `flashgrad run` on files that are damaged, hostile or do not describe attention: one line, the
// right status, no output file.
#include <cstring>
#include <filesystem>

#include "tool.hpp"

namespace flashgrad::tool {
namespace {

using Shape = std::vector<std::int64_t>;

class HostileFiles : public ToolTest {
 protected:
  // A sound call of 2 x 5 queries and 7 keys, 4 heads over 2, head_dim 8, with dout.
  [[nodiscard]] static std::vector<FileTensor> sound() {
    return {noise("q", "BF16", {2, 5, 4, 8}), noise("k", "BF16", {2, 7, 2, 8}),
            noise("v", "BF16", {2, 7, 2, 8}), noise("dout", "BF16", {2, 5, 4, 8})};
  }

  // The sound call with these tensors in place of (or beside) its own.
  void write_changed(const std::vector<FileTensor>& changes) const {
    std::vector<FileTensor> tensors = sound();
    for (const FileTensor& change : changes) {
      std::erase_if(tensors, [&](const FileTensor& tensor) { return tensor.name == change.name; });
      tensors.push_back(change);
    }
    write_input(tensors);
  }

  // A packed call: 3 sequences of 2, 3 and 1 queries, 4, 0 and 5 keys.
  [[nodiscard]] static std::vector<FileTensor> packed() {
    return {noise("q", "F32", {6, 2, 8}), noise("k", "F32", {9, 2, 8}),
            noise("v", "F32", {9, 2, 8}), noise("dout", "F32", {6, 2, 8})};
  }
  void write_packed(const std::vector<std::int64_t>& cu_q, const std::vector<std::int64_t>& cu_kv,
                    const std::vector<FileTensor>& more = {}) const {
    std::vector<FileTensor> tensors = packed();
    tensors.push_back(integers("cu_seqlens_q", "I32", cu_q));
    tensors.push_back(integers("cu_seqlens_kv", "I32", cu_kv));
    tensors.insert(tensors.end(), more.begin(), more.end());
    write_input(tensors);
  }

  void put_header(std::uint64_t length, const std::string& header,
                  const std::string& data = "") const {
    put("in", std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + data);
  }
  void put_header(const std::string& header, const std::string& data = "") const {
    put_header(header.size(), header, data);
  }
};

TEST_F(HostileFiles, TheSoundCallsRun) {
  write_changed({});
  EXPECT_EQ(run().exit_status, 0) << run().err;
  write_packed({0, 2, 5, 6}, {0, 4, 4, 9});
  EXPECT_EQ(run().exit_status, 0) << run().err;
}

TEST_F(HostileFiles, Truncated) {
  write_changed({});
  const std::string whole = contents("in");
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{8}, std::size_t{100},
                                 whole.size() / 2, whole.size() - 1}) {
    put("in", whole.substr(0, size));
    expect_refused({}, 2, path("in"));
  }
  put("in", whole + "x");
  expect_refused({}, 2, "belong to no tensor");
}

TEST_F(HostileFiles, HeaderLength) {
  put_header(std::uint64_t{1} << 63, "{}");
  expect_refused({}, 2, "header length 9223372036854775808");
  put_header(UINT64_MAX, "{}");
  expect_refused({}, 2, "header length");
  put_header(3, "{}");
  expect_refused({}, 2, "header length");
  put_header(0, "");
  expect_refused({}, 2, "header");
}

TEST_F(HostileFiles, HeaderText) {
  for (const char* header : {"", "x", "[]", "null", "{", "{}{}", "{\"q\":", "{\"q\":[[[[[[",
                             "{\"q\":{\"dtype\":", "{\"\xff\xfe\":{}}"}) {
    put_header(header);
    expect_refused({}, 2, "header");
  }
  std::string deep;
  for (int i = 0; i < 1000000; ++i) {
    deep += "{\"q\":";
  }
  put_header(deep);
  expect_refused({}, 2, "q");
}

TEST_F(HostileFiles, ShapesAndOffsets) {
  const auto q = [](const std::string& shape, const std::string& offsets) {
    return R"({"q":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const std::string data(16, '\0');
  put_header(q("[4294967296,4294967296,4294967296,4]", "[0,0]"));
  expect_refused({}, 2, "overflows");
  put_header(q("[9223372036854775807,2]", "[0,16]"), data);
  expect_refused({}, 2, "overflows");
  put_header(q("[0,9223372036854775807,9223372036854775807]", "[0,0]"));
  expect_refused({}, 2, "overflows");
  put_header(q("[-4]", "[0,16]"), data);
  expect_refused({}, 2, "negative");
  put_header(q("[4.0]", "[0,16]"), data);
  expect_refused({}, 2, "not whole");
  put_header(q("[4]", "[0,15]"), data);
  expect_refused({}, 2, "want 16");
  put_header(q("[8]", "[0,32]"), data);
  expect_refused({}, 2, "out of range");
  put_header(q("[4]", "[16,0]"), data);
  expect_refused({}, 2, "out of range");
  put_header(q("[4]", "[18446744073709551600,18446744073709551615]"), data);
  expect_refused({}, 2, "out of range");
  put_header(
      R"({"q":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"k":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
      data);
  expect_refused({}, 2, "overlap");
}

TEST_F(HostileFiles, NamesCannotForgeTheTerminal) {
  put_header("{\"\\u001b]0;x\\u0007\\nq\":{\"dtype\":1}}");
  const ToolResult result = run();
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_EQ(result.err.find('\x1b'), std::string::npos);
  expect_refused({}, 2, "\\x1b");
  // U+009B is ESC [ in one character, U+202E turns the direction, U+2028 ends the line.
  put_header("{\"\\u009b31m\\u202ex\\u2028q\":{\"dtype\":1}}");
  expect_refused({}, 2, "'\\xc2\\x9b31m\\xe2\\x80\\xaex\\xe2\\x80\\xa8q'");
  // What is only foreign stays, and is not cut inside of a character.
  std::string name;
  for (int i = 0; i < 40; ++i) {
    name += "\u6ce8";
  }
  put_header("{\"" + name + "\":{\"dtype\":1}}");
  expect_refused({}, 2, "'" + name.substr(0, std::size_t{27} * 3) + "...'");
  // Not UTF-8, as a path may be.
  const ToolResult path_result =
      run_tool({"run", "--input", "no\x9b\xf9\x80\x80\x80\xc3", "--output", path("out")});
  EXPECT_NE(path_result.err.find("no\\x9b\\xf9\\x80\\x80\\x80\\xc3: can't open"), std::string::npos)
      << path_result.err;
}

TEST_F(HostileFiles, MissingTensors) {
  for (const char* name : {"q", "k", "v"}) {
    std::vector<FileTensor> tensors = sound();
    std::erase_if(tensors, [&](const FileTensor& tensor) { return tensor.name == name; });
    write_input(tensors);
    expect_refused({}, 2, std::string("no tensor '") + name + "'");
  }
  put_header("{}");
  expect_refused({}, 2, "no tensor 'q'");
  // One line also where there are others to name.
  write_input({noise("weight", "F32", {3})});
  expect_refused({}, 2, "no tensor 'q'");
}

TEST_F(HostileFiles, OutAndLseComeAsAPair) {
  write_changed({noise("out", "BF16", {2, 5, 4, 8})});
  expect_refused({}, 2, "out without lse");
  write_changed({noise("lse", "F32", {2, 4, 5})});
  expect_refused({}, 2, "lse without out");
}

TEST_F(HostileFiles, WrongDtypes) {
  write_changed({noise("k", "F16", {2, 7, 2, 8})});
  expect_refused({}, 2, "k");
  write_changed({noise("dout", "F32", {2, 5, 4, 8})});
  expect_refused({}, 2, "dout");
  write_changed({{"q", "I32", {2, 5, 4, 8}, std::vector<std::byte>(1280)}});
  expect_refused({}, 2, "q");
  write_changed({{"q", "U8", {2, 5, 4, 8}, std::vector<std::byte>(320)}});
  expect_refused({}, 2, "q: dtype U8");
  for (const char* dtype : {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}) {
    write_changed({{"q", dtype, {2, 5, 4, 8}, std::vector<std::byte>(320)}});
    expect_refused({}, 3, std::string("q: dtype ") + dtype);
  }
  write_changed({{"q", "F4", {2, 5, 4, 8}, std::vector<std::byte>(160)}});
  expect_refused({}, 3, "q: dtype F4");
  write_changed({{"scales", "F6_E2M3", {3}, std::vector<std::byte>(2)}});
  expect_refused({}, 2, "F6_E2M3 (3) is not a whole number of bytes");
  write_changed({noise("sinks", "BF16", {4})});
  expect_refused({}, 2, "sinks");
  write_changed({noise("dlse", "BF16", {2, 4, 5})});
  expect_refused({}, 2, "dlse");
  write_changed({noise("out", "BF16", {2, 5, 4, 8}), noise("lse", "BF16", {2, 4, 5})});
  expect_refused({}, 2, "lse");
  write_changed({integers("seqused_kv", "I64", {7, 7})});
  expect_refused({}, 2, "seqused_kv");
  write_changed({integers("q_offset", "I32", {0, 0})});
  expect_refused({}, 2, "q_offset");
  write_changed({noise("seqused_q", "F32", {2})});
  expect_refused({}, 2, "seqused_q");
}

TEST_F(HostileFiles, WrongShapes) {
  struct Change {
    const char* name;
    Shape shape;
  };
  for (const Change& change : {Change{"q", {}},
                               Change{"q", {5}},
                               Change{"q", {5, 8}},
                               Change{"q", {5, 4, 8}},
                               Change{"q", {1, 2, 5, 4, 8}},
                               Change{"q", {2, 5, 4, 7}},
                               Change{"q", {2, 5, 3, 8}},
                               Change{"q", {3, 5, 4, 8}},
                               Change{"q", {2, 5, 0, 8}},
                               Change{"q", {2, 5, 4, 0}},
                               Change{"k", {2, 7, 2, 9}},
                               Change{"k", {2, 6, 2, 8}},
                               Change{"k", {2, 7, 0, 8}},
                               Change{"k", {7, 2, 8}},
                               Change{"k", {}},
                               Change{"v", {2, 7, 1, 8}},
                               Change{"v", {}},
                               Change{"v", {2, 7, 2, 0}},
                               Change{"v", {7, 2, 8}},
                               Change{"dout", {2, 5, 4, 9}},
                               Change{"dout", {2, 5, 4}},
                               Change{"dout", {}}}) {
    write_changed({noise(change.name, "BF16", change.shape)});
    SCOPED_TRACE(std::string(change.name) + format_shape(change.shape));
    expect_refused({}, 2, change.name);
  }
  write_changed({noise("sinks", "F32", {3})});
  expect_refused({}, 2, "sinks");
  write_changed({noise("dlse", "F32", {2, 5, 4})});
  expect_refused({}, 2, "dlse");
  write_changed({noise("out", "BF16", {2, 5, 4, 8}), noise("lse", "F32", {2, 5, 4})});
  expect_refused({}, 2, "lse");
  write_changed({noise("q", "BF16", {2, 5, 4, 257}), noise("k", "BF16", {2, 7, 2, 257})});
  expect_refused({}, 3, "head_dim 257");
}

// Their bytes are none, so any extent fits into a file; memory and time must not follow the
// extents.
TEST_F(HostileFiles, EmptyTensorsOfHugeExtent) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 55;
  write_input({noise("q", "BF16", {1, 0, 1, 1}),
               noise("k", "BF16", {1, 0, 1, 1}),
               {"v", "BF16", {1, kHuge, 0, 1}, {}}});
  expect_refused({}, 2, "v");
  // k and v of no keys, so that only the outputs are large.
  write_input({{"q", "BF16", {kHuge, 0, 1, 1}, {}},
               {"k", "BF16", {kHuge, 1, 0, 1}, {}},
               {"v", "BF16", {kHuge, 1, 0, 1}, {}}});
  expect_refused({}, 2, "k");
  write_input({{"q", "BF16", {kHuge, kHuge / 4, 0, 1}, {}},
               {"k", "BF16", {1, 0, 1, 1}, {}},
               {"v", "BF16", {1, 0, 1, 1}, {}}});
  expect_refused({}, 2, "overflows");
  // These are attention of nothing, which is legal and takes no time.
  const std::vector<Shape> shapes = {{kHuge, 0, 1, 1}, {1, 0, kHuge, 1}, {0, kHuge, 1, 1}};
  for (const Shape& shape : shapes) {
    write_input({{"q", "BF16", shape, {}},
                 {"k", "BF16", shape, {}},
                 {"v", "BF16", shape, {}},
                 {"dout", "BF16", shape, {}}});
    for (const char* backend : {"cpu", "reference"}) {
      const ToolResult result = run({"--backend", backend});
      EXPECT_EQ(result.exit_status, 0) << format_shape(shape) << result.err;
    }
  }
}

TEST_F(HostileFiles, OffsetsOfPackedSequences) {
  struct Offsets {
    std::vector<std::int64_t> cu_q, cu_kv;
  };
  for (const Offsets& offsets :
       {Offsets{{0, 5, 2, 6}, {0, 4, 4, 9}}, Offsets{{0, 2, 5, 7}, {0, 4, 4, 9}},
        Offsets{{-1, 2, 5, 6}, {0, 4, 4, 9}}, Offsets{{0, 2, 5, 6}, {0, 4, 3, 9}},
        Offsets{{0, 2, 5, 6}, {0, 4, 4, 10}}, Offsets{{0, 2, 5, 6}, {0, 4, 4, 2147483647}},
        Offsets{{0, 2, 5, 6}, {-2147483648LL, 4, 4, 9}}, Offsets{{0, 2, 5, 6}, {0, 9}},
        Offsets{{0, 6}, {0, 4, 4, 9}}, Offsets{{}, {}}}) {
    write_packed(offsets.cu_q, offsets.cu_kv);
    expect_refused({}, 2, "cu_seqlens");
  }
  std::vector<FileTensor> tensors = packed();
  write_input(tensors);
  expect_refused({}, 2, "cu_seqlens");
  tensors.push_back(integers("cu_seqlens_q", "I32", {0, 2, 5, 6}));
  write_input(tensors);
  expect_refused({}, 2, "cu_seqlens_kv");
  tensors.push_back(integers("cu_seqlens_kv", "I64", {0, 4, 4, 9}));
  write_input(tensors);
  expect_refused({}, 2, "cu_seqlens_kv");
}

TEST_F(HostileFiles, LengthsThatDoNotFit) {
  for (const std::vector<std::int64_t>& used :
       {std::vector<std::int64_t>{8, 7}, {-1, 7}, {7}, {7, 7, 7}, {}}) {
    write_changed({integers("seqused_kv", "I32", used)});
    expect_refused({}, 2, "seqused_kv");
  }
  write_changed({integers("seqused_q", "I32", {5, 6})});
  expect_refused({}, 2, "seqused_q");
  write_packed({0, 2, 5, 6}, {0, 4, 4, 9}, {integers("seqused_q", "I32", {2, 4, 1})});
  expect_refused({}, 2, "seqused_q");
  write_packed({0, 2, 5, 6}, {0, 4, 4, 9});
  expect_refused({"--max-seqlen-q", "2"}, 2, "max_seqlen_q");
  expect_refused({"--max-seqlen-kv", "4"}, 2, "max_seqlen_kv");
  EXPECT_EQ(run({"--max-seqlen-q", "3", "--max-seqlen-kv", "5"}).exit_status, 0);
}

TEST_F(HostileFiles, CuSeqlensOfAFixedLengthCall) {
  write_changed({integers("cu_seqlens_q", "I32", {0, 5, 10})});
  expect_refused({}, 2, "cu_seqlens");
}

TEST_F(HostileFiles, OutputIsTheInput) {
  write_changed({});
  std::filesystem::create_symlink(path("in"), path("link"));
  const auto size = std::filesystem::file_size(path("in"));
  for (const char* output : {"in", "link", "./in"}) {
    const ToolResult result = run_tool({"run", "--input", path("in"), "--output", path(output)});
    EXPECT_EQ(result.exit_status, 2) << output;
    EXPECT_NE(result.err.find("it is the input"), std::string::npos) << result.err;
    EXPECT_EQ(std::filesystem::file_size(path("in")), size);
  }
}

TEST_F(HostileFiles, OutputIsALinkToNothing) {
  write_changed({});
  std::filesystem::create_symlink(path("nowhere"), path("link"));
  const ToolResult result = run_tool({"run", "--input", path("in"), "--output", path("link")});
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_NE(result.err.find("a symbolic link to a file that does not exist"), std::string::npos)
      << result.err;
}

TEST_F(HostileFiles, NotAFile) {
  expect_refused({}, 2, "can't open");
  std::filesystem::create_directory(path("in"));
  expect_refused({}, 2, "not a regular file");
  const ToolResult result = run_tool({"run", "--input", "/dev/zero", "--output", path("out")});
  EXPECT_EQ(result.exit_status, 2);
}

}  // namespace
}  // namespace flashgrad::tool
