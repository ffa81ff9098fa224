// SPDX-License-Identifier: Apache-2.0
// The kernels of bwd_wide.cuh and bwd_wide_dq.cuh for head dims padded to 256.
#include "cuda/sm90/bwd_wide_width.cuh"

namespace flashgrad::sm90 {

template Status launch_bwd_wide<256, 256>(int, int, bool, DType, const BwdMaps&, const BwdParams&,
                                          const WidePass&, void*);
template Status launch_bwd_wide_dq<256>(int, int, DType, const BwdMaps&, const BwdQueryParams&,
                                        const WidePass&, void*);

}  // namespace flashgrad::sm90
