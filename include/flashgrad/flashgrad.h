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
/// holds every detail.
///
/// Calls neither allocate tensor memory, nor print, nor throw, nor keep state (but the calling
/// thread's last error message); they may run in several threads at once.
#ifndef FLASHGRAD_FLASHGRAD_H_
#define FLASHGRAD_FLASHGRAD_H_

#include <dlpack/dlpack.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(FLASHGRAD_STATIC)
#define FG_API
#else
#define FG_API __attribute__((visibility("default")))
#endif

/// The version of this header; `fg_version()` answers the library's.
#define FG_VERSION_MAJOR 0
#define FG_VERSION_MINOR 1
#define FG_VERSION_PATCH 0

/// Opens a side of the window. So does any value of 2^31 or more.
#define FG_UNBOUNDED INT64_MAX

#ifdef __cplusplus
extern "C" {
#endif

/// What every function returns. `fg_last_error()` holds the message when it is not `FG_OK`.
typedef enum fg_status {
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
typedef enum fg_pass { FG_FORWARD = 0, FG_BACKWARD = 1 } fg_pass;

/// Where the diagonal of the mask stands when seqlen_q and seqlen_kv differ.
typedef enum fg_alignment {
  /// The last query row faces the last key: shift = seqlen_kv - seqlen_q. The default.
  FG_BOTTOM_RIGHT = 0,
  /// The first query row faces the first key: shift = 0.
  FG_TOP_LEFT = 1
} fg_alignment;

/// The tensors of a call. Set what applies and leave the rest null. Every tensor has strides of its
/// own, in elements (null strides: compact); the last dimension's stride is 1, except that `dout`
/// and `dlse` may have stride 0 anywhere.
///
/// Fixed length: 4-d tensors with a batch. Packed: 3-d tensors whose rows are the sequences one
/// after the other; `cu_seqlens_q` and `cu_seqlens_kv` are given. heads_q is a multiple of
/// heads_kv; query head h reads key head h / (heads_q / heads_kv). head_dim and head_dim_v go from
/// 1 to 256, independently. Outputs must not overlap each other or an input.
typedef struct fg_tensors {
  size_t struct_size;  ///< sizeof(fg_tensors), as the initialiser sets it.
  const DLTensor* q;   ///< (batch, seqlen_q, heads_q, head_dim) or (total_q, heads_q, head_dim);
                       ///< f32, bf16, f16 (f64: reference backend).
  const DLTensor*
      k;  ///< (batch, seqlen_kv, heads_kv, head_dim) or (total_kv, heads_kv, head_dim); q's dtype.
  const DLTensor* v;     ///< (batch, seqlen_kv, heads_kv, head_dim_v) or (total_kv, heads_kv,
                         ///< head_dim_v); q's dtype.
  const DLTensor* out;   ///< (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q,
                         ///< head_dim_v); q's dtype. Written by forward, read by backward.
  const DLTensor* lse;   ///< (batch, heads_q, seqlen_q) or (heads_q, total_q); f32 (f64 with f64).
                         ///< Natural log. Written by forward (may be null there), read by backward.
  const DLTensor* dout;  ///< As out. The gradient of out; null means 0 (then dlse is required).
                         ///< Backward only, as all below up to dsinks.
  const DLTensor* dlse;  ///< As lse. The gradient of lse; null means 0.
  const DLTensor*
      dq;  ///< As q, in q's dtype or f32. Null: not computed. Gradients are written, not added to.
  const DLTensor* dk;      ///< As k, in q's dtype or f32. Null: not computed.
  const DLTensor* dv;      ///< As v, in q's dtype or f32. Null: not computed.
  const DLTensor* dsinks;  ///< (heads_q), f32 (f64 with f64). Null: not computed. Needs sinks.
  const DLTensor* sinks;   ///< (heads_q), f32 (f64 with f64). A logit per head that joins the
                           ///< softmax without a value; -inf: none.
  const DLTensor* cu_seqlens_q;   ///< (batch + 1), i32: offsets of the packed query sequences.
  const DLTensor* cu_seqlens_kv;  ///< (batch + 1), i32: offsets of the packed key sequences.
  const DLTensor* seqused_q;   ///< (batch), i32: rows of each query sequence that count. Null: all.
  const DLTensor* seqused_kv;  ///< (batch), i32: keys of each sequence that count. Null: all.
  const DLTensor* q_offset;    ///< (batch), i64: where the first query stands among the keys;
                               ///< replaces the alignment's shift. Null: alignment.
} fg_tensors;

/// The options of a call. Initialise with `FG_OPTIONS_INIT`.
typedef struct fg_options {
  size_t struct_size;    ///< sizeof(fg_options), as the initialiser sets it.
  int64_t window_left;   ///< Row i sees key j iff i + shift - window_left <= j <= i + shift +
                         ///< window_right. FG_UNBOUNDED opens; negative is allowed.
  int64_t window_right;  ///< 0 with an open left side: causal.
  fg_alignment alignment;
  double scale;    ///< NaN (the default): 1 / sqrt(head_dim). 0 and negative values are legal.
  double softcap;  ///< 0 (the default): none. Otherwise positive: s = softcap * tanh(s / softcap),
                   ///< before the mask.
  int32_t deterministic;  ///< Not 0: the same bits run after run and whatever else is in the batch.
                          ///< The CPU always is.
  int32_t num_threads;    ///< CPU threads; 0 (the default): OpenMP's own number.
  int64_t max_seqlen_q;   ///< An upper bound of the packed query lengths; 0 (the default): total_q.
                          ///< Smaller bounds need less workspace.
  int64_t max_seqlen_kv;  ///< An upper bound of the packed key lengths; 0 (the default): total_kv.
  const char* backend;    ///< The name of the one backend to use; null: FLASHGRAD_BACKEND, else the
                          ///< first that supports the call.
} fg_options;

/// A backend as `fg_backend_info` describes it.
typedef struct fg_backend {
  size_t struct_size;  ///< sizeof(fg_backend), set by the caller.
  const char* name;    ///< What `fg_options::backend` takes. Static storage.
  const char* detail;  ///< For people: the instruction set or device it will use, or why it can't
                       ///< run here. Static storage.
  int32_t available;   ///< 1 if it can run on this machine.
} fg_backend;

// clang-format off
#define FG_TENSORS_INIT {sizeof(fg_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
#define FG_OPTIONS_INIT {sizeof(fg_options), FG_UNBOUNDED, FG_UNBOUNDED, FG_BOTTOM_RIGHT, (double)NAN, 0.0, 0, 0, 0, 0, NULL}
#define FG_BACKEND_INIT {sizeof(fg_backend), NULL, NULL, 0}
// clang-format on

/// Computes out and, unless null, lse.
///
/// @param tensors   q, k, v, out required; lse, sinks, cu_seqlens_*, seqused_*, q_offset optional.
/// @param options   Null: the defaults of FG_OPTIONS_INIT.
/// @param workspace Scratch on the tensors' device, any alignment; null if the minimum is 0. Its
/// contents before and after mean nothing.
/// @param workspace_bytes At least the minimum of `fg_workspace_size`; the fastest plan that fits
/// is taken.
/// @param stream    The `cudaStream_t` to enqueue on; null on the CPU.
/// @return FG_OK or an error; on FG_INVALID_ARGUMENT, FG_UNSUPPORTED and FG_WORKSPACE_TOO_SMALL
/// nothing was written. Rows that see nothing get out 0 and lse -inf. Always deterministic and
/// batch-invariant.
FG_API fg_status fg_forward(const fg_tensors* tensors, const fg_options* options, void* workspace,
                            size_t workspace_bytes, void* stream);

/// Computes those of dq, dk, dv and dsinks that are not null.
///
///     delta_i = <dout_i, out_i>,  ds_ij = p_ij * (<dout_i, v_j> - delta_i + dlse_i)   (times 1 -
///     (s_ij / softcap)^2) dv_j = sum_i p_ij dout_i,  dk_j = scale * sum_i ds_ij q_i,  dq_i = scale
///     * sum_j ds_ij k_j dsink_h = sum_i exp(sink_h - lse_i) * (dlse_i - delta_i)
///
/// @param tensors q, k, v, out, lse and dout or dlse required, with the masks and options of the
/// forward call. The other parameters and the return value are those of `fg_forward`. An lse of
/// +inf or -inf marks a row that sees nothing.
FG_API fg_status fg_backward(const fg_tensors* tensors, const fg_options* options, void* workspace,
                             size_t workspace_bytes, void* stream);

/// Answers how much workspace a call needs. Reads shapes, strides, dtypes and devices, never data
/// pointers.
///
/// @param[out] minimum   With less, the call is refused. May be null.
/// @param[out] preferred More than this brings nothing. May be null. Both are linear in the
/// sequence length.
FG_API fg_status fg_workspace_size(fg_pass pass, const fg_tensors* tensors,
                                   const fg_options* options, size_t* minimum, size_t* preferred);

/// Answers whether a call would be accepted, and by whom, without running it. Reads no data.
///
/// @param[out] backend The name of the backend that would run (static storage). May be null.
/// @return FG_OK, or the error that the call itself would return.
FG_API fg_status fg_supports(fg_pass pass, const fg_tensors* tensors, const fg_options* options,
                             const char** backend);

/// The number of backends in this library, fastest first.
FG_API int32_t fg_backend_count(void);

/// Describes the backend of an index from 0 to `fg_backend_count() - 1`.
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
