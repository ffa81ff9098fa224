// SPDX-License-Identifier: Apache-2.0
// Turns command line arguments into fg_options.
#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "cpu/dispatch.hpp"
#include "text.hpp"

namespace flashgrad::tool {
namespace {

// More threads than this bring nothing, and a system refuses to start some number of them; the
// results are the same bits for any.
std::int64_t max_threads() {
  return std::max<std::int64_t>(64, 4 * std::int64_t{std::thread::hardware_concurrency()});
}

std::int64_t parse_window_side(std::string_view text) {
  return text == "inf" ? FG_UNBOUNDED : parse_integer(text, "--window", INT64_MIN, INT64_MAX);
}

void parse_window(const std::string& text, fg_options& options) {
  const std::size_t comma = text.find(',');
  if (comma == std::string::npos || text.find(',', comma + 1) != std::string::npos) {
    throw Error(
        fmt::format("--window: got '{}', want LEFT,RIGHT (whole numbers or inf)", printable(text)));
  }
  const std::string_view view = text;
  options.window_left = parse_window_side(view.substr(0, comma));
  options.window_right = parse_window_side(view.substr(comma + 1));
}

// The backend that the option names, or else FLASHGRAD_BACKEND; empty if neither does. Throws
// unless it can run here.
std::string chosen_backend(const std::string& option) {
  constexpr const char* kVariable = "FLASHGRAD_BACKEND";
  const char* forced = std::getenv(kVariable);
  const bool by_option = option != "auto";
  std::string name = by_option || forced == nullptr ? option : forced;
  if (name == "auto" || (name.empty() && !by_option)) {
    return "";
  }
  const std::string source = by_option ? "--backend" : kVariable;
  const std::vector<std::string> names = backend_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw Error(fmt::format("{}: got '{}', want auto or one of: {}", source, printable(name),
                            fmt::join(names, ", ")));
  }
  if (const fg_backend info = describe_backend(name); info.available == 0) {
    throw Error(fmt::format("{} {}: {}", source, name, info.detail), kExitUnsupported);
  }
  return name;
}

std::string side(std::int64_t value) {
  return value >= (std::int64_t{1} << 31) ? "inf" : std::to_string(value);
}

}  // namespace

void add_call_options(CLI::App& app, CallArguments& arguments) {
  CLI::Option* causal = app.add_flag("--causal", arguments.causal,
                                     "A row sees the keys up to its own: --window inf,0")
                            ->disable_flag_override();
  app.add_option("--window", arguments.window,
                 "Row i sees keys i + shift - LEFT to i + shift + RIGHT; inf opens a side, a "
                 "negative side moves the band off the diagonal")
      ->type_name("LEFT,RIGHT")
      ->excludes(causal);
  app.add_option(
         "--align", arguments.align,
         "Where the diagonal stands: bottom-right (shift = seqlen_kv - seqlen_q) or top-left "
         "(shift = 0)")
      ->type_name("CORNER")
      ->capture_default_str();
  app.add_option("--scale", arguments.scale, "Factor of q k^T; default 1/sqrt(head_dim)")
      ->type_name("X");
  app.add_option("--softcap", arguments.softcap,
                 "s = softcap * tanh(s / softcap) before the mask; 0: none")
      ->type_name("X")
      ->capture_default_str();
  app.add_option("--backend", arguments.backend,
                 fmt::format("auto (the fastest on the CPU that supports the call), {}",
                             fmt::join(backend_names(), ", ")))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_flag("--deterministic", arguments.deterministic,
               "The same bits run after run (the CPU always is)")
      ->disable_flag_override();
  app.add_option("--threads", arguments.threads, "CPU threads, 1 or more; default: OpenMP's own")
      ->type_name("N");
  app.add_option("--max-seqlen-q", arguments.max_seqlen_q,
                 "Upper bound of the packed query lengths; 0: total_q")
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--max-seqlen-kv", arguments.max_seqlen_kv,
                 "Upper bound of the packed key lengths; 0: total_kv")
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--grad-dtype", arguments.grad_dtype,
                 "dtype of dq, dk and dv: input (that of q) or f32")
      ->type_name("input|f32")
      ->capture_default_str();
}

CallOptions::CallOptions(const CallArguments& arguments) {
  // Without this the call would quietly fall back to the reference backend.
  if (cpu::selected_instruction_set() == nullptr) {
    throw Error(printable(cpu::selection_error(), 400));
  }
  if (arguments.causal) {
    options.window_right = 0;
  } else if (arguments.window) {
    parse_window(*arguments.window, options);
  }

  if (arguments.align == "top-left") {
    options.alignment = FG_TOP_LEFT;
  } else if (arguments.align != "bottom-right") {
    throw Error(fmt::format("--align: got '{}', want bottom-right or top-left",
                            printable(arguments.align)));
  }

  if (arguments.scale) {
    options.scale = parse_real(*arguments.scale, "--scale");
  }
  options.softcap = parse_real(arguments.softcap, "--softcap");
  if (options.softcap < 0) {
    throw Error(fmt::format("--softcap: got {}, want 0 or more", printable(arguments.softcap)));
  }

  backend = chosen_backend(arguments.backend);
  if (!backend.empty()) {
    options.backend = backend.c_str();
  }
  place = check::place_of(backend);

  options.deterministic = arguments.deterministic ? 1 : 0;
  if (arguments.threads) {
    const std::int64_t threads = parse_integer(*arguments.threads, "--threads", 1, INT32_MAX);
    if (threads > max_threads()) {
      std::cerr << fmt::format(
          "flashgrad: note: --threads {}: {} are used, the results are the same\n", threads,
          max_threads());
    }
    options.num_threads = static_cast<std::int32_t>(std::min(threads, max_threads()));
  }
  options.max_seqlen_q = parse_integer(arguments.max_seqlen_q, "--max-seqlen-q", 0, INT64_MAX);
  options.max_seqlen_kv = parse_integer(arguments.max_seqlen_kv, "--max-seqlen-kv", 0, INT64_MAX);

  if (arguments.grad_dtype != "input" && arguments.grad_dtype != "f32") {
    throw Error(
        fmt::format("--grad-dtype: got '{}', want input or f32", printable(arguments.grad_dtype)));
  }
  grad_f32 = arguments.grad_dtype == "f32";
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (std::int32_t i = 0; i < fg_backend_count(); ++i) {
    fg_backend info = FG_BACKEND_INIT;
    if (fg_backend_info(i, &info) == FG_OK) {
      names.emplace_back(info.name);
    }
  }
  return names;
}

fg_backend describe_backend(const std::string& name) {
  for (std::int32_t i = 0; i < fg_backend_count(); ++i) {
    fg_backend info = FG_BACKEND_INIT;
    if (fg_backend_info(i, &info) == FG_OK && info.name == name) {
      return info;
    }
  }
  throw Error(fmt::format("no backend '{}'", printable(name)));
}

std::string describe_mask(const fg_options& options) {
  const std::string left = side(options.window_left);
  const std::string right = side(options.window_right);
  if (left == "inf" && right == "inf") {
    return "full";
  }
  const std::string band =
      left == "inf" && right == "0" ? "causal" : fmt::format("window {},{}", left, right);
  return band + (options.alignment == FG_TOP_LEFT ? " (top-left)" : " (bottom-right)");
}

}  // namespace flashgrad::tool
