// SPDX-License-Identifier: Apache-2.0
// The C functions: validate, pick the backend, call it. The only place that catches exceptions.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <string>

#include "api/validate.hpp"
#include "core/backend.hpp"

namespace flashgrad {
namespace {

// Grows on the first failure only; a call that succeeds does not touch it.
thread_local std::string last_error;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

fg_status report(const Status& status) noexcept {
  if (!status.ok()) {
    try {
      last_error = status.message;
    } catch (...) {
      last_error.clear();
    }
  }
  return status.code;
}

template <class F>
fg_status guarded(F&& f) noexcept {
  try {
    return report(f());
  } catch (const std::exception& e) {
    return report({FG_INTERNAL_ERROR, std::string("internal error: ") + e.what()});
  } catch (...) {
    return report({FG_INTERNAL_ERROR, "internal error"});
  }
}

// Whether this process is a child of fork() that has not become another program.
bool is_forked_child = false;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
const bool kForksAreNoted = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; }) == 0;

Status run_backend(const Backend& backend, const Problem& problem, Pass pass, const Args& args) {
  const auto run = [&] {
    return pass == Pass::kForward ? backend.forward(problem, args)
                                  : backend.backward(problem, args);
  };
  // GNU's OpenMP keeps a pool of threads for each thread that uses them. In a child of fork() the
  // calling thread's pool is gone, and it would wait for it for ever; a new thread gets a new pool.
  const bool new_pool =
      is_forked_child && problem.device_type == DeviceType::kCpu && problem.num_threads > 1;
  return new_pool ? std::async(std::launch::async, run).get() : run();
}

bool verbose() {
  const char* value = std::getenv("FLASHGRAD_VERBOSE");
  return value != nullptr && std::string(value) == "1";
}

std::string names_of_backends() {
  std::string names;
  for (const Backend* backend : backends()) {
    names += (names.empty() ? "" : ", ") + std::string(backend->name);
  }
  return names;
}

// The first backend that serves the call, or the one that was asked for. `reasons` gets why those
// before it were passed over.
Status select(const Call& call, Pass pass, const Backend** selected,
              std::string* reasons = nullptr) {
  const char* wanted = call.backend;
  const char* source = "backend";
  if (wanted == nullptr) {
    wanted = std::getenv("FLASHGRAD_BACKEND");
    source = "FLASHGRAD_BACKEND";
    if (wanted != nullptr && (*wanted == '\0' || std::string(wanted) == "auto")) {
      wanted = nullptr;
    }
  }
  std::string refusals;
  bool known = false;
  for (const Backend* backend : backends()) {
    if (wanted != nullptr && std::string(wanted) != backend->name) {
      continue;
    }
    known = true;
    Status status = backend->supports(call.problem, pass);
    if (status.ok()) {
      *selected = backend;
      if (reasons != nullptr) {
        *reasons = refusals;
      }
      return {};
    }
    // A setting that makes no sense is told, not worked round with a slower backend.
    if (status.code == FG_INVALID_ARGUMENT) {
      return status;
    }
    refusals += (refusals.empty() ? "" : "; ") + std::string(backend->name) + ": " + status.message;
  }
  if (!known) {
    return invalid(std::string(source) + ": " + quoted(wanted) + ", want one of " +
                   names_of_backends());
  }
  return unsupported("no backend serves this call: " + refusals);
}

Status check_pass(fg_pass pass) {
  return pass == FG_FORWARD || pass == FG_BACKWARD
             ? Status{}
             : invalid("pass: " + std::to_string(static_cast<int>(pass)) +
                       ", want FG_FORWARD or FG_BACKWARD");
}

Pass to_pass(fg_pass pass) { return pass == FG_FORWARD ? Pass::kForward : Pass::kBackward; }

// Without an element to write there is nothing to run, however large the other extents are: a batch
// of 2^50 empty sequences is legal and must not be walked through.
bool has_outputs(const Problem& p, Pass pass) {
  const std::int64_t batch = p.packed ? 1 : p.batch;
  const bool has_rows = batch > 0 && p.seqlen_q > 0;
  const bool has_keys = batch > 0 && p.seqlen_kv > 0;
  return pass == Pass::kForward ? has_rows
                                : (p.wants_dq && has_rows) ||
                                      ((p.wants_dk || p.wants_dv) && has_keys) || p.wants_dsinks;
}

// Without rows and without gradients of keys there are only the zeros of dsinks, which do not grow
// with the batch.
void drop_empty_batch(Problem& p) {
  if (!p.packed && p.seqlen_q == 0 && (p.seqlen_kv == 0 || !(p.wants_dk || p.wants_dv))) {
    p.batch = 0;
  }
}

