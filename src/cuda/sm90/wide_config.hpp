// SPDX-License-Identifier: Apache-2.0
// The shapes of the backward's kernels for head dims above 128 as values: tiles, stages, what stays
// in registers, and the layout of shared memory that follows.
#pragma once

#include "cuda/sm90/config.hpp"
#include "cuda/sm90/wide_tile.cuh"
#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

inline constexpr int kWideRoundBarriers = 7;  // wide_rounds.cuh
inline constexpr int kWideThreads = 384;

// Of bwd_wide.cuh: head_dim columns of K and Q, head_dim_v of V and dO. A stage has pieces of 128
// columns, which arrive by themselves, so that products begin early. The resident columns of K and
// V, those that live in registers, come through the first stage of Q and of dO: step i takes stage
// i + 1 (mod the stages).
struct WideConfig {
  int head_dim;
  int head_dim_v;
  int cluster;
  bool softcap;

  static constexpr int kBoxBytes = 64 * tile::kBoxRowBytes;

  // With v of 128 registers are left over: for all of K and V, for S of the next step and for lse,
  // loaded before S is there. H200, causal 16k: 622 -> 671 TFLOP/s. And shared memory, so that a
  // CTA can make several tiles, the next one's loads and first products under the end of the last.
  constexpr bool ahead() const { return head_dim == 192 && head_dim_v == 128 && !softcap; }
  constexpr int resident_k() const { return ahead() ? 192 : 64; }  // columns
  constexpr int resident_v() const { return ahead() ? 128 : 64; }
  constexpr int p_registers() const { return ahead() ? 240 : 232; }
  constexpr int ds_registers() const { return ahead() ? 216 : 232; }
  constexpr int loader_registers() const { return ahead() ? 48 : 40; }
  constexpr int slots() const { return ahead() ? 4 : 2; }  // a power of two
  constexpr int q_stages() const {
    return head_dim == 256 ? (softcap ? 2 : 3) : softcap && head_dim_v > 128 ? 3 : 4;
  }
  constexpr int do_stages() const { return head_dim == 256 ? 2 : 3; }
  // dk and dv on their way out: places of their own, so that the next tile can begin, or stages.
  constexpr int staging_bytes() const { return ahead() ? 64 * (head_dim + head_dim_v) * 2 : 0; }
  constexpr int q_pieces() const { return (head_dim + 127) / 128; }
  constexpr int do_pieces() const { return (head_dim_v + 127) / 128; }
  constexpr int k_bytes() const { return (head_dim - resident_k()) / 64 * kBoxBytes; }
  constexpr int v_bytes() const { return (head_dim_v - resident_v()) / 64 * kBoxBytes; }
  constexpr int q_bytes() const { return head_dim / 64 * kBoxBytes; }
  constexpr int do_bytes() const { return head_dim_v / 64 * kBoxBytes; }
  // P^T, over which dS^T is written; with softcap the factors of (4) follow.
  constexpr int slot_bytes() const { return kDsImageBytes * (softcap ? 2 : 1); }
  // lse and delta are read after their stage of Q or dO has been released: one set more than
  // stages, rounded up to a power of two.
  constexpr int statistics() const { return do_stages() > 3 ? 8 : 4; }

  // Offsets in shared memory.
  constexpr int v_offset() const { return k_bytes(); }
  constexpr int q_offset() const { return v_offset() + v_bytes(); }
  constexpr int do_offset() const { return q_offset() + q_stages() * q_bytes(); }
  constexpr int slot_offset() const { return do_offset() + do_stages() * do_bytes(); }
  constexpr int staging_offset() const { return slot_offset() + slots() * slot_bytes(); }
  constexpr int lse_offset() const { return staging_offset() + staging_bytes(); }
  constexpr int delta_offset() const { return lse_offset() + statistics() * kBlockM * 4; }
  constexpr int barrier_offset() const { return delta_offset() + statistics() * kBlockM * 4; }
  // Barriers: landing, done, then q_full, q_empty, do_full, do_empty, p_empty, rounds.
  constexpr int num_barriers() const {
    return 2 + kWideRoundBarriers + q_stages() * (q_pieces() + 1) +
           do_stages() * (do_pieces() + 1) + slots();
  }
  // The number of the next tile, from the cluster's first CTA; then the tiles of two rounds.
  constexpr int number_offset() const { return barrier_offset() + 8 * num_barriers(); }
  constexpr int info_offset() const { return (number_offset() + 8 + 15) / 16 * 16; }
  constexpr int shared_bytes() const {
    return info_offset() + 2 * static_cast<int>(sizeof(WideTile));
  }

  constexpr bool valid() const {
    return q_stages() < statistics() + 1 && do_stages() < statistics() &&  // or they would be lost
           shared_bytes() <= 227 * 1024;
  }
};

inline constexpr int kWideDqThreads = 384;
inline constexpr int kWideDqRegisters = 208;
inline constexpr int kWideDqLoaderRegisters = 88;  // wide_dq_tile() spills with fewer

// Of bwd_wide_dq.cuh: a stage has the images of dS of two consumers, and K.
struct WideDqConfig {
  int head_dim;
  int cluster;

  constexpr int stages() const { return head_dim == 256 ? 3 : 4; }
  constexpr int k_bytes() const { return kWideKeys * head_dim * 2; }
  constexpr int stage_bytes() const { return 2 * kDsImageBytes + k_bytes(); }
  constexpr int staging_offset() const { return stages() * stage_bytes(); }  // dq on its way out
  constexpr int barrier_offset() const { return staging_offset() + kWideDqRows * head_dim * 2; }
  constexpr int num_barriers() const { return 2 * stages() + 1 + kWideRoundBarriers; }
  // The number of the next tile, from the cluster's first CTA.
  constexpr int number_offset() const { return barrier_offset() + 8 * num_barriers(); }
  constexpr int info_offset() const { return (number_offset() + 8 + 15) / 16 * 16; }
  constexpr int shared_bytes() const {
    return info_offset() + 2 * static_cast<int>(sizeof(WideDqTile)) + tile::kTileAlignment;
  }
};

}  // namespace flashgrad::sm90
