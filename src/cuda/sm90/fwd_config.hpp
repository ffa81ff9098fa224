// SPDX-License-Identifier: Apache-2.0
// The forward kernel's compile-time choices and what follows from them: threads, registers, the plan of shared memory.
#pragma once

namespace flashgrad::cuda {

struct FwdConfig {
  int head_dim;         // native widths: what is narrower is padded with zeros by TMA
  int head_dim_v;
  int num_consumers;    // warpgroups, each with 64 query rows
  int block_n;          // keys a step
  int q_stages;         // 2: the next tile's Q arrives under this tile's products
  int stages;           // of K, and as many of V
  bool q_in_registers;  // Q is read from shared memory once a tile, not once a step
  bool ping_pong;       // one consumer issues its products only after the one before it has
  bool late_wait;
  bool uniform_desc;
  bool score_function;  // softcap, or a scale that is not positive: scores are transformed one by one

  constexpr int block_m() const { return 64 * num_consumers; }
  constexpr int threads() const { return 128 * (num_consumers + 1); }
  // 64K registers: 504 per slot of three warpgroups, 512 per slot of four.
  constexpr int consumer_registers() const { return num_consumers == 2 ? 232 : 160; }
  constexpr int producer_registers() const { return num_consumers == 2 ? 40 : 32; }

  // TMA boxes of 64 elements (128 bytes, the width of the swizzle) by all rows of a tile.
  constexpr int boxes() const { return (head_dim + 63) / 64; }
  constexpr int boxes_v() const { return (head_dim_v + 63) / 64; }
  constexpr int q_bytes() const { return boxes() * block_m() * 128; }
  constexpr int k_bytes() const { return boxes() * block_n * 128; }
  constexpr int v_bytes() const { return boxes_v() * block_n * 128; }

  // Offsets from a 1024-byte boundary, which the swizzle needs.
  constexpr int q_offset() const { return 0; }
  constexpr int k_offset() const { return q_stages * q_bytes(); }
  constexpr int v_offset() const { return k_offset() + stages * k_bytes(); }
  constexpr int control_offset() const { return v_offset() + stages * v_bytes(); }
  static constexpr int kBarrierBytes = 256;
  constexpr int tiles_offset() const { return control_offset() + kBarrierBytes; }
  static constexpr int kTileBytes = 208;
  constexpr int row_keys_offset() const { return tiles_offset() + 2 * kTileBytes; }  // two int32 a row
  constexpr int shared_bytes() const { return row_keys_offset() + 2 * 8 * block_m(); }

  constexpr bool fits() const {
    const int live = block_n / 2 + block_n / 4 + head_dim_v / 2 + (q_in_registers ? head_dim / 4 : 0);
    return shared_bytes() <= 232448 && block_n % 16 == 0 && block_n <= 128 && head_dim % 16 == 0 && head_dim_v % 32 == 0 &&
           24 + live + 2 <= consumer_registers();
  }
};

}  // namespace flashgrad::cuda
