// SPDX-License-Identifier: Apache-2.0
// `flashgrad plan roofline` and `flashgrad plan memory`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "peak.hpp"
#include "plan/account.hpp"
#include "plan/memory.hpp"
#include "plan/pictures.hpp"
#include "plan/pipeline.hpp"
#include "plan_commands.hpp"
#include "plan_shape.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const plan::Kernel& kernel, const plan::Device& device) {
  const plan::Account a = plan::account(kernel, device);
  const double expected_cycles = kernel.workers > 0 ? plan::step_cycles(kernel, device) : 0;
  ordered_json shared = ordered_json::object();
  for (int i = 0; i < plan::kNumUses; ++i) {
    shared[plan::name_of(static_cast<plan::Use>(i))] = a.by_use[static_cast<std::size_t>(i)];
  }
  return {{"kernel", kernel.name},
          {"description", kernel.description},
          {"queries", kernel.queries},
          {"keys", kernel.keys},
          {"head_dim", kernel.head_dim},
          {"ctas", kernel.ctas},
          {"mma_cycles", a.mma},
          {"exp_cycles", a.exp},
          {"fp32_cycles", a.fp32},
          {"shared_cycles", a.shared},
          {"shared_cycles_by_use", shared},
          {"hbm_cycles", a.hbm},
          {"l2_reduce_cycles", a.l2_reduce},
          {"l2_bytes_per_clk", a.l2_bytes_per_clk},
          {"bound_cycles", a.bound},
          {"expected_cycles", kernel.workers > 0 ? ordered_json(expected_cycles) : ordered_json()},
          {"tensor_cores_busy", a.busy()},
          {"bottleneck", plan::name_of(a.bottleneck)},
          {"shared_bytes", a.shared_bytes},
          {"tensor_memory_columns", a.tensor_columns},
          {"registers", a.registers},
          {"overflows", a.overflows}};
}

std::string table_header() {
  return fmt::format("  {:<32} {:>6} {:>6} {:>6} {:>5} {:>6} {:>8} {:>6} {:>5}  {}\n", "kernel",
                     "MMA", "exp", "shared", "/MMA", "HBM", "L2 B/clk", "bound", "busy",
                     "bottleneck");
}

std::string table_row(const std::string& name, const plan::Account& a) {
  std::string text = fmt::format(
      "  {:<32} {:>6.0f} {:>6.0f} {:>6.0f} {:>4.0f}% {:>6.0f} {:>8.1f} {:>6.0f} "
      "{:>4.0f}%  {}\n",
      name, a.mma, a.exp, a.shared, 100 * a.shared / a.mma, a.hbm, a.l2_bytes_per_clk, a.bound,
      100 * a.busy(), plan::name_of(a.bottleneck));
  for (const std::string& overflow : a.overflows) {
    text += fmt::format("  {:<32} does not fit: {}\n", "", overflow);
  }
  return text;
}

ordered_json sources(const plan::Device& device) {
  ordered_json figures = ordered_json::object();
  print_out(fmt::format("{}: {}\n", device.name, device.what));
  for (std::size_t i = 0; i < std::size(plan::kDeviceFields); ++i) {
    const plan::DeviceField& field = plan::kDeviceFields[i];
    const double value = device.*field.value;
    print_out(fmt::format("  {:<26} {:>14}  {}\n", field.key,
                          std::isnan(value) ? "unknown" : fmt::format("{:.6g}", value),
                          device.sources[i]));
    figures[field.key] = {{"value", value}, {"source", device.sources[i]}};
  }
  return {{"device", device.name}, {"figures", figures}};
}

ordered_json generations(std::string* svg) {
  std::vector<plan::Kernel> kernels;
  ordered_json rows = ordered_json::array();
  print_out(fmt::format("  {:<20}", "what binds"));
  for (const plan::Device& device : plan::devices()) {
    print_out(fmt::format(" {:<30}", device.name));
  }
  print_out("\n");
  for (const char* name : {"standard-forward", "fa1-forward", "fa2-forward", "fa3-forward",
                           "fa3-backward", "fa4-forward", "fa4-backward", "fa4-backward-2cta"}) {
    print_out(fmt::format("  {:<20}", name));
    kernels.push_back(plan::find_kernel(name));
    ordered_json row = {{"kernel", name}};
    for (const plan::Device& device : plan::devices()) {
      const plan::Account a = plan::account(kernels.back(), device);
      // An older device may lack the instructions too; what counts here is what it cannot hold.
      const bool fits = a.overflows.empty();
      print_out(fmt::format(
          " {:<30}", fits
                         ? fmt::format("{} ({:.0f} %)", plan::name_of(a.bottleneck), 100 * a.busy())
                         : "does not fit"));
      row[device.name] = {{"fits", fits}};
      if (fits) {
        row[device.name].update(
            {{"bottleneck", plan::name_of(a.bottleneck)}, {"tensor_cores_busy", a.busy()}});
      }
    }
    print_out("\n");
    rows.push_back(row);
  }
  print_out("  (in brackets: the share of the time that the tensor cores are busy at best)\n");
  *svg = plan::generations_svg(kernels, plan::devices());
  return rows;
}

