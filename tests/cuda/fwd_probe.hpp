// SPDX-License-Identifier: Apache-2.0
// A table of forward kernel variants for fwd_probe.cpp: each is one translation unit's registration.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "core/status.hpp"

struct ProbeVariant {
  const char* name;
  flashgrad::DType dtype;
  int head_dim, head_dim_v;
  bool score_function;
  flashgrad::Status (*run)(const flashgrad::Problem&, const flashgrad::Args&);
};
std::vector<ProbeVariant>& probe_variants();
struct ProbeRegistration {
  explicit ProbeRegistration(const ProbeVariant& v) { probe_variants().push_back(v); }
};
