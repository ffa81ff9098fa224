// SPDX-License-Identifier: Apache-2.0
// The C interface from strict C11: every initialiser, every function, and an answer that can be
// computed by hand.
#include <flashgrad/flashgrad.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

static void check(int holds, const char* what) {
  if (!holds) {
    fprintf(stderr, "failed: %s (last error: %s)\n", what, fg_last_error());
    ++failures;
  }
}

static DLTensor tensor(void* data, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", FG_VERSION_MAJOR, FG_VERSION_MINOR,
           FG_VERSION_PATCH);
  check(strcmp(version, fg_version()) == 0, "the header's version is the library's");
  check(fg_last_error()[0] == '\0', "no error before the first call");

  const int32_t num_backends = fg_backend_count();
  check(num_backends >= 1, "there is a backend");
  fg_backend info = FG_BACKEND_INIT;
  for (int32_t i = 0; i < num_backends; ++i) {
    check(fg_backend_info(i, &info) == FG_OK, "a backend describes itself");
    check(info.name != NULL && info.name[0] != '\0' && info.detail != NULL,
          "a backend has a name and a detail");
  }
  check(strcmp(info.name, "reference") == 0 && info.available == 1,
        "the reference backend is last and always there");
  check(fg_backend_info(-1, &info) == FG_INVALID_ARGUMENT, "index -1 is refused");
  check(fg_backend_info(num_backends, &info) == FG_INVALID_ARGUMENT,
        "an index past the end is refused");
  check(fg_backend_info(0, NULL) == FG_INVALID_ARGUMENT, "a null info is refused");

  // One row that sees one key: out = v, lse = s, p = 1; so dv = dout, and ds = dlse = 3.
  float q[2] = {1, 2}, k[2] = {3, 4}, v[1] = {7}, out[1], lse[1], dout[1] = {5}, dlse[1] = {3};
  float dq[2], dk[2], dv[1];
  int64_t shape_qk[4] = {1, 1, 1, 2}, shape_v[4] = {1, 1, 1, 1}, shape_lse[3] = {1, 1, 1};
  const DLTensor tq = tensor(q, 4, shape_qk), tk = tensor(k, 4, shape_qk),
                 tv = tensor(v, 4, shape_v);
  const DLTensor tout = tensor(out, 4, shape_v), tlse = tensor(lse, 3, shape_lse);
  const DLTensor tdout = tensor(dout, 4, shape_v), tdlse = tensor(dlse, 3, shape_lse);
  const DLTensor tdq = tensor(dq, 4, shape_qk), tdk = tensor(dk, 4, shape_qk),
                 tdv = tensor(dv, 4, shape_v);

  fg_tensors tensors = FG_TENSORS_INIT;
  tensors.q = &tq;
  tensors.k = &tk;
  tensors.v = &tv;
  tensors.out = &tout;
  tensors.lse = &tlse;
  fg_options options = FG_OPTIONS_INIT;
  options.scale = 0.5;

  const char* backend = NULL;
  check(fg_supports(FG_FORWARD, &tensors, &options, &backend) == FG_OK && backend != NULL,
        "forward is supported");
  size_t minimum = 0, preferred = 0;
  check(fg_workspace_size(FG_FORWARD, &tensors, &options, &minimum, &preferred) == FG_OK,
        "forward has a size");
  check(minimum <= preferred, "minimum <= preferred");
  void* workspace = malloc(preferred + 1);
  check(fg_forward(&tensors, &options, workspace, preferred, NULL) == FG_OK, "forward runs");
  check(out[0] == 7 && lse[0] == 0.5F * 11, "forward's values");
  free(workspace);

  tensors.dout = &tdout;
  tensors.dlse = &tdlse;
  tensors.dq = &tdq;
  tensors.dk = &tdk;
  tensors.dv = &tdv;
  check(fg_workspace_size(FG_BACKWARD, &tensors, &options, &minimum, &preferred) == FG_OK,
        "backward has a size");
  workspace = malloc(preferred + 1);
  check(fg_backward(&tensors, &options, workspace, preferred, NULL) == FG_OK, "backward runs");
  check(dv[0] == 5, "dv = dout");
  check(dq[0] == 0.5F * 3 * 3 && dq[1] == 0.5F * 3 * 4, "dq = scale * dlse * k");
  check(dk[0] == 0.5F * 3 * 1 && dk[1] == 0.5F * 3 * 2, "dk = scale * dlse * q");
  free(workspace);

  tensors.q = NULL;
  check(fg_supports(FG_FORWARD, &tensors, NULL, NULL) == FG_INVALID_ARGUMENT,
        "a missing q is refused");
  check(fg_last_error()[0] != '\0', "a refusal has a message");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
