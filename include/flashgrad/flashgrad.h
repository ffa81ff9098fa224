// SPDX-License-Identifier: Apache-2.0
/// @file flashgrad.h
/// @brief The C interface of flashgrad: exact attention, forward and backward. The only compiled
/// boundary.
///
/// Tensors cross this interface as DLPack `DLTensor`s, whose memory the caller owns. A call
/// computes
///
///     s_ij = scale * <q_i, k_j>          (softcap * tanh(s_ij / softcap) if softcap > 0)
///     p_ij = exp(s_ij - lse_i) for the keys j that row i sees, 0 elsewhere
///     out_i = sum_j p_ij v_j,  lse_i = log(sum_{visible j} exp(s_ij) + exp(sink_h))
///
/// and, backward, the exact gradients of `sum(dout * out) + sum(dlse * lse)`. docs/semantics.md
/// holds every detail, docs/math.md the derivation and its sources.
///
/// Calls neither allocate tensor memory, nor print, nor throw, nor keep state (but the calling
/// thread's last error message); they may run in several threads at once.
#ifndef FLASHGRAD_FLASHGRAD_H_
#define FLASHGRAD_FLASHGRAD_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#if defined(FLASHGRAD_STATIC)
#define FG_API
#else
#define FG_API __attribute__((visibility("default")))
#endif

// The enumerations are ints on both sides: a C caller may pass any int, and C++ may look at it.
#ifdef __cplusplus
#define FG_INT_ENUM : int
#else
#define FG_INT_ENUM
#endif

/// The major version of this header; `fg_version()` answers the library's.
#define FG_VERSION_MAJOR 0
/// The minor version of this header.
#define FG_VERSION_MINOR 1
/// The patch version of this header.
#define FG_VERSION_PATCH 0

/// Opens a side of the window. So does any value of 2^31 or more.
#define FG_UNBOUNDED INT64_MAX

