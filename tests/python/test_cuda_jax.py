# SPDX-License-Identifier: Apache-2.0
"""flashgrad.jax on CUDA: the other handler of src/xla."""

import flashgrad.jax as fgj
import jax
import jax.numpy as jnp
import numpy as np
import pytest

try:
    DEVICE = jax.devices("cuda")[0]
except RuntimeError:
    DEVICE = None

pytestmark = pytest.mark.skipif(DEVICE is None, reason="JAX has no CUDA device")


def inputs(device):
    rng = np.random.default_rng(0)
    shapes = ((2, 150, 4, 64), *[(2, 200, 2, 64)] * 2)
    return [jax.device_put(jnp.asarray(rng.normal(size=s), jnp.bfloat16), device) for s in shapes]


def value_and_gradients(q, k, v):
    out, pullback = jax.vjp(lambda *x: fgj.dot_product_attention(*x, is_causal=True), q, k, v)
    return out, *pullback(out)


def results(device, jitted):
    run = jax.jit(value_and_gradients) if jitted else value_and_gradients
    return run(*inputs(device))


def close(got, want, tolerance):
    for x, y in zip(got, want):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("jitted", [False, True])
def test_same_numbers_as_the_cpu(jitted):
    close(results(DEVICE, jitted), results(jax.devices("cpu")[0], True), 6e-2)


def test_vmap():
    q, k, v = inputs(DEVICE)
    mapped = jax.vmap(lambda q: fgj.dot_product_attention(q, k, v))(q[None])
    alone = fgj.dot_product_attention(q, k, v)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (mapped[0], alone)))


def test_packed_sequences():
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in inputs(DEVICE))
    cu_q, cu_kv = (
        jax.device_put(jnp.array(x, jnp.int32), DEVICE) for x in ([0, 50, 300], [0, 120, 400])
    )
    offset = jax.device_put(jnp.array([70, -100], jnp.int32), DEVICE)
    out, _ = fgj.attention(
        q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, q_offset=offset
    )
    for n, (a, b, c, d) in enumerate(((0, 50, 0, 120), (50, 300, 120, 400))):
        alone, _ = fgj.attention(
            q[None, a:b], k[None, c:d], v[None, c:d], causal=True, q_offset=offset[n : n + 1]
        )
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (out[a:b], alone[0])), rtol=0, atol=1e-2
        )


def test_unsupported_is_refused():
    q, k, v = (x.astype(jnp.float32) for x in inputs(DEVICE))
    with pytest.raises(jax.errors.JaxRuntimeError, match="f32"):
        jax.block_until_ready(fgj.attention(q, k, v))


needs_two = pytest.mark.skipif(
    DEVICE is None or jax.device_count("cuda") < 2, reason="JAX has fewer than 2 CUDA devices"
)


@needs_two
@pytest.mark.parametrize("jitted", [False, True])
def test_runs_where_the_arrays_lie(jitted):
    want = results(DEVICE, jitted)
    for device in 3 * jax.devices("cuda")[:2]:
        got = results(device, jitted)
        assert all(x.devices() == {device} for x in got)
        close(got, want, 2e-2)


@needs_two
def test_shard_map_over_two_devices():
    """A sequence of the batch on each device, forward and backward."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cuda")[:2]), ("batch",))
    spec = jax.sharding.PartitionSpec("batch")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    sharded = [jax.device_put(np.asarray(x), sharding) for x in inputs(DEVICE)]
    run = jax.jit(jax.shard_map(value_and_gradients, mesh=mesh, in_specs=spec, out_specs=spec))
    got = run(*sharded)
    assert all(len(x.sharding.device_set) == 2 for x in got)
    close(got, results(DEVICE, True), 2e-2)
