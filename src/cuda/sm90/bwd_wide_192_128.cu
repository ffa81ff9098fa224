// SPDX-License-Identifier: Apache-2.0
// The kernels of bwd_wide.cuh for head dims padded to 192, and of v to 128.
#include "cuda/sm90/bwd_wide_width.cuh"

namespace flashgrad::sm90 {

template Status launch_bwd_wide<192, 128>(int, int, bool, DType, const BwdMaps&, const BwdParams&,
                                          const WidePass&, void*);

}  // namespace flashgrad::sm90
