# SPDX-License-Identifier: Apache-2.0
"""Calls prepared once for their tensors' shapes, strides and options.

In a small call the library takes less time than what leads to it. A plan keeps what depends on
neither data nor address, the C structs and the answer of fg_workspace_size, so that a call like an
earlier one only sets its tensors' addresses. Whether a call is like an earlier one is for
PyTorch's own guards to say, those of torch.compile: one look at all tensors compares their classes,
shapes, strides, dtypes, devices, requires_grad and dispatch keys, with the modes of the thread
(autocast, transforms of torch.func) in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
from torch.overrides import has_torch_function_variadic

from .._call import CPU, CUDA, DATA_WORD, SLOT, Call, outside_of_dynamo
from .._library import BACKWARD, FORWARD, WORKSPACE_TOO_SMALL, library
from ._layout import HEADS_FIRST, HEADS_FIRST_TO_ROWS, Layout, empty_like, parts

# A program has few shapes; one whose shapes keep changing must not keep them all.
_MAX_PLANS = 64
# The forms of one plan's backward: which gradients are needed, and how dout lies.
_MAX_BACKWARD_FORMS = 8
# A workspace up to this size is kept, on the CPU with its plan, on a GPU for its stream (as PyTorch
# keeps one for cuBLAS). A larger one comes from PyTorch's allocator each time.
_KEPT_BYTES_CPU = 1 << 17
_KEPT_BYTES_CUDA = 1 << 25

# DLPack's type code and bits.
_DTYPES = {
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float64: (2, 64),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
}

# The tensors of a call beside q, k and v, and where they are: see Plan.
OTHERS = ("sinks", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "q_offset")
Places = tuple[tuple[int, int], ...]

# A PyTorch that no longer has them takes the general way always.
_TensorGuards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
_dispatch_modes = torch._C._len_torch_dispatch_stack


def _keys(*names: str) -> int:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


# The dispatch keys of a thread in no mode, and of plain tensors on the devices of the backends.
_PLAIN_THREAD, _PLAIN_TENSORS = None, frozenset()
if hasattr(torch._C.DispatchKeySet, "raw_repr"):  # an older PyTorch always takes the dispatcher
    _PLAIN_THREAD = _keys("BackendSelect", "ADInplaceOrView")
    _PLAIN_TENSORS = frozenset(
        _keys(device, "ADInplaceOrView", f"Autograd{device}", f"Autocast{device}")
        for device in ("CPU", "CUDA")
    )


def is_ordinary(optional: Any, *tensors: Any) -> bool:
    """Whether autograd and autocast are all that the dispatcher would do before the kernel.

    Then it is left out, which halves the overhead of a small call. No mode, transform or tracer is
    active, and the arguments are tensors, neither of subclasses nor lazily negated.
    """
    if (
        _PLAIN_THREAD is None
        or torch.compiler.is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() != _PLAIN_THREAD
        or has_torch_function_variadic(optional, *tensors)
    ):
        return False
    try:
        for x in tensors if optional is None else (optional, *tensors):
            if torch._C._dispatch_keys(x).raw_repr() not in _PLAIN_TENSORS:
                return False
    except TypeError:  # one is no tensor
        return False
    return True


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether tensors, in this thread's state, are as these are; False if one comes twice."""
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _have_shapes(tensors: Sequence[Any]) -> bool:
    """Whether a guard may look at them: one of PyTorch 2.15 aborts at a nested tensor."""
    try:
        for x in tensors:
            if x.is_nested:
                return False
    except AttributeError:  # one is no tensor
        return False
    return True


def current_stream(device: int) -> int:
    """The cudaStream_t that is current on a CUDA device.

    As ``torch.cuda.current_stream``, which takes 2 us for an object around it.
    """
    return torch._C._cuda_getCurrentRawStream(device)


