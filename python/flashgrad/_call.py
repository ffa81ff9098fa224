# SPDX-License-Identifier: Apache-2.0
"""One call of the C library: its structs and DLTensors in one buffer, its memory kept alive.

The buffer holds fg_tensors, fg_options, the answer of fg_workspace_size and a record for each
tensor that brings no DLTensor of its own: a DLTensor, four sizes and four strides.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._library import OPTIONS, SIZES, TENSOR_NAMES, TENSORS, ArgumentError, library

_MAX_NDIM = 4
_TENSORS_AND_OPTIONS = struct.Struct(f"{TENSORS.format}{OPTIONS.size}s")
_TENSORS_BYTES = _OPTIONS_OFFSET = TENSORS.size
_SIZES_OFFSET = _OPTIONS_OFFSET + OPTIONS.size
_RECORDS_OFFSET = _SIZES_OFFSET + SIZES.size
_SHAPE_OFFSET = 48  # sizeof(DLTensor)
_STRIDES_OFFSET = _SHAPE_OFFSET + 8 * _MAX_NDIM
_RECORD_BYTES = _STRIDES_OFFSET + 8 * _MAX_NDIM
_Buffer = ctypes.c_char * (_RECORDS_OFFSET + len(TENSOR_NAMES) * _RECORD_BYTES)

# Where a described tensor's address stands among `Call.words`, by slot.
DATA_WORD = [(_RECORDS_OFFSET + slot * _RECORD_BYTES) // 8 for slot in range(len(TENSOR_NAMES))]

# By the number of dimensions: DLTensor, sizes, room up to four, strides.
_DLTENSOR = struct.Struct("@P i i i B B H P P Q")
_RECORDS = [
    struct.Struct(f"{_DLTENSOR.format} {n}q {8 * (_MAX_NDIM - n)}x {n}q")
    for n in range(_MAX_NDIM + 1)
]

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
# In DLManagedTensorVersioned: version, manager_ctx, deleter, flags, then the DLTensor.
_VERSIONED_FLAGS_OFFSET = 24
_VERSIONED_TENSOR_OFFSET = 32

# DLPack's type codes by NumPy's kinds.
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}

# Where TENSOR_NAMES stand in `Call.pointers`.
SLOT = {name: index for index, name in enumerate(TENSOR_NAMES)}

capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
capsule_pointer.restype = ctypes.c_void_p
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes = [ctypes.py_object]
_capsule_name.restype = ctypes.c_char_p


_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def outside_of_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, into which torch.compile does not look.

    It would follow the calls of ctypes and keep the addresses of buffers that it makes anew.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return function(*arguments, **options)
        if function not in _outside:
            _outside[function] = dynamo.disable(function)
        return _outside[function](*arguments, **options)

    return call


@functools.cache
def kind(cls: type, name: str) -> str:
    """How a tensor of a class is taken, "numpy", "torch" or "dlpack"; TypeError for others."""
    # An instance of either library's class can only exist once that library is imported.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and issubclass(cls, numpy.ndarray):
        if issubclass(cls, numpy.ma.MaskedArray):
            raise TypeError(
                f"flashgrad: {name}: a numpy.ma.MaskedArray, want an array without a mask: "
                "it would be ignored"
            )
        return "numpy"
    if torch is not None and issubclass(cls, torch.Tensor):
        return "torch"
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return "dlpack"
    raise TypeError(
        f"flashgrad: {name}: a {cls.__module__}.{cls.__qualname__}, want a NumPy array, a PyTorch "
        "tensor or an object with __dlpack__ and __dlpack_device__"
    )


@functools.cache
def dlpack_dtype(dtype: Any) -> tuple[int, int]:
    """DLPack's type code and bits of a NumPy dtype."""
    if dtype.name == "bfloat16":  # ml_dtypes'
        return 4, 16
    if dtype.kind not in _CODES or not dtype.isnative or dtype.names is not None:
        raise NotImplementedError(
            f"flashgrad: dtype {dtype}, supported are float32, float16, bfloat16 (ml_dtypes) and, "
            "on the reference backend, float64"
        )
    return _CODES[dtype.kind], 8 * dtype.itemsize


_DEFAULT_SCALE = float("nan")
_strings: dict[str, ctypes.c_char_p] = {}


def _c_string(text: str) -> int:
    """The address of a C string that is never freed: there are only so many backends' names."""
    if not isinstance(text, str) or "\0" in text:
        raise ArgumentError(f"flashgrad: backend: {text!r}, want a name, or None")
    string = _strings.setdefault(text, ctypes.c_char_p(text.encode()))
    return ctypes.cast(string, ctypes.c_void_p).value or 0


