# SPDX-License-Identifier: Apache-2.0
"""The C interface of flashgrad, called through ctypes with PyTorch tensors.

Mirrors include/flashgrad/flashgrad.h as far as the benchmarks need it. A struct that does not
match the library is refused by it, since every struct carries its own size.
"""

import ctypes
import os
import pathlib

import torch

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_DEFAULT_LIBRARIES = ("build/release/src/libflashgrad.so", "build/src/libflashgrad.so")

FORWARD, BACKWARD = 0, 1
UNBOUNDED = 2**63 - 1

# DLPack's (code, bits).
_DTYPES = {
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int32: (0, 32),
}


class DLDevice(ctypes.Structure):
    """DLPack's device."""

    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


class DLDataType(ctypes.Structure):
    """DLPack's element type."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    """DLPack's tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_TENSOR_NAMES = (
    "q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "dsinks", "sinks",
    "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "q_offset",
)  # fmt: skip


class Tensors(ctypes.Structure):
    """fg_tensors."""

    _fields_ = [("struct_size", ctypes.c_size_t)] + [
        (name, ctypes.POINTER(DLTensor)) for name in _TENSOR_NAMES
    ]


class Options(ctypes.Structure):
    """fg_options."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("alignment", ctypes.c_int),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("deterministic", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_kv", ctypes.c_int64),
        ("backend", ctypes.c_char_p),
    ]


class Backend(ctypes.Structure):
    """fg_backend."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("detail", ctypes.c_char_p),
        ("available", ctypes.c_int32),
    ]


def find_library(path=None):
    """The shared library: `path`, else $FLASHGRAD_LIBRARY, else where the presets build it."""
    path = path or os.environ.get("FLASHGRAD_LIBRARY")
    if path:
        return pathlib.Path(path)
    for candidate in _DEFAULT_LIBRARIES:
        if (_ROOT / candidate).exists():
            return _ROOT / candidate
    raise FileNotFoundError(
        f"no flashgrad library at {' or '.join(_DEFAULT_LIBRARIES)}: build it with "
        "`cmake --preset release && cmake --build --preset release`, or name it with --library "
        "or FLASHGRAD_LIBRARY"
    )


class Library:
    """A loaded flashgrad library; `path` as in `find_library`."""

    def __init__(self, path=None):
        self._lib = ctypes.CDLL(str(find_library(path).resolve()))
        self._lib.fg_last_error.restype = ctypes.c_char_p
        self._lib.fg_version.restype = ctypes.c_char_p
        call = [
            ctypes.POINTER(Tensors), ctypes.POINTER(Options),
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip
        self._lib.fg_forward.argtypes = call
        self._lib.fg_backward.argtypes = call

    def check(self, status):
        """Raises RuntimeError with the library's message unless `status` is FG_OK."""
        if status != 0:
            raise RuntimeError(f"flashgrad: {self._lib.fg_last_error().decode()}")

    @property
    def version(self):
        """The library's own version."""
        return self._lib.fg_version().decode()

    def backends(self):
        """[(name, detail, available)], fastest first."""
        found = []
        for index in range(self._lib.fg_backend_count()):
            info = Backend(struct_size=ctypes.sizeof(Backend))
            self.check(self._lib.fg_backend_info(index, ctypes.byref(info)))
            found.append((info.name.decode(), info.detail.decode(), bool(info.available)))
        return found


class Call:
    """A forward or backward call on fixed tensors, with the workspace it prefers. Call it to run.

    Parameters
    ----------
    library : Library
    which : FORWARD or BACKWARD
    options : dict
        Fields of fg_options that differ from FG_OPTIONS_INIT.
    tensors : dict
        torch tensors by fg_tensors' names: q, k, v, out, dout and the gradients as
        (batch, seqlen, heads, head_dim), lse as (batch, heads, seqlen), any strides; packed ones
        without the batch. All on one device; on a GPU the call goes to the default stream.
    """

    def __init__(self, library, which, options, tensors):
        self._library = library
        self._keep = []  # the memory that the structs point to
        self._options = Options(
            struct_size=ctypes.sizeof(Options),
            window_left=UNBOUNDED,
            window_right=UNBOUNDED,
            scale=float("nan"),
        )
        for name, value in options.items():
            setattr(self._options, name, value)
        self._tensors = Tensors(struct_size=ctypes.sizeof(Tensors))
        for name, tensor in tensors.items():
            setattr(self._tensors, name, ctypes.pointer(self._dltensor(tensor)))
        lib = library._lib
        self._function = lib.fg_forward if which == FORWARD else lib.fg_backward

        minimum, preferred = ctypes.c_size_t(), ctypes.c_size_t()
        arguments = (which, ctypes.byref(self._tensors), ctypes.byref(self._options))
        library.check(
            lib.fg_workspace_size(*arguments, ctypes.byref(minimum), ctypes.byref(preferred))
        )
        name = ctypes.c_char_p()
        library.check(lib.fg_supports(*arguments, ctypes.byref(name)))
        self.backend = name.value.decode()
        self.workspace_bytes = preferred.value
        self._workspace = torch.empty(
            max(1, preferred.value), dtype=torch.uint8, device=tensors["q"].device
        )

    def _dltensor(self, tensor):
        sizes = ctypes.c_int64 * tensor.dim()
        shape, strides = sizes(*tensor.shape), sizes(*tensor.stride())
        self._keep += [tensor, shape, strides]
        code, bits = _DTYPES[tensor.dtype]
        return DLTensor(
            data=tensor.data_ptr(),
            device=DLDevice(2, tensor.device.index) if tensor.is_cuda else DLDevice(1, 0),
            ndim=tensor.dim(),
            dtype=DLDataType(code, bits, 1),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            strides=ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        )

    def __call__(self):
        """Runs the call; raises RuntimeError with the library's message if it is refused."""
        self._library.check(
            self._function(
                self._tensors, self._options, self._workspace.data_ptr(), self.workspace_bytes, None
            )
        )
