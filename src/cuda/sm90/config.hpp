// SPDX-License-Identifier: Apache-2.0
// The shapes of the backward's kernels as values: tiles, stages, registers, and what follows from
// them.
#pragma once

#include <cstdint>

#include "cuda/tile/swizzle.hpp"

namespace flashgrad::sm90 {

// Queries of a block, in every backward kernel, in the statistics and in the dq accumulators.
inline constexpr int kBlockM = 64;

// The backward for head dims up to 128: two consumer warpgroups make S, P, dP, dS, dV and dK of
// `key_blocks` x 64 keys each; a third warpgroup issues the loads and makes dq.
struct BwdConfig {
  int head_dim;    // of q, k and v, padded: 64, 96 or 128
  int key_blocks;  // blocks of 64 keys per consumer warpgroup
  int cluster;     // 2: CTAs of neighbouring keys share Q and dO, each makes half of dq's columns
  int q_stages;    // of Q and lse
  int do_stages;   // of dO and delta
  int ds_stages;   // of dS on its way to the dq warpgroup, 128 keys each
  bool ping_pong;  // the consumers take turns at issuing products
  bool softcap;
  bool ordered;  // dq is added in a fixed order and finished here (bwd_order.cuh)
  bool whole;    // a CTA or its cluster holds all keys of a sequence: a step's dq is complete
  int consumer_registers;
  int dq_registers;

  // dS goes to the peer from each consumer warp instead of from the loader: what is taken off the
  // dq warpgroup's way pays for its turns. H200, d128, 16k, cool, without / with: ordered, full 669
  // / 689, causal 630 / 652; not ordered, full 704 / 677.
  constexpr bool consumers_send() const { return cluster == 2 && ordered; }

  // The query heads of a group inside of the query blocks (StepWalk); else outside.
  constexpr bool heads_inside() const { return ordered || whole; }

  // Tiles prepare and finish other units too (unit_pipeline.hpp); softcap needs the registers.
  constexpr bool serves_units() const { return !ordered && !whole && !softcap; }

  // A consumer leaves out the query blocks that see none of its keys, and stores dk and dv from its
  // registers. H200, without / with, cool and sustained: causal 1k 330, 336 / 335, 341; window
  // (1024, 0) at 16k 420, 400 / 442, 406. With a cluster 670, 595 / 661, 590 at full 4k and 572,
  // 520 / 572, 523 at causal 4k; head dim 96, causal 4k 450, 434 / 440, 428; ordered, ptxas
  // serialises the products (C7512).
  constexpr bool skips_hidden() const {
    return !ordered && !softcap && cluster == 1 && head_dim == 128;
  }

  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kKeysPerDs = 64 * kConsumers;

  constexpr int block_n() const { return 64 * kConsumers * key_blocks; }
  constexpr int keys_per_cluster() const { return block_n() * cluster; }
  // Boxes of 64 columns; of 96 the second holds 32 and zeros, which no product reads.
  constexpr int boxes() const { return (head_dim + tile::kBoxColumns - 1) / tile::kBoxColumns; }
  constexpr int kv_bytes() const { return boxes() * block_n() * tile::kBoxRowBytes; }
  constexpr int q_bytes() const { return boxes() * kBlockM * tile::kBoxRowBytes; }
  // Columns of dq that are made, added and finished together. A product of 96 reads dS once, and
  // there are registers for it.
  constexpr int dq_columns() const { return head_dim % 64 == 0 ? 64 : head_dim; }
  constexpr int dq_pieces() const { return head_dim / dq_columns(); }
  constexpr int ds_bytes() const { return kKeysPerDs * kBlockM * 2; }
  // With a cluster: half the columns of the peer's K, and its dS.
  constexpr int peer_k_bytes() const { return cluster == 2 ? kv_bytes() / 2 : 0; }
  constexpr int peer_ds_bytes() const { return cluster == 2 ? ds_bytes() : 0; }

  // Offsets in shared memory.
  constexpr int k_offset() const { return 0; }
  constexpr int v_offset() const { return k_offset() + kv_bytes(); }
  constexpr int peer_k_offset() const { return v_offset() + kv_bytes(); }
  constexpr int q_offset() const { return peer_k_offset() + peer_k_bytes(); }
  constexpr int do_offset() const { return q_offset() + q_stages * q_bytes(); }
  constexpr int ds_offset() const { return do_offset() + do_stages * q_bytes(); }
  constexpr int peer_ds_offset() const { return ds_offset() + ds_stages * ds_bytes(); }
  constexpr int lse_offset() const { return peer_ds_offset() + ds_stages * peer_ds_bytes(); }
  constexpr int delta_offset() const { return lse_offset() + q_stages * kBlockM * 4; }
  // With softcap: 1 - (s / softcap)^2 of the step, 64 bytes a consumer thread.
  constexpr int factor_offset() const { return delta_offset() + do_stages * kBlockM * 4; }
  constexpr int factor_bytes() const { return softcap ? kConsumers * 128 * 64 : 0; }
  constexpr int barrier_offset() const { return factor_offset() + factor_bytes(); }
  constexpr int num_barriers() const {
    return 7 + 2 * q_stages + 2 * do_stages + 2 * ds_stages + (cluster == 2 ? 2 * ds_stages : 0);
  }
  // Of the KeyTile, which is read 16 bytes at a time.
  constexpr int info_offset() const {
    return (barrier_offset() + 8 * num_barriers() + 15) / 16 * 16;
  }
  static constexpr int kInfoBytes = 184;  // KeyTile and, last, the number of an ordered cluster
  constexpr int number_offset() const { return info_offset() + kInfoBytes - 4; }
  // Dynamic shared memory starts at a multiple of 16; the tiles are aligned by hand.
  constexpr int shared_bytes() const { return info_offset() + kInfoBytes + tile::kTileAlignment; }

  constexpr bool valid() const {
    return head_dim % 32 == 0 && dq_pieces() * dq_columns() == head_dim &&
           shared_bytes() <= 227 * 1024 && block_n() <= 256 &&
           kConsumers * consumer_registers + dq_registers <= 504 && consumer_registers % 8 == 0 &&
           dq_registers % 8 == 0 && (cluster == 1 || (head_dim == 128 && key_blocks == 1)) &&
           (ds_stages & (ds_stages - 1)) == 0;
  }
};

// The variants by number, since nvcc's host stubs can't spell a class-type template argument.
enum class BwdVariant : int {
#define FG_BWD_VARIANT(name, ...) name,
#include "cuda/sm90/variants.def"
#undef FG_BWD_VARIANT
};

inline constexpr BwdConfig kBwdConfigs[] = {
#define FG_BWD_VARIANT(name, ...) BwdConfig{__VA_ARGS__},
#include "cuda/sm90/variants.def"
#undef FG_BWD_VARIANT
};

}  // namespace flashgrad::sm90
