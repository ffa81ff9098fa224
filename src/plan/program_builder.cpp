// SPDX-License-Identifier: Apache-2.0
// The numbers behind the programs' operations, and the tensors of a head.
#include "plan/program_builder.hpp"

#include <cmath>
#include <random>
#include <stdexcept>

#include "core/dtype.hpp"
#include "cuda/sm90/config.hpp"

namespace flashgrad::plan {
namespace {

constexpr double kLog2E = 1.4426950408889634;

Matrix join_halves(const Matrix& first, const Matrix& second, Halves halves) {
  const bool rows = halves == Halves::kRows;
  Matrix whole(first.rows + (rows ? second.rows : 0), first.columns + (rows ? 0 : second.columns));
  for (const Matrix* half : {&first, &second}) {
    const int row_offset = rows && half == &second ? first.rows : 0;
    const int column_offset = !rows && half == &second ? first.columns : 0;
    for (int row = 0; row < half->rows; ++row) {
      for (int column = 0; column < half->columns; ++column) {
        whole.at(row_offset + row, column_offset + column) = half->at(row, column);
      }
    }
  }
  return whole;
}

}  // namespace

void add_product(Matrix& sum, const Matrix& a, const Matrix& b) {
  for (int row = 0; row < a.rows; ++row) {
    for (int k = 0; k < a.columns; ++k) {
      const float x = a.at(row, k);
      for (int column = 0; column < b.columns; ++column) {
        sum.at(row, column) += x * b.at(k, column);
      }
    }
  }
}

void RoleWriter::product(const std::string& name, const std::vector<Access>& accumulators,
                         const std::vector<Access>& before, const std::vector<Access>& a,
                         const std::vector<Access>& b, ProductShape shape) {
  std::vector<Access> reads = before;
  reads.insert(reads.end(), a.begin(), a.end());
  reads.insert(reads.end(), b.begin(), b.end());
  const std::size_t ctas = accumulators.size();
  const std::size_t sums = before.size();
  add({Kind::kProduct,
       name,
       step_,
       std::move(reads),
       accumulators,
       [=](const std::vector<Matrix>& in) {
         const auto operand = [&in](std::size_t i, bool transpose) {
           return transpose ? transposed(in[i]) : in[i];
         };
         const std::size_t first_b = sums + ctas;
         Matrix b_whole = in[first_b];
         if (ctas == 2) {
           b_whole = join_halves(in[first_b], in[first_b + 1], shape.halves);
         }
         if (shape.transpose_b) {
           b_whole = transposed(b_whole);
         }
         std::vector<Matrix> out;
         for (std::size_t c = 0; c < ctas; ++c) {
           const Matrix a_own = operand(sums + c, shape.transpose_a);
           Matrix sum = sums > 0 ? in[c] : Matrix(a_own.rows, b_whole.columns);
           add_product(sum, a_own, b_whole);
           out.push_back(std::move(sum));
         }
         return out;
       },
       {},
       0});
}

void RoleWriter::store_scaled(const Access& sum, View stage, const View& rows, float factor) {
  const int columns = sum.view.columns / 2;
  stage.stride = columns * 4;
  stage.columns = columns;
  stage.element = Element::kF32;
  for (int half = 0; half < 2; ++half) {
    const auto part = [&](const View& view) {
      return view.part(0, view.rows, columns * half, columns);
    };
    const Access staged{stage, sum.value, 2 * sum.step + half};
    compute(sum.value, {{part(sum.view), sum.value, sum.step}}, {staged},
            [factor](const std::vector<Matrix>& in) {
              Matrix scaled = in[0];
              for (float& value : scaled.values) {
                value *= factor;
              }
              return std::vector<Matrix>{scaled};
            });
    compute(sum.value, {staged}, {{part(rows), "result", 0}});
  }
}

Access global_input(const HeadData& data, GlobalTensor tensor, int row, int rows, int column,
                    int columns) {
  const bool statistic = tensor == kGlobalLse || tensor == kGlobalDelta;
  const Element element = statistic ? Element::kF32 : Element::kBf16;
  const bool of_v = tensor == kGlobalV || tensor == kGlobalDout;
  const int width = statistic ? 1 : of_v ? data.head_dim_v : data.head_dim;
  View whole{"global memory", Store::kGlobal, tensor, 0, width * size_of(element), 0, 0, element};
  View view = whole.part(row, rows, column, columns);
  if (statistic) {  // as a row of numbers
    view = {"global memory", Store::kGlobal, tensor, row * 4, rows * 4, 1, rows, element};
  }
  return {view, "input", -1};
}

Band HeadData::band() const {
  return Band::of({kUnbounded, causal ? 0 : kUnbounded, Alignment::kBottomRight}, queries, keys);
}

std::vector<int> query_blocks(const HeadData& data, int rows, int first_key, int keys) {
  const Range range = data.band().q_range(first_key, first_key + keys);
  std::vector<int> blocks;
  for (int block = 0; block * rows < data.queries; ++block) {
    const std::int64_t begin = std::int64_t{block} * rows;
    if (begin < range.end && begin + rows > range.begin) {
      blocks.push_back(block);
    }
  }
  return blocks;
}

std::function<std::vector<Matrix>(const std::vector<Matrix>&)> softmax_of(const HeadData& data,
                                                                          int first_key,
                                                                          int first_query) {
  const auto scale_log2 = static_cast<float>(data.scale * kLog2E);
  return [band = data.band(), scale_log2, first_key, first_query](const std::vector<Matrix>& in) {
    Matrix p = in[0];
    for (int key = 0; key < p.rows; ++key) {
      for (int query = 0; query < p.columns; ++query) {
        p.at(key, query) = band.visible(first_query + query, first_key + key)
                               ? std::exp2(p.at(key, query) * scale_log2 - in[1].at(0, query))
                               : 0.0F;
      }
    }
    return std::vector<Matrix>{p, p};
  };
}

Matrix ds_of(const std::vector<Matrix>& in) {
  Matrix ds = in[0];
  for (int key = 0; key < ds.rows; ++key) {
    for (int query = 0; query < ds.columns; ++query) {
      ds.at(key, query) *= in[1].at(key, query) - in[2].at(0, query);
    }
  }
  return ds;
}

HeadData random_head(int queries, int keys, int head_dim, bool causal, std::uint64_t seed,
                     int head_dim_v) {
  const int width_v = head_dim_v > 0 ? head_dim_v : head_dim;
  HeadData data;
  data.queries = queries;
  data.keys = keys;
  data.head_dim = head_dim;
  data.head_dim_v = width_v;
  data.causal = causal;
  data.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<std::uint16_t>& tensor, int rows, int width) {
    tensor.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width));
    for (std::uint16_t& bits : tensor) {
      bits = f32_to_bf16(normal(generator));
    }
  };
  fill(data.q, queries, head_dim);
  fill(data.k, keys, head_dim);
  fill(data.v, keys, width_v);
  fill(data.dout, queries, width_v);
  const auto element = [](const std::vector<std::uint16_t>& tensor, int row, int column,
                          int width) {
    return static_cast<double>(
        bf16_to_f32(tensor[static_cast<std::size_t>(row) * static_cast<std::size_t>(width) +
                           static_cast<std::size_t>(column)]));
  };
  const Band band = data.band();
  for (int row = 0; row < queries; ++row) {
    std::vector<double> p(static_cast<std::size_t>(keys));
    double sum = 0;
    for (int key = 0; key < keys; ++key) {
      double dot = 0;
      for (int i = 0; i < head_dim; ++i) {
        dot += element(data.q, row, i, head_dim) * element(data.k, key, i, head_dim);
      }
      p[static_cast<std::size_t>(key)] =
          band.visible(row, key) ? std::exp(static_cast<double>(data.scale) * dot) : 0;
      sum += p[static_cast<std::size_t>(key)];
    }
    double delta = 0;
    for (int i = 0; i < width_v; ++i) {
      double out = 0;
      for (int key = 0; key < keys; ++key) {
        out += p[static_cast<std::size_t>(key)] * element(data.v, key, i, width_v);
      }
      data.out.push_back(f32_to_bf16(static_cast<float>(out / sum)));
      delta +=
          static_cast<double>(bf16_to_f32(data.out.back())) * element(data.dout, row, i, width_v);
    }
    data.lse.push_back(static_cast<float>(std::log(sum)));
    data.lse_log2.push_back(static_cast<float>(std::log(sum) * kLog2E));
    data.delta.push_back(static_cast<float>(delta));
  }
  data.dq.assign(data.q.size(), 0);
  data.dk.assign(data.k.size(), 0);
  data.dv.assign(data.v.size(), 0);
  data.ds.assign(static_cast<std::size_t>(queries) * static_cast<std::size_t>(keys), 0);
  return data;
}