Status run(Pass pass, const fg_tensors* tensors, const fg_options* options, void* workspace,
           std::size_t workspace_bytes, void* stream) {
  Call call;
  const Scratch scratch{workspace, workspace_bytes};
  FG_RETURN_IF_ERROR(validate(pass, tensors, options, &scratch, &call));
  const Backend* backend = nullptr;
  std::string reasons;
  FG_RETURN_IF_ERROR(select(call, pass, &backend, &reasons));
  if (!has_outputs(call.problem, pass)) {
    return {};
  }
  if (verbose()) {
    std::fprintf(stderr, "flashgrad: %s %s by %s (%s)%s%s\n",
                 pass == Pass::kForward ? "forward" : "backward", to_string(call.problem).c_str(),
                 backend->name, backend->detail(), reasons.empty() ? "" : "; ", reasons.c_str());
  }
  drop_empty_batch(call.problem);
  const WorkspaceSize size = backend->workspace_size(call.problem, pass);
  if (workspace_bytes < size.minimum || (workspace == nullptr && size.minimum > 0)) {
    return {FG_WORKSPACE_TOO_SMALL,
            "workspace: " +
                (workspace == nullptr ? "null" : std::to_string(workspace_bytes) + " bytes") +
                ", want " + std::to_string(size.minimum) + " or more (" +
                std::to_string(size.preferred) + " preferred)"};
  }
  call.args.workspace = workspace;
  call.args.workspace_bytes = workspace == nullptr ? 0 : workspace_bytes;
  call.args.stream = stream;
  return run_backend(*backend, call.problem, pass, call.args);
}

}  // namespace
}  // namespace flashgrad

using namespace flashgrad;  // NOLINT(google-build-using-namespace)

fg_status fg_forward(const fg_tensors* tensors, const fg_options* options, void* workspace,
                     size_t workspace_bytes, void* stream) {
  return guarded(
      [&] { return run(Pass::kForward, tensors, options, workspace, workspace_bytes, stream); });
}

fg_status fg_backward(const fg_tensors* tensors, const fg_options* options, void* workspace,
                      size_t workspace_bytes, void* stream) {
  return guarded(
      [&] { return run(Pass::kBackward, tensors, options, workspace, workspace_bytes, stream); });
}

fg_status fg_workspace_size(fg_pass pass, const fg_tensors* tensors, const fg_options* options,
                            size_t* minimum, size_t* preferred) {
  return guarded([&]() -> Status {
    FG_RETURN_IF_ERROR(check_pass(pass));
    Call call;
    FG_RETURN_IF_ERROR(validate(to_pass(pass), tensors, options, nullptr, &call));
    const Backend* backend = nullptr;
    FG_RETURN_IF_ERROR(select(call, to_pass(pass), &backend));
    WorkspaceSize size;
    if (has_outputs(call.problem, to_pass(pass))) {
      drop_empty_batch(call.problem);
      size = backend->workspace_size(call.problem, to_pass(pass));
    }
    if (minimum != nullptr) {
      *minimum = size.minimum;
    }
    if (preferred != nullptr) {
      *preferred = size.preferred;
    }
    return {};
  });
}

fg_status fg_supports(fg_pass pass, const fg_tensors* tensors, const fg_options* options,
                      const char** backend) {
  return guarded([&]() -> Status {
    FG_RETURN_IF_ERROR(check_pass(pass));
    Call call;
    FG_RETURN_IF_ERROR(validate(to_pass(pass), tensors, options, nullptr, &call));
    const Backend* selected = nullptr;
    FG_RETURN_IF_ERROR(select(call, to_pass(pass), &selected));
    if (backend != nullptr) {
      *backend = selected->name;
    }
    return {};
  });
}

int32_t fg_backend_count(void) { return static_cast<int32_t>(backends().size()); }

fg_status fg_backend_info(int32_t index, fg_backend* info) {
  return guarded([&]() -> Status {
    if (index < 0 || index >= fg_backend_count()) {
      return invalid("index: " + std::to_string(index) + ", want 0 to " +
                     std::to_string(fg_backend_count() - 1));
    }
    if (info == nullptr || info->struct_size < sizeof(fg_backend)) {
      return invalid(info == nullptr ? std::string("info: null")
                                     : "info: struct_size " + std::to_string(info->struct_size) +
                                           ", want " + std::to_string(sizeof(fg_backend)));
    }
    const Backend* backend = backends()[static_cast<std::size_t>(index)];
    info->name = backend->name;
    info->detail = backend->detail();
    info->available = backend->available() ? 1 : 0;
    return {};
  });
}

const char* fg_last_error(void) { return flashgrad::last_error.c_str(); }

const char* fg_version(void) { return FLASHGRAD_VERSION; }
