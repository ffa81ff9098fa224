// SPDX-License-Identifier: Apache-2.0
// A real model's attention (data/): every target against results that another program computed in
// float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "conformance.hpp"
#include "safetensors.hpp"

namespace flashgrad::check {
namespace {

class RealData : public testing::TestWithParam<const char*> {
 protected:
  // The tensors of the file in `dtype`; the outputs poison.
  static CallTensors load(const tool::SafetensorsFile& file, Case* c, DType dtype) {
    const std::vector<std::int64_t>& shape = file.find("q")->shape;
    *c = parse_shape("b=" + std::to_string(shape[0]) + ",sq=" + std::to_string(shape[1]) +
                     ",hq=" + std::to_string(shape[2]) + ",d=" + std::to_string(shape[3]));
    c->dtype = dtype;
    CallTensors t = make_tensors(*c);
    fill(file, "q", t.q);
    fill(file, "k", t.k);
    fill(file, "v", t.v);
    fill(file, "dout", t.dout);
    return t;
  }

  // Of the source tree, or of where the test was copied to.
  static std::string directory() {
    const char* copied = std::getenv("FLASHGRAD_TEST_DATA");
    return copied != nullptr ? copied : FLASHGRAD_DATA_DIR;
  }

  static void fill(const tool::SafetensorsFile& file, const char* name, const HostTensor& t) {
    const tool::TensorEntry& entry = *file.find(name);
    ASSERT_EQ(entry.dtype, "BF16");
    ASSERT_EQ(entry.shape, t.shape());
    const tool::Buffer bytes = file.load(entry);
    for (std::int64_t n = 0; n < t.num_elements(); ++n) {
      t.set(n, load_f64(bytes.data(), DType::kBF16, n));
    }
  }

  // max |x - expected|, and max |expected|.
  static std::pair<double, double> difference(const tool::SafetensorsFile& file, const char* name,
                                              const HostTensor& t) {
    const tool::TensorEntry& entry = *file.find(name);
    EXPECT_EQ(entry.dtype, "F32");
    EXPECT_EQ(entry.shape, t.shape());
    const tool::Buffer bytes = file.load(entry);
    double error = 0;
    double magnitude = 0;
    for (std::int64_t n = 0; n < t.num_elements(); ++n) {
      const double want = load_f64(bytes.data(), DType::kF32, n);
      const double difference = std::abs(t.get(n) - want);
      error = std::isnan(difference) ? difference : std::max(error, difference);
      magnitude = std::max(magnitude, std::abs(want));
    }
    return {error, magnitude};
  }

  static void run(CallTensors& t, const Case& c, const std::string& backend) {
    fg_options o = make_options(c);
    o.backend = backend.c_str();
    WorkspaceMemory memory;
    for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
      const PassResult r = run_pass(pass, t, o, Workspace::kPreferred, memory);
      ASSERT_EQ(r.status, FG_OK) << r.message;
    }
  }
};

TEST_P(RealData, EqualsTheExpectedFile) {
  const std::string path = directory() + "/" + GetParam();
  const tool::SafetensorsFile inputs(path + ".safetensors");
  const tool::SafetensorsFile expected(path + "_expected.safetensors");
  Case c;

  // The oracle itself, in float64: the file's numbers were rounded once to f32.
  CallTensors exact = load(inputs, &c, DType::kF64);
  run(exact, c, "reference");
  const auto outputs = [](const CallTensors& t) {
    return std::vector<NamedTensor>{
        {"out", &t.out}, {"lse", &t.lse}, {"dq", &t.dq}, {"dk", &t.dk}, {"dv", &t.dv}};
  };
  for (const NamedTensor& output : outputs(exact)) {
    const auto [error, magnitude] = difference(expected, output.name, *output.tensor);
    EXPECT_LE(error, 6.1e-8 * magnitude) << output.name;
  }

  for (const Target& target : targets()) {
    SCOPED_TRACE(target.name());
    const UseTarget use(target);
    CallTensors t = load(inputs, &c, DType::kBF16);
    run(t, c, target.backend);
    const Judgement judgement = judge(t.c_tensors(), make_options(c), false);
    ASSERT_EQ(judgement.outputs.size(), 5U);
    const std::vector<NamedTensor> produced = outputs(t);
    for (std::size_t n = 0; n < 5; ++n) {
      const OutputResult& r = judgement.outputs[n];
      EXPECT_TRUE(r.ok) << r.name << ": " << r.error << " > " << r.bound << " " << r.reason;
      EXPECT_EQ(r.name, produced[n].name);
      const auto [error, magnitude] = difference(expected, produced[n].name, *produced[n].tensor);
      // lse's bound is relative to 1 + |lse|.
      const double bound = r.name == "lse" ? r.bound * (1 + magnitude) : r.bound;
      EXPECT_LE(error, bound + 6.1e-8 * magnitude) << r.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(MiniLm, RealData, testing::Values("minilm_layer0"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace flashgrad::check
