// SPDX-License-Identifier: Apache-2.0
// Runs reference.hpp over whole problems. Every element of every output is computed by one thread
// in one order, so the bits do not depend on the number of threads. The workspace is a Scratch for
// each thread.
#include "reference/reference.hpp"

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/refusals.hpp"
#include "reference/reference_backend.hpp"

namespace flashgrad {
namespace {

using reference::Head;
using reference::kBlock;
using Scratch = reference::Scratch<double>;
using Exact = reference::Formula<double>;

// A block of consecutive rows or keys [begin, end) as the list that reference.hpp takes.
struct Consecutive {
  std::array<std::int64_t, kBlock> index;
  int size = 0;

  Consecutive(std::int64_t begin, std::int64_t end) {
    for (std::int64_t x = begin; x < end && size < kBlock; ++x) {
      index[static_cast<std::size_t>(size++)] = x;
    }
  }
};

void store_row(const Tensor& t, std::int64_t offset, std::int64_t size, const double* row) {
  for (std::int64_t c = 0; c < size; ++c) {
    store_f64(t.data, t.dtype, offset + c * t.dim_stride, row[c]);
  }
}

void fill_rows(const Tensor& t, std::int64_t batch_index, Range rows, std::int64_t heads,
               std::int64_t size, double value) {
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t offset = t.offset(batch_index, i, h);
      for (std::int64_t c = 0; c < size; ++c) {
        store_f64(t.data, t.dtype, offset + c * t.dim_stride, value);
      }
    }
  }
}

const char* detail() { return "float64 textbook formulas"; }

bool available() { return true; }

Status supports(const Problem& p, Pass /*pass*/) { return want_device(p, DeviceType::kCpu); }

// A call may get fewer threads than it asks for, not more.
WorkspaceSize workspace_size(const Problem& p, Pass /*pass*/) {
  const std::size_t bytes = static_cast<std::size_t>(std::max(p.num_threads, 1)) * sizeof(Scratch);
  return {bytes + alignof(Scratch), bytes + alignof(Scratch)};
}

// That of the thread that asks.
Scratch& scratch_of_thread(const Args& a) {
  const auto begin = reinterpret_cast<std::uintptr_t>(a.workspace);
  const std::size_t pad = (alignof(Scratch) - begin % alignof(Scratch)) % alignof(Scratch);
  auto* first = reinterpret_cast<Scratch*>(static_cast<std::byte*>(a.workspace) + pad);
  return first[omp_get_thread_num()];
}

Status forward(const Problem& p, const Args& a) {
  const Exact f(p);
  for_each_unused_q(p, a, [&](std::int64_t batch_index, Range rows) {
    fill_rows(a.out, batch_index, rows, p.heads_q, p.head_dim_v, 0);
    if (a.lse) {
      fill_rows(a.lse, batch_index, rows, p.heads_q, 1, -std::numeric_limits<double>::infinity());
    }
  });
#pragma omp parallel num_threads(p.num_threads)
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, a, b);
    Scratch& scratch = scratch_of_thread(a);
#pragma omp for collapse(2) schedule(dynamic) nowait
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t begin = 0; begin < s.band.seqlen_q; begin += kBlock) {
        const Head head{p, a, s, h};
        const Consecutive rows(begin, s.band.seqlen_q);
        reference::forward_rows(f, head, rows.index.data(), rows.size, scratch);
        for (int r = 0; r < rows.size; ++r) {
          store_row(a.out, head.q(a.out, begin + r), p.head_dim_v, scratch.out[r].data());
          if (a.lse) {
            store_row(a.lse, head.q(a.lse, begin + r), 1, &scratch.lse[r]);
          }
        }
      }
    }
  }
  return {};
}

Status backward(const Problem& p, const Args& a) {
  const Exact f(p);
  for_each_unused_q(p, a, [&](std::int64_t batch_index, Range rows) {
    if (a.dq) {
      fill_rows(a.dq, batch_index, rows, p.heads_q, p.head_dim, 0);
    }
  });
  for_each_unused_kv(p, a, [&](std::int64_t batch_index, Range keys) {
    if (a.dk) {
      fill_rows(a.dk, batch_index, keys, p.heads_kv, p.head_dim, 0);
    }
    if (a.dv) {
      fill_rows(a.dv, batch_index, keys, p.heads_kv, p.head_dim_v, 0);
    }
  });
#pragma omp parallel num_threads(p.num_threads)
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, a, b);
    Scratch& scratch = scratch_of_thread(a);
#pragma omp for collapse(2) schedule(dynamic) nowait
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t begin = 0; begin < (a.dq ? s.band.seqlen_q : 0); begin += kBlock) {
        const Head head{p, a, s, h};
        const Consecutive rows(begin, s.band.seqlen_q);
        reference::backward_rows(f, head, rows.index.data(), rows.size, scratch);
        for (int r = 0; r < rows.size; ++r) {
          store_row(a.dq, head.q(a.dq, begin + r), p.head_dim, scratch.dq[r].data());
        }
      }
    }
#pragma omp for collapse(2) schedule(dynamic) nowait
    for (std::int64_t h = 0; h < p.heads_kv; ++h) {
      for (std::int64_t begin = 0; begin < (a.dk || a.dv ? s.band.seqlen_kv : 0); begin += kBlock) {
        const Head head{p, a, s, h * p.group()};
        const Consecutive keys(begin, s.band.seqlen_kv);
        reference::backward_keys(f, head, keys.index.data(), keys.size, scratch);
        for (int c = 0; c < keys.size; ++c) {
          if (a.dk) {
            store_row(a.dk, head.kv(a.dk, begin + c), p.head_dim, scratch.dk[c].data());
          }
          if (a.dv) {
            store_row(a.dv, head.kv(a.dv, begin + c), p.head_dim_v, scratch.dv[c].data());
          }
        }
      }
    }
  }
  if (a.dsinks != nullptr) {
#pragma omp parallel for num_threads(p.num_threads)
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      double sum = 0;
      for (std::int64_t b = 0; b < p.batch; ++b) {
        sum += reference::backward_sink(f, Head{p, a, sequence(p, a, b), h});
      }
      store_f64(a.dsinks, statistics_dtype(p.dtype), h, sum);
    }
  }
  return {};
}

}  // namespace

const Backend reference_backend{"reference",    detail,  available, supports,
                                workspace_size, forward, backward};

}  // namespace flashgrad
