// SPDX-License-Identifier: Apache-2.0
// The scheduler of the CPU's forward pass (forward_schedule.cpp, compiled once) and what it asks of
// the kernels (forward_item.hpp, compiled for each instruction set).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cpu/forward_plan.hpp"

namespace flashgrad::cpu {

// What a kernel knows of a call.
struct ForwardCall {
  const Problem& problem;
  const Args& args;
  ForwardSizes sizes;
};

// What a thread works in. All of it is scratch of one item, but the key block packed last, which
// the next item may want too.
struct ForwardScratch {
  void* q = nullptr;                   // Q^T, panels of (padded_head_words, panel) words
  void* staging = nullptr;             // rows of Q on their way into a panel, staging_words
  float* s = nullptr;                  // S^T of a panel, (keys, panel)
  void* p = nullptr;                   // P^T of a panel, (keys / unit, panel) words
  float* out = nullptr;                // O, (rows, columns)
  float* row_max = nullptr;            // (rows) the m of the algorithm
  float* row_sum = nullptr;            // (rows) its l
  float* row_rescale = nullptr;        // (rows) its exp(m - m') in the present key block
  std::int64_t* keys_begin = nullptr;  // (rows) the keys that a row sees
  std::int64_t* keys_end = nullptr;    // (rows)
  // A key block that the thread packed for itself, where blocks are not shared, and which it is.
  void* block = nullptr;
  std::int64_t block_batch = -1;
  std::int64_t block_head = -1;
  std::int64_t block_begin = -1;
};

// One instruction set's kernels for one dtype.
struct ForwardKernels {
  std::int64_t unit;   // elements in a word of Q, K, P and V
  std::int64_t lanes;  // floats in a vector
  std::int64_t panel;  // query rows, or columns of V, side by side: the register tile's width
  // Packs keys block_begin + [0, kForwardKeyBlock) of the sequence, as far as they exist, to
  // `block`.
  void (*pack_block)(const ForwardCall&, const Sequence&, std::int64_t head_kv,
                     std::int64_t block_begin, void* block);
  // Computes out and lse of an item.
  void (*run_item)(const ForwardCall&, const Sequence&, const ForwardItem&, ForwardScratch&);
};

WorkspaceSize forward_workspace(const Problem&, const ForwardKernels&);
void schedule_forward(const Problem&, const Args&, const ForwardKernels&);

}  // namespace flashgrad::cpu