class _PreparedCall:
    """One call of the library, for one thread at a time."""

    __slots__ = ("call", "device", "num_bytes", "options", "places", "which", "words", "workspace")

    @outside_of_dynamo
    def __init__(
        self,
        which: int,
        tensors: dict[str, tuple[torch.Tensor, int]],
        sources: Sequence[torch.Tensor],
        options: bytes,
    ) -> None:
        """``tensors``: by name, each with the index of that source in whose memory it lies."""
        self.which, self.options = which, options
        device = sources[0].device
        self.device = device.index if device.type == "cuda" else None
        self.call = Call()
        self.words = self.call.words()
        self.places = []
        for name, (x, source) in tensors.items():
            self.call.add_shape(
                SLOT[name], x.shape, *_DTYPES[x.dtype], x.stride(),
                (CPU, 0) if self.device is None else (CUDA, self.device),
            )  # fmt: skip
            self.places.append(
                (DATA_WORD[SLOT[name]], source, x.data_ptr() - sources[source].data_ptr())
            )
        self.prepare()

    def prepare(self) -> None:
        self.num_bytes = self.call.prepare(self.which, self.options)
        self.workspace = None
        if self.device is None and self.num_bytes <= _KEPT_BYTES_CPU:
            self.workspace = torch.empty(self.num_bytes, dtype=torch.uint8)

    @outside_of_dynamo
    def run(self, sources: Sequence[torch.Tensor]) -> None:
        words = self.words
        addresses = 0
        for word, source, offset in self.places:
            address = sources[source].data_ptr() + offset
            words[word] = address
            addresses |= address
        if addresses & 15 and self.device is not None:  # what is copied takes workspace
            self.prepare()
        launch = self.launch if self.device is None else self.launch_on_gpu
        status = launch()
        if status == WORKSPACE_TOO_SMALL:  # the backend was changed since
            self.prepare()
            status = launch()
        if status:
            raise library().error(status)

    def launch(self) -> int:
        workspace = self.workspace
        if workspace is None:
            workspace = torch.empty(self.num_bytes, dtype=torch.uint8)
        return self.call.try_launch(self.which, workspace.data_ptr(), self.num_bytes, 0)

    def launch_on_gpu(self) -> int:
        device = self.device
        stream = current_stream(device)
        # What is captured must keep its workspace to itself, in the memory of its graph.
        keeps = (
            self.num_bytes <= _KEPT_BYTES_CUDA
            and device == torch._C._cuda_getDevice()
            and not torch._C._cuda_isCurrentStreamCapturing()
        )
        kept = _kept.setdefault((device, stream), [])
        try:
            workspace = kept.pop() if keeps else None
        except IndexError:
            workspace = None
        if workspace is None or workspace.numel() < self.num_bytes:
            workspace = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        status = self.call.try_launch(self.which, workspace.data_ptr(), self.num_bytes, stream)
        # All of the call's kernels are in the stream now, before those of whoever takes it next.
        if keeps:
            kept.append(workspace)
        return status


# By device and stream: the workspaces that no thread is using.
_kept: dict[tuple[int, int], list[torch.Tensor]] = {}


class _BackwardForm:
    """What the backwards of a plan have in common that read and write tensors alike."""

    __slots__ = ("guard", "idle", "makers", "needs")

    def __init__(self, needs: tuple[bool, ...], guard: Any, makers: list[Any]) -> None:
        self.needs, self.guard, self.makers = needs, guard, makers
        self.idle: list[_PreparedCall] = []


