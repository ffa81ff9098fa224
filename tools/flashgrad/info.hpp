// SPDX-License-Identifier: Apache-2.0
// `flashgrad info`: what this library is and what it can do here.
#pragma once

namespace flashgrad::tool {

int info_command();

}  // namespace flashgrad::tool
