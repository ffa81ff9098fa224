// SPDX-License-Identifier: Apache-2.0
// The texts of devices/*.json, compiled in.
#pragma once

#include <vector>

namespace flashgrad::plan {

extern const std::vector<const char*> kDeviceTexts;

}  // namespace flashgrad::plan