class Plan:
    """Forward and backward of calls that are alike.

    Attributes
    ----------
    guard : callable
        Whether the inputs given to it want this plan: the tensors, as ``layout`` says, and what
        other tensors the call has.
    records : bool
        Whether autograd records the call, where it is enabled.
    layout : Layout
    places : tuple of (int, int)
        Which of ``OTHERS`` there are, and where after the tensors: cu_seqlens_q and cu_seqlens_kv
        may be one.
    numbers : tuple
        The options that are no tensors.
    """

    __slots__ = (
        "_forms", "_idle", "_lse", "_options", "_out", "_out_strides", "guard", "layout",
        "num_tensors", "numbers", "places", "records",
    )  # fmt: skip

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        layout: Layout,
        places: Places,
        numbers: tuple[Any, ...],
        results: Sequence[torch.Tensor],
        options: bytes,
    ) -> None:
        self.guard = _guard(inputs)
        self.records = any(x.requires_grad for x in inputs)
        self.num_tensors = len(inputs) - len({place for _, place in places})
        self.layout, self.places, self.numbers = layout, places, numbers
        # Like out and lse, of one element: torch.empty_like is quicker than torch.empty.
        self._out, self._lse = (x.new_empty(1).expand(x.shape) for x in results)
        # Heads first, out has the memory of rows first, as a model's next layer reads it.
        self._out_strides = None
        if layout == HEADS_FIRST:
            self._out = self._out.transpose(1, 2)
            self._out_strides = results[0].transpose(1, 2).stride()
        self._options = options
        # The prepared calls that no thread is using.
        self._idle: list[_PreparedCall] = []
        self._forms: list[_BackwardForm] = []

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        if self._out_strides is None:
            out = torch.empty_like(self._out, memory_format=torch.contiguous_format)
        else:
            out = inputs[0].new_empty_strided(self._out.shape, self._out_strides)
        lse = torch.empty_like(self._lse, memory_format=torch.contiguous_format)
        sources = (*inputs, out, lse)
        try:
            call = self._idle.pop()
        except IndexError:
            n = len(inputs)
            named = self._named(("q", "k", "v", *OTHERS), inputs, 0)
            named.update(out=(self._rows(out, HEADS_FIRST), n), lse=(lse, n + 1))
            call = _PreparedCall(FORWARD, named, sources, self._options)
        call.run(sources)
        self._idle.append(call)
        return out, lse

    def backward(
        self, dout: torch.Tensor, saved: Sequence[torch.Tensor], needs: tuple[bool, ...]
    ) -> list[torch.Tensor | None] | None:
        """The gradients that are needed of the saved inputs, which are followed by out and lse.

        None: these tensors want the general way.
        """
        for form in self._forms:
            if form.needs == needs and not dout.is_nested and form.guard(dout, *saved):
                break
        else:
            form = self._form(dout, saved, needs)
            if form is None:
                return None
        gradients = [None if maker is None else maker(x) for maker, x in zip(form.makers, saved)]
        sources = (dout, *saved, *gradients)
        try:
            call = form.idle.pop()
        except IndexError:
            call = self._prepare_backward(sources)
        call.run(sources)
        form.idle.append(call)
        return gradients

    def others(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Those of ``OTHERS``, in that order."""
        found: list[torch.Tensor | None] = [None] * len(OTHERS)
        for other, place in self.places:
            found[other] = inputs[self.num_tensors + place]
        return found

    def _form(
        self, dout: torch.Tensor, saved: Sequence[torch.Tensor], needs: tuple[bool, ...]
    ) -> _BackwardForm | None:
        n = self.num_tensors
        if not (
            is_ordinary(None, dout, *saved)
            and dout.stride(-1) in (0, 1)
            # Hooks on saved tensors may have given them other strides.
            and all(x.stride(-1) == 1 for x in (*saved[:n], *saved[-2:]))
            and all(x.is_contiguous() for x in saved[n:-2])
        ):
            return None
        guard = _guard((dout, *saved))
        if not guard(dout, *saved):
            return None
        makers = []
        for i, (x, need) in enumerate(zip(saved, needs)):
            layout = self.layout if i < n else None
            like = torch.empty_like(x).stride() == empty_like(x, layout).stride()
            maker = torch.empty_like if like else functools.partial(empty_like, layout=layout)
            makers.append(maker if need else None)
        if len(self._forms) >= _MAX_BACKWARD_FORMS:
            self._forms = []
        form = _BackwardForm(needs, guard, makers)
        self._forms.append(form)
        return form

    def _prepare_backward(self, sources: Sequence[Any]) -> _PreparedCall:
        """Of dout, the saved inputs with out and lse, and their gradients."""
        n = (len(sources) - 3) // 2
        dout, *inputs = sources[: 1 + n]
        out, lse, *gradients = sources[1 + n :]
        named = self._named(("q", "k", "v", *OTHERS), inputs, 1)
        named.update(self._named(("dq", "dk", "dv", "dsinks"), gradients, n + 3))
        named.update(
            out=(self._rows(out, HEADS_FIRST), n + 1),
            lse=(lse, n + 2),
            dout=(self._rows(dout, HEADS_FIRST), 0),
        )
        return _PreparedCall(BACKWARD, named, sources, self._options)

    def _named(
        self, names: Sequence[str], inputs: Sequence[Any], first: int
    ) -> dict[str, tuple[torch.Tensor, int]]:
        """The inputs (or gradients) as the library takes them, and where among the sources."""
        inputs = [x if x is None else x.detach() for x in inputs]
        n = self.num_tensors
        named = {
            name: (self._rows(x, HEADS_FIRST, HEADS_FIRST_TO_ROWS), first + min(i, n - 1))
            for i, (name, x) in enumerate(zip(names, parts(inputs[:n], self.layout)))
            if x is not None
        }
        for other, place in self.places:
            if 3 + other < len(names) and inputs[n + place] is not None:
                named[names[3 + other]] = inputs[n + place], first + n + place
        return named

    def _rows(self, x: torch.Tensor, *heads_first: str) -> torch.Tensor:
        """x with its rows before its heads, if the layout is one of these."""
        return x.transpose(1, 2) if self.layout in heads_first else x


_plans: dict[Any, list[Plan]] = {}


def find(
    inputs: Sequence[Any], layout: Layout, places: Places, numbers: tuple[Any, ...]
) -> Plan | None:
    """The plan of an earlier call like this one."""
    key = (layout, len(inputs), places, numbers, torch.get_num_threads())
    try:
        plans = _plans.get(key)
    except TypeError:  # a number that is none, as a list, or not yet: a NumPy array of one element
        return None
    if (
        plans is None
        or _dispatch_modes()
        or has_torch_function_variadic(*inputs)
        or not _have_shapes(inputs)
    ):
        return None
    for plan in plans:
        if plan.guard(*inputs):
            if plan is not plans[0]:  # the next layer will want it too
                _plans[key] = [plan, *(x for x in plans if x is not plan)]
            return plan
    return None


def make(
    inputs: Sequence[torch.Tensor],
    layout: Layout,
    places: Places,
    numbers: tuple[Any, ...],
    results: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]],
    options: Callable[..., bytes],
) -> Plan | None:
    """A plan for such calls, or None if they want the general way.

    ``results(q, v)`` makes out and lse, ``options(*numbers)`` fg_options.
    """
    n = len(inputs) - len({place for _, place in places})
    q, k, v = parts([x.detach() for x in inputs[:n]], layout)
    if isinstance(layout, str):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # The library refuses other ranks and dtypes and mixed devices; other strides are copied. A
    # number that is a tensor may be another one in the next call.
    if (
        _TensorGuards is None
        or not 3 <= q.ndim == k.ndim == v.ndim <= 4
        or not all(x.device == q.device and x.dtype in _DTYPES for x in (k, *inputs))
        or not all(x.stride(-1) == 1 for x in (q, k, v))
        or not all(x.ndim == 1 and x.is_contiguous() for x in inputs[n:])
        or not all(x is None or isinstance(x, Number) for x in numbers)
    ):
        return None
    plan = Plan(inputs, layout, places, numbers, results(q, v), options(*numbers))
    if not plan.guard(*inputs):  # a tensor that comes twice
        return None
    if sum(map(len, _plans.values())) >= _MAX_PLANS:
        _plans.clear()
    key = (layout, len(inputs), places, numbers, torch.get_num_threads())
    _plans.setdefault(key, []).append(plan)
    return plan
