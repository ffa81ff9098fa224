// SPDX-License-Identifier: Apache-2.0
// Causal attention with grouped heads from C: forward, backward, and what to do with an error.
#include <flashgrad/flashgrad.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kBatch = 2, kSeqlen = 300, kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64 };

// An f32 tensor (shape[0], .., shape[ndim - 1]) that owns its memory.
typedef struct {
  DLTensor dl;
  int64_t shape[4];
} Tensor;

static void make(Tensor* tensor, int ndim, const int64_t* shape) {
  size_t count = 1;
  for (int i = 0; i < ndim; ++i) {
    tensor->shape[i] = shape[i];
    count *= (size_t)shape[i];
  }
  float* data = malloc(count * sizeof *data);
  if (data == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  for (size_t i = 0; i < count; ++i) {
    data[i] = (float)rand() / (float)RAND_MAX - 0.5F;
  }
  tensor->dl = (DLTensor){.data = data,
                          .device = {kDLCPU, 0},
                          .ndim = ndim,
                          .dtype = {kDLFloat, 32, 1},
                          .shape = tensor->shape,
                          .strides = NULL,  // compact
                          .byte_offset = 0};
}

// Every function answers a status; the message says what was given and what is wanted.
static void check(fg_status status) {
  if (status != FG_OK) {
    fprintf(stderr, "flashgrad: %s\n", fg_last_error());
    exit(1);
  }
}

// The call's scratch memory; the library itself allocates none.
static void* workspace_for(fg_pass pass, const fg_tensors* tensors, const fg_options* options,
                           size_t* bytes) {
  size_t minimum;
  check(fg_workspace_size(pass, tensors, options, &minimum, bytes));
  printf("%s: %zu bytes of workspace, %zu at least\n", pass == FG_FORWARD ? "forward" : "backward",
         *bytes, minimum);
  void* workspace = malloc(*bytes + 1);  // a null pointer would mean "none"
  if (workspace == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return workspace;
}

int main(void) {
  const int64_t rows_q[4] = {kBatch, kSeqlen, kHeadsQ, kHeadDim};
  const int64_t rows_kv[4] = {kBatch, kSeqlen, kHeadsKv, kHeadDim};
  const int64_t rows_lse[3] = {kBatch, kHeadsQ, kSeqlen};
  Tensor q, k, v, out, lse, dout, dq, dk, dv;
  make(&q, 4, rows_q);
  make(&k, 4, rows_kv);
  make(&v, 4, rows_kv);
  make(&out, 4, rows_q);
  make(&lse, 3, rows_lse);
  make(&dout, 4, rows_q);
  make(&dq, 4, rows_q);
  make(&dk, 4, rows_kv);
  make(&dv, 4, rows_kv);

  fg_tensors tensors = FG_TENSORS_INIT;
  tensors.q = &q.dl;
  tensors.k = &k.dl;
  tensors.v = &v.dl;
  tensors.out = &out.dl;
  tensors.lse = &lse.dl;
  fg_options options = FG_OPTIONS_INIT;
  options.window_right = 0;  // causal: no key to the right of the diagonal

  const char* backend;
  check(fg_supports(FG_FORWARD, &tensors, &options, &backend));
  printf("flashgrad %s, backend %s\n", fg_version(), backend);

  size_t bytes;
  void* workspace = workspace_for(FG_FORWARD, &tensors, &options, &bytes);
  check(fg_forward(&tensors, &options, workspace, bytes, NULL));
  free(workspace);

  tensors.dout = &dout.dl;
  tensors.dq = &dq.dl;
  tensors.dk = &dk.dl;
  tensors.dv = &dv.dl;
  workspace = workspace_for(FG_BACKWARD, &tensors, &options, &bytes);
  check(fg_backward(&tensors, &options, workspace, bytes, NULL));
  free(workspace);

  // Row 0 sees key 0 alone, so its out is v's first row and nothing flows back into q.
  const float* first_out = out.dl.data;
  const float* first_v = v.dl.data;
  const float* first_dq = dq.dl.data;
  printf("out[0] = %g, v[0] = %g, dq[0] = %g\n", first_out[0], first_v[0], first_dq[0]);
  const int right = fabsf(first_out[0] - first_v[0]) < 1e-5F && fabsf(first_dq[0]) < 1e-5F;

  // A wrong call is refused and says why; nothing was written.
  v.shape[3] = kHeadDim + 1;
  const int refused = fg_forward(&tensors, &options, NULL, 0, NULL) == FG_INVALID_ARGUMENT;
  printf("refused: %s\n", fg_last_error());

  Tensor* all[] = {&q, &k, &v, &out, &lse, &dout, &dq, &dk, &dv};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
    free(all[i]->dl.data);
  }
  return right && refused ? 0 : 1;
}
