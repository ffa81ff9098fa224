// SPDX-License-Identifier: Apache-2.0
// What the programs of the simulator are written with: places, products, one line per operation.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plan/simulator.hpp"

namespace flashgrad::plan {

inline Matrix transposed(const Matrix& x) {
  Matrix y(x.columns, x.rows);
  for (int row = 0; row < x.rows; ++row) {
    for (int column = 0; column < x.columns; ++column) {
      y.at(column, row) = x.at(row, column);
    }
  }
  return y;
}

inline Matrix rows_of(const Matrix& whole, int first, int rows) {
  Matrix part(rows, whole.columns);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < whole.columns; ++column) {
      part.at(row, column) = whole.at(first + row, column);
    }
  }
  return part;
}

// sum += a b.
void add_product(Matrix& sum, const Matrix& a, const Matrix& b);

// How the halves of a pair's B lie together.
enum class Halves : std::uint8_t { kRows, kColumns };

// A product of one CTA, or of a pair with half of B in each: A B, each operand transposed first
// where it says so.
struct ProductShape {
  bool transpose_a = false;
  bool transpose_b = false;
  Halves halves = Halves::kRows;
};

class ProgramBuilder {
 public:
  ProgramBuilder(std::string name, int ctas) {
    program_.name = std::move(name);
    program_.ctas = ctas;
    program_.pipes = 0;
  }

  Program take(int steps) {
    program_.steps = steps;
    return std::move(program_);
  }

  int barrier(const std::string& name, int cta, int count) {
    program_.barriers.push_back({name, cta, count});
    return static_cast<int>(program_.barriers.size()) - 1;
  }

  // A place in the shared memory of every CTA.
  int shared(const std::string& name, int bytes) {
    const int offset = shared_end_;
    shared_end_ += (bytes + 127) / 128 * 128;
    program_.shared_regions.push_back({name, offset, bytes});
    return offset;
  }
  void tensor(const std::string& name, int column, int columns) {
    program_.tensor_regions.push_back({name, column, columns});
  }

  int add_pipe() { return program_.pipes++; }

  Program& program() { return program_; }

 private:
  Program program_;
  int shared_end_ = 0;
};

// Writes the operations of one role.
class RoleWriter {
 public:
  RoleWriter(ProgramBuilder& builder, const std::string& name, int cta, int pipe = 0)
      : program_(builder.program()), index_(program_.roles.size()) {
    program_.roles.push_back({name, cta, pipe, {}});
    program_.register_bytes.push_back(0);
  }

  [[nodiscard]] int cta() const { return program_.roles[index_].cta; }
  void set_step(int step) { step_ = step; }

  // A place in the role's registers.
  View registers(const std::string& name, int rows, int columns, Element element) {
    int& end = program_.register_bytes[index_];
    View view{name,
              Store::kRegisters,
              static_cast<int>(index_),
              end,
              columns * size_of(element),
              rows,
              columns,
              element};
    end += (static_cast<int>(view.bytes()) + 63) / 64 * 64;
    return view;
  }

  void wait(int barrier, int phase) {
    add({Kind::kWait, "wait", step_, {}, {}, {}, {barrier}, phase});
  }
  void arrive(std::vector<int> barriers) {
    add({Kind::kArrive, "arrive", step_, {}, {}, {}, std::move(barriers), 0});
  }
  void compute(const std::string& name, std::vector<Access> reads, std::vector<Access> writes,
               std::function<std::vector<Matrix>(const std::vector<Matrix>&)> function = {}) {
    add({Kind::kCompute,
         name,
         step_,
         std::move(reads),
         std::move(writes),
         std::move(function),
         {},
         0});
  }
  // One accumulator, A and B for each CTA that takes part. `before`: the accumulators' values so
  // far, if they are added to.
  void product(const std::string& name, const std::vector<Access>& accumulators,
               const std::vector<Access>& before, const std::vector<Access>& a,
               const std::vector<Access>& b, ProductShape shape);
  // A sum, times `factor`, from registers to rows of global memory by way of shared memory that
  // nobody reads any more. The kernels store 16-bit results; here they are f32, half the columns at
  // a time.
  void store_scaled(const Access& sum, View stage, const View& rows, float factor);
  void commit(std::vector<int> barriers = {}) {
    add({Kind::kCommit, "commit", step_, {}, {}, {}, std::move(barriers), 0});
  }
  void wait_products(int left) { add({Kind::kWaitProducts, "wait", step_, {}, {}, {}, {}, left}); }
  void copy(const std::string& name, Access from, std::vector<Access> to,
            std::vector<int> barriers) {
    add({Kind::kCopy, name, step_, {std::move(from)}, std::move(to), {}, std::move(barriers), 0});
  }
  void wait_copies(int left) { add({Kind::kWaitCopies, "wait", step_, {}, {}, {}, {}, left}); }

 private:
  using Kind = Operation::Kind;
  void add(Operation operation) {
    program_.roles[index_].operations.push_back(std::move(operation));
  }

  Program& program_;
  std::size_t index_;
  int step_ = 0;
};

// Rows [row, row + rows) and columns of a tensor in global memory, as the caller left it.
Access global_input(const HeadData& data, GlobalTensor tensor, int row, int rows, int column,
                    int columns);

// The query blocks of `rows` rows that see a key of [first_key, first_key + keys).
std::vector<int> query_blocks(const HeadData& data, int rows, int first_key, int keys);

// P^T = exp2(scale_log2 S^T - lse_log2), 0 where masked; keys from `first_key`, queries from
// `first_query`.
std::function<std::vector<Matrix>(const std::vector<Matrix>&)> softmax_of(const HeadData& data,
                                                                          int first_key,
                                                                          int first_query);

// dS^T = P^T (dP^T - delta), of inputs P^T, dP^T, delta.
Matrix ds_of(const std::vector<Matrix>& inputs);

}  // namespace flashgrad::plan
