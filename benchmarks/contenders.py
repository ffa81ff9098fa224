# SPDX-License-Identifier: Apache-2.0
"""What peers.py compares: one attention problem, run by PyTorch and by flashgrad."""

import dataclasses

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import capi

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Relative Frobenius errors beyond these mean that two results answer different questions. They are
# wide, since PyTorch sums dq, dk and dv in the dtype of the inputs; the conformance tests are what
# checks precision.
LOOSE_ERROR = {"f32": 1e-3, "bf16": 5e-2, "f16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call.

    `window` is None (full), "causal", or how many keys before its own a causal row sees.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen: int
    head_dim: int
    window: object = None

    def flops(self, which):
        """4BHS^2d forward and 10BHS^2d backward, halved if causal, visible pairs in a window."""
        pairs = self.seqlen**2
        if self.window == "causal":
            pairs /= 2
        elif self.window is not None:
            reach = min(self.window + 1, self.seqlen)
            pairs = reach * self.seqlen - reach * (reach - 1) // 2
        factor = 4 if which == "forward" else 10
        return factor * self.batch * self.heads_q * pairs * self.head_dim


class Inputs:
    """q, k, v, dout of a problem, standard normal, as (batch, heads, seqlen, head_dim) views.

    `layout` is the order in memory: "bshd", as a model's projections leave it, or "bhsd".
    """

    def __init__(self, problem, layout, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(heads):
            sizes = {"b": problem.batch, "h": heads, "s": problem.seqlen, "d": problem.head_dim}
            x = torch.empty([sizes[c] for c in layout], dtype=DTYPES[problem.dtype])
            for part in x.view(-1, problem.head_dim).split(4096):  # no f32 copy of the whole
                part.copy_(torch.randn(part.shape, generator=generator))
            return x.transpose(1, 2) if layout == "bshd" else x

        self.q, self.k, self.v = (
            normal(h) for h in (problem.heads_q, problem.heads_kv, problem.heads_kv)
        )
        self.dout = normal(problem.heads_q)


class PyTorch:
    """scaled_dot_product_attention with its CPU flash kernel; refuses to run with another."""

    def __init__(self, problem, inputs):
        if problem.window not in (None, "causal") or problem.heads_q != problem.heads_kv:
            raise ValueError("PyTorch's CPU flash kernel has neither windows nor GQA")
        self._causal = problem.window == "causal"
        self._qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        self._dout = inputs.dout
        self._out = None

    def _attention(self):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*self._qkv, is_causal=self._causal)

    def prepare(self):
        """Runs forward and keeps its graph for `backward`."""
        self._out = self._attention()
        kernel = self._out.grad_fn.name()
        if not kernel.startswith("ScaledDotProductFlashAttentionForCpu"):
            raise RuntimeError(f"PyTorch ran {kernel}, not its CPU flash kernel")
        return self._out.detach()

    def forward(self):
        """Forward alone, without a graph."""
        with torch.no_grad():
            self._attention()

    def backward(self):
        """The backward operator alone."""
        return torch.autograd.grad(self._out, self._qkv, self._dout, retain_graph=True)


class Flashgrad:
    """flashgrad through its C interface, on the same memory."""

    def __init__(self, problem, inputs, library, threads, backend=None):
        self._library = library
        self._options = {"num_threads": threads}
        if problem.window is not None:
            self._options["window_right"] = 0
        if isinstance(problem.window, int):
            self._options["window_left"] = problem.window
        if backend:
            self._options["backend"] = backend.encode()
        self._inputs = {n: getattr(inputs, n).transpose(1, 2) for n in ("q", "k", "v", "dout")}
        self._out = torch.empty_like(self._inputs["dout"])
        self._lse = torch.empty(problem.batch, problem.heads_q, problem.seqlen)
        self._gradients = {"d" + n: torch.empty_like(self._inputs[n]) for n in ("q", "k", "v")}
        self._forward = self._backward = None

    def prepare(self):
        """Runs forward, which `backward` reads."""
        tensors = {n: self._inputs[n] for n in ("q", "k", "v")}
        tensors |= {"out": self._out, "lse": self._lse}
        self._forward = capi.Call(self._library, capi.FORWARD, self._options, tensors)
        self._forward()
        return self._out.transpose(1, 2)

    def prepare_backward(self):
        """Binds the backward call and its workspace."""
        tensors = {**self._inputs, "out": self._out, "lse": self._lse, **self._gradients}
        self._backward = capi.Call(self._library, capi.BACKWARD, self._options, tensors)
        return self._backward

    def release_forward(self):
        """Frees forward's workspace."""
        self._forward = None

    def forward(self):
        """Forward into the tensors that `prepare` bound."""
        self._forward()

    def backward(self):
        """Backward alone; binds the call at its first use."""
        if self._backward is None:
            self.prepare_backward()
        self._backward()
        return [g.transpose(1, 2) for g in self._gradients.values()]

    def facts(self, which):
        """What ran, for the record."""
        call = self._forward if which == "forward" else self._backward
        return {"backend": call.backend, "workspace_bytes": call.workspace_bytes}


def relative_error(x, reference):
    """|x - reference| / |reference| in the Frobenius norm, inf where x is not finite."""
    x, reference = x.double(), reference.double()
    error = ((x - reference).norm() / reference.norm()).item()
    return error if error == error else float("inf")
