// SPDX-License-Identifier: Apache-2.0
// Where the program of program_sm90_wide.cpp keeps its tiles in shared memory: the layout of
// wide_config.hpp as the simulator's views.
#pragma once

#include "cuda/sm90/wide_config.hpp"
#include "plan/program_builder.hpp"

namespace flashgrad::plan {

struct WidePlaces {
  static constexpr int kM = sm90::kBlockM;
  static constexpr int kKeys = sm90::kWideKeys;
  static constexpr int kChunk = 16;  // queries whose P or dS goes into a product at a time
  static constexpr int kChunks = kM / kChunk;
  static constexpr int kWarpKeys = kKeys / 4;

  sm90::WideConfig c;

  static View shared(const char* name, int cta, int offset, int rows, int columns,
                     Element element = Element::kBf16) {
    return {name, Store::kShared, cta, offset, columns * size_of(element), rows, columns, element};
  }
  // Columns of K, or V, that are not resident.
  [[nodiscard]] View k(int cta) const {
    return shared("K", cta, 0, kKeys, c.head_dim - c.resident_k());
  }
  [[nodiscard]] View v(int cta) const {
    return shared("V", cta, c.v_offset(), kKeys, c.head_dim_v - c.resident_v());
  }
  [[nodiscard]] View q(int cta, int use) const {
    return shared("Q", cta, c.q_offset() + use % c.q_stages() * c.q_bytes(), kM, c.head_dim);
  }
  [[nodiscard]] View dout(int cta, int use) const {
    return shared("dO", cta, c.do_offset() + use % c.do_stages() * c.do_bytes(), kM, c.head_dim_v);
  }
  [[nodiscard]] View lse(int cta, int step) const {
    return shared("lse", cta, c.lse_offset() + step % c.statistics() * kM * 4, 1, kM,
                  Element::kF32);
  }
  [[nodiscard]] View delta(int cta, int step) const {
    return shared("delta", cta, c.delta_offset() + step % c.statistics() * kM * 4, 1, kM,
                  Element::kF32);
  }
  // Of P^T, then dS^T, as the image that goes to global memory.
  [[nodiscard]] View slot(int cta, int step) const {
    return shared("slot", cta, c.slot_offset() + step % c.slots() * c.slot_bytes(), kKeys, kM);
  }
  // Of dv, or dk behind it, on its way out.
  [[nodiscard]] View staging(int cta, int offset, int columns) const {
    return shared("staging", cta, c.staging_offset() + offset, kKeys, columns);
  }
  // Where a warp's rows of P^T lie for some queries: in the same bytes as its rows of dS^T will,
  // but one chunk after the other (WideShared::handover).
  [[nodiscard]] View handover(int cta, int step, int chunk, int warp) const {
    View view = slot(cta, step);
    view.offset += (warp * kChunks + chunk) * kWarpKeys * kChunk * 2;
    view.stride = kChunk * 2;
    view.rows = kWarpKeys;
    view.columns = kChunk;
    return view;
  }
};

}  // namespace flashgrad::plan
