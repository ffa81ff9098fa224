// SPDX-License-Identifier: Apache-2.0
// Launches bwd.cuh: every variant of variants.def.
#include "cuda/common/launch.hpp"
#include "cuda/sm90/bwd.cuh"

namespace flashgrad::sm90 {
namespace {

template <BwdVariant kVariant, class T>
Status launch_variant(const BwdMaps& maps, const BwdParams& params, void* stream) {
  constexpr const BwdConfig& kConfig = kBwdConfigs[static_cast<int>(kVariant)];
  const cuda::LaunchShape shape{.num_ctas = params.num_ctas,
                                .num_threads = BwdConfig::kThreads,
                                .shared_bytes = kConfig.shared_bytes(),
                                .cluster_size = kConfig.cluster,
                                .overlaps_predecessor = true};
  return cuda::launch("sm90 backward", bwd_main<kVariant, T>, shape, stream, maps, params);
}

}  // namespace

Status launch_bwd_main(int variant, DType dtype, const BwdMaps& maps, const BwdParams& params,
                       void* stream) {
  switch (static_cast<BwdVariant>(variant)) {
#define FG_BWD_VARIANT(name, ...)                                                      \
  case BwdVariant::name:                                                               \
    return dtype == DType::kBF16                                                       \
               ? launch_variant<BwdVariant::name, __nv_bfloat16>(maps, params, stream) \
               : launch_variant<BwdVariant::name, __half>(maps, params, stream);
#include "cuda/sm90/variants.def"
#undef FG_BWD_VARIANT
  }
  return {FG_INTERNAL_ERROR, "sm90 backward: no such variant"};
}

}  // namespace flashgrad::sm90
