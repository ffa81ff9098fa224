// SPDX-License-Identifier: Apache-2.0
// The launches of the backward for head dims above 128.
#pragma once

#include "core/problem.hpp"
#include "core/status.hpp"
#include "cuda/common/device.hpp"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/wide_plan.hpp"

namespace flashgrad::sm90 {

// The main kernel and, if dS is kept, dq. `room` is aligned to 256 bytes.
Status launch_wide(const Problem& p, const Args& args, const WidePlan& plan,
                   const RowStatistics& rows, std::uint32_t* ticket, std::uint8_t* room,
                   const cuda::DeviceProperties& device);

}  // namespace flashgrad::sm90
