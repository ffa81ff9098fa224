// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan`: where the time and the memory of a pass go, without a GPU.
#pragma once

#include <CLI/App.hpp>
#include <optional>
#include <string>
#include <vector>

namespace flashgrad::tool {

// As given on the command line.
struct PlanArguments {
  std::optional<std::string> json;  // file for the numbers
  std::optional<std::string> svg;   // file for the picture
  std::string device = "h200";
  std::vector<std::string> kernels;
  bool sources = false;
  bool generations = false;
  int head_dim = 128;
  int cluster = 0;  // as the kernels do

  std::string pass = "backward";
  std::string tokens = "16384";
  std::string tokens_kv;  // empty: tokens
  std::string packed;
  std::string packed_kv;  // empty: packed
  int batch = 1;
  int heads = 16;
  int heads_kv = 0;  // 0: heads
  int gpus = 1;
  std::string dtype = "bf16";
  bool causal = false;
  std::string window;
  std::string align = "bottom-right";

  std::string order;  // empty: the kernels'
  bool compare = false;
  int processors = 0;       // 0: the device's SMs, or pairs of them
  int section = 0;          // 0: as the kernels do
  double step_cycles = 0;   // 0: the kernel's
  double tile_cycles = -1;  // negative: the kernel's
  double signal_cycles = 700;
  double turn_cycles = -1;  // negative: the kernel's
  int slack = 1;
  double jitter = 0.1;
  double spread = 0.02;

  std::vector<std::string> results;
  int head_dim_v = 0;  // 0: head_dim
  bool deterministic = false;

  std::string program = "fa4-2cta";
  std::string drop_wait;
  int queries = 512;
  int keys = 512;
  int seed = 1;
};

void add_plan(CLI::App& app, PlanArguments& arguments);
int plan_command(CLI::App& app, const PlanArguments& arguments);

}  // namespace flashgrad::tool
