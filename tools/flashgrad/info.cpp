// SPDX-License-Identifier: Apache-2.0
// `flashgrad info`. What is supported is asked of the library, by calls it would accept or refuse.
#include "info.hpp"

#include <fmt/format.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "attention_call.hpp"
#include "cpu/dispatch.hpp"
#include "options.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

// A call as small as it gets.
AttentionCall probe(const std::string& dtype, std::int64_t head_dim) {
  AttentionCall call;
  call.q = make_tensor("q", dtype, {1, 1, 1, head_dim});
  call.k = make_tensor("k", dtype, {1, 1, 1, head_dim});
  call.v = make_tensor("v", dtype, {1, 1, 1, head_dim});
  call.dout = make_tensor("dout", dtype, {1, 1, 1, head_dim});
  call.make_outputs();
  call.make_gradients(false);
  return call;
}

bool supports(const std::string& backend, const std::string& dtype, std::int64_t head_dim) {
  AttentionCall call = probe(dtype, head_dim);
  fg_options options = FG_OPTIONS_INIT;
  options.backend = backend.c_str();
  const fg_tensors tensors = call.bind(check::place_of(backend));
  return fg_supports(FG_FORWARD, &tensors, &options, nullptr) == FG_OK &&
         fg_supports(FG_BACKWARD, &tensors, &options, nullptr) == FG_OK;
}

// The widest head that the backend takes, from 1 on.
std::int64_t max_head_dim(const std::string& backend, const std::string& dtype) {
  std::int64_t head_dim = 0;
  while (head_dim < 4096 && supports(backend, dtype, head_dim + 1)) {
    ++head_dim;
  }
  return head_dim;
}

std::string supported_dtypes(const std::string& backend) {
  std::string text;
  // As `--dtype` spells them.
  for (const auto& [dtype, name] :
       {std::pair{"F32", "f32"}, {"BF16", "bf16"}, {"F16", "f16"}, {"F64", "f64"}}) {
    if (const std::int64_t head_dim = max_head_dim(backend, dtype); head_dim > 0) {
      text += fmt::format("{}{} (head_dim 1 to {})", text.empty() ? "" : ", ", name, head_dim);
    }
  }
  return text.empty() ? "nothing on this machine" : text;
}

std::string instruction_sets() {
  std::string text =
      "instruction sets of the cpu backend, best first (FLASHGRAD_CPU_ISA=NAME forces one)\n";
  const cpu::InstructionSet* selected = cpu::selected_instruction_set();
  for (const cpu::InstructionSet& set : cpu::instruction_sets()) {
    text += fmt::format("  {:<12} {}\n", set.name,
                        &set == selected  ? "used"
                        : set.available() ? "available"
                                          : "not on this machine");
  }
  return text + (selected == nullptr ? "  " + printable(cpu::selection_error(), 400) + "\n" : "");
}

}  // namespace

int info_command() {
  std::string text = fmt::format("flashgrad {}\n\nbackends, fastest first\n", fg_version());
  for (const std::string& name : backend_names()) {
    const fg_backend info = describe_backend(name);
    text += fmt::format("  {:<10} {}{}\n  {:<10} {}\n", name,
                        info.available != 0 ? "" : "not here: ", info.detail, "",
                        supported_dtypes(name));
  }
  text += "\n" + instruction_sets();
  text += R"(
forward and backward, on every backend
  heads      heads_q a multiple of heads_kv (MHA, GQA, MQA); head_dim_v independent of head_dim
  masks      full, causal, windows with open, closed or negative sides; bottom-right or top-left
  batches    fixed length, packed (cu_seqlens), shortened (seqused), chunks of a sequence (q_offset)
  softmax    scale, softcap, sinks and their gradient, lse and its gradient
  gradients  in q's dtype or f32
)";
  print_out(text);
  return kExitOk;
}

}  // namespace flashgrad::tool
