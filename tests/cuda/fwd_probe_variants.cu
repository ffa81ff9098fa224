// SPDX-License-Identifier: Apache-2.0
// Kernel variants under study; VARIANTS is a list of V(name, head_dim, head_dim_v, consumers, block_n, q_stages, stages, q_in_registers, ping_pong, late_wait, score_function, persistent, element).
#include "cuda/sm90/fwd_launch.cuh"
#include "fwd_probe.hpp"
using namespace flashgrad;
using namespace flashgrad::cuda;
template <class T> constexpr DType kDTypeOf = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
#define V(NAME, D, DV, NC, BN, QS, ST, QR, PP, LW, UD, SC, PERS, T)                                   \
  struct NAME {                                                                            \
    static constexpr FwdConfig kConfig{D, DV, NC, BN, QS, ST, QR, PP, LW, UD, SC};                      \
    static constexpr bool kPersistent = PERS;                                              \
    using Element = T;                                                                     \
  };                                                                                       \
  static ProbeRegistration register_##NAME({#NAME, kDTypeOf<T>, D, DV, SC, launch_fwd<NAME>});
using bf = __nv_bfloat16;
using hf = __half;
#include VARIANTS
