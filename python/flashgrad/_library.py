# SPDX-License-Identifier: Apache-2.0
"""The C library: where it lies, its functions, its structs as bytes, its errors.

Mirrors include/flashgrad/flashgrad.h. The library is loaded by the first call and not by the
import, so that a program that uses PyTorch has its OpenMP runtime loaded by then and both share
one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import NamedTuple

FORWARD, BACKWARD = 0, 1
UNBOUNDED = 2**63 - 1

# The tensors of fg_tensors, in its order.
TENSOR_NAMES = (
    "q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "dsinks", "sinks",
    "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "q_offset",
)  # fmt: skip

# fg_tensors: struct_size and the pointers; and fg_options.
TENSORS = struct.Struct(f"@N{len(TENSOR_NAMES)}P")
OPTIONS = struct.Struct("@N q q i d d i i q q P")

# Two size_t: the answer of fg_workspace_size.
SIZES = struct.Struct("@NN")

WORKSPACE_TOO_SMALL = 3


class ArgumentError(ValueError, RuntimeError):
    """An argument contradicts the rules.

    A ValueError, and for those who expect PyTorch's or flash-attn's error also a RuntimeError.
    """


_ERRORS = {1: ArgumentError, 2: NotImplementedError}  # RuntimeError for all others


class Backend(NamedTuple):
    """One backend of the library.

    Attributes
    ----------
    name : str
        What the ``backend`` argument and ``FLASHGRAD_BACKEND`` take.
    detail : str
        The instruction set or device that it will use, or why it can't run here.
    available : bool
        Whether it can run on this machine.
    """

    name: str
    detail: str
    available: bool


class _BackendInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("detail", ctypes.c_char_p),
        ("available", ctypes.c_int32),
    ]


def library_path() -> str:
    """$FLASHGRAD_LIBRARY, else the file that the wheel installed beside this one."""
    path = os.environ.get("FLASHGRAD_LIBRARY")
    if not path:
        path = os.path.join(os.path.dirname(__file__), "libflashgrad.so")
    if not os.path.exists(path):
        raise ImportError(
            f"flashgrad: no library at {path}; install the package with `pip install .`, or name "
            "a built libflashgrad.so in FLASHGRAD_LIBRARY"
        )
    return os.path.realpath(path)


class Library:
    """The functions of the loaded library, with their argument types."""

    def __init__(self) -> None:
        lib = ctypes.CDLL(library_path())
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        call = [pointer, pointer, pointer, size, pointer]
        for function in (lib.fg_forward, lib.fg_backward):
            function.argtypes = call
            function.restype = ctypes.c_int
        lib.fg_workspace_size.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer]
        lib.fg_workspace_size.restype = ctypes.c_int
        lib.fg_backend_count.restype = ctypes.c_int32
        lib.fg_backend_info.argtypes = [ctypes.c_int32, ctypes.POINTER(_BackendInfo)]
        lib.fg_last_error.restype = ctypes.c_char_p
        lib.fg_version.restype = ctypes.c_char_p
        self.functions = (lib.fg_forward, lib.fg_backward)  # by FORWARD, BACKWARD
        self.workspace_size = lib.fg_workspace_size
        self.backend_count = lib.fg_backend_count
        self.backend_info = lib.fg_backend_info
        self.last_error = lib.fg_last_error
        self.version = lib.fg_version

    def error(self, status: int) -> Exception:
        """The exception for a status that is not FG_OK, with the library's message."""
        return _ERRORS.get(status, RuntimeError)(f"flashgrad: {self.last_error().decode()}")


@functools.cache
def library() -> Library:
    """The library, loaded once."""
    return Library()


def backends() -> list[Backend]:
    """The backends of the library, fastest first.

    Returns
    -------
    list of Backend
        The first that supports a call runs it, unless ``backend`` or ``FLASHGRAD_BACKEND`` names
        another.
    """
    lib = library()
    found = []
    for index in range(lib.backend_count()):
        info = _BackendInfo(struct_size=ctypes.sizeof(_BackendInfo))
        status = lib.backend_info(index, info)
        if status != 0:
            raise lib.error(status)
        found.append(Backend(info.name.decode(), info.detail.decode(), bool(info.available)))
    return found