const std::vector<ProgramChoice>& programs() {
  static const std::vector<ProgramChoice> kPrograms = {
      {"fa4", "fa4-backward", 128, 128,
       [](const HeadData& data, int first_key) { return fa4_program(data, first_key, 1); }},
      {"fa4-2cta", "fa4-backward-2cta", 256, 128,
       [](const HeadData& data, int first_key) { return fa4_program(data, first_key, 2); }},
      {"sm90-d64", "sm90-backward-D64", 256, 64,
       [](const HeadData& data, int first_key) {
         return sm90_program(data, first_key, static_cast<int>(sm90::BwdVariant::kD64));
       }},
      {"sm90-d96", "sm90-backward-D96", 128, 96,
       [](const HeadData& data, int first_key) {
         return sm90_program(data, first_key, static_cast<int>(sm90::BwdVariant::kD96));
       }},
      {"sm90-d128", "sm90-backward-D128", 128, 128,
       [](const HeadData& data, int first_key) {
         return sm90_program(data, first_key, static_cast<int>(sm90::BwdVariant::kD128));
       }},
      {"sm90-d128-cluster", "sm90-backward-D128Cluster", 256, 128,
       [](const HeadData& data, int first_key) {
         return sm90_program(data, first_key, static_cast<int>(sm90::BwdVariant::kD128Cluster));
       }},
      {"sm90-d128-ordered", "sm90-backward-D128Ordered", 256, 128,
       [](const HeadData& data, int first_key) {
         return sm90_program(data, first_key, static_cast<int>(sm90::BwdVariant::kD128Ordered));
       }},
      {"sm90-wide-d192-v128", "sm90-backward-wide-D192V128", 128, 192, sm90_wide_program, 128,
       nullptr, "sm90-wide-dq-d192"},
      {"sm90-wide-d192", "sm90-backward-wide-D192", 128, 192, sm90_wide_program, 192, nullptr,
       "sm90-wide-dq-d192"},
      {"sm90-wide-d256", "sm90-backward-wide-D256", 128, 256, sm90_wide_program, 256, nullptr,
       "sm90-wide-dq-d256"},
      {"sm90-wide-dq-d192", "sm90-backward-wide-dq-D192", 0, 192,
       [](const HeadData& data, int) { return sm90_wide_dq_program(data); }, 128,
       "sm90-wide-d192-v128"},
      {"sm90-wide-dq-d256", "sm90-backward-wide-dq-D256", 0, 256,
       [](const HeadData& data, int) { return sm90_wide_dq_program(data); }, 256, "sm90-wide-d256"},
  };
  return kPrograms;
}

