# SPDX-License-Identifier: Apache-2.0
"""torch.compile does not look into the calls of the C library, whoever makes them.

It would keep addresses of buffers that are gone, which ends the process: each program has its own.
"""

import subprocess
import sys

import pytest
from torch._dynamo import compiled_autograd

HEAD = """
import flashgrad, flashgrad.torch as fgt, torch
import flashgrad.torch._attention as attention
x = [torch.randn(2, 16, 4, 8, requires_grad=True) for _ in "qkv"]
def loss():
    return fgt.flash_attn_func(*x, causal=True).pow(2).sum()
want = torch.autograd.grad(loss(), x)
def check(step):
    for _ in range(3):
        for t in x:
            t.grad = None
        step()
        for t, reference in zip(x, want):
            torch.testing.assert_close(t.grad, reference)
"""

COMPILED_AUTOGRAD = """
from torch._dynamo import compiled_autograd
def step():
    value = loss()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        value.backward()
check(step)
"""

PROGRAMS = {
    "forward": """
q = x[0].detach()
out = torch.compile(lambda q: flashgrad.forward(q, q, q)[0], backend="eager")(q)
assert torch.equal(out, flashgrad.forward(q, q, q)[0])
""",
    "forward and backward": """
def both(q, k, v):
    out, lse = flashgrad.forward(q, k, v, causal=True)
    return out, flashgrad.backward(2 * out, q, k, v, out, lse, causal=True)
inputs = [t.detach() for t in x]
out, gradients = torch.compile(both, backend="eager")(*inputs)
assert torch.equal(out, fgt.flash_attn_func(*inputs, causal=True))
assert all(map(torch.equal, gradients, want))
""",
    "a whole step": """
@torch.compile(backend="eager")
def step():
    value = fgt.flash_attn_func(*x, causal=True)
    torch._dynamo.graph_break()
    value.pow(2).sum().backward()
check(step)
""",
    "a backward": """
@torch.compile(backend="eager")
def backward(value):
    value.backward()
check(lambda: backward(loss()))
""",
    "compiled autograd, plan": COMPILED_AUTOGRAD,
    "compiled autograd, kernel": "attention.find = attention.make = lambda *_: None"
    + COMPILED_AUTOGRAD,
    "compiled autograd, operator": "attention.find = lambda *_: None\n"
    "attention.is_ordinary = lambda *_: False" + COMPILED_AUTOGRAD,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_compiled(program):
    if "_enable" in program and not hasattr(compiled_autograd, "_enable"):
        pytest.skip("this PyTorch's compiled autograd is entered otherwise")
    subprocess.run([sys.executable, "-W", "ignore", "-c", HEAD + program], check=True)