ordered_json this_machine() {
  const plan::Cpu cpu = plan::this_cpu();
  const Peak f32 = measure_f32_peak(cpu.threads);
  const Peak bf16 = measure_bf16_peak(cpu.threads);
  print_out(fmt::format(
      "this machine: {}, {} threads, caches {} / {} / {}, memory {}\n"
      "  {}: {:.0f} GFLOP/s\n  {}: {:.0f} GFLOP/s\n",
      cpu.instruction_set, cpu.threads, format_bytes(cpu.l1_bytes), format_bytes(cpu.l2_bytes),
      format_bytes(cpu.l3_bytes), format_bytes(cpu.memory_bytes), f32.instruction, f32.gflops,
      bf16.instruction, bf16.gflops));
  return {{"instruction_set", cpu.instruction_set},
          {"threads", cpu.threads},
          {"l1_bytes", cpu.l1_bytes},
          {"l2_bytes", cpu.l2_bytes},
          {"l3_bytes", cpu.l3_bytes},
          {"memory_bytes", cpu.memory_bytes},
          {"f32_gflops", f32.gflops},
          {"bf16_gflops", bf16.gflops}};
}

ordered_json one_kernel(const plan::Kernel& kernel, const plan::Device& device) {
  const plan::Account a = plan::account(kernel, device);
  std::string text = fmt::format(
      "{} on {}: {}, head_dim {}\ncycles of one CTA for {} queries x {} "
      "keys\n",
      kernel.name, device.name, kernel.description, kernel.head_dim, kernel.queries, kernel.keys);
  const auto line = [&text](const std::string& what, double cycles) {
    text += fmt::format("  {:<62} {:>7.0f}\n", what, cycles);
  };
  for (const plan::Product& product : kernel.products) {
    line(fmt::format("MMA: {} = {} x {} x {}", product.name, product.rows, product.columns,
                     product.depth),
         product.flop() / device.mma_flop_per_clk);
  }
  line("MMA", a.mma);
  line("exp", a.exp);
  line("f32 arithmetic of the softmax", a.fp32);
  for (const plan::Line& shared : a.shared_lines) {
    line("shared: " + shared.what, shared.cycles);
  }
  for (int i = 0; i < plan::kNumUses; ++i) {
    line(fmt::format("shared, all {}", plan::name_of(static_cast<plan::Use>(i))),
         a.by_use[static_cast<std::size_t>(i)]);
  }
  const double operands = a.by_use[static_cast<std::size_t>(plan::Use::kOperands)];
  line("shared memory but operands, as the kernel's own account counts", a.shared - operands);
  line("shared memory, as the kernel's own account counts", a.shared);
  line("HBM", a.hbm);
  line("reductions into the L2, where the rate is known", a.l2_reduce);
  line("bound", a.bound);
  if (kernel.workers > 0) {
    line(fmt::format("expected, warpgroups between products and softmax: {}", kernel.workers),
         plan::step_cycles(kernel, device));
  }
  text += fmt::format(
      "bottleneck: {}; tensor cores busy {:.0f} % at best\n"
      "L2: {:.1f} bytes per clock; reductions {:.0f} bytes\nholds: {} of shared memory, {:.0f} "
      "columns of tensor memory, {:.0f} registers\n",
      plan::name_of(a.bottleneck), 100 * a.busy(), a.l2_bytes_per_clk, a.l2_reduce_bytes,
      format_bytes(a.shared_bytes), a.tensor_columns, a.registers);
  for (const std::string& overflow : a.overflows) {
    text += "does not fit: " + overflow + "\n";
  }
  print_out(text);
  return to_json(kernel, device);
}

// The tiles that fit, with and without a cluster, and what the cluster buys.
ordered_json search(const plan::Device& device, int head_dim, std::string* svg) {
  constexpr std::size_t kShown = 4;
  print_out(
      fmt::format("backward at head_dim {} on {}: tiles that fit, without a cluster and with one, "
                  "each the fastest first\n"
                  "  cycles per 1024 pairs, tensor cores busy, traffic with the L2, tile\n",
                  head_dim, device.name));
  ordered_json rows = ordered_json::array();
  double best[2] = {0, 0};
  std::vector<plan::Kernel> winners;
  for (const int cluster : {1, 2}) {
    const std::vector<plan::Kernel> found = plan::search_hopper_backward(device, head_dim, cluster);
    winners.insert(winners.end(), found.begin(), found.begin() + (found.empty() ? 0 : 1));
    for (std::size_t i = 0; i < std::min(kShown, found.size()); ++i) {
      const plan::Account a = plan::account(found[i], device);
      const double cost = 1024 * a.bound / found[i].pairs();
      best[cluster - 1] = i == 0 ? cost : best[cluster - 1];
      print_out(fmt::format("  {:>7.1f} {:>4.0f}%  L2 {:>4.1f} B/clk  {}\n", cost, 100 * a.busy(),
                            a.l2_bytes_per_clk, found[i].description));
      rows.push_back(to_json(found[i], device));
    }
  }
  *svg = plan::bars_svg(winners, device);
  if (best[0] > 0 && best[1] > 0) {
    print_out(fmt::format("a 2-CTA cluster: {:+.1f} % speed\n", 100 * (best[0] / best[1] - 1)));
  }
  return rows;
}

