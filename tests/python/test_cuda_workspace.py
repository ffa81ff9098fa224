# SPDX-License-Identifier: Apache-2.0
"""The workspaces that plans keep for a CUDA stream: no call writes into another one's."""

import threading

import flashgrad.torch as fgt
import pytest
import torch
from flashgrad.torch import _plans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def qkv(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, rows, 4, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for _ in "qkv"
    ]


def run(inputs):
    """out and deterministic gradients, so that every run gives the same bits."""
    out = fgt.flash_attn_func(*inputs, causal=True, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def same(got, want):
    return all(map(torch.equal, got, want))


@pytest.fixture
def kept(monkeypatch):
    workspaces = {}
    monkeypatch.setattr(_plans, "_kept", workspaces)
    return workspaces


def test_calls_share_one_workspace_which_grows(kept):
    sizes = []
    for rows in (100, 1000, 100):
        inputs = qkv(rows)
        for _ in range(3):
            run(inputs)
        ((workspace,),) = kept.values()
        sizes.append(workspace.numel())
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_large_workspace_is_not_kept(kept, monkeypatch):
    monkeypatch.setattr(_plans, "_KEPT_BYTES_CUDA", 0)
    inputs = qkv(1000)
    want = run(inputs)
    assert same(run(inputs), want) and not any(kept.values())


def begun_anywhere(inputs):
    """The same numbers in memory that begins at no multiple of 16 bytes."""
    moved = []
    for n, x in enumerate(inputs, 1):
        memory = torch.empty(x.numel() + n, device=x.device, dtype=x.dtype)
        moved.append(memory[n:].view_as(x).copy_(x.detach()).requires_grad_())
    return moved


def test_what_begins_anywhere_is_copied_to_the_workspace(kept):
    inputs = qkv(1000)
    want = run(inputs)
    ((workspace,),) = kept.values()
    before = workspace.numel()
    assert same(run(begun_anywhere(inputs)), want)
    ((workspace,),) = kept.values()
    assert workspace.numel() >= before + sum(x.numel() * x.element_size() for x in inputs)
    assert same(run(inputs), want)


def test_a_graph_has_a_workspace_of_its_own(kept):
    inputs = qkv(300)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = run(inputs)
        (before,) = (x.data_ptr() for x in kept[0, stream.cuda_stream])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = run(inputs)
        size = kept[0, stream.cuda_stream][0].numel()
        run(qkv(2000))  # takes a larger one, and the first is free
        (after,) = kept[0, stream.cuda_stream]
        assert after.data_ptr() != before
        fillers = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
        after.fill_(7)
        for x in got:
            x.zero_()
        graph.replay()
        assert same(got, want)
        assert all((x == 7).all() for x in (*fillers, after))
    torch.cuda.synchronize()


def test_each_stream_has_its_own(kept):
    inputs = [qkv(300, seed) for seed in range(3)]
    want = [run(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = []
    for _ in range(20):
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                got.append(run(x))
    torch.cuda.synchronize()
    assert all(same(x, want[n % 3]) for n, x in enumerate(got))
    assert {stream for _, stream in kept} >= {x.cuda_stream for x in streams}


def test_threads_of_one_stream():
    inputs = [qkv(200 + 50 * n, n) for n in range(4)]
    want = [run(x) for x in inputs]
    wrong = []

    def work(n):
        for _ in range(50):
            if not same(run(inputs[n]), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
