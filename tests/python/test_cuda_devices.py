# SPDX-License-Identifier: Apache-2.0
"""Several CUDA devices and streams: a call runs where its tensors lie, on their device's stream."""

import threading

import flashgrad
import flashgrad.torch as fgt
import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} CUDA devices, want 2"
)

ROWS, KEYS = 300, 333


def qkv(device, seed=0, dim=64):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, ROWS, 4, dim), (2, KEYS, 2, dim), (2, KEYS, 2, dim), (2, ROWS, 4, dim))
    *inputs, dout = (
        torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes
    )
    return [x.requires_grad_() for x in inputs], dout


def run(inputs, dout, **options):
    """out, lse and deterministic gradients, so that every run gives the same bits."""
    out, lse = fgt.flash_attn_func(
        *inputs, causal=True, deterministic=True, return_lse=True, **options
    )
    return [x.detach() for x in (out, lse)] + list(torch.autograd.grad(out, inputs, dout))


def expected(seed=0, dim=64):
    inputs, dout = qkv("cuda:0", seed, dim)
    with torch.cuda.device(0):
        return [x.cpu() for x in run(inputs, dout)]


def same(got, want):
    return len(got) == len(want) and all(torch.equal(x.cpu(), y) for x, y in zip(got, want))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_tensors_device_is_used_and_the_current_one_kept(current, device, dim):
    with torch.cuda.device(current):
        inputs, dout = qkv(f"cuda:{device}", dim=dim)
        got = run(inputs, dout)
        assert torch.cuda.current_device() == current
    assert all(x.device.index == device for x in got)
    assert same(got, expected(dim=dim))


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"packed": True}, {"seqused": True}])
def test_every_way_into_the_library(options):
    """Plans, the general way and the operators on device 1, while 0 is current."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs, dout = qkv(device)
        more = {}
        if "sinks" in options:
            more["sinks"] = torch.linspace(-1, 1, 4, device=device)
        if "seqused" in options:
            more["seqused_k"] = torch.tensor([KEYS, 40], dtype=torch.int32, device=device)
        if "packed" in options:
            q, k, v = (x.flatten(0, 1) for x in inputs)
            cu_q, cu_k = (
                torch.tensor([0, 100, x], dtype=torch.int32, device=device)
                for x in (2 * ROWS, 2 * KEYS)
            )
            out = fgt.flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=True, deterministic=True)
            results.append([out, *torch.autograd.grad(out, inputs, dout.flatten(0, 1))])
        else:
            results.append(run(inputs, dout, **more))
    assert same(results[1], [x.cpu() for x in results[0]])


def test_devices_in_turn():
    both = [qkv(f"cuda:{device}", seed=device) for device in (0, 1)]
    want = [expected(seed) for seed in (0, 1)]
    for _ in range(5):
        for device in (0, 1):
            assert same(run(*both[device]), want[device])


def test_one_backward_through_both_devices():
    first, dout = qkv("cuda:0")
    q, k, v = (x.detach().to("cuda:1").requires_grad_() for x in first)
    out = fgt.flash_attn_func(*first, causal=True, deterministic=True)
    moved = fgt.flash_attn_func(out.to("cuda:1"), k, v, causal=True, deterministic=True)
    got = torch.autograd.grad(moved, (*first, k, v), dout.to("cuda:1"))
    alone = [x.detach().requires_grad_() for x in first]
    others = [x.detach().to("cuda:0").requires_grad_() for x in (k, v)]
    out = fgt.flash_attn_func(*alone, causal=True, deterministic=True)
    out = fgt.flash_attn_func(out, *others, causal=True, deterministic=True)
    want = torch.autograd.grad(out, (*alone, *others), dout)
    assert same(got, [x.cpu() for x in want])


def test_a_thread_for_each_device():
    want = [expected(seed) for seed in range(4)]
    wrong = []

    def work(number):
        device = number % 2
        inputs, dout = qkv(f"cuda:{device}", seed=number)
        # Device 0 stays current in all of them, but in one thread that chooses its own.
        if number == 3:
            torch.cuda.set_device(1)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(20):
                if not same(run(inputs, dout), want[number]):
                    wrong.append(number)

    for device in (0, 1):
        torch.cuda.synchronize(device)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_side_stream_of_device_1_orders_calls():
    """A call waits for what its stream waits for, and later work of that stream for the call."""
    want = expected(seed=7)
    inputs, dout = qkv("cuda:1", seed=7)
    late = [torch.zeros_like(x).requires_grad_() for x in inputs]
    with torch.cuda.device(1):
        default, side = torch.cuda.current_stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # tens of milliseconds
        with torch.no_grad():
            for x, y in zip(late, inputs):
                x.copy_(y)
        ready = default.record_event()
    with torch.cuda.stream(side):
        side.wait_event(ready)
        got = run(late, dout)
        copies = [x.clone() for x in got]
        for x in got:
            x.record_stream(default)
    with torch.cuda.device(1):
        default.wait_stream(side)
    assert same(copies, want) and same(got, want)


def test_a_given_stream():
    """flashgrad.forward and backward on a stream that is not current; memory is made for it."""
    inputs, dout = qkv("cuda:1", seed=3)
    q, k, v = (x.detach() for x in inputs)
    want = expected(seed=3)
    side = torch.cuda.Stream(1)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        for _ in range(10):
            out, lse = flashgrad.forward(q, k, v, causal=True, stream=side.cuda_stream)
            gradients = flashgrad.backward(
                dout, q, k, v, out, lse, causal=True, deterministic=True, stream=side.cuda_stream
            )
            junk = [torch.full((1 << 22,), float("nan"), device="cuda:1") for _ in range(4)]
            del junk
        side.synchronize()
    assert same([out, lse, *gradients], want)


def test_graph_on_device_1():
    static, dout = qkv("cuda:1", seed=1)
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up, as capture asks for
            run(static, dout)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(static, dout)
    fresh, _ = qkv("cuda:1", seed=5)
    with torch.no_grad():
        for x, y in zip(static, fresh):
            x.copy_(y)
    # Replayed while device 0 is current.
    torch.cuda.synchronize(1)
    graph.replay()
    torch.cuda.synchronize(1)
    assert same(captured, [x.cpu() for x in run(fresh, dout)])


def test_tensors_of_two_devices_are_refused():
    (q, k, v), _ = qkv("cuda:0")
    with pytest.raises(ValueError, match="k: is on cuda:1, want cuda:0"):
        fgt.flash_attn_func(q, k.to("cuda:1"), v)
