// SPDX-License-Identifier: Apache-2.0
// The parts of a call that share nothing with each other, and what is computed of each.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "core/problem.hpp"

namespace flashgrad::check {

enum Output : std::size_t { kOut, kLse, kDq, kDk, kDv, kDsinks, kNumOutputs };

// What one call stores of a unit, for R double (the oracle) or float (naive). out and lse have all
// rows, so that the backward finds row i at i; dq, dk, dv only the chosen rows and keys, in their
// order. q-like ones lie (group, row, dim).
template <class R>
struct Values {
  std::array<std::vector<R>, kDsinks> of;
};

// One kv head of one sequence with its group of query heads: the part of a call that shares nothing
// with the rest.
struct Unit {
  std::int64_t b = 0;
  std::int64_t head_kv = 0;
  Sequence at;                     // where its rows and keys lie in the whole tensors
  Problem problem;                 // of the unit alone: batch 1, one kv head
  Args args;                       // likewise: tensors that start at the unit
  bool whole = true;               // all rows and keys are chosen
  std::vector<std::int64_t> rows;  // chosen, ascending
  std::vector<std::int64_t> keys;
  Values<double> exact;
  std::vector<bool> row_is_empty;  // (group, chosen row): sees nothing, or lse is infinite
  std::vector<bool> key_is_unseen;
  // (output, head of the group): the oracle is not 0 and the naive result points the same way and
  // is as long, so that the tested one must point there too. Direction alone says nothing of a
  // gradient that is all rounding error: where one row sees one key it is right or opposite, by
  // chance.
  std::array<std::vector<bool>, kDsinks> direction_counts;

  [[nodiscard]] Sequence sequence() const {
    Sequence s;
    s.band = at.band;
    return s;
  }
  [[nodiscard]] std::int64_t seqlen_q() const { return at.band.seqlen_q; }
};

// The parts of an output of a unit: heads, the chosen rows or keys, elements of each.
struct Extent {
  std::int64_t heads;
  const std::vector<std::int64_t>* index;
  std::int64_t dim;
};
Extent extent(const Unit& u, Output output);

// Where the t-th chosen row or key of a head lies in Values, and how much Values holds.
std::size_t slot(const Unit& u, Output output, std::int64_t head, std::int64_t t);
std::size_t size_of(const Unit& u, Output output);

// The unit without any chosen rows and keys.
Unit make_unit(const Problem& p, const Args& a, std::int64_t b, std::int64_t head_kv);

// Operations of forward and backward, with what storing an element costs.
double cost_of(const Unit& u);

// Blocks of consecutive indices below `size`, the first and the last among them, about `count`
// indices in all.
std::vector<std::int64_t> sample(std::int64_t size, double count, std::mt19937_64& random);
std::vector<std::int64_t> all_below(std::int64_t size);

// The tensor of `values` as args.out or args.lse of a unit, for the backward, which only reads it.
template <class R>
Tensor stored(const Unit& u, const Values<R>& values, Output output) {
  Tensor t;
  t.data = const_cast<R*>(values.of[output].data());
  t.dtype = sizeof(R) == 8 ? DType::kF64 : DType::kF32;
  t.row_stride = extent(u, output).dim;
  t.head_stride = u.seqlen_q() * t.row_stride;
  return t;
}

}  // namespace flashgrad::check