def pack_options(
    window_left: int,
    window_right: int,
    top_left: bool,
    scale: float | None,
    softcap: float,
    deterministic: bool,
    num_threads: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    backend: str | None,
) -> bytes:
    """fg_options, with a backend's name that stays alive.

    Not cached: an option may be a tensor of one element, which may be another one in the next call.
    """
    try:
        packed = OPTIONS.pack(
            OPTIONS.size, window_left, window_right, top_left,
            _DEFAULT_SCALE if scale is None else scale, softcap, deterministic, num_threads,
            max_seqlen_q, max_seqlen_kv, 0 if backend is None else _c_string(backend),
        )  # fmt: skip
    except struct.error:
        pass
    else:
        # The library would take NaN for None.
        if scale is not None and not math.isfinite(scale):
            raise ArgumentError(
                f"flashgrad: scale: {float(scale)}, want a finite number, or None for 1 / "
                "sqrt(head_dim)"
            )
        return packed
    for name, value, code, want in (
        ("window_left", window_left, "q", "a whole number of 64 bits"),
        ("window_right", window_right, "q", "a whole number of 64 bits"),
        ("scale", 0 if scale is None else scale, "d", "a number"),
        ("softcap", softcap, "d", "a number"),
        ("num_threads", num_threads, "i", "a whole number of 32 bits"),
        ("max_seqlen_q", max_seqlen_q, "q", "a whole number of 64 bits"),
        ("max_seqlen_kv", max_seqlen_kv, "q", "a whole number of 64 bits"),
        ("deterministic", deterministic, "i", "True or False"),
    ):
        try:
            struct.pack(code, value)
        except struct.error:
            raise ArgumentError(f"flashgrad: {name}: {value!r}, want {want}") from None
    raise AssertionError("each option could be packed alone")


