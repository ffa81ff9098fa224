// SPDX-License-Identifier: Apache-2.0
// The shapes that `flashgrad bench` measures, and tensors for them.
#include "bench_suites.hpp"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include "options.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::json;

std::string suite_text(const std::string& name_or_path) {
  for (const SuiteText& suite : kSuiteTexts) {
    if (name_or_path == suite.name) {
      return suite.json;
    }
  }
  // A pipe without a writer or a device would be read for ever.
  std::error_code error;
  std::ifstream file;
  if (std::filesystem::is_regular_file(name_or_path, error)) {
    file.open(name_or_path, std::ios::binary);
  }
  if (!file.is_open()) {
    throw Error(fmt::format("--suite: '{}' is neither a suite ({}) nor a file that can be read",
                            printable(name_or_path), suite_names()));
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

const char* safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "F64";
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
  }
  return "";
}

// Uniform numbers of variance 1. Cheap, since filling the tensors should not take longer than
// attention.
void fill_random(const HostTensor& tensor, DType dtype, std::uint64_t state) {
  const auto count = static_cast<std::int64_t>(tensor.buffer.size()) / size_bytes(dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const double uniform = static_cast<double>(state >> 11) * 0x1p-53;
    store_f64(tensor.buffer.data(), dtype, i, (2 * uniform - 1) * 1.7320508);
  }
}

HostTensor offsets(const char* name, const std::vector<std::int32_t>& values) {
  HostTensor tensor = make_tensor(name, "I32", {static_cast<std::int64_t>(values.size())});
  std::memcpy(tensor.buffer.data(), values.data(), values.size() * sizeof(values[0]));
  return tensor;
}

}  // namespace

std::string suite_names() {
  std::string names;
  for (const SuiteText& suite : kSuiteTexts) {
    names += (names.empty() ? "" : ", ") + std::string(suite.name);
  }
  return names;
}

std::vector<check::Case> load_suite(const std::string& name_or_path) {
  std::vector<check::Case> cases;
  const std::string text = suite_text(name_or_path);
  try {
    const json suite = json::parse(text);
    for (const json& entry : suite.at("shapes")) {
      for (const json& mask : entry.at("masks")) {
        for (const json& dtype : entry.at("dtypes")) {
          check::Case c = check::parse_shape(entry.at("shape").get<std::string>());
          require_plain(c);
          c.dtype = check::parse_dtype(dtype.get<std::string>());
          CallArguments arguments;
          const auto window = mask.get<std::string>();
          arguments.causal = window == "causal";
          if (window != "causal" && window != "full") {
            arguments.window = window;
          }
          const CallOptions parsed(arguments);
          c.mask = {parsed.options.window_left, parsed.options.window_right,
                    Alignment::kBottomRight};
          cases.push_back(c);
        }
      }
    }
  } catch (const json::exception& error) {
    throw Error(fmt::format(
        R"(--suite {}: {}; want {{"shapes": [{{"shape": "b=1,...", "masks": [...], "dtypes": [...]}}]}})",
        printable(name_or_path), printable(error.what(), 200)));
  } catch (const std::exception& error) {
    throw Error(
        fmt::format("--suite {}: {}", printable(name_or_path), printable(error.what(), 200)));
  }
  return cases;
}

void require_plain(const check::Case& c) {
  check::Case plain;
  plain.batch = c.batch;
  plain.heads_q = c.heads_q;
  plain.heads_kv = c.heads_kv;
  plain.seqlen_q = c.seqlen_q;
  plain.seqlen_kv = c.seqlen_kv;
  plain.head_dim = c.head_dim;
  plain.head_dim_v = c.head_dim_v;
  plain.cu_seqlens_q = c.cu_seqlens_q;
  plain.cu_seqlens_kv = c.cu_seqlens_kv;
  plain.max_seqlen_q = c.max_seqlen_q;
  plain.max_seqlen_kv = c.max_seqlen_kv;
  if (check::shape_text(plain) != check::shape_text(c)) {
    throw Error(
        "--shape: bench measures b, hq, hkv, sq, sk, d, dv, cu_q, cu_kv, max_q and max_kv, and no "
        "other key");
  }
}

AttentionCall make_shapes(const check::Case& c, bool grad_f32) {
  AttentionCall call;
  const std::string dtype = safetensors_dtype(c.dtype);
  const auto shape = [&](std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    return c.packed() ? std::vector<std::int64_t>{rows, heads, dim}
                      : std::vector<std::int64_t>{c.batch, rows, heads, dim};
  };
  call.q = make_tensor("q", dtype, shape(c.seqlen_q, c.heads_q, c.head_dim));
  call.k = make_tensor("k", dtype, shape(c.seqlen_kv, c.heads_kv, c.head_dim));
  call.v = make_tensor("v", dtype, shape(c.seqlen_kv, c.heads_kv, c.head_dim_v));
  call.dout = make_tensor("dout", dtype, shape(c.seqlen_q, c.heads_q, c.head_dim_v));
  if (c.packed()) {
    call.cu_seqlens_q = offsets("cu_seqlens_q", c.cu_seqlens_q);
    call.cu_seqlens_kv = offsets("cu_seqlens_kv", c.cu_seqlens_kv);
  }
  call.make_outputs();
  call.make_gradients(grad_f32);
  return call;
}

AttentionCall make_call(const check::Case& c, bool grad_f32) {
  AttentionCall call = make_shapes(c, grad_f32);
  std::uint64_t seed = c.seed;
  for (const HostTensor* tensor : {&call.q, &call.k, &call.v, &call.dout}) {
    fill_random(*tensor, c.dtype, ++seed);
  }
  return call;
}

}  // namespace flashgrad::tool