#ifdef __cplusplus
extern "C" {
#endif

/// What every function returns. `fg_last_error()` holds the message when it is not `FG_OK`.
typedef enum fg_status FG_INT_ENUM {
  FG_OK = 0,
  /// A tensor or an option contradicts the rules (shape, stride, dtype, range, overlap, null).
  FG_INVALID_ARGUMENT = 1,
  /// The call is meaningful, but no backend of this library serves it; the message has each
  /// backend's reason.
  FG_UNSUPPORTED = 2,
  /// `workspace_bytes` is under the minimum that `fg_workspace_size` answers.
  FG_WORKSPACE_TOO_SMALL = 3,
  /// The device or its driver reported an error.
  FG_DEVICE_ERROR = 4,
  /// A fault of the library itself.
  FG_INTERNAL_ERROR = 5
} fg_status;

/// Forward or backward.
typedef enum fg_pass FG_INT_ENUM { FG_FORWARD = 0, FG_BACKWARD = 1 } fg_pass;

/// Where the diagonal of the mask stands when seqlen_q and seqlen_kv differ.
typedef enum fg_alignment FG_INT_ENUM {
  /// The last query row faces the last key: shift = seqlen_kv - seqlen_q. The default.
  FG_BOTTOM_RIGHT = 0,
  /// The first query row faces the first key: shift = 0.
  FG_TOP_LEFT = 1
} fg_alignment;

/// The tensors of a call. Set what applies and leave the rest null. Every tensor has strides of its
/// own, in elements (null strides: compact); the last dimension's stride is 1, except that `dout`
/// and `dlse` may have stride 0 anywhere. Data is aligned to its dtype.
///
/// Fixed length: 4-d tensors with a batch. Packed: 3-d tensors whose rows are the sequences one
/// after the other; `cu_seqlens_q` and `cu_seqlens_kv` are given. heads_q is a multiple of
/// heads_kv; query head h reads key head h / (heads_q / heads_kv). head_dim and head_dim_v go from
/// 1 to 256, independently. Outputs must not overlap each other or an input.
typedef struct fg_tensors {
  /// sizeof(fg_tensors), as the initialiser sets it.
  size_t struct_size;
  /// (batch, seqlen_q, heads_q, head_dim) or (total_q, heads_q, head_dim); f32, bf16, f16 (f64:
  /// reference backend).
  const DLTensor* q;
  /// (batch, seqlen_kv, heads_kv, head_dim) or (total_kv, heads_kv, head_dim); q's dtype.
  const DLTensor* k;
  /// (batch, seqlen_kv, heads_kv, head_dim_v) or (total_kv, heads_kv, head_dim_v); q's dtype.
  const DLTensor* v;
  /// (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v); q's dtype. Written
  /// by forward, read by backward.
  const DLTensor* out;
  /// (batch, heads_q, seqlen_q) or (heads_q, total_q); f32 (f64 with f64). Natural log. Written by
  /// forward (may be null there), read by backward.
  const DLTensor* lse;
  /// As out. The gradient of out; null means 0 (then dlse is required). Backward only, as all below
  /// up to dsinks.
  const DLTensor* dout;
  /// As lse. The gradient of lse; null means 0.
  const DLTensor* dlse;
  /// As q, in q's dtype or f32. Null: not computed. Gradients are written, not added to.
  const DLTensor* dq;
  /// As k, in q's dtype or f32. Null: not computed.
  const DLTensor* dk;
  /// As v, in q's dtype or f32. Null: not computed.
  const DLTensor* dv;
  /// (heads_q), f32 (f64 with f64). Null: not computed. Needs sinks.
  const DLTensor* dsinks;
  /// (heads_q), f32 (f64 with f64). A logit per head that joins the softmax without a value; -inf:
  /// none.
  const DLTensor* sinks;
  /// (batch + 1), i32: offsets of the packed query sequences.
  const DLTensor* cu_seqlens_q;
  /// (batch + 1), i32: offsets of the packed key sequences.
  const DLTensor* cu_seqlens_kv;
  /// (batch), i32: rows of each query sequence that count. Null: all.
  const DLTensor* seqused_q;
  /// (batch), i32: keys of each sequence that count. Null: all.
  const DLTensor* seqused_kv;
  /// (batch), i64: where the first query stands among the keys; replaces the alignment's shift.
  /// Null: alignment.
  const DLTensor* q_offset;
} fg_tensors;

/// The options of a call. Initialise with `FG_OPTIONS_INIT`.
typedef struct fg_options {
  /// sizeof(fg_options), as the initialiser sets it.
  size_t struct_size;
  /// Row i sees key j iff i + shift - window_left <= j <= i + shift + window_right. FG_UNBOUNDED
  /// opens; negative is allowed.
  int64_t window_left;
  /// 0 with an open left side: causal.
  int64_t window_right;
  /// What shift is, where no q_offset is given.
  fg_alignment alignment;
  /// NaN (the default): 1 / sqrt(head_dim). 0 and negative values are legal.
  double scale;
  /// 0 (the default): none. Otherwise positive: s = softcap * tanh(s / softcap), before the mask.
  double softcap;
  /// Not 0: the same bits run after run and whatever else is in the batch. The CPU always is.
  int32_t deterministic;
  /// CPU threads; 0 (the default): OpenMP's own number.
  int32_t num_threads;
  /// An upper bound of the packed query lengths; 0 (the default): total_q. Smaller bounds need less
  /// workspace.
  int64_t max_seqlen_q;
  /// An upper bound of the packed key lengths; 0 (the default): total_kv.
  int64_t max_seqlen_kv;
  /// The name of the one backend to use; null: FLASHGRAD_BACKEND, else the first that supports the
  /// call.
  const char* backend;
} fg_options;

/// A backend as `fg_backend_info` describes it.
typedef struct fg_backend {
  /// sizeof(fg_backend), set by the caller.
  size_t struct_size;
  /// What `fg_options::backend` takes. Static storage.
  const char* name;
  /// For people: the instruction set or device it will use, or why it can't run here. Static
  /// storage.
  const char* detail;
  /// 1 if it can run on this machine.
  int32_t available;
} fg_backend;

/// All tensors null.
#define FG_TENSORS_INIT                                                                         \
  {                                                                                             \
    sizeof(fg_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL                                                            \
  }
/// No mask, the default scale, no softcap, any backend, OpenMP's number of threads.
#define FG_OPTIONS_INIT                                                                            \
  {                                                                                                \
    sizeof(fg_options), FG_UNBOUNDED, FG_UNBOUNDED, FG_BOTTOM_RIGHT, __builtin_nan(""), 0.0, 0, 0, \
        0, 0, NULL                                                                                 \
  }
/// To be filled by `fg_backend_info`.
#define FG_BACKEND_INIT \
  { sizeof(fg_backend), NULL, NULL, 0 }

/// Computes out and, unless null, lse. Rows that see nothing get out 0 and lse -inf. Always
/// deterministic and batch-invariant.
///
/// @param tensors   q, k, v, out required; lse, sinks, cu_seqlens_*, seqused_*, q_offset optional.
/// @param options   Null: the defaults of FG_OPTIONS_INIT.
/// @param workspace Scratch on the tensors' device, any alignment; null if the minimum is 0. It
/// must not overlap a tensor. Its contents before and after mean nothing.
/// @param workspace_bytes At least the minimum of `fg_workspace_size`; the fastest plan that fits
/// is taken.
/// @param stream    The `cudaStream_t` to enqueue on; null on the CPU.
/// @return FG_OK or any of the errors; on FG_INVALID_ARGUMENT, FG_UNSUPPORTED and
/// FG_WORKSPACE_TOO_SMALL nothing was written.
///
/// @code
/// fg_tensors tensors = FG_TENSORS_INIT;
/// fg_options options = FG_OPTIONS_INIT;
/// tensors.q = &q;  // likewise k, v, out, lse
/// size_t minimum, preferred;
/// fg_status status = fg_workspace_size(FG_FORWARD, &tensors, &options, &minimum, &preferred);
/// if (status == FG_OK) {
///   void* workspace = malloc(preferred);
///   status = fg_forward(&tensors, &options, workspace, preferred, NULL);
///   free(workspace);
/// }
/// if (status != FG_OK) fprintf(stderr, "%s\n", fg_last_error());
/// @endcode
FG_API fg_status fg_forward(const fg_tensors* tensors, const fg_options* options, void* workspace,
                            size_t workspace_bytes, void* stream);

/// Computes those of dq, dk, dv and dsinks that are not null. An lse of +inf or -inf marks a row
/// that sees nothing.
///
///     delta_i = <dout_i, out_i>
///     ds_ij   = p_ij * (<dout_i, v_j> - delta_i + dlse_i)
///     ds_ij  *= 1 - (s_ij / softcap)^2                    if softcap > 0
///     dv_j    = sum_i p_ij dout_i
///     dk_j    = scale * sum_i ds_ij q_i
///     dq_i    = scale * sum_j ds_ij k_j
///     dsink_h = sum_i exp(sink_h - lse_i) * (dlse_i - delta_i)
///
/// @param tensors   q, k, v, out, lse and one of dout and dlse required, with the lengths, offsets
///                  and sinks of the forward call.
/// @param options   Those of the forward call. On the CPU, and with `deterministic` also on a GPU,
///                  the gradients are the same bits in every run.
/// @param workspace As in `fg_forward`.
/// @param workspace_bytes As in `fg_forward`, for FG_BACKWARD.
/// @param stream    As in `fg_forward`.
/// @return As `fg_forward`.
FG_API fg_status fg_backward(const fg_tensors* tensors, const fg_options* options, void* workspace,
                             size_t workspace_bytes, void* stream);

/// Answers how much workspace a call needs. Reads shapes, strides, dtypes and devices, never data,
/// so it works for traced tensors. Both sizes are linear in the sequence length. On a GPU a call
/// copies 16-bit tensors that do not begin at a multiple of 16 bytes if there is room, and
/// `preferred` has that room where the data pointers given here say so; null begins at one.
///
/// @param pass      The call that is meant.
/// @param tensors   As for that call; the data pointers may be null.
/// @param options   As for that call.
/// @param[out] minimum   With less, the call is refused. May be null.
/// @param[out] preferred More than this brings nothing. May be null.
/// @return FG_OK, FG_INVALID_ARGUMENT or FG_UNSUPPORTED.
FG_API fg_status fg_workspace_size(fg_pass pass, const fg_tensors* tensors,
                                   const fg_options* options, size_t* minimum, size_t* preferred);

/// Answers whether a call would be accepted, and by whom, without running it. Reads no data.
///
/// @param pass      The call that is meant.
/// @param tensors   As for that call; the data pointers may be anything.
/// @param options   As for that call.
/// @param[out] backend The name of the backend that would run (static storage). May be null.
/// @return FG_OK, or the error that the call itself would return for these shapes and options:
///         FG_INVALID_ARGUMENT or FG_UNSUPPORTED.
FG_API fg_status fg_supports(fg_pass pass, const fg_tensors* tensors, const fg_options* options,
                             const char** backend);

/// The number of backends that this library knows, fastest first. One that was left out of the
/// build is among them; `available` is 0 then.
FG_API int32_t fg_backend_count(void);

/// Describes a backend.
///
/// @param index     From 0 to `fg_backend_count() - 1`.
/// @param[out] info Initialised with FG_BACKEND_INIT.
/// @return FG_OK or FG_INVALID_ARGUMENT.
FG_API fg_status fg_backend_info(int32_t index, fg_backend* info);

/// The message of the calling thread's last call that failed: what, got, want. Empty if none did.
/// Valid until that thread's next call.
FG_API const char* fg_last_error(void);

/// The library's version, "major.minor.patch".
FG_API const char* fg_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // FLASHGRAD_FLASHGRAD_H_