class Call:
    """Collects the tensors of one call, then runs it.

    Attributes
    ----------
    pointers : list of int
        The address of a DLTensor for each of TENSOR_NAMES, 0 for null.
    keep : list
        What the addresses need alive.
    """

    __slots__ = ("_address", "_buffer", "keep", "pointers")

    def __init__(self) -> None:
        self._buffer = _Buffer()
        self._address = ctypes.addressof(self._buffer)
        self.keep: list[Any] = []
        self.pointers = [0] * len(TENSOR_NAMES)

    def add(self, slot: int, tensor: Any, output: bool = False) -> None:
        """Sets a tensor; ``output`` says that the call writes it."""
        how = kind(type(tensor), TENSOR_NAMES[slot])
        if how == "numpy":
            self.add_numpy(slot, tensor, output)
        elif how == "torch":
            if tensor.is_neg():  # its memory has the other sign
                if output:
                    raise ArgumentError(
                        f"flashgrad: {TENSOR_NAMES[slot]}: is lazily negated, but would be written"
                    )
                tensor = tensor.resolve_neg()
            try:
                capsule = sys.modules["torch"]._C._to_dlpack(tensor)
            except (BufferError, RuntimeError) as error:  # on meta, sparse, in a transform
                raise NotImplementedError(
                    f"flashgrad: {TENSOR_NAMES[slot]}: a tensor without memory of its own ({error})"
                ) from None
            self.pointers[slot] = capsule_pointer(capsule, b"dltensor")
            self.keep.append(capsule)
        else:
            # JAX does not say in its capsule that nobody may write to its arrays.
            jax = sys.modules.get("jax")
            if output and jax is not None and isinstance(tensor, jax.Array):
                raise ValueError(
                    f"flashgrad: {TENSOR_NAMES[slot]}: a jax.Array, which can't be changed, but it "
                    "would be written"
                )
            self.add_capsule(slot, _capsule(TENSOR_NAMES[slot], tensor), output)

    def add_numpy(self, slot: int, array: Any, output: bool) -> None:
        """Describes a NumPy array where it lies; NumPy's own export refuses bf16 and read-only."""
        shape, flags = array.shape, array.flags
        ndim = len(shape)
        if ndim > _MAX_NDIM:
            raise ValueError(f"flashgrad: {TENSOR_NAMES[slot]}: {ndim} dimensions, want 1 to 4")
        if output and not flags.writeable:
            raise ValueError(f"flashgrad: {TENSOR_NAMES[slot]}: is read-only, but would be written")
        if flags.c_contiguous:
            strides = None
        else:
            width = array.itemsize
            if any(stride % width for stride in array.strides):
                raise ValueError(
                    f"flashgrad: {TENSOR_NAMES[slot]}: strides of {array.strides} bytes, want "
                    f"multiples of {width}"
                )
            strides = [stride // width for stride in array.strides]
        self._describe(slot, array.ctypes.data, shape, strides, *dlpack_dtype(array.dtype))
        self.keep.append(array)

    def add_shape(
        self,
        slot: int,
        shape: tuple[int, ...],
        code: int,
        bits: int,
        strides: Sequence[int] | None = None,
        device: tuple[int, int] = (CPU, 0),
    ) -> None:
        """Describes a tensor by its DLPack type and device; its address is set in ``words``.

        ``prepare`` needs no address. Strides are in elements; None: compact.
        """
        if len(shape) > _MAX_NDIM:
            raise ValueError(
                f"flashgrad: {TENSOR_NAMES[slot]}: {len(shape)} dimensions, want 1 to 4"
            )
        self._describe(slot, 0, shape, strides, code, bits, device)

    def words(self) -> memoryview:
        """The buffer in words of 64 bits."""
        return memoryview(self._buffer).cast("B").cast("Q")

    def _describe(
        self,
        slot: int,
        data: int,
        shape: tuple[int, ...],
        strides: Sequence[int] | None,
        code: int,
        bits: int,
        device: tuple[int, int] = (CPU, 0),
    ) -> None:
        """Writes a tensor's DLTensor."""
        offset = _RECORDS_OFFSET + slot * _RECORD_BYTES
        address = self._address + offset
        ndim = len(shape)
        _RECORDS[ndim].pack_into(
            self._buffer, offset, data, *device, ndim, code, bits, 1, address + _SHAPE_OFFSET,
            0 if strides is None else address + _STRIDES_OFFSET, 0, *shape, *(strides or shape),
        )  # fmt: skip
        self.pointers[slot] = address

    def add_capsule(self, slot: int, capsule: Any, output: bool) -> None:
        """Takes the DLTensor inside a capsule, which frees it with itself after the call."""
        name = _capsule_name(capsule)
        if name == b"dltensor":
            self.pointers[slot] = capsule_pointer(capsule, b"dltensor")
        elif name == b"dltensor_versioned":
            address = capsule_pointer(capsule, b"dltensor_versioned")
            flags = ctypes.c_uint64.from_address(address + _VERSIONED_FLAGS_OFFSET).value
            if output and flags & _READ_ONLY:
                raise ValueError(
                    f"flashgrad: {TENSOR_NAMES[slot]}: is read-only, but would be written"
                )
            self.pointers[slot] = address + _VERSIONED_TENSOR_OFFSET
        else:
            raise TypeError(
                f"flashgrad: {TENSOR_NAMES[slot]}: __dlpack__ gave a capsule named {name!r}, want "
                "dltensor or dltensor_versioned that nobody has consumed"
            )
        self.keep.append(capsule)

    def prepare(self, which: int, options: bytes) -> int:
        """Writes the structs, with what ``pack_options`` returned; answers the workspace's bytes.

        Raises what the library refuses, as ``launch`` does.
        """
        address = self._address
        _TENSORS_AND_OPTIONS.pack_into(self._buffer, 0, _TENSORS_BYTES, *self.pointers, options)
        lib = library()
        sizes = address + _SIZES_OFFSET
        status = lib.workspace_size(which, address, address + _OPTIONS_OFFSET, sizes, sizes + 8)
        if status:
            raise lib.error(status)
        return SIZES.unpack_from(self._buffer, _SIZES_OFFSET)[1]

    def launch(self, which: int, workspace: int, num_bytes: int, stream: int) -> None:
        """Calls fg_forward or fg_backward with a workspace on the tensors' device, by address."""
        status = self.try_launch(which, workspace, num_bytes, stream)
        if status:
            raise library().error(status)

    def try_launch(self, which: int, workspace: int, num_bytes: int, stream: int) -> int:
        """``launch`` that returns the status instead of raising."""
        address = self._address
        return library().functions[which](
            address, address + _OPTIONS_OFFSET, workspace, num_bytes, stream
        )


def _capsule(name: str, tensor: Any) -> Any:
    """The DLPack capsule of a CPU tensor of another library."""
    device_type = int(tensor.__dlpack_device__()[0])
    if device_type != CPU:
        raise NotImplementedError(
            f"flashgrad: {name}: a {type(tensor).__module__}.{type(tensor).__qualname__} on DLPack "
            f"device type {device_type}; tensors that are not on the CPU are taken from PyTorch only"
        )
    try:
        return tensor.__dlpack__(max_version=(1, 0))
    except TypeError:  # from before DLPack 1.0
        return tensor.__dlpack__()
