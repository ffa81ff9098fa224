// SPDX-License-Identifier: Apache-2.0
// The options that say what to compute. `run`, `check` and `bench` share them, so that a failing
// check can print the command that repeats it.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "check/device_memory.hpp"
#include "flashgrad/flashgrad.h"

namespace flashgrad::tool {

// As given on the command line. Strings, because the numbers' grammar is this tool's own (`inf`, no
// trailing characters).
struct CallArguments {
  bool causal = false;
  std::optional<std::string> window;
  std::string align = "bottom-right";
  std::optional<std::string> scale;
  std::string softcap = "0";
  std::string backend = "auto";
  bool deterministic = false;
  std::optional<std::string> threads;
  std::string max_seqlen_q = "0";
  std::string max_seqlen_kv = "0";
  std::string grad_dtype = "input";
};

// Adds them to a subcommand.
void add_call_options(CLI::App& app, CallArguments& arguments);

// What the arguments mean. `options.backend` points into `backend`: no copies.
struct CallOptions {
  explicit CallOptions(const CallArguments& arguments);
  CallOptions(const CallOptions&) = delete;
  CallOptions& operator=(const CallOptions&) = delete;

  // By --backend or FLASHGRAD_BACKEND; empty: automatic, of those that take tensors in host memory.
  std::string backend;
  check::Place place = check::Place::kHost;  // where the backend takes its tensors
  bool grad_f32 = false;
  fg_options options = FG_OPTIONS_INIT;
};

// The names of this library's backends.
std::vector<std::string> backend_names();

// What `fg_backend_info` says about a backend of that name.
fg_backend describe_backend(const std::string& name);

// "causal", "full", "window 128,0 (top-left)".
std::string describe_mask(const fg_options& options);

}  // namespace flashgrad::tool