const ProgramChoice& find_program(const std::string& name) {
  std::string names;
  for (const ProgramChoice& choice : programs()) {
    if (name == choice.name) {
      return choice;
    }
    names += (names.empty() ? "" : ", ") + std::string(choice.name);
  }
  throw std::invalid_argument("no program '" + name + "', want one of: " + names);
}

namespace {

// One program, for all keys.
SimulationResult run_all_keys(const ProgramChoice& program, HeadData& data, std::uint64_t seed) {
  SimulationResult result;
  const int keys = program.keys > 0 ? program.keys : data.keys;
  for (int first_key = 0; first_key < data.keys; first_key += keys) {
    SimulationResult part = run(program.make(data, first_key), data, seed);
    result.faults.insert(result.faults.end(), part.faults.begin(), part.faults.end());
    if (first_key == 0) {
      result.trace = std::move(part.trace);
    }
    result.shared_bytes.resize(part.shared_bytes.size());
    for (std::size_t cta = 0; cta < part.shared_bytes.size(); ++cta) {
      for (std::size_t use = 0; use < kNumUses; ++use) {
        result.shared_bytes[cta][use] += part.shared_bytes[cta][use];
      }
    }
  }
  return result;
}

}  // namespace

SimulationResult run_backward(const ProgramChoice& program, HeadData& data, std::uint64_t seed) {
  std::vector<Fault> faults;
  const auto run_other = [&](const char* name) {
    if (name != nullptr) {
      const std::vector<Fault> found = run_all_keys(find_program(name), data, seed).faults;
      faults.insert(faults.end(), found.begin(), found.end());
    }
  };
  run_other(program.before);
  SimulationResult result = run_all_keys(program, data, seed);
  run_other(program.after);
  result.faults.insert(result.faults.end(), faults.begin(), faults.end());
  if (program.before == nullptr && program.after == nullptr) {
    for (float& x : data.dq) {
      x *= data.scale;
    }
  }
  return result;
}

}  // namespace flashgrad::plan