ordered_json print_plan(const char* name, const plan::MemoryPlan& plan) {
  ordered_json lines = ordered_json::array();
  print_out(fmt::format("{}: {}\n", name, format_bytes(plan.total())));
  for (const plan::MemoryLine& line : plan.lines) {
    print_out(
        fmt::format("  {:<22} {:>12}  {}\n", line.buffer, format_bytes(line.bytes), line.why));
    lines.push_back({{"buffer", line.buffer}, {"bytes", line.bytes}, {"why", line.why}});
  }
  return {{"total_bytes", plan.total()}, {"lines", lines}};
}

}  // namespace

ordered_json plan_roofline(const PlanArguments& arguments, std::string* svg) {
  if (arguments.generations) {
    return generations(svg);
  }
  if (arguments.device == "cpu") {
    return this_machine();
  }
  const plan::Device device = device_of(arguments);
  if (arguments.sources) {
    return sources(device);
  }
  if (arguments.kernels == std::vector<std::string>{"hopper-backward"}) {
    return search(device, arguments.head_dim, svg);
  }
  if (std::find(arguments.kernels.begin(), arguments.kernels.end(), "hopper-backward") !=
      arguments.kernels.end()) {
    throw Error("--kernel: hopper-backward goes alone");
  }
  if (arguments.head_dim != PlanArguments().head_dim) {
    throw Error("--head-dim: of hopper-backward alone; the other kernels have their own");
  }
  if (!arguments.kernels.empty()) {
    std::vector<plan::Kernel> kernels;
    ordered_json rows = ordered_json::array();
    for (const std::string& name : arguments.kernels) {
      kernels.push_back(plan::find_kernel(name));
      rows.push_back(one_kernel(kernels.back(), device));
    }
    *svg = plan::bars_svg(kernels, device);
    return {{"device", device.name}, {"kernels", rows}};
  }
  print_out(fmt::format("{}: cycles of one CTA for a tile of queries x keys\n{}", device.name,
                        table_header()));
  ordered_json rows = ordered_json::array();
  for (const plan::Kernel& kernel : plan::kernels()) {
    const plan::Account a = plan::account(kernel, device);
    print_out(table_row(kernel.name, a));
    rows.push_back(to_json(kernel, device));
  }
  *svg = plan::bars_svg(plan::kernels(), device);
  return {{"device", device.name}, {"kernels", rows}};
}

ordered_json plan_memory(const PlanArguments& arguments, std::string* svg) {
  const plan::Device device = device_of(arguments);
  plan::MemoryShape shape;
  shape.batch = arguments.batch;
  shape.heads_q = arguments.heads;
  shape.heads_kv = heads_kv(arguments);
  const Tokens tokens = parse_tokens(arguments);
  shape.seqlen_q = static_cast<double>(tokens.q);
  shape.seqlen_kv = static_cast<double>(tokens.kv);
  shape.head_dim = shape.head_dim_v = arguments.head_dim;
  shape.element_bytes = arguments.dtype == "f32" ? 4 : 2;
  shape.gpus = arguments.gpus;
  if (shape.gpus > shape.seqlen_q) {
    throw Error("--gpus: more GPUs than tokens of a sequence");
  }
  print_out(fmt::format(
      "backward, batch {} of {} tokens and {} keys, {} query and {} key heads of {}, {}{}\n",
      arguments.batch, tokens.q, tokens.kv, arguments.heads, heads_kv(arguments),
      arguments.head_dim, arguments.dtype,
      shape.gpus > 1 ? fmt::format(", each of {} GPUs", arguments.gpus) : ""));
  const plan::MemoryPlan standard = plan::standard_backward_memory(shape);
  const plan::MemoryPlan recomputing = plan::recomputing_backward_memory(shape);
  *svg = plan::memory_svg(standard, recomputing);
  ordered_json result = {{"standard", print_plan("standard, P stored", standard)},
                         {"recomputing", print_plan("P made again", recomputing)}};
  print_out(fmt::format("{} {:.0f} times less; {} holds {}: {}\n", "that is",
                        standard.total() / recomputing.total(), device.name,
                        format_bytes(device.hbm_bytes),
                        recomputing.total() > device.hbm_bytes ? "neither fits"
                        : standard.total() > device.hbm_bytes  ? "only the second fits"
                                                               : "both fit"));
  return result;
}

}  // namespace flashgrad::tool
